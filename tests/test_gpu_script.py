"""`benchmarks/gpu.sh` and its parts, as far as they run without a GPU."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import gpu_probe, gpu_report
from tests.system.processes import ROOT, wait_for


@pytest.fixture
def call(tmp_path):
    """Starts the script on a CPU; returns the process."""

    def start(out="out", **environment):
        given = {
            "PYTHON": sys.executable,
            "APEXRL_GPU_DEVICE": "cpu",
            "ARCHIVE": str(tmp_path / "all.tgz"),
        } | environment
        return subprocess.Popen(
            ["bash", str(ROOT / "benchmarks" / "gpu.sh"), str(tmp_path / out)],
            env=os.environ | given | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def said(process):
    return process.communicate(timeout=120)[0]


def test_a_call_goes_on_with_the_parts_of_the_archive(tmp_path, call):
    first = call(PARTS="machine")
    assert "TRIAL WITHOUT A GPU" in said(first) and first.returncode == 0
    elsewhere = call("elsewhere", PARTS="machine")
    assert "machine: is there" in said(elsewhere) and elsewhere.returncode == 0
    found = [json.loads((tmp_path / out / "machine.json").read_text()) for out in ("out", "elsewhere")]
    assert found[0] == found[1] and found[0]["torch"] == torch.__version__


def test_parts_without_time_are_named(call):
    process = call(PARTS="machine cores", TOTAL_SECONDS="1")
    assert "LEFT: machine cores: run the same command again" in said(process) and process.returncode == 3


def test_an_interrupted_call_leaves_its_figures_in_the_archive(tmp_path, call):
    process = call(PARTS="cores")
    wait_for((tmp_path / "out" / "cores.log").exists, 60, "the part")
    process.send_signal(signal.SIGTERM)
    assert "interrupted" in said(process) and process.returncode == 130
    listed = subprocess.run(["tar", "tzf", tmp_path / "all.tgz"], capture_output=True, text=True, check=True)
    assert "./cores.log" in listed.stdout


@pytest.fixture
def python_without(tmp_path):
    """Returns a function that makes an interpreter which fails where a word is among its arguments."""

    def make(word):
        broken = tmp_path / f"python-without-{word}"
        broken.write_text(f'#!/bin/sh\ncase "$*" in *{word}*) exit 1;; esac\nexec {sys.executable} "$@"\n')
        broken.chmod(0o755)
        return str(broken)

    return make


def test_a_part_that_failed_is_tried_again_after_the_others(call, python_without):
    broken = python_without("benchmarks.")
    assert "FAILED: gather: status 1" in said(call(PARTS="gather", PYTHON=broken))
    text = said(call(PARTS="gather cores", PYTHON=broken))
    assert text.index("cores: at most") < text.index("gather: at most")


def test_a_smoke_part_that_fails_ends_the_call(tmp_path, call, python_without):
    process = call(PARTS="smoke cores", PYTHON=python_without("gpu_probe"))
    text = said(process)
    assert "FAILED: smoke: status 1" in text and "KEEP_GOING=1" in text and process.returncode == 1
    assert not (tmp_path / "out" / "cores.log").exists()


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (5, 1, 0, 0), (5, 0, 1, 0), (5, 0, 0, 1)])
def test_all_tests_have_to_run_and_pass_on_a_gpu_and_are_counted_anyway(tmp_path, counts):
    names = ("tests", "skipped", "failures", "errors")
    given = " ".join(f'{name}="{count}"' for name, count in zip(names, counts, strict=True))
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite {given}/></testsuites>")
    with pytest.raises(SystemExit, match="all tests have to run and to pass"):
        gpu_report.main("tests", str(tmp_path / "tests.xml"), str(tmp_path / "tests.part"))
    assert json.loads((tmp_path / "tests.part").read_text())["passed"] == max(counts[0] - 1, 0)


@pytest.fixture
def smoke(monkeypatch):
    """Takes the smoke part on a CPU; the second of its worlds is changed by a function before its update."""
    monkeypatch.setattr(gpu_probe, "RING", 8)
    monkeypatch.setattr(gpu_probe, "SMOKE_UPDATES", 1)
    make, worlds = gpu_probe.World, []

    def take(change):
        def changed(*args, **kwargs):
            worlds.append(make(*args, **kwargs))
            if len(worlds) == 2:
                change(worlds[1])
            return worlds[-1]

        monkeypatch.setattr(gpu_probe, "World", changed)
        return dict(gpu_probe.smoke(torch.device("cpu")))

    return take


def zeroed(world):
    with torch.no_grad():
        for tensor in world.learner.acting_tensors().values():
            tensor.zero_()
    world.learner.copy_target()


def black(world):
    world.store._frames.zero_()


def test_the_smoke_part_compares_a_device_with_the_cpu(smoke):
    found = smoke(lambda world: None)
    assert found["first_priorities_distance"] == found["first_gradient_distance"] == 0
    assert found["actor_values_distance"] == 0 and np.isfinite(found["ten_updates_seconds"])


@pytest.mark.parametrize("change", [zeroed, black])
def test_the_smoke_part_fails_where_network_or_screens_are_wrong(smoke, change):
    with pytest.raises(RuntimeError, match="the errors of an update differ by"):
        smoke(change)
