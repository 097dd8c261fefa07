"""Service Quotas as AWS answers it: moto knows no quota of EC2. Two requests of the JSON protocol over HTTP."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NOT_FOUND = {"__type": "NoSuchResourceException", "Message": "no such quota"}


@contextlib.contextmanager
def quota_server(applied: dict[str, float], defaults: dict[str, float]) -> Iterator[str]:
    """Serves quotas by code: those that the account has, and AWS's defaults; yields the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            operation = self.headers["X-Amz-Target"].partition(".")[2]
            values = {"GetServiceQuota": applied, "GetAWSDefaultServiceQuota": defaults}[operation]
            value = values.get(body["QuotaCode"])
            answer = NOT_FOUND if value is None else {"Quota": {"QuotaCode": body["QuotaCode"], "Value": value}}
            content = json.dumps(answer).encode()
            self.send_response(400 if value is None else 200)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            """Keeps the output of the tests clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
