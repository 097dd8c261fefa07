"""Tables of the replay, as texts and as records."""

import dataclasses

import pytest

from apexrl.agents.contract import Unrolls, Want
from apexrl.agents.families import FAMILIES
from apexrl.config.commands import ReplayCommand, RunCommand
from apexrl.config.flags import parse
from apexrl.config.sections import ReplayConfig
from apexrl.config.tables import TableConfig, TableSpec, logs_of, part_of, table_spec, tables_of
from apexrl.errors import ConfigError
from tests.own_agent import OWN


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a=priority", TableSpec("a", "priority")),
        ("a=fifo:0", TableSpec("a", "fifo", 0.0)),
        ("a.b@3=uniform:2.5:7:5", TableSpec("a.b@3", "uniform", 2.5, 7, 5)),
        ("a=elite:::10000000", TableSpec("a", "elite", None, None, 10_000_000)),
        ("my-log_2/a=fifo", TableSpec("my-log_2/a", "fifo")),
    ],
)
def test_a_table_is_the_same_as_a_record_and_as_a_text(text, spec):
    assert table_spec(text) == spec and str(spec) == text


def test_tables_take_the_common_numbers_unless_they_have_their_own():
    config = ReplayConfig(
        capacity=1000,
        min_size_to_sample=100,
        samples_per_insert=2.0,
        tables=(
            "a=priority",
            "b=uniform",
            "c=fifo:0.5:7",
            "d=fifo",
            "e=uniform:0",
            "f=uniform:::5",
            "g=fifo:0.5:",
            "h=elite:0::5",
        ),
    )
    assert tables_of(config, 8) == {
        "a": TableConfig("priority", 2.0, 100),
        "b": TableConfig("uniform", 2.0, 12),  # unrolls
        "c": TableConfig("fifo", 0.5, 7),
        "d": TableConfig("fifo", 1.0, 1),  # each once
        "e": TableConfig("uniform", 0.0, 12),
        "f": TableConfig("uniform", 2.0, 12, 5),
        "g": TableConfig("fifo", 0.5, 1),
        "h": TableConfig("elite", 0.0, 12, 5),
    }
    assert tables_of(config, 1000)["b"].min_size_to_sample == 1


@pytest.mark.parametrize(
    "tables",
    [
        (),
        ("",),
        ("x",),
        ("=fifo",),
        ("x=",),
        ("x=last",),
        ("x=lifo:1.5",),
        ("x=lifo:1:2:3",),
        ("x=lifo:1:2::1",),
        ("x=uniform:1:2:3:0",),
        ("x=uniform:3:2:3:2",),
        ("x=uniform:1:2:3:1.5",),
        ("x=fifo:a:1",),
        ("x=fifo:1:2:3",),
        ("x=fifo:1.5",),
        ("x=priority:1:2:3",),
        ("x=uniform:1:2:0",),
        ("x=uniform:1:2:-1",),
        ("x=uniform:1:2:1.5",),
        ("x=uniform:1:2:3:4:5",),
        ("x=elite",),
        ("x=elite:1:2:0",),
        ("x=fifo:-1:1",),
        ("x=fifo:nan:1",),
        ("x=fifo:inf:1",),
        ("x=fifo:1:0",),
        ("x=fifo:1:1.5",),
        ("x=fifo:1:1001",),
        ("x=fifo", "x=uniform"),
        ("a:b=uniform",),
        ("a/b=uniform",),
    ],
)
def test_tables_that_make_no_sense_are_refused(tables):
    with pytest.raises(ConfigError, match="--tables"):
        tables_of(ReplayConfig(capacity=1000, min_size_to_sample=100, tables=tables), 8)


def test_the_logs_of_a_server_have_the_tables_that_name_them():
    config = ReplayConfig(capacity=7, min_size_to_sample=2, tables=("a/x=fifo", "b/x=uniform:0:1:5", "a/y=priority"))
    own, other = (dataclasses.replace(config, tables=t) for t in (("x=fifo", "y=priority"), ("x=uniform:0:1:5",)))
    assert logs_of(config) == {"a": own, "b": other}
    assert logs_of(own) == {"": own}
    assert part_of(config, 2).tables == ("a/x=fifo", "b/x=uniform:0:1:3", "a/y=priority")
    assert parse(ReplayCommand, ["--tables", "a/x=fifo", "b/x=fifo"]).replay.tables == ("a/x=fifo", "b/x=fifo")


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        (("a/x=fifo", "x=fifo"), "--tables x=fifo: others name the log a: give each table that of its log, as in a/x="),
        (("a/x=fifo", "a/x=lifo"), "there is a table x before"),
        (("a/x=fifo:2",), "gives each unroll once"),
        *(
            ((f"{name}/x=fifo",), "behind LOG/")
            for name in ("", ".", "..", "../a", "/a", "a/b", "-a", "ä", "a.b", 65 * "a")
        ),
        ((), "at least one is needed"),
    ],
)
def test_names_of_logs_that_make_no_sense_are_refused(tables, complaint):
    with pytest.raises(ConfigError, match=complaint):
        logs_of(ReplayConfig(tables=tables))


def test_a_run_has_one_log_without_a_name():
    with pytest.raises(ConfigError, match="the log of a run has no name"):
        parse(RunCommand, ["--tables", "a/transitions=priority"])


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("tables", TableSpec("queue", "fifo"), r"Family\.tables gives TableSpec\(name='queue'.*: give a tuple of Tabl"),
        ("tables", ("queue=fifo",), r"Family\.tables gives \('queue=fifo',\): give a tuple of TableSpec, such as \(T"),
        ("wants", Want("queue", 2, Unrolls()), r"Family\.wants gives Want\(.*: give a tuple of Want"),
        ("wants", None, r"Family\.wants gives None: give a tuple of Want"),
    ],
)
def test_what_is_no_tuple_of_records_is_named(monkeypatch, name, given, complaint):
    monkeypatch.setitem(FAMILIES, "own", OWN._replace(**{name: lambda *_: given}))
    with pytest.raises(ConfigError, match=complaint):
        parse(RunCommand, ["--agent", "tests.own_agent:own"])
