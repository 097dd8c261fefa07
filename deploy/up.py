"""`python -m deploy up PLAN`: from an account to frames. Each step looks at what there is, and does what is missing."""

import argparse
import datetime
import re
import shlex
import sys
from pathlib import Path

from deploy import cost, place
from deploy.aws import AwsError, client, code_of
from deploy.cluster import Cluster, values_in
from deploy.commands import wait_for_frames, watch
from deploy.findings import Line, account_of, has_images, zones_for
from deploy.keys import key_names, store_keys, stored_keys
from deploy.place import BACKEND, BOOTSTRAP, CHOICE, CLUSTER, INIT_SECONDS, terraform
from deploy.preflight import failures
from deploy.steps import ROOT, DeployError, StepError, must_read, require, run, show, tell

APPLY_SECONDS = 3600.0
BUCKETS = ROOT / CLUSTER / "bootstrap.auto.tfvars"
BUILD_SECONDS = 5400.0
COPY_SECONDS = 600.0
CURE_SECONDS = 60.0
ROLE = re.compile(r"aws iam create-service-linked-role --aws-service-name [a-z]+\.amazonaws\.com")
NO_CAPACITY = re.compile("InsufficientInstanceCapacity|do not have sufficient [^ ]+ capacity")  # of EC2, of a group
CURE = "give other learner_instance_types or replay_instance_type, or use_placement_group = false"


def up(chosen: argparse.Namespace) -> None:
    """Starts a cluster, waits for its first frames, and opens the tunnel to TensorBoard.

    Raises: DeployError when something has to be changed first; StepError when a command fails.
    """
    plugin = () if chosen.no_tunnel and not chosen.images else ("session-manager-plugin",)
    require("terraform", "aws", "git", *(("packer",) if chosen.images else ()), *plugin)
    place.describe(chosen.plan)
    cluster = heed_description()
    if not chosen.email and not _has_buckets():
        raise DeployError("--email is missing: the alarm about money has to know where to write, at the first start")
    tell("AWS is asked about the account", "nothing", "nothing was made but AWS's own roles, which are free")
    check_account(cluster, chosen.request_quotas)
    ask(cluster, chosen.yes)
    bootstrap(cluster, chosen.email)
    cluster = place.described()  # the bucket is known now
    initialize(cluster.name)
    make_keys(cluster)
    provide_software(cluster, chosen.images, chosen.upgrade)
    an_hour = cost.hourly_total(cluster)
    dearest = max(an_hour.on_demand, an_hour.high)
    tell(
        "The hosts",
        f"at most {dearest:.2f} dollars an hour, and {dearest * cluster.max_hours:.2f} until all end by themselves",
        "`python -m deploy down`",
    )
    apply(chosen.yes)
    tell("The first frames", "nothing more", "`python -m deploy down`")
    wait_for_frames(place.described(), chosen.wait_minutes)
    if chosen.no_tunnel:
        print("next: python -m deploy watch | status | logs | scale N | down")
    else:
        watch(chosen)


def heed_description() -> Cluster:
    """Returns the cluster that terraform.tfvars describes. A zone that it names replaces one that was chosen here.

    Raises: DeployError when another file overrules its region.
    """
    own = values_in(place.VARIABLES, "region", "availability_zone")
    if own["availability_zone"]:
        place.ZONE.unlink(missing_ok=True)
    cluster = place.described()
    if own["region"] not in (None, cluster.region):
        raise DeployError(
            f"terraform.tfvars in {CLUSTER} asks for {own['region']}, and a file that overrules it for "
            f"{cluster.region}, where the buckets are: change the one, or use another clone for the other region"
        )
    return cluster


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


def _has_buckets() -> bool:
    """Returns whether the files that bootstrap leaves are there, and the bucket that they name."""
    if not BACKEND.exists() or not BUCKETS.exists():
        return False
    given = values_in(BUCKETS, "results_bucket", "region")
    if None in given.values():
        raise DeployError(f"{BUCKETS} lacks results_bucket or region: make it anew, as deploy/README.md says in step 3")
    return bucket_is_ours(given["results_bucket"], given["region"])


def bucket_is_ours(bucket: str, region: str) -> bool:
    """Returns whether a bucket is there.

    Raises: DeployError when it is somebody else's: all accounts share the names, and ours can be guessed.
    """
    try:
        client("s3", region).head_bucket(Bucket=bucket, ExpectedBucketOwner=account_of(region)["Account"])
    except AwsError as error:
        if code_of(error) == "403":
            told = "belongs to somebody else, or access to it is denied"
            raise DeployError(f"the bucket {bucket} {told}: apply {BOOTSTRAP} by hand with another `name`") from error
        if code_of(error) != "404":
            raise
        return False
    return True


