"""Plans of environments whose frames are large, or whose unrolls no log can hold."""

import msgspec
import pytest

from apexrl.config.commands import RunCommand
from apexrl.config.flags import Asked, default_command
from apexrl.config.words import Basis
from apexrl.errors import ConfigError
from apexrl.net.insert_checks import why_impossible
from apexrl.running.plan import make_plan
from apexrl.types import EnvironmentSpec

CAMERA = EnvironmentSpec("Camera-v0", (480, 640, 3), "uint8", 1, 2, 1)


def plan_of(monkeypatch, spec, *flags):
    """A plan of an environment that was looked at."""
    monkeypatch.setattr("apexrl.running.plan.look_at", lambda *_: (spec, ()))
    arguments = ["--env", spec.env, "--memory-gb", "999", *flags]
    return make_plan(Asked.of(default_command(RunCommand, Basis.of(arguments).algorithm), arguments), None)


@pytest.mark.parametrize("agent", ["apex-dqn", "impala"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_unrolls_of_large_frames_are_as_long_as_a_message_takes(monkeypatch, caplog, agent, dtype):
    caplog.set_level("INFO")
    made = plan_of(
        monkeypatch, msgspec.structs.replace(CAMERA, frame_dtype=dtype), "--agent", agent, "--hidden-size", "64"
    )
    longer = msgspec.structs.replace(made.spec, unroll_starts=made.spec.unroll_starts + 1)
    assert not why_impossible(made.spec) and made.command.algorithm.unroll_starts == made.spec.unroll_starts
    usual = default_command(RunCommand, agent).algorithm.unroll_starts
    if made.spec.unroll_starts < usual:
        assert why_impossible(longer) and f"--unroll-starts is {made.spec.unroll_starts}, not" in caplog.text
    else:
        assert not caplog.text


@pytest.mark.parametrize(
    ("changes", "flags", "complaint"),
    [
        ({}, ["--unroll-starts", "90"], r"of uint8: an unroll of \d+ bytes .*: lower --unroll-starts to \d\d$"),
        ({}, ["--unroll-starts", "80"], r"of uint8: an unroll of \d+ bytes .*: lower --unroll-starts to \d\d$"),
        ({"frame_shape": (4000, 4000, 3)}, [], r"\(4000, 4000, 3\) of uint8: the shortest unroll .*--resize"),
        ({}, [], r"the network has 1\d\d MiB of parameters .* holds 62: .* as with --resize"),
        ({"frame_shape": (0,)}, [], r"environment 'Camera-v0' has frames \(0,\).*no numbers at all"),
        ({"frame_shape": (2,), "action_names": ("stay", "stay")}, [], "needs 2 different action_names, or none"),
    ],
)
def test_an_environment_that_no_log_can_hold_is_refused_by_the_plan(monkeypatch, changes, flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        plan_of(monkeypatch, msgspec.structs.replace(CAMERA, **changes), *flags)
