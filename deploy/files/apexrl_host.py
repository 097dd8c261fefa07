"""The tasks of a cluster's host besides its role. The units in `systemd/` run `apexrl_host.py COMMAND [PATH]`.

address   takes the private address of this learner host's rank
keys      fetches the CURVE keys of this host's role from the Parameter Store into a directory
restore   fetches the run so far from S3 into an empty run directory
sync      uploads changed files of the run directory to S3
journal   finds the volume of the journal and makes its file system, then leaves a link to its device
finish    ends the cluster, when its learner has done all that it was asked for
deadline  prints the deadline of the cluster, as the Parameter Store has it
leave     scales the group of this learner host to zero
limit     waits for the deadline of the cluster, then powers the host off
logs      writes the configuration of the CloudWatch agent

All settings come from the environment (role.env). An error ends the program with status 1 and a line that says what to
do. The unit then starts it again. `limit` must work when nothing else does: only what talks to AWS imports boto3.
"""

import datetime
import logging
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from host_environment import HostError, host_rank, keeps_the_run, role, variable

logger = logging.getLogger("apexrl_host")

LIMIT_PERIOD_SECONDS = 10.0
DEADLINE_PERIOD_SECONDS = 60.0
AWS_PATIENCE_SECONDS = 60.0
NO_DEADLINE_SECONDS = 3600.0
POWEROFF_SECONDS = 300.0
ATTACH_SECONDS = 120.0
DISK_SECONDS = 600.0
BLANK_BYTES = 1 << 20
FIXED_STATUS = 1  # of e2fsck: it has mended the file system
DEVICES = Path("/dev/disk/by-id")
AGENT_CONFIG = Path(__file__).with_name("cloudwatch-agent.json")


def as_time(text: str) -> datetime.datetime:
    """Returns a deadline as the Parameter Store holds it.

    Raises: HostError when it is not a time like 2026-01-02T03:04:05Z.
    """
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)
    except ValueError as error:
        raise HostError(f"the deadline is {text!r}: a time like 2026-01-02T03:04:05Z was expected") from error


def limit(directory: Path) -> None:
    """Powers the host off at the cluster's deadline, which it asks for every minute and keeps in the directory.

    Without an answer the last one counts. A host that never got one has an hour from its start.
    """
    told, asked, end = None, 0.0, datetime.datetime.now(datetime.UTC)
    while True:
        now = datetime.datetime.now(datetime.UTC)
        if now >= end or time.monotonic() >= asked + DEADLINE_PERIOD_SECONDS:
            asked, end = time.monotonic(), newest_deadline(directory / "deadline")
        if end != told:
            logger.info("this host is powered off at %s", end.isoformat())
            told = end
        left = (end - datetime.datetime.now(datetime.UTC)).total_seconds()
        if left <= 0:
            break
        time.sleep(min(left, LIMIT_PERIOD_SECONDS))  # in short steps, because the clock may be set meanwhile
    logger.warning("the time of the cluster is up: powering off")
    _leave()
    subprocess.run(["systemctl", "poweroff"], check=True, timeout=60)
    time.sleep(POWEROFF_SECONDS)  # the shutdown stops this process; if it does not, the unit asks again


def newest_deadline(kept: Path) -> datetime.datetime:
    """Returns the deadline by the Parameter Store, else the last one, else an hour from the start of the host."""
    try:
        answer = _ask_aws("deadline")
        end = as_time(answer)
        temporary = kept.with_suffix(".tmp")
        temporary.write_text(answer)
        temporary.replace(kept)
        return end
    except (HostError, OSError, subprocess.SubprocessError) as error:
        logger.error("the deadline is not known: %s", error)
    try:
        return as_time(kept.read_text())
    except (HostError, OSError):
        started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return datetime.datetime.fromtimestamp(started + NO_DEADLINE_SECONDS, datetime.UTC)


def _leave() -> None:
    """Lets no other learner host take the place of this one. Without an answer AWS's schedule does it."""
    if os.environ.get("APEXRL_GROUP"):
        try:
            _ask_aws("leave")
        except (OSError, subprocess.SubprocessError) as error:
            logger.error("the group of this host stays: %s", error)


def _ask_aws(command: str) -> str:
    """Returns what a command prints, in a process of its own: whatever becomes of it, this one goes on.

    Raises: OSError or SubprocessError when it fails, or does not end in time.
    """
    words = [sys.executable, str(Path(__file__).resolve()), command]
    return subprocess.run(
        words, stdout=subprocess.PIPE, text=True, timeout=AWS_PATIENCE_SECONDS, check=True
    ).stdout.strip()


def journal(link: Path) -> None:
    """Finds the volume of the journal, which is attached once the host runs, and checks or makes its file system.

    Raises: HostError when the volume is not attached in time, or its file system is beyond repair.
    """
    volume = variable("APEXRL_JOURNAL_VOLUME", r"vol-[0-9a-f]+")
    device = DEVICES / f"nvme-Amazon_Elastic_Block_Store_{volume.replace('-', '')}"
    end = time.monotonic() + ATTACH_SECONDS
    while not device.exists():
        if time.monotonic() >= end:
            raise HostError(f"{volume} is not attached to this host: terraform apply attaches it")
        time.sleep(1.0)
    with device.open("rb") as file:
        is_blank = not any(file.read(BLANK_BYTES))
    if is_blank:
        user = pwd.getpwnam("apexrl")
        _run("mkfs.ext4", "-q", "-m", "0", "-E", f"root_owner={user.pw_uid}:{user.pw_gid}", str(device))
    elif _run("e2fsck", "-f", "-p", str(device), check=False) > FIXED_STATUS:
        raise HostError(f"{device} is damaged: `e2fsck {device}` asks how to mend it")
    _run("resize2fs", str(device))  # the volume may have grown
    link.unlink(missing_ok=True)
    link.symlink_to(device)
    logger.info("the journal is on %s%s", volume, ", which was blank" if is_blank else "")


def _run(*command: str, check: bool = True) -> int:
    return subprocess.run(command, check=check, timeout=DISK_SECONDS).returncode


def logs(path: Path) -> None:
    """Writes the configuration of the CloudWatch agent with this host's log group, role and rank."""
    host = f"learner/{host_rank()}" if role() == "learner" else role()
    text = AGENT_CONFIG.read_text().replace("CLUSTER", variable("APEXRL_CLUSTER", r"[a-z0-9-]+")).replace("HOST", host)
    path.write_text(text)


def main(arguments: list[str]) -> int:
    """Runs one command of the command line; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("botocore").setLevel(logging.WARNING)  # it tells each time where its credentials are from
    with_path: dict[str, Callable[[Path], None]] = {"limit": limit, "journal": journal, "logs": logs}
    try:
        match arguments:
            case [name, path] if name in with_path:
                with_path[name](Path(path))
            case ["address" | "deadline" | "leave" as name]:
                import apexrl_store  # noqa: PLC0415 - see above

                getattr(apexrl_store, name)()
            case ["restore" | "sync" | "finish" as name, _] if not keeps_the_run():
                logger.info("%s: nothing to do: the first learner host keeps the run", name)
            case ["keys" | "restore" | "sync" | "finish" as name, path]:
                import apexrl_store  # noqa: PLC0415 - see above

                getattr(apexrl_store, name)(Path(path))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except (HostError, OSError, subprocess.SubprocessError) as error:
        logger.error("%s: %s", arguments[0], error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