def bootstrap(cluster: Cluster, emails: list[str]) -> None:
    """Makes the buckets and the alarm, and writes down where they are."""
    region = cluster.region
    tell(
        "The buckets and the alarm about money",
        "cents a month, by what the buckets hold",
        "empty and delete the buckets in the S3 console, and delete the budget",
    )
    if _has_buckets():
        print("\nbuckets and alarm: there already")
        return
    names = {purpose: f"apexrl-{purpose}-{account_of(region)['Account']}-{region}" for purpose in ("state", "results")}
    if not (ROOT / BOOTSTRAP / "terraform.tfstate").exists() and all(
        bucket_is_ours(name, region) for name in names.values()
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
    stored = stored_keys(cluster.region, cluster.name)
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
    store_keys(cluster.region, cluster.name)


def provide_software(cluster: Cluster, images: bool, upgrade: bool) -> None:
    """Makes what the hosts start from, unless it is there, and tells Terraform.

    A release that was chosen before is kept, and images that are there are used. Otherwise it is a release, which takes
    no build but each host some minutes at its start; or images, where somebody wants them.

    Args:
      images: images, even if they have to be built.
      upgrade: a new release, or new images, of what is checked out.
    Raises: StepError when a command fails.
    """
    if cluster.release and not images and not upgrade:
        print(f"\nsoftware: release {cluster.release}, as before")
        return
    if not upgrade and has_images(cluster):
        print("\nsoftware: the images of this account")
        if cluster.release:
            print(f"\n$ rm {CHOICE.relative_to(ROOT)}")
            CHOICE.unlink(missing_ok=True)
        return
    version = must_read("git", "describe", "--tags", "--always").strip()
    if images:
        build = "two c7i.xlarge for the minutes of their builds, then the snapshots: a few dollars a month"
        tell("The images", build, 'the commands of "To leave nothing behind" in deploy/README.md')
        run("packer", "init", "deploy/packer", seconds=INIT_SECONDS)
        given = ("-var", f"version={version}", "-var", f"region={cluster.region}")
        run("packer", "build", *given, "deploy/packer", seconds=BUILD_SECONDS)
    else:
        file, target = f"build/release-{version}.tar", f"s3://{cluster.results_bucket}/releases/{version}.tar"
        tell("The release", "nothing worth a cent", f"`aws s3 rm --region {cluster.region} {target}`")
        run("bash", "deploy/packer/release.sh", version, file, seconds=COPY_SECONDS)
        run("aws", "s3", "cp", "--region", cluster.region, file, target, seconds=COPY_SECONDS)
    place.write_variable(CHOICE, "image_version" if images else "release", version)


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

    Where EC2 has no capacity it goes on in the next zone that offers all types. It stays in a zone that somebody has
    named, and where the journal may hold experience: that is lost by a move, which Terraform refuses by itself.

    Args:
      yes: Terraform does not ask.
    Raises: StepError when it fails, or no zone is left.
    """
    deadline = place.outputs().get("deadline")
    is_over = deadline and datetime.datetime.fromisoformat(deadline) < datetime.datetime.now(datetime.UTC)
    approval = ("-input=false", "-auto-approve") if yes or not place.exists() else ()
    tried: list[str] = []
    while True:
        cluster, zone = place.described(), place.zone()
        moves = zone and cluster.availability_zone not in ("", zone) and not place.may_hold_experience()
        forced = [name for name, is_so in (("deadline", is_over), ("zone", moves)) if is_so]
        again = [f"-replace=terraform_data.{name}" for name in forced]
        try:
            return run(*terraform(CLUSTER, "apply", *approval, *again), seconds=APPLY_SECONDS)
        except StepError as error:
            if not NO_CAPACITY.search(" ".join(error.heard.replace("│", " ").split())):  # Terraform breaks its lines
                raise
        zones = zones_for(cluster)
        tried.append(place.zone())
        left = [zone for zone in zones if zone not in tried]
        told = ""
        if cluster.availability_zone and not place.ZONE.exists():
            told = "availability_zone names it; without it `up` tries others"
        elif place.may_hold_experience():
            told = "the cluster's experience is there"
        elif not left:
            told = "no other zone offers all types, and another region may have them"
        if told:
            raise StepError(
                f"EC2 has no capacity in {', '.join(tried)} ({told}): try again later, or {CURE}; what has started "
                "costs until `python -m deploy down`"
            )
        place.write_variable(place.ZONE, "availability_zone", left[0])


def check_account(cluster: Cluster, request_quotas: bool) -> None:
    """Checks all that `up` cannot make itself. The roles that AWS wants, which cost nothing, it makes.

    Args:
      request_quotas: whether to ask AWS for quotas that are too low.
    Raises: DeployError when something has to be changed first. StepError when AWS has not granted the quotas yet.
    """
    show("python", "-m", "deploy", "preflight", *(("--request-quotas",) if request_quotas else ()))
    blocking = []
    for line in failures(cluster, request_quotas):
        if found := ROLE.match(line.cure):
            run(*shlex.split(found[0]), seconds=CURE_SECONDS)
        else:
            blocking.append(line)
    if others := [line for line in blocking if line.name != "quota"]:
        raise DeployError(f"{_text(others)}; then the same command again")
    if blocking and not request_quotas:
        raise DeployError(f"{_text(blocking)}; or the same command with --request-quotas, which asks AWS")
    if blocking:
        raise StepError("AWS has the requests for quotas; it writes when they are granted. Then the same command again")


def _text(found: list[Line]) -> str:
    return "; ".join(f"{line.name}: {line.finding} ({line.cure})" for line in found)
