import subprocess
import sys

import pytest

from tests.system.processes import ROOT


def modules_after(code):
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import replay", {"torch", "gymnasium", "ale_py", "tensorboardX", "cv2"}),
        ("import apexrl.net.replay_server", {"torch", "gymnasium", "ale_py"}),
        ("import apexrl.net", {"torch", "gymnasium", "ale_py", "tyro"}),
        ("import apexrl.net.service", {"torch", "gymnasium", "ale_py", "tyro"}),
        ("import apexrl.replay.replay", {"torch", "zmq", "asyncio", "gymnasium", "tyro"}),
        ("import apexrl.tools.keys", {"torch", "gymnasium"}),
        ("import apexrl.losses.value_learning", {"zmq", "gymnasium"}),
        ("import apexrl.environments.vector", {"torch", "zmq"}),
        ("import apexrl.unroll", {"torch", "zmq", "gymnasium"}),
        ("import apexrl.learning.unroll_store", {"zmq", "gymnasium"}),
        ("import apexrl.agents.apex_dqn", {"zmq", "gymnasium", "ale_py"}),
        ("import apexrl.acting.loop", {"cv2", "tensorboardX"}),
    ],
)
def test_dependencies_point_one_way(code, forbidden):
    assert not modules_after(code) & forbidden
