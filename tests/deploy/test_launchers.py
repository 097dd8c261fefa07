"""Clusters by Ray's launcher, by SkyPilot and by Kubernetes, against their schemas; nobody has run them."""

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
# As far as the example wants them: get_task_schema and get_resources_schema in sky/utils/schemas.py of
# skypilot-org/skypilot, where each further field is an error.
TASK = {"name": str, "num_nodes": int, "resources": dict, "workdir": str, "file_mounts": dict, "envs": dict}
TASK |= {"setup": str, "run": str}
RESOURCES = {"infra": str, "accelerators": str, "cpus": str, "memory": str, "disk_size": int, "autostop": dict}


# Required fields, and optional ones as far as an example may want them: ray-operator/apis/ray/v1/rayjob_types.go and
# raycluster_types.go of ray-project/kuberay.
SPEC = (
    {"rayClusterSpec", "entrypoint"},
    {
        *(
            "activeDeadlineSeconds",
            "backoffLimit",
            "submitterPodTemplate",
            "submitterConfig",
            "runtimeEnvYAML",
            "suspend",
        ),
        *("submissionMode", "entrypointNumCpus", "ttlSecondsAfterFinished", "shutdownAfterJobFinishes"),
    },
)
CLUSTER = {"headGroupSpec"}, {"workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions"}
HEAD = {"rayStartParams", "template"}, {"serviceType", "headService", "enableIngress"}
WORKERS = {"groupName", "minReplicas", "maxReplicas", *HEAD[0]}, {"replicas", "numOfHosts", "scaleStrategy"}


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
    text = (EXAMPLES / "192-actors.tfvars").read_text() + (ROOT / "deploy/terraform/cluster/variables.tf").read_text()
    for role, name in (("replay", "replay_instance_type"), ("learner", "learner_instance_types")):
        first = re.search(rf'^variable "{name}" {{.*?default +=[ \[]+"(.*?)"', text, re.MULTILINE | re.DOTALL)[1]
        assert types[role]["node_config"]["InstanceType"] == first
    assert types["actors"]["min_workers"] == int(re.search(r"^actor_hosts = (\d+)", text, re.MULTILINE)[1])
    pinned = (ROOT / "requirements-dev.txt").read_text().split()
    assert [word for word in pinned if word in described["setup_commands"][2]], "the Ray that the tests run"


def test_the_run_on_rays_cluster_has_keys():
    [line] = [line for line in (EXAMPLES / "ray-up.yaml").read_text().splitlines() if "ray exec" in line]
    words = re.search(r"apexrl.running.ray_cluster (.*)'", line)[1].split()
    config, arguments, _ = divided(words)
    assert config.ray_address == "auto" and "--keys" in arguments


def test_the_task_of_skypilot_has_its_fields_and_types():
    task = load("sky.yaml")
    for given, fields in ((task, TASK), (task["resources"], RESOURCES)):
        assert {name: type(value) for name, value in given.items()} == {name: fields[name] for name in given}
    assert task["resources"]["autostop"]["down"] and task["num_nodes"] > 1
    assert task["resources"]["infra"].split("/")[0] == "aws"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_script_of_skypilot_starts_the_roles_with_keys(rank, tmp_path):
    """It runs here, with a stand-in for Python that tells its arguments; the end of the learner ends all."""
    task = load("sky.yaml")
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


def has_fields(given, fields):
    required, optional = fields
    return required <= given.keys() <= required | optional


def test_it_has_the_fields_of_a_rayjob(job):
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob") and job["metadata"]["name"]
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    assert has_fields(spec, SPEC) and has_fields(cluster, CLUSTER) and has_fields(cluster["headGroupSpec"], HEAD)
    assert spec["submissionMode"] == "K8sJobMode"
    for group in cluster["workerGroupSpecs"]:
        assert has_fields(group, WORKERS) and group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert f"ray[default]=={cluster['rayVersion']}" in (ROOT / "requirements-dev.txt").read_text().split()


def test_all_pods_see_the_runs_and_have_what_they_ask_for(job):
    cluster = job["spec"]["rayClusterSpec"]
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
