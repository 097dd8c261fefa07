"""Clusters by Ray's launcher, against its schema, by SkyPilot and by Kubernetes; nobody has run them."""

import re
import shlex
import subprocess

import pytest
import yaml

from apexrl.config.commands import ActorCommand, LearnerCommand, ReplayCommand, RunCommand
from apexrl.config.flags import Asked, default_command, parse
from apexrl.config.words import Basis
from apexrl.running.ray_flags import divided
from apexrl.running.refusals import check_asked
from tests.system.processes import ROOT

EXAMPLES = ROOT / "deploy" / "examples"
COMMANDS = {"replay.py": ReplayCommand, "learner.py": LearnerCommand, "actor.py": ActorCommand}


def load(name):
    return yaml.safe_load((EXAMPLES / name).read_text())


def test_rays_launcher_takes_the_cluster_of_192_actors():
    util = pytest.importorskip("ray.autoscaler._private.util")
    described = load("ray-up.yaml")
    util.validate_config(util.prepare_config(load("ray-up.yaml")))
    wrong = load("ray-up.yaml")
    wrong["available_node_types"]["actors"]["workers"] = 3
    with pytest.raises(Exception, match="'workers' was unexpected"):
        util.validate_config(util.prepare_config(wrong))

    types = described["available_node_types"]
    bases = set(re.findall(r'name += "(.*)"', (ROOT / "deploy/packer/bases.pkr.hcl").read_text()))
    images = {role: type_["node_config"]["ImageId"].removeprefix("resolve:ssm:") for role, type_ in types.items()}
    assert set(images.values()) == bases and "nvidia-driver" in images["learner"]
    text = (EXAMPLES / "192-actors.tfvars").read_text() + (ROOT / "deploy/terraform/cluster/variables.tf").read_text()
    for role, name in (("replay", "replay_instance_type"), ("learner", "learner_instance_types")):
        first = re.search(rf'^variable "{name}" {{.*?default +=[ \[]+"(.*?)"', text, re.MULTILINE | re.DOTALL)[1]
        assert types[role]["node_config"]["InstanceType"] == first
    assert types["actors"]["min_workers"] == int(re.search(r"^actor_hosts = (\d+)", text, re.MULTILINE)[1])
    pinned = (ROOT / "requirements-dev.txt").read_text().split()
    assert [word for word in pinned if word in described["setup_commands"][2]], "the Ray that the tests run"


def test_the_run_on_rays_cluster_has_keys_and_waits_for_its_gpu():
    [line] = [line for line in (EXAMPLES / "ray-up.yaml").read_text().splitlines() if "ray exec" in line]
    words = re.search(r"apexrl.running.ray_cluster (.*)'", line)[1].split()
    config, arguments, _ = divided(words)
    assert config.ray_address == "auto" and "--keys" in arguments
    assert parse(RunCommand, arguments).learning.device == "cuda" and "exec --tmux" in line


@pytest.mark.parametrize("rank", [0, 1])
def test_the_script_of_skypilot_starts_the_roles_with_keys(rank, tmp_path):
    """It runs here, with a stand-in for Python that tells its arguments; the end of the learner ends all."""
    task = load("sky.yaml")
    assert task["resources"]["autostop"]["down"] and task["num_nodes"] > 1
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >>"$HOME/called"\n[ "$1" = learner.py ] || exec sleep 60\nsleep 1\n')
    python.chmod(0o755)
    (tmp_path / "nproc").write_text("#!/bin/sh\necho 16\n")
    (tmp_path / "nproc").chmod(0o755)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin", "SKYPILOT_NODE_RANK": str(rank)}
    environment |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"} | task["envs"]
    script = task["run"].replace("exec ", "exec timeout 1 ") if rank else task["run"]
    subprocess.run(["bash", "-c", script], env=environment, check=False, timeout=30)
    called = [line.split() for line in (tmp_path / "called").read_text().splitlines()]
    wanted = ["actor.py", "actor.py", "learner.py", "replay.py"] if rank == 0 else ["actor.py"]
    assert sorted(name for name, *_ in called) == wanted
    for name, *flags in called:
        wires = parse(COMMANDS[name], flags).wires
        assert (wires.keys, wires.replay_host) == (f"{tmp_path}/keys", "10.0.0.1")


@pytest.fixture(scope="module")
def job():
    return load("rayjob.yaml")


def test_all_pods_see_the_runs_and_have_what_they_ask_for(job):
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray[default]=={cluster['rayVersion']}" in (ROOT / "requirements-dev.txt").read_text().split()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["image"] == "IMAGE" and container["workingDir"] == "/apexrl"
        assert pod["terminationGracePeriodSeconds"] >= 60, "a last checkpoint takes its time"


def test_its_entrypoint_is_a_run_on_the_shared_volume(job):
    python, module, name, *flags = shlex.split(job["spec"]["entrypoint"])
    assert (python, module, name) == ("python", "-m", "apexrl.running.ray_cluster")
    config, arguments, _ = divided(flags)
    asked = Asked.of(default_command(RunCommand, Basis.of(arguments).algorithm), arguments)
    check_asked(asked)
    mounts = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert config.ray_address == "auto" and any(
        asked.command.run_dir.startswith(mount["mountPath"]) for mount in mounts
    )
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    [maker] = head["initContainers"]
    assert asked.command.wires.keys == "/runs/keys" and maker["command"][2].endswith("apexrl keys /runs/keys")
    environment = yaml.safe_load(job["spec"]["runtimeEnvYAML"])
    assert environment["env_vars"] == {"PYTHONPATH": "/apexrl", "RAY_JOB_STOP_WAIT_TIME_S": "60"}
