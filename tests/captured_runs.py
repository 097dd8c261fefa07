"""Whole reproducible runs, on a CPU and on a stand-in for a GPU, whose updates are captured once."""

import torch

from apexrl.agents.engine import plain_learner
from apexrl.config.commands import RunCommand
from apexrl.config.flags import parse
from apexrl.lifecycle import Stop
from apexrl.lockstep import learner as lockstep
from apexrl.lockstep.loop import LockstepLoop
from apexrl.networks.device import fastest_dtype
from tests.fake_graph import FakeDeviceStream


def run_lockstep(directory, flags):
    """Plays and learns in one process; returns the learner's tensors."""
    loop = LockstepLoop(parse(RunCommand, [*flags, "--run-dir", str(directory)]), Stop())
    loop.run()
    return loop.learner.updater.state_dict()


def check_captured_run(monkeypatch, directory, flags):
    """Checks that a captured update learns the same networks to the bit, with the copy that computes in bfloat16."""
    expected, device_stream = run_lockstep(directory / "cpu", flags), FakeDeviceStream()
    monkeypatch.setattr(lockstep, "DeviceStream", lambda _: device_stream)
    monkeypatch.setattr(plain_learner, "copied_dtype", fastest_dtype)
    found = run_lockstep(directory / "gpu", flags)
    assert device_stream.num_captures == 1 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
