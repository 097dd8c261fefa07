"""The RayJob for Kubernetes, against the fields that KubeRay's v1 types have; no cluster has run it."""

import shlex

import pytest
import yaml

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command
from apexrl.config.words import Basis
from apexrl.running.ray_flags import divided
from apexrl.running.refusals import check_asked
from tests.system.processes import ROOT

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


@pytest.fixture(scope="module")
def job():
    return yaml.safe_load((ROOT / "deploy" / "examples" / "rayjob.yaml").read_text())


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
