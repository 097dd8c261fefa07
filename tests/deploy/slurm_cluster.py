"""SLURM on this machine: its own daemons, and hosts in network namespaces. It needs root and the Debian packages."""

import os
import secrets
import socket
import time
from pathlib import Path

from benchmarks.namespaces import Namespaces
from tests.deploy.commands import ran
from tests.system.processes import ROOT, Process

HOSTS = ("one", "two")
CONFIGURATION = """
ClusterName=apexrl
SlurmctldHost={name}({address})
SlurmUser=root
AuthInfo=socket={files}/munge.socket
StateSaveLocation={files}
SlurmdSpoolDir={files}/spool-%n
SlurmctldPidFile={files}/slurmctld.pid
SlurmdPidFile={files}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
PartitionName=all Nodes=ALL Default=YES
"""
START_SECONDS = 60.0


class SlurmCluster:
    """The cluster, as a context manager that leaves nothing behind."""

    def __init__(self, files: Path):
        self._files = files
        self._hosts = Namespaces()
        self._daemons: list[Process] = []

    def __enter__(self):
        self._hosts.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for daemon in self._daemons:
            daemon.__exit__()
        self._hosts.__exit__()

    def run(self, *words):
        """Runs one of SLURM's commands; returns its output."""
        done = ran(list(map(str, words)), cwd=ROOT, env=os.environ | {"SLURM_CONF": str(self._configuration)})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def runs(self, part):
        """The hosts that have a process whose command line has a part."""
        return [host for host in HOSTS if self._hosts.runs(host, part)]

    @property
    def _configuration(self):
        return self._files / "slurm.conf"

    def _start(self):
        for host in HOSTS:
            self._hosts.add(host)
        address = self._hosts.address(HOSTS[0]).rpartition(".")[0] + ".1"
        text = CONFIGURATION.format(name=socket.gethostname().split(".")[0], address=address, files=self._files)
        lines = [f"NodeName={host} NodeAddr={self._hosts.address(host)} CPUs=8" for host in HOSTS]
        self._configuration.write_text("\n".join([text, *lines, ""]))
        (self._files / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # it has none of their controllers
        names = [f"{self._hosts.address(host)} {host}" for host in HOSTS]
        (self._files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        key = self._files / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        own = [f"--{name}-file={self._files}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={self._files}/munge.socket", *own)
        self._daemon("slurmctld", "-D", "-f", self._configuration)
        for host in HOSTS:
            inside = f'hostname {host} && mount --bind {self._files}/hosts /etc/hosts && exec slurmd -D -f "$0"'
            words = ["unshare", "--uts", "sh", "-c", inside, str(self._configuration)]
            self._daemon(*self._hosts.command(host, words), log=f"slurmd-{host}")
        deadline = time.monotonic() + START_SECONDS
        while self._states() != {"idle"}:
            logs = "\n".join(daemon.text()[-2000:] for daemon in self._daemons)
            assert time.monotonic() < deadline, logs
            time.sleep(0.2)

    def _states(self):
        asked = ran(["sinfo", "--noheader", "--format=%t"], env=os.environ | {"SLURM_CONF": str(self._configuration)})
        return set(asked.stdout.split())

    def _daemon(self, *words, log=""):
        code = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
        self._daemons.append(Process(["-c", code, *words], self._files / f"{log or words[0]}.log"))
