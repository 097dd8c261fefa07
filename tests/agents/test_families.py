"""Families of somebody's own: names of fields, and contents of presets, that are refused."""

import dataclasses
import enum
import pathlib
from typing import Literal

import pytest

from apexrl.agents.families import FAMILIES, SHIPPED, family_of, stream_of
from apexrl.config.commands import RunCommand
from apexrl.config.fields import with_values
from apexrl.config.flags import default_command, parse, to_flags, with_preset
from apexrl.config.sections import AlgorithmConfig, Changing, UpdateConfig
from apexrl.errors import ConfigError
from apexrl.files import write_json
from apexrl.running.run_directory import CONFIG_FILE, read_config
from tests.own_agent import OWN


def update_with(*names):
    return dataclasses.make_dataclass("OwnUpdate", [(n, int, 3) for n in names], bases=(UpdateConfig,), frozen=True)()


@pytest.fixture
def register(monkeypatch):
    """Lists a changed family, and returns its name."""

    def change(**changes):
        monkeypatch.setitem(FAMILIES, "other", OWN._replace(**changes))
        return "tests.own_agent:other"

    return change


@pytest.mark.parametrize("field", ["episodes", "shard", "max_seconds", "agent", "unroll_starts"])
def test_a_field_that_is_a_flag_already_is_named(register, field):
    agent, flag = register(update=update_with(field)), f"--{field.replace('_', '-')}"
    with pytest.raises(
        ConfigError, match=f"--agent {agent}: OwnUpdate has a field {field}: there is a flag {flag} already"
    ):
        family_of(agent)


def test_a_field_with_the_name_of_a_device_is_named_where_actors_have_such_a_flag(register):
    kind = dataclasses.make_dataclass("OwnAlgorithm", [("device", str, "cpu")], bases=(AlgorithmConfig,), frozen=True)
    with pytest.raises(ConfigError, match="OwnAlgorithm has a field device: there is a flag --device already"):
        family_of(register(algorithm=kind()))


class Kind(enum.Enum):
    A = "a"


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        (Kind, Kind.A, "Kind"),
        (pathlib.Path, pathlib.Path("a"), "Path"),
        (dict[str, int], {"a": 3}, "dict"),
        (tuple[tuple[int, int], ...], ((3, 4),), "tuple"),
        (bool | None, None, "bool"),
        (set[int], {3}, "set"),
        ("Unknown", 3, "name 'Unknown' is not defined"),
    ],
)
def test_a_field_that_no_words_can_give_is_named(register, kind, value, told):
    field = dataclasses.field(default_factory=lambda: value)
    own = dataclasses.make_dataclass("OwnUpdate", [("steps", kind, field)], bases=(UpdateConfig,), frozen=True)
    with pytest.raises(ConfigError, match=f"--agent tests.own_agent:other: OwnUpdate.*{told}"):
        family_of(register(update=own()))


@pytest.mark.parametrize(
    ("kind", "value", "other"),
    [
        (int | None, None, 3),
        (int | None, 3, None),
        (tuple[int, ...] | None, (3,), None),
        (tuple[str, float], ("a", 1.0), ("b", 2.5)),
        (list[int], [1], [3, 4]),
        (tuple[bool, ...], (True,), (False, True)),
        (Literal["a", 3], "a", 3),
        (Changing, 0.5, "0.5:0:1000"),
    ],
)
def test_roles_get_the_fields_that_words_can_give(register, kind, value, other):
    field = dataclasses.field(default_factory=lambda: value)
    own = dataclasses.make_dataclass("OwnUpdate", [("steps", kind, field)], bases=(type(OWN.update),), frozen=True)
    command = with_preset(default_command(RunCommand, register(update=own(), presets={})), "small")
    changed = with_values(command, {"steps": other})
    assert parse(RunCommand, to_flags(changed)).update.steps == other


@pytest.mark.parametrize(
    ("preset", "complaint"),
    [
        ({"lerning": {}}, "preset small has a section lerning: they are env, algorithm, network, update, acting, "),
        ({"update": {"batchsize": 3}}, "preset small: the section update has no field batchsize"),
        ({"env": {"batch_size": 3}}, "preset small: the section env has no field batch_size"),
        ({"update": 3}, "preset small: the section update is 3: give its fields by name"),
    ],
)
def test_a_mistake_in_a_preset_is_named(register, preset, complaint):
    agent = register(presets={"small": preset})
    with pytest.raises(ConfigError, match=f"--agent {agent}: {complaint}"):
        family_of(agent)


@pytest.mark.parametrize(
    ("stream", "complaint"), [(lambda *_: 1 / 0, "ZeroDivisionError"), (lambda *_: None, "gives None: give a Stream")]
)
def test_a_stream_that_is_none_is_named(register, stream, complaint):
    agent = register(stream=stream)
    with pytest.raises(ConfigError, match=f"--agent {agent}: Family.stream.*{complaint}"):
        stream_of(agent, OWN.algorithm, None)


def test_what_is_registered_is_a_family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "other", 3)
    with pytest.raises(ConfigError, match=r"FAMILIES\['other'\] is 3: give a Family"):
        family_of("tests.own_agent:other")


def test_families_that_we_ship_and_those_of_our_tests_keep_to_it(register):
    for name, family in list(FAMILIES.items()):
        agent = register(**family._asdict())
        for preset in family.presets:
            assert with_preset(default_command(RunCommand, agent), preset).preset == preset, name


def test_a_resumed_run_keeps_numbers_of_an_author_whose_names_earlier_versions_had(tmp_path, register):
    kind = dataclasses.make_dataclass(
        "OwnUpdate", [("learning_rate_schedule", str, "linear")], bases=(UpdateConfig,), frozen=True
    )
    agent = register(update=kind(), presets={})
    command = dataclasses.asdict(default_command(RunCommand, agent))
    write_json(tmp_path / CONFIG_FILE, {"command": command})
    found = read_config(tmp_path / CONFIG_FILE)[0].update
    assert found == kind() and "apex-dqn" in SHIPPED and "other" not in SHIPPED
