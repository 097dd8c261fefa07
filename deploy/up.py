"""`python -m deploy up PLAN`: from an account to frames. Each step looks at what there is, and does what is missing."""

import argparse
import datetime
import re
import shlex
import sys
from pathlib import Path

from deploy import cost, frames, place, software
from deploy.aws import AwsError, client, code_of
from deploy.cluster import Cluster, values_in
from deploy.commands import watch
from deploy.findings import Line, zones_for
from deploy.keys import key_names, store_keys, stored_keys
from deploy.place import BACKEND, BOOTSTRAP, CLUSTER, INIT_SECONDS, terraform
from deploy.preflight import failures
from deploy.steps import (
    ROOT,
    DeployError,
    StepError,
    failure,
    must_read,
    require,
    run,
    run_and_hear,
    show,
    tell,
)

APPLY_SECONDS = 3600.0
BUCKETS = ROOT / CLUSTER / "bootstrap.auto.tfvars"
CURE_SECONDS = 60.0
MADE_LATER = ("bucket", "image", "release", "keys")
"""Findings that later steps of `up` cure."""
ROLE = re.compile(r"aws iam create-service-linked-role --aws-service-name [a-z]+\.amazonaws\.com")
NO_CAPACITY = re.compile("InsufficientInstanceCapacity|do not have sufficient [^ ]+ capacity")  # of EC2, of a group
CURE = "give other learner_instance_types or replay_instance_type, or use_placement_group = false"
MAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")


def up(chosen: argparse.Namespace) -> None:
    """Starts a cluster, waits for its first frames, and opens the tunnel to TensorBoard.

    Raises: DeployError when something has to be changed first; StepError when a command fails.
    """
    require(*_programs(chosen))
    for email in chosen.email:
        if not MAIL.fullmatch(email):
            raise DeployError(f"--email {email}: an address such as you@example.com was expected")
    place.describe(chosen.plan)
    heed_named_zone()
    cluster = place.described()
    check_region(cluster.region)
    number = client("sts", cluster.region).get_caller_identity()["Account"]
    if not chosen.email and not _has_buckets(number):
        raise DeployError("--email is missing: the alarm about money has to know where to write, at the first start")
    chosen_software = software.choose(cluster, chosen.images, chosen.upgrade)
    tell("AWS is asked about the account", "nothing", "nothing was made but AWS's own roles, which are free")
    check_account(cluster._replace(release=chosen_software.release), chosen.request_quotas)
    ask(cluster, chosen.yes)
    bootstrap(cluster, number, chosen.email)
    cluster = place.described()  # the bucket is known now
    initialize(cluster.name)
    make_keys(cluster)
    software.provide(chosen_software, cluster)
    check_ready(place.described())
    an_hour = cost.total_of(cost.hourly_rows(cluster, cost.read_prices()))
    dearest = max(an_hour.on_demand, an_hour.high)
    tell(
        "The hosts",
        f"at most {dearest:.2f} dollars an hour, and {dearest * cluster.max_hours:.2f} until all end by themselves",
        "`python -m deploy down`",
    )
    apply(chosen.yes)
    tell("The first frames", "nothing more", "`python -m deploy down`")
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


def check_region(region: str) -> None:
    """Raises DeployError when another file overrules the region of terraform.tfvars."""
    wanted = values_in(place.VARIABLES, "region")["region"] or region
    if wanted != region:
        raise DeployError(
            f"terraform.tfvars in {CLUSTER} asks for {wanted}, and a file that overrules it for {region}, where the "
            "buckets are: change the one, or use another clone for the other region"
        )


