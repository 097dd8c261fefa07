"""Records of 64 floats, `RecordClient` beside Reverb: `python -m benchmarks.records [--repeats 3] [--out FILE.json]`.

Each system has a fresh server in a process of its own, ours with its journal on the disk. One client inserts one record
after the other with a priority; then one client samples batches by priority. The systems take turns.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from apexrl import RecordClient
from benchmarks.peers import environment
from benchmarks.replay import ROOT, free_ports, serving

SIZE, COUNT, BATCH = 64, 20_000, 256
SECONDS_TO_END = 120


def ours(seconds: float) -> dict[str, float]:
    """Returns records/s confirmed and batches/s of our service."""
    records = np.random.default_rng(0).standard_normal((1000, SIZE)).astype(np.float32)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving("--tables", "records=priority:0:64", "--capacity", 200_000))
        ends = f"tcp://127.0.0.1:{server.ports[0]}", f"tcp://127.0.0.1:{server.ports[1]}"
        fields = {"x": ("float32", SIZE)}
        client = stack.enter_context(RecordClient(ends, "benchmark", fields, {"records": BATCH}))
        made, began, counted = 0, time.perf_counter(), 0
        while made < COUNT or time.perf_counter() - began < seconds:
            if made == COUNT:
                assert client.flush()
                began, counted = time.perf_counter(), made
            client.insert({"x": records[made % 1000]}, 1.0)
            made += 1
        assert client.flush()
        inserts = (made - counted) / (time.perf_counter() - began)
        for _ in range(20):
            client.sample("records")
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            assert client.sample("records").data["x"].shape == (BATCH, SIZE)
            count += 1
        return {"inserts": inserts, "batches": count / (time.perf_counter() - began)}


def reverbs(python: Path, seconds: float) -> dict[str, float]:
    """Returns the same of Reverb."""
    command = [str(python), str(ROOT / "benchmarks/peers/reverb_records.py"), "--port", str(free_ports(1)[0])]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert server.stdout is not None and b"ready" in server.stdout.readline(), "reverb did not start"

        def rate(work: str) -> float:
            flags = ["--work", work, "--count", str(COUNT), "--batch", str(BATCH), "--seconds", str(seconds)]
            done = subprocess.run([*command, *flags], capture_output=True, timeout=SECONDS_TO_END, check=True)
            return float(json.loads(done.stdout))

        return {"inserts": rate("insert"), "batches": rate("sample")}
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Measures both by turns, and prints medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--environment", type=Path, default=ROOT / "runs/reverb-environment")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    python = environment.make(arguments.environment)
    if python is None:
        sys.exit("dm-reverb does not install here")
    rows: dict[str, list[dict[str, float]]] = {"ours": [], "reverb": []}
    for _ in range(arguments.repeats):
        rows["ours"].append(ours(arguments.seconds))
        rows["reverb"].append(reverbs(python, arguments.seconds))
    found: dict[str, Any] = {"repeats": rows}
    for work in ("inserts", "batches"):
        medians = {name: statistics.median(row[work] for row in measured) for name, measured in rows.items()}
        found[work] = medians | {"ratio": medians["ours"] / medians["reverb"]}
        print(f"{work}/s: ours {medians['ours']:,.0f}, reverb {medians['reverb']:,.0f}: {found[work]['ratio']:.2f}x")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
