"""Hosts that install a release at their first start, on public images, instead of starting from images of one's own."""

import subprocess
import tarfile

import pytest
import yaml

from tests.deploy.commands import ran
from tests.deploy.needed import require_tool
from tests.deploy.policies import allows, statements
from tests.deploy.terraform import BUCKET, resources, role_environment, templates, user_data

ROLES = ("replay", "learner", "actor")
RELEASE = {"release": "v1.2"}
OBJECT = f"arn:aws:s3:::{BUCKET}/releases/v1.2.tar"
INSTALLER = 'echo "$APEXRL_VERSION $APEXRL_IMAGE $(basename "$APEXRL_RELEASE")" >>"$RECORD"; rm "$APEXRL_RELEASE"\n'


@pytest.fixture(scope="module")
def workspace(cluster, tmp_path_factory):
    workspace = cluster.copy(tmp_path_factory.mktemp("release"))
    workspace.apply({"results_bucket": BUCKET} | RELEASE)
    return workspace


@pytest.fixture(scope="module")
def state(workspace):
    return workspace.state()


def test_hosts_start_from_the_public_images_and_keep_them(workspace, state):
    found = resources(state)
    images = {name: made["image_id"] for name, made in templates(state).items()}
    assert images == {"learner": "ami-0000000000000aba5", "actor": "ami-0000000000000cba5"}
    assert found["aws_instance.replay"]["ami"] == images["actor"]
    for name, gib in (("learner", 200), ("actor", 16)):
        [disk] = templates(state)[name]["block_device_mappings"]
        assert (disk["device_name"], disk["ebs"][0]["volume_size"]) == ("/dev/sda1", gib)
    again = workspace.plan({"results_bucket": BUCKET} | RELEASE, "-detailed-exitcode")
    assert again.returncode == 0, again.stdout


def test_a_host_may_read_its_release_and_fetch_packages_by_http(state, applied):
    found = resources(state)
    for role in ROLES:
        given = statements(found[f'aws_iam_role_policy.release["{role}"]']["policy"])
        assert allows(given, "s3:GetObject", OBJECT)
        assert not allows(given, "s3:GetObject", f"arn:aws:s3:::{BUCKET}/apexrl/run-1/checkpoints/newest.safetensors")
        rule = found[f'aws_vpc_security_group_egress_rule.packages["{role}"]']
        assert (rule["from_port"], rule["to_port"]) == (80, 80)
    of_images = resources(applied)
    assert not [address for address in of_images if ".release[" in address or ".packages[" in address]


@pytest.mark.parametrize("role", ROLES)
def test_user_data_installs_the_release_and_then_tells_the_role(state, applied, role, tmp_path):
    """The script runs here, with stand-ins for what would change this machine."""
    text = user_data(state)[role]
    assert len(text) < 16_384
    content = yaml.safe_load(text)
    described, script = content["write_files"]
    names = role_environment(user_data(applied)[role]).keys()
    assert dict(line.split("=", 1) for line in described["content"].splitlines()).keys() == names
    [command] = content["runcmd"]
    assert command[0] == "systemd-run" and command[-1] == script["path"]
    record = run_script(script["content"], tmp_path)
    image = "gpu" if role == "learner" else "cpu"
    assert record == [
        "apt-get -o Acquire::Retries=3 update -q",
        "apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install -q -y --no-install-recommends python3-boto3",
        f"v1.2 {image} release.tar",
        "agent https://amazoncloudwatch-agent.s3.amazonaws.com",
        "systemctl daemon-reload",
        "systemctl start --no-block apexrl.target",
    ]
    assert not (tmp_path / "installing").exists()


def run_script(script: str, directory) -> list[str]:
    """Runs an installing script beside a bucket of one release; returns what its programs were called with."""
    tree, programs = directory / "tree" / "deploy" / "packer", directory / "programs"
    tree.mkdir(parents=True)
    programs.mkdir()
    (tree / "install.sh").write_text(INSTALLER)
    (tree / "agent.sh").write_text('echo "agent $CLOUDWATCH_AGENT_URL" >>"$RECORD"\n')
    with tarfile.open(directory / "v1.2.tar", "w") as archive:
        archive.add(directory / "tree" / "deploy", "deploy")
    stand_ins = {
        "apt-get": 'echo "apt-get $*" >>"$RECORD"',
        "systemctl": 'echo "systemctl $*" >>"$RECORD"',
        "python3": f'[ "$3 $4 $5" = "us-east-1 {BUCKET} releases/v1.2.tar" ] && cp "$STORE/v1.2.tar" "$6"',
    }
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    path, record = directory / "script", directory / "record"
    path.write_text(script.replace("folder=/var/tmp/apexrl-install", f"folder={directory}/installing"))
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(record), "STORE": str(directory)}
    subprocess.run(["bash", path], env=environment, check=True, timeout=30)
    return record.read_text().splitlines()


def test_the_installer_can_try_again_after_it_has_installed_the_units(state):
    """They harden every apexrl-*.service, transient ones, too: one that may not write the system cannot install it."""
    for text in user_data(state).values():
        [command] = yaml.safe_load(text)["runcmd"]
        [unit] = [word.removeprefix("--unit=") for word in command if word.startswith("--unit=")]
        assert unit and not unit.startswith("apexrl-") and "--property=Restart=on-failure" in command


def test_shellcheck_finds_nothing_in_the_script(state, tmp_path):
    require_tool("shellcheck", "shellcheck")
    path = tmp_path / "apexrl-install"
    path.write_text(yaml.safe_load(user_data(state)["actor"])["write_files"][1]["content"])
    result = ran(["shellcheck", path])
    assert result.returncode == 0, result.stdout
