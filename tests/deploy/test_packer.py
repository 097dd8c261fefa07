"""The images: the template, a whole build of both, and what is in them."""

import contextlib
import ipaddress
import json
import re
import shutil
import subprocess

import pytest

from deploy.cluster import packer_default
from tests.deploy import rootfs, site
from tests.deploy.commands import ran
from tests.deploy.image_build import (
    BASES,
    BUILDER,
    PROFILE,
    TORCH,
    VERSION,
    commit,
    copy_repository,
    for_this_packer,
    packer,
)
from tests.system.processes import ROOT

PACKER = ROOT / "deploy/packer"
# The first time, a root file system is made and packages are downloaded.
pytestmark = [pytest.mark.long("clusters of machines"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A copy of deploy/ with the template as this Packer can read it."""
    directory = tmp_path_factory.mktemp("template")
    shutil.copytree(ROOT / "deploy", directory / "deploy")
    for_this_packer(directory)
    return directory


def packages(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text.lower(), re.MULTILINE))


def test_the_template_is_formatted():
    result = packer("fmt", "-check", "-diff", "deploy/packer")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_template_is_valid(template):
    result = packer("validate", "-var", "version=v1.0", "deploy/packer", cwd=template)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "variables, message",
    [
        ([], 'Unset variable "version"'),
        (["version=one two"], "give -var version=$(git describe --tags --always)"),
        (["version=v1", "region=moon"], "list them with: aws ec2 describe-regions"),
        (["version=v1", "gpu_volume_gib=20"], "The gpu image needs at least 75 GiB"),
        (["version=v1", "ssh_interface=telnet"], "The ssh_interface has to be session_manager"),
        (["version=v1", "ssh_interfase=x"], "ssh_interfase"),
    ],
)
def test_a_wrong_value_is_named_with_its_cure(template, variables, message):
    words = [word for variable in variables for word in ("-var", variable)]
    result = packer("validate", *words, "deploy/packer", cwd=template)
    assert result.returncode != 0 and message in " ".join((result.stdout + result.stderr).split())


def test_a_build_is_closed_unless_it_is_opened():
    assert packer_default("ssh_interface") == "session_manager"
    cidrs = json.loads(packer_default("ssh_cidrs"))
    assert cidrs and all(ipaddress.ip_network(cidr).is_loopback for cidr in cidrs)


def test_only_the_newer_lines_are_left_out(template):
    """The lines that Packer 1.6 does not check are few, and hold the right values."""
    newer = [line for line in (PACKER / "apexrl.pkr.hcl").read_text().splitlines() if line.endswith("# packer >= 1.7")]
    values = dict(re.findall(r'(\w+) += "?(.*?)"? +#', "\n".join(newer)))
    assert values == {
        "imds_support": "v2.0",
        "http_endpoint": "enabled",
        "http_tokens": "required",
        "http_put_response_hop_limit": "1",
        "delay_seconds": "30",
        "max_attempts": "240",
    }
    assert len(newer) == len(values) + 4  # the ends of two blocks


@pytest.fixture
def repository(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("not installed: apt-get install git")
    repository = copy_repository(tmp_path / "repository")
    commit(repository)
    return repository


def release(repository, version):
    command = ["deploy/packer/release.sh", version, "build/release.tar"]
    return ran(command, cwd=repository)


def test_a_release_is_what_git_holds_at_the_version(repository):
    assert release(repository, VERSION).returncode == 0
    listing = subprocess.run(
        ["tar", "--list", "--file", repository / "build/release.tar"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout.split()  # fmt: skip
    assert {"actor.py", "apexrl/unroll.py", "deploy/files/apexrl_host.py", "LICENSE"} <= set(listing)
    assert not [name for name in listing if name.startswith(("tests", "docs", "benchmarks", "deploy/terraform"))]

    assert "git knows no version v9" in release(repository, "v9").stderr
    with (repository / "actor.py").open("a") as file:
        file.write("# changed\n")
    assert "not committed: commit or stash them" in release(repository, VERSION).stderr
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "--all", "--message=next"],
        cwd=repository, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert f"{VERSION} is not what is checked out: git checkout {VERSION}" in release(repository, VERSION).stderr


def test_both_images_are_found_by_their_tags(build):
    for name, image in build.images.items():
        assert image.description["Name"].startswith(f"apexrl-{name}-{VERSION}-")
        base = BASES[name]
        expected = {"Project": "apexrl", "Role": name, "Version": VERSION, "Name": f"apexrl-{name}-{VERSION}"}
        assert image.tags == expected | {"BaseImage": base[0], "BaseImageName": base[2]}
    manifest = json.loads((build.repository / "build/images.json").read_text())["builds"]
    built = {entry["custom_data"]["image"]: entry["artifact_id"].split(":")[1] for entry in manifest}
    assert built == {name: image.description["ImageId"] for name, image in build.images.items()}


def test_a_build_is_encrypted_and_closed(build):
    sizes = {"cpu": 16, "gpu": 100}
    for name, image in build.images.items():
        (volume,) = image.instance.volumes
        assert (volume["VolumeType"], volume["Encrypted"], volume["Size"]) == ("gp3", True, sizes[name])
        (rule,) = image.instance.open_to
        assert (rule["FromPort"], rule["ToPort"]) == (22, 22)
        assert [entry["CidrIp"] for entry in rule["IpRanges"]] == ["10.213.0.0/16"] and not rule["Ipv6Ranges"]
        assert image.instance.profile == PROFILE
        tags = {tag["Key"]: tag["Value"] for tag in image.instance.description["Tags"]}
        assert tags["Project"] == "apexrl" and tags["Version"] == VERSION
    assert "0.0.0.0/0" not in build.output


def test_a_build_leaves_nothing_running(build):
    ec2, iam = build.aws.client("ec2"), build.aws.client("iam")
    reservations = ec2.describe_instances()["Reservations"]
    states = [instance["State"]["Name"] for entry in reservations for instance in entry["Instances"]]
    assert len(states) == len(BASES) and set(states) == {"terminated"}
    assert not ec2.describe_key_pairs()["KeyPairs"]
    assert {group["GroupName"] for group in ec2.describe_security_groups()["SecurityGroups"]} == {"default"}
    profiles = iam.list_instance_profiles()["InstanceProfiles"]
    assert not iam.list_roles()["Roles"] and [found["InstanceProfileName"] for found in profiles] == [PROFILE]
    assert len(ec2.describe_images(Owners=["self"])["Images"]) == len(BASES), "a copy stays"


@pytest.fixture
def opened(build, tmp_path):
    """The root file system of each image."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(rootfs.overlay(image.layers, tmp_path / name))
            for name, image in build.images.items()
        }


def test_nothing_of_one_machine_is_in_an_image(build, opened):
    for name, root in opened.items():
        assert (root / "etc/machine-id").read_text() == ""
        assert not list((root / "etc/ssh").glob("ssh_host_*"))
        assert not [*root.glob("home/*/.ssh/*"), *root.glob("root/.ssh/*"), *root.glob("**/.bash_history")]
        assert not list((root / "var/lib/cloud").iterdir())
        assert not list(root.glob("etc/netplan/*cloud-init*"))
        for left in ("var/lib/apt/lists/*", "var/log/journal/*", "var/tmp/*", "tmp/*", "var/lib/systemd/random-seed"):
            assert not [path for path in root.glob(left) if path.is_file()], left
        key = build.images[name].instance.public_key
        found = ran(["grep", "-rlF", key, build.images[name].layers[0]])
        assert found.returncode == 1, found.stdout


def test_no_secret_is_in_an_image(build):
    """A CURVE key is a line of 40 characters, some of each kind."""
    patterns = {
        "a private key": "-----BEGIN [A-Z ]*PRIVATE KEY-----",
        "an SSH key": "(ssh-(rsa|dss|ed25519)|ecdsa-sha2-nistp[0-9]+) AAAA",
        "a key of AWS": "A(KIA|SIA)[0-9A-Z]{16}",
        "a secret of AWS": re.escape(BUILDER["AWS_SECRET_ACCESS_KEY"]),
        "a CURVE key": r"^(?=.*\d)(?=.*[A-Z])(?=.*[a-z])(?=.*[\^!*?&<>()[\]{}@%$#])[-\w.:+=^!/*?&<>()[\]{}@%$#]{40}$",
    }
    for image in build.images.values():
        folders = [image.changes / name for name in ("etc", "var", "opt/apexrl", "root", "home")]
        places = [folder for folder in folders if folder.is_dir()]
        assert len(places) >= 3
        assert not [path for folder in places for path in folder.rglob("*.secret")]
        for what, pattern in patterns.items():
            command = ["grep", "-rlIP", "--exclude-dir=.venv", "-e", pattern, *places]
            found = ran(command)
            assert found.returncode == 1, f"{what}: {found.stdout}{found.stderr}"


def test_an_image_holds_the_release_and_its_locked_packages(build, opened):
    common = packages((PACKER / "requirements-common.txt").read_text())
    for name, root in opened.items():
        home = root / "opt/apexrl"
        assert (home / "VERSION").read_text() == f"{VERSION}\n"
        for path in [*ROOT.glob("*.py"), *ROOT.glob("apexrl/**/*.py"), *(ROOT / "deploy/files").glob("*.py")]:
            assert (home / path.relative_to(ROOT)).read_bytes() == path.read_bytes(), path
        names = [path.stem for path in home.glob(".venv/lib/python3.12/site-packages/*.dist-info")]
        installed = {name.split("-")[0].replace("_", "-").lower(): name.split("-")[1] for name in names}
        assert installed.pop("pip")
        assert installed == common | {"torch": TORCH[name]}
        loose = [path for path in home.rglob("*") if not path.is_symlink() and _may_be_changed(path)]
        assert not loose, loose[:5]
        user = re.search(r"^apexrl:x:(\d+):(\d+):.*:(\S+)$", (root / "etc/passwd").read_text(), re.MULTILINE)
        assert user[3] == "/usr/sbin/nologin"
        state = (root / "var/lib/apexrl").stat()
        assert (state.st_uid, state.st_gid, state.st_mode & 0o777) == (int(user[1]), int(user[2]), 0o750)


def _may_be_changed(path):
    stat = path.stat()
    return bool(stat.st_uid or stat.st_gid or stat.st_mode & 0o022)


def test_an_image_starts_our_target_and_no_ssh(opened):
    for root in opened.values():
        units = root / "etc/systemd/system"
        assert (units / "multi-user.target.wants/apexrl.target").is_symlink()
        enabled = {path.name for folder in units.glob("*.wants") for path in folder.iterdir()}
        assert not enabled & {"ssh.service", "ssh.socket", "amazon-cloudwatch-agent.service"}, enabled
        assert (units / "apt-daily-upgrade.timer").readlink().as_posix() == "/dev/null"
        assert (root / site.AGENT).exists()


@pytest.mark.parametrize("tampered", [False, True])
def test_an_agent_that_aws_did_not_sign_is_not_installed(tmp_path, tampered):
    """The published key is not AWS's; or it is trusted, and the package was changed after it was signed."""
    rootfs.require()
    base = rootfs.base()
    published = tmp_path / "published"
    fingerprint = site.publish_agent(published)
    script = (PACKER / "agent.sh").read_text()
    expected = "is not signed by AWS's key 937616F3450B7D806CBD9725D58167303B789C72"
    if tampered:
        script = script.replace("937616F3450B7D806CBD9725D58167303B789C72", fingerprint)
        with (published / "ubuntu/amd64/latest/amazon-cloudwatch-agent.deb").open("ab") as file:
            file.write(b"!")
        expected = "is not what its signature says"
    with (
        site.host_address() as address,
        site.serving(address, published) as url,
        rootfs.overlay([base], tmp_path / "host") as root,
    ):
        (root / "root/agent.sh").write_text(script)
        result = ran(["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--pipe", "-D", root,
             f"--setenv=CLOUDWATCH_AGENT_URL={url}", "bash", "/root/agent.sh"], stdin=subprocess.DEVNULL)  # fmt: skip
        assert result.returncode == 1 and expected in result.stderr, result.stderr
        assert not (root / site.AGENT).exists()
