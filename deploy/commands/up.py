"""`python -m deploy up PLAN`: from an account to frames. Each step looks at what there is, and does what is missing."""

import argparse
import datetime
import re
import sys
from pathlib import Path

from aws import AwsError, client, code_of
from cluster import Cluster
from keys import key_names, stored_keys
from tfvars import DeployError, read_tfvars

from commands import account, frames, place, software
from commands.cluster_commands import watch
from commands.place import BOOTSTRAP, CLUSTER, terraform
from commands.steps import ROOT, copy_output, must_read, require, run

INIT_SECONDS = 900.0
APPLY_SECONDS = 3600.0
SCRIPT_SECONDS = 300.0
BACKEND = ROOT / CLUSTER / "backend.hcl"
BUCKETS = ROOT / CLUSTER / "bootstrap.auto.tfvars"
MAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")


def main(chosen: argparse.Namespace) -> None:
    """Starts a cluster, waits for its first frames, and opens the tunnel to TensorBoard.

    Raises: DeployError when something has to be changed first; StepError when a command fails.
    """
    require(*_programs(chosen))
    for email in chosen.email:
        if not MAIL.fullmatch(email):
            raise DeployError(f"--email {email}: an address such as you@example.com was expected")
    place.describe(chosen.plan)
    cluster = place.described()
    number = client("sts", cluster.region).get_caller_identity()["Account"]
    if not chosen.email and not _has_buckets():
        raise DeployError("--email is missing: the alarm about money has to know where to write, at the first start")
    chosen_software = software.choose(cluster, chosen.images, chosen.upgrade)
    account.check_account(chosen_software.release, chosen.request_quotas)
    _ask(chosen.yes)
    bootstrap(cluster.region, number, chosen.email)
    cluster = place.described()  # the bucket is known now
    make_keys(cluster)
    software.provide(chosen_software, cluster)
    account.check_ready()
    apply(cluster.name)
    frames.wait_for_frames(place.described(), chosen.wait_minutes)
    if chosen.no_tunnel:
        print("next: python -m deploy watch | status | logs | scale N | down")
    else:
        watch(chosen)


def _programs(chosen: argparse.Namespace) -> list[str]:
    """Returns the programs that the chosen steps need."""
    return [
        *("terraform", "aws", "git"),
        *(("packer",) if chosen.images else ()),
        *(() if chosen.no_tunnel and not chosen.images else ("session-manager-plugin",)),
    ]


def _ask(yes: bool) -> None:
    """Shows the price and asks whether to go on.

    Raises: DeployError when the answer is no, or nobody can answer.
    """
    copy_output("python", "deploy/cost.py", seconds=SCRIPT_SECONDS)
    if yes:
        return
    if not sys.stdin.isatty():
        raise DeployError("nobody can answer here whether to start this: give --yes")
    if input("\nStart this? [y/N] ").strip().lower() not in ("y", "yes"):
        raise DeployError("not started, and nothing costs anything; change deploy/terraform/cluster/terraform.tfvars")


def _has_buckets() -> bool:
    """Returns whether the files that bootstrap leaves are there, and the bucket that they name."""
    if not BACKEND.exists() or not BUCKETS.exists():
        return False
    given = read_tfvars(BUCKETS)
    return _bucket_is_ours(given["results_bucket"], given["region"])


def _bucket_is_ours(bucket: str, region: str) -> bool:
    try:
        client("s3", region).head_bucket(Bucket=bucket)
    except AwsError as error:
        if code_of(error) == "404":
            return False
        raise
    return True


def bootstrap(region: str, account_number: str, emails: list[str]) -> None:
    """Makes the buckets and the alarm, and writes down where they are."""
    if _has_buckets():
        print("\nbuckets and alarm: there already")
        return
    names = {purpose: f"apexrl-{purpose}-{account_number}-{region}" for purpose in ("state", "results")}
    if not (ROOT / BOOTSTRAP / "terraform.tfstate").exists() and all(
        _bucket_is_ours(name, region) for name in names.values()
    ):
        print("\nbuckets and alarm: made from another clone")
        _write(BACKEND, f'bucket = "{names["state"]}"\nregion = "{region}"\n')
        _write(BUCKETS, f'region         = "{region}"\nresults_bucket = "{names["results"]}"\n')
        return
    run(*terraform(BOOTSTRAP, "init", "-input=false"), seconds=INIT_SECONDS)
    listed = ",".join(f'"{email}"' for email in emails)
    given = ("-var", f"region={region}", "-var", f"budget_emails=[{listed}]")
    run(*terraform(BOOTSTRAP, "apply", "-input=false", "-auto-approve", *given), seconds=APPLY_SECONDS)
    for name, path in (("cluster_backend", BACKEND), ("cluster_tfvars", BUCKETS)):
        command = terraform(BOOTSTRAP, "output", "-raw", name)
        print(f"\n$ {' '.join(command)} > {path.relative_to(ROOT)}")
        _write(path, must_read(*command))


def _write(path: Path, text: str) -> None:
    arriving = path.with_name(f"{path.name}.arriving")
    arriving.write_text(text, encoding="utf-8")
    arriving.replace(path)


def make_keys(cluster: Cluster) -> None:
    """Makes the keys of the cluster, unless all of them are there."""
    stored = stored_keys(client("ssm", cluster.region), cluster.name)
    missing = [name for name in key_names(cluster.name) if name not in stored]
    if not missing:
        print("\nkeys: there already")
        return
    rest = ("--rotate",) if stored else ()  # an earlier run was stopped between two keys
    run(
        "python", "deploy/keys.py", "--cluster", cluster.name, "--region", cluster.region, *rest, seconds=SCRIPT_SECONDS
    )


def apply(name: str) -> None:
    """Runs `terraform apply`. A cluster whose time was over starts again."""
    initialize(name)
    again = ("-replace=terraform_data.deadline",) if _is_over(place.outputs().get("deadline", "")) else ()
    run(*terraform(CLUSTER, "apply", "-input=false", "-auto-approve", *again), seconds=APPLY_SECONDS)


def initialize(name: str) -> None:
    """Runs `terraform init`. Each cluster has a state of its own, unless an older one is up under the common key."""
    key = f'key    = "cluster/{name}.tfstate"\n'
    held = BACKEND.read_text(encoding="utf-8")
    if not place.exists() and key not in held:
        lines = [line for line in held.splitlines(keepends=True) if not line.startswith("key")]
        _write(BACKEND, "".join(lines) + key)
    configured = ("-backend-config=backend.hcl", "-reconfigure", "-input=false")
    run(*terraform(CLUSTER, "init", *configured), seconds=INIT_SECONDS)


def _is_over(deadline: str) -> bool:
    if not deadline:
        return False
    end = datetime.datetime.strptime(deadline, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)
    return end < datetime.datetime.now(datetime.UTC)
