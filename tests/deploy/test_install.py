"""The installation of the tools for these tests."""

import hashlib
import http.server
import io
import platform
import subprocess
import threading
import zipfile

import pytest

from tests.deploy import terraform_release
from tests.deploy.needed import PACKAGES, require_tool
from tests.system.processes import ROOT


def test_shellcheck_finds_nothing():
    require_tool("shellcheck", "shellcheck")
    command = ["shellcheck", ".ci/run", "run.sh", "tests/deploy/install.sh", "deploy/examples/slurm.sbatch"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout


def test_a_missing_package_of_the_requirements_would_be_noticed():
    lines = (ROOT / "requirements-dev.txt").read_text().rpartition("\n\n")[2].splitlines()
    assert {line.partition("==")[0] for line in lines if "==" in line} == set(PACKAGES.values())


@pytest.fixture
def release(tmp_path, monkeypatch):
    """A release of this system, served over HTTP; returns its file, and where it is."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    path = tmp_path / "www" / terraform_release.VERSION / f"terraform_{terraform_release.VERSION}_linux_amd64.zip"
    path.parent.mkdir(parents=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path / "www"))

        def log_message(self, *_):
            """Keeps the output of the tests clean."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield path, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_terraform_is_taken_when_it_is_the_release_that_is_meant(release, tmp_path, monkeypatch):
    path, source = release
    program = tmp_path / "terraform"
    with pytest.raises(OSError, match=r"cannot be fetched: .*404"):
        terraform_release.fetch(program, source)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("terraform", "#!/bin/sh\necho Terraform\n")
    path.write_bytes(packed.getvalue())
    with pytest.raises(OSError, match="its SHA-256 is another"):
        terraform_release.fetch(program, source)
    assert not program.exists()
    sums = {"linux_amd64": hashlib.sha256(packed.getvalue()).hexdigest()}
    monkeypatch.setattr(terraform_release, "SHA256", sums)
    terraform_release.fetch(program, source)
    assert subprocess.run([program], capture_output=True, check=True, timeout=10).stdout == b"Terraform\n"
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match=r"no hash of Terraform .* for linux_riscv64"):
        terraform_release.fetch(program, source)