def ask(cluster: Cluster, yes: bool) -> None:
    """Shows the price and asks whether to go on.

    Raises: DeployError when the answer is no, nobody can answer, or there is no price.
    """
    show("python", "-m", "deploy", "cost")
    print("\n".join(cost.report(cluster)), flush=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise DeployError("nobody can answer here whether to start this: give --yes")
    if input("\nStart this? [y/N] ").strip().lower() not in ("y", "yes"):
        raise DeployError("not started, and nothing costs anything; change deploy/terraform/cluster/terraform.tfvars")


def _has_buckets(account_number: str) -> bool:
    """Returns whether the files that bootstrap leaves are there, and the bucket that they name."""
    if not BACKEND.exists() or not BUCKETS.exists():
        return False
    given = values_in(BUCKETS, "results_bucket", "region")
    if None in given.values():
        raise DeployError(f"{BUCKETS} lacks results_bucket or region: make it anew, as deploy/README.md says in step 3")
    return bucket_is_ours(given["results_bucket"], given["region"], account_number)


def bucket_is_ours(bucket: str, region: str, account_number: str) -> bool:
    """Returns whether a bucket is there.

    Raises: DeployError when it is somebody else's: all accounts share the names, and ours can be guessed.
    """
    try:
        client("s3", region).head_bucket(Bucket=bucket, ExpectedBucketOwner=account_number)
    except AwsError as error:
        if code_of(error) == "404":
            return False
        if code_of(error) == "403":
            raise DeployError(
                f"the bucket {bucket} is not of account {account_number}, or access to it is denied: apply {BOOTSTRAP} "
                "by hand with another `name`"
            ) from error
        raise
    return True


def bootstrap(cluster: Cluster, account_number: str, emails: list[str]) -> None:
    """Makes the buckets and the alarm, and writes down where they are."""
    region = cluster.region
    tell(
        "The buckets and the alarm about money",
        "cents a month, by what the buckets hold",
        "empty and delete the buckets in the S3 console, and delete the budget",
    )
    if _has_buckets(account_number):
        print("\nbuckets and alarm: there already")
        return
    names = {purpose: f"apexrl-{purpose}-{account_number}-{region}" for purpose in ("state", "results")}
    if not (ROOT / BOOTSTRAP / "terraform.tfstate").exists() and all(
        bucket_is_ours(name, region, account_number) for name in names.values()
    ):
        print("\nbuckets and alarm: made from another clone")
        _write(BACKEND, f'bucket = "{names["state"]}"\nregion = "{region}"\n{_key(cluster.name)}')
        _write(BUCKETS, f'region         = "{region}"\nresults_bucket = "{names["results"]}"\n')
        return
    run(*terraform(BOOTSTRAP, "init", "-input=false"), seconds=INIT_SECONDS)
    listed = ",".join(f'"{email}"' for email in emails)
    given = ("-var", f"region={region}", "-var", f"budget_emails=[{listed}]")
    run(*terraform(BOOTSTRAP, "apply", "-input=false", "-auto-approve", *given), seconds=APPLY_SECONDS)
    for name, path, rest in (("cluster_backend", BACKEND, _key(cluster.name)), ("cluster_tfvars", BUCKETS, "")):
        command = terraform(BOOTSTRAP, "output", "-raw", name)
        print(f"\n$ {' '.join(command)} > {path.relative_to(ROOT)}")
        _write(path, must_read(*command) + rest)


def _key(name: str) -> str:
    return f'key    = "cluster/{name}.tfstate"\n'


def _write(path: Path, text: str) -> None:
    arriving = path.with_name(f"{path.name}.arriving")
    arriving.write_text(text, encoding="utf-8")
    arriving.replace(path)


def make_keys(cluster: Cluster) -> None:
    """Makes the keys of the cluster that are missing, and no others: hosts that run know those that are there.

    Raises: DeployError when they cannot be made, or a cluster that is up would have hosts with different keys.
    """
    names = " ".join(key_names(cluster.name))
    remove = f"`aws ssm delete-parameters --region {cluster.region} --names {names}`"
    tell("The keys of the roles", "nothing", remove)
    ssm = client("ssm", cluster.region)
    stored = stored_keys(ssm, cluster.name)
    missing = [name for name in key_names(cluster.name) if name not in stored]
    if not missing:
        print("\nkeys: there already")
        return
    keys = ("python", "-m", "deploy", "keys", "--cluster", cluster.name, "--region", cluster.region)
    secrets = [name for name in missing if name.endswith(".secret")]
    if secrets and place.exists():
        raise DeployError(
            f"{', '.join(secrets)} missing, and hosts that run know another one: `{' '.join(keys)}` makes a new pair; "
            "then restart all hosts, as deploy/README.md says about new keys"
        )
    show(*keys)
    print(f"missing: {', '.join(missing)}")
    store_keys(ssm, cluster.name)


def initialize(name: str) -> None:
    """Runs `terraform init`. Each cluster has a state of its own, unless an older one is up under the common key.

    Raises: DeployError when the state is of another cluster, all of which `terraform apply` would replace.
    """
    held = BACKEND.read_text(encoding="utf-8")
    is_own = _key(name) in held
    if not is_own and not place.exists():
        lines = [line for line in held.splitlines(keepends=True) if not line.startswith("key")]
        _write(BACKEND, "".join(lines) + _key(name))
        is_own = True
    place.initialize()
    results = place.outputs().get("results", "")
    if f"/{name}/" not in results and (results or not is_own):
        raise DeployError(
            f"a cluster of another name than {name} is up ({results or 'its start did not come to its end'}): "
            "`python -m deploy down` destroys it; for a second one use another clone"
        )


def apply(yes: bool) -> None:
    """Runs `terraform apply`, which asks before it changes a cluster that is up. One whose time was over starts again.

    Where EC2 has no capacity for a new cluster it goes on in another zone.

    Args:
      yes: Terraform does not ask.
    """
    again = ("-replace=terraform_data.deadline",) if _is_over(place.outputs().get("deadline", "")) else ()
    approval = ("-input=false", "-auto-approve") if yes or not place.exists() else ()
    apply_in_zones(*approval, *again)


def _is_over(deadline: str) -> bool:
    if not deadline:
        return False
    end = datetime.datetime.strptime(deadline, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)
    return end < datetime.datetime.now(datetime.UTC)


def apply_in_zones(*arguments: str) -> None:
    """Runs `terraform apply`. Where EC2 has no capacity it goes on in the next zone that offers all types.

    It stays in a zone that somebody has named, and where the journal may hold experience: that is lost by a move.

    Raises: StepError when it fails, or no zone is left.
    """
    command = terraform(CLUSTER, "apply", *arguments)
    tried: list[str] = []
    while True:
        status, errors = run_and_hear(*command, seconds=APPLY_SECONDS)
        if not status:
            return
        if not NO_CAPACITY.search(" ".join(errors.replace("│", " ").split())):  # Terraform breaks its lines
            raise failure(command, status)
        cluster = place.described()
        zones = zones_for(cluster)
        tried.append(cluster.availability_zone or zones[0])
        left = [zone for zone in zones if zone not in tried]
        stays = _reason_to_stay(cluster)
        if stays or not left:
            told = stays or "no other zone offers all types, and another region may have them"
            raise StepError(
                f"EC2 has no capacity in {', '.join(tried)} ({told}): try again later, or {CURE}; what has started "
                "costs until `python -m deploy down`"
            )
        place.write_variable(place.ZONE, "availability_zone", left[0])


def _reason_to_stay(cluster: Cluster) -> str:
    if cluster.availability_zone and not place.ZONE.exists():
        return "availability_zone names it; without it `up` tries others"
    if place.may_hold_experience():
        return "the cluster's experience is there"
    return ""


def heed_named_zone() -> None:
    """Forgets a zone that was chosen here, when terraform.tfvars names one."""
    if values_in(place.VARIABLES, "availability_zone")["availability_zone"]:
        place.ZONE.unlink(missing_ok=True)


def check_account(cluster: Cluster, request_quotas: bool) -> None:
    """Checks all that `up` cannot make itself. The roles that AWS wants, which cost nothing, it makes.

    Args:
      cluster: with the release that its hosts will install, if any.
      request_quotas: whether to ask AWS for quotas that are too low.
    Raises: DeployError when something has to be changed first. StepError when AWS has not granted the quotas yet.
    """
    blocking = _blocking(cluster, request_quotas)
    for line in blocking:
        if found := ROLE.match(line.cure):
            run(*shlex.split(found[0]), seconds=CURE_SECONDS)
    blocking = [line for line in blocking if not ROLE.match(line.cure)]
    if others := [line for line in blocking if line.name != "quota"]:
        raise DeployError(f"{_text(others)}; then the same command again")
    if not blocking:
        return
    if not request_quotas:
        raise DeployError(f"{_text(blocking)}; or the same command with --request-quotas, which asks AWS")
    raise StepError("AWS has the requests for quotas; it writes when they are granted. Then the same command again")


def check_ready(cluster: Cluster) -> None:
    """Checks that everything is there.

    Raises: DeployError when something is missing.
    """
    show("python", "-m", "deploy", "preflight")
    if found := failures(cluster):
        raise DeployError(_text(found))


def _blocking(cluster: Cluster, request_quotas: bool) -> list[Line]:
    show("python", "-m", "deploy", "preflight", *(("--request-quotas",) if request_quotas else ()))
    return [line for line in failures(cluster, request_quotas=request_quotas) if line.name not in MADE_LATER]


def _text(found: list[Line]) -> str:
    return "; ".join(f"{line.name}: {line.finding} ({line.cure})" for line in found)
