"""Mixes as --mix gives them, the tables that serve them, and the batches that they make."""

import re
from fractions import Fraction

import pytest

from apexrl.agents.impala_config import FAMILY, ImpalaAlgorithm, ImpalaUpdate, selections_of, wants
from apexrl.agents.replaying.mix import Part, Selection, batch_sizes, parts_of, tables_for
from apexrl.config.commands import LearnerCommand, RunCommand
from apexrl.config.flags import explicit_replay, parse, wants_of
from apexrl.config.sections import ReplayConfig
from apexrl.config.tables import TableConfig, TableSpec, tables_of
from apexrl.errors import ConfigError

LASER = ("queue=1/8", "uniform=7/8")
THREE = ("queue=1/4", "uniform=1/2", "uniform@300=1/4")


def tables(update):
    """The tables of an update, as --tables takes them."""
    return tuple(map(str, FAMILY.tables(update)))


def test_a_mix_is_read_as_parts():
    assert parts_of(("queue=1",)) == (Part("queue", "queue", 0, Fraction(1)),)
    assert parts_of(("queue=0.25", "uniform=1/4", "uniform@300=1/2")) == (
        Part("queue", "queue", 0, Fraction(1, 4)),
        Part("uniform", "uniform", 0, Fraction(1, 4)),
        Part("uniform@300", "uniform", 300, Fraction(1, 2)),
    )
    assert [part.is_online for part in parts_of(LASER)] == [True, False]


@pytest.mark.parametrize("cost", ["policy_cloning_cost", "value_cloning_cost"])
def test_cloning_is_for_replayed_unrolls(cost):
    wants(ImpalaAlgorithm(), ImpalaUpdate(mix=LASER, **{cost: 0.1}))
    with pytest.raises(ConfigError, match="are for replayed unrolls: add some to --mix"):
        wants(ImpalaAlgorithm(), ImpalaUpdate(mix=("queue=1",), **{cost: 0.1}))


@pytest.mark.parametrize(
    "text",
    [
        *("", "queue", "=1", "queue=", "queue=x", "queue=1/0", "queue=nan", "queue=inf", "queue=0", "queue=-1"),
        *("stack=1", "Queue=1", "queue@5=1", "uniform@=1", "uniform@0=1", "uniform@-5=1", "uniform@x=1", "@5=1"),
        *("queue=1=1", "uniform@1.5=1", "queue 1"),
    ],
)
def test_a_part_that_makes_no_sense_is_refused_by_its_text(text):
    with pytest.raises(ConfigError, match=re.escape(f"--mix {text}: give KIND=SHARE or KIND@CAPACITY=SHARE")):
        parts_of((text,))


@pytest.mark.parametrize(
    ("mix", "total"),
    [
        (("queue=1/2",), "1/2"),
        (("queue=1/2", "uniform=2/3"), "7/6"),
        (("queue=0.3", "uniform=0.6"), "9/10"),
        (("queue=1/2", "queue=1/2"), "1"),
        ((), "0"),
    ],
)
def test_shares_that_are_not_a_whole_are_refused(mix, total):
    with pytest.raises(ConfigError, match=re.escape(f"--mix {' '.join(mix)}: the shares add up to {total};")):
        parts_of(mix)


@pytest.mark.parametrize("mix", [("queue=1",), LASER, ("queue=0.1", "uniform=0.9"), ("queue=1/3", "uniform=2/3")])
def test_batches_are_divided_into_whole_unrolls_or_sizes_that_work_are_named(mix):
    parts = parts_of(mix)
    unit = max(part.share.denominator for part in parts)
    for size in range(1, 3 * unit + 1):
        if size % unit == 0:
            sizes = batch_sizes(parts, size)
            assert sum(sizes.values()) == size and all(sizes[part.name] == part.share * size for part in parts)
            continue
        with pytest.raises(ConfigError, match=f"--batch-size {size} cannot be divided") as refused:
            batch_sizes(parts, size)
        named = [int(number) for number in re.findall(r": (\d+) and (\d+) can", str(refused.value))[0]]
        for other in named:
            assert sum(batch_sizes(parts, other).values()) == other > 0
        assert abs(size - min(named, key=lambda other: abs(other - size))) < unit


def test_shares_of_unequal_denominators_need_a_multiple_of_all():
    parts = parts_of(("queue=1/4", "uniform=5/12", "uniform@9=1/3"))
    assert batch_sizes(parts, 24) == {"queue": 6, "uniform": 10, "uniform@9": 8}
    with pytest.raises(ConfigError, match="12 and 24 can, or any other multiple of 12"):
        batch_sizes(parts, 16)


def test_the_queue_sets_the_pace_and_capacities_reach_the_tables():
    assert tables(ImpalaUpdate(mix=THREE)) == ("queue=fifo", "uniform=uniform:0", "uniform@300=uniform:0::300")
    served = tables_of(ReplayConfig(min_size_to_sample=2000, tables=tables(ImpalaUpdate(mix=THREE))), 20)
    assert served == {
        "queue": TableConfig("fifo", 1.0, 1),
        "uniform": TableConfig("uniform", 0.0, 100),
        "uniform@300": TableConfig("uniform", 0.0, 100, 300),
    }


def test_elite_insertion_has_a_table_of_its_own_that_gives_what_is_kept():
    update = ImpalaUpdate(mix=("queue=1/4", "elite-insertion@300=3/4"), batch_size=8)
    assert tables(update) == ("queue=fifo", "elite-insertion@300=elite:0::300")
    assert [(want.table, want.batch_size, want.num_rows) for want in wants(ImpalaAlgorithm(), update)] == [
        ("queue", 2, 2),
        ("elite-insertion@300", 6, 6),
    ]
    assert tables_for(parts_of(("elite-insertion@300=1",))) == (
        TableSpec("elite-insertion@300", "elite", capacity=300),
    )
    parse(RunCommand, ["--agent", "impala", "--mix", *update.mix, "--batch-size", "8"])
    with pytest.raises(ConfigError, match=r"elite-insertion=1: .* as in elite-insertion@2000=1/2"):
        parts_of(("elite-insertion=1",))
    with pytest.raises(ConfigError, match="elite-insertion@7 holds 7 unrolls, and --agent impala draws 8 different"):
        parse(RunCommand, ["--agent", "impala", "--mix", "elite-insertion@7=1", "--batch-size", "8"])


def test_without_a_queue_each_table_keeps_the_pace():
    update = ImpalaUpdate(mix=("uniform=1/2", "uniform@300=1/2"))
    assert tables(update) == (
        "uniform=uniform",
        "uniform@300=uniform:::300",
    )
    served = tables_of(ReplayConfig(samples_per_insert=3.0, tables=tables(ImpalaUpdate(mix=("uniform=1",)))), 20)
    assert served["uniform"].samples_per_insert == 3.0


def test_the_learner_wants_what_the_replay_serves():
    flags = ["--agent", "impala", "--preset", "small", "--mix", *LASER, "--batch-size", "16"]
    command = parse(RunCommand, flags)
    assert {want.table: want.batch_size for want in wants_of(command)} == {"queue": 2, "uniform": 14}
    assert explicit_replay(command).tables == ("queue=fifo", "uniform=uniform:0")
    with pytest.raises(ConfigError, match="needs a table named uniform"):
        parse(RunCommand, [*flags, "--tables", "queue=fifo"])
    with pytest.raises(ConfigError, match="--batch-size 12 cannot be divided"):
        parse(RunCommand, [*flags, "--batch-size", "12"])
    with pytest.raises(ConfigError, match=r"--rho-bar 0\.5 is below --c-bar 1:"):
        parse(RunCommand, [*flags, "--rho-bar", "0.5"])


def test_a_transform_of_rewards_needs_those_of_the_environment():
    flags = ["--agent", "impala", "--reward-transform", "soft-asymmetric"]
    parse(RunCommand, [*flags, "--clip-rewards", "no"])
    parse(LearnerCommand, flags)  # knows no environment
    with pytest.raises(ConfigError, match="give --clip-rewards no"):
        parse(RunCommand, flags)


def test_a_batch_has_to_fit_the_capacity_that_it_is_drawn_from():
    flags = ["--agent", "impala", "--batch-size", "16", "--mix", "queue=1/2"]
    parse(RunCommand, [*flags, "uniform@8=1/2"])
    with pytest.raises(ConfigError, match=r"uniform@7 holds 7 unrolls, and --agent impala draws 8 different ones"):
        parse(RunCommand, [*flags, "uniform@7=1/2"])
    with pytest.raises(ConfigError, match=r"uniform holds 7 unrolls"):
        parse(RunCommand, [*flags, "uniform=1/2", "--capacity", "140", "--min-size-to-sample", "20"])


def test_a_selection_asks_for_candidates_and_keeps_its_share():
    update = ImpalaUpdate(mix=("queue=1/4", "elite-3@300=1/2", "attentive=1/4"), batch_size=8, candidates=3,
                          distance="cosine", anneal_updates=9)  # fmt: skip
    queue, elite, attentive = wants(ImpalaAlgorithm(), update)
    assert (queue.batch_size, queue.num_rows) == (2, 2)
    assert (elite.table, elite.batch_size, elite.num_rows) == ("elite-3@300", 12, 4)
    assert (attentive.batch_size, attentive.num_rows) == (6, 2)
    assert selections_of(update) == {
        "elite-3@300": Selection("elite-3", 4, "cosine", 9, "queue"),
        "attentive": Selection("attentive", 2, "cosine", 9, "queue"),
    }
    assert tables(update) == ("queue=fifo", "elite-3@300=uniform:0::300", "attentive=uniform:0")


def test_attentive_replay_compares_features_with_those_of_a_queue():
    mix = ("queue=1/4", "attentive=1/4", "elite-1=1/2")
    found = {
        distance: [selection.distance for selection in selections_of(ImpalaUpdate(mix=mix, distance=distance)).values()]
        for distance in ("kl", "l2", "cosine")
    }
    assert found == {"kl": ["cosine", "kl"], "l2": ["l2", "l2"], "cosine": ["cosine", "cosine"]}
    with pytest.raises(ConfigError, match=r"--mix attentive: it compares features .*: add queue=SHARE"):
        wants(ImpalaAlgorithm(), ImpalaUpdate(mix=("uniform=1/2", "attentive=1/2")))


def test_a_part_may_choose_its_own_selection():
    update = ImpalaUpdate(mix=("queue=1/4", "elite-1@300:distance=l2:candidates=2=1/4", "elite-2:anneal-updates=0=1/4",
                               "attentive:distance=l2:candidates=1=1/4"),
                          batch_size=8, candidates=3, distance="kl", anneal_updates=9)  # fmt: skip
    _, *found = wants(ImpalaAlgorithm(), update)
    assert [(want.table, want.batch_size) for want in found] == [("elite-1@300", 4), ("elite-2", 6), ("attentive", 2)]
    assert list(selections_of(update).values()) == [
        Selection("elite-1", 2, "l2", 9, "queue"),
        Selection("elite-2", 2, "kl", 0, "queue"),
        Selection("attentive", 2, "l2", 9, "queue"),
    ]
    assert tables(update)[1:] == ("elite-1@300=uniform:0::300", "elite-2=uniform:0", "attentive=uniform:0")
    parse(RunCommand, ["--agent", "impala", "--mix", *update.mix, "--batch-size", "8"])


@pytest.mark.parametrize(
    "part",
    [
        *("elite-1:=1", "elite-1:8=1", "elite-1:candidates=1", "elite-1:candidates=0=1", "elite-1:candidates=x=1"),
        *("elite-1:anneal-updates=-1=1", "elite-1:anneal_updates=1=1", "elite-1:distance=l1=1", "elite-1:distance=1"),
        *(
            "attentive:distance=kl=1",
            "uniform:candidates=2=1",
            "queue:distance=kl=1",
            "elite-insertion@9:distance=l2=1",
        ),
        *("elite-1:candidates=2:candidates=3=1", "elite-1:distance=kl:distance=l2=1"),
    ],
)
def test_an_option_that_a_part_has_not_is_refused_by_its_text(part):
    with pytest.raises(ConfigError, match=re.escape(f"--mix {part}: elite-1 to elite-4 and attentive take :distance")):
        parts_of((part,))


def test_candidates_have_to_fit_the_capacity():
    flags = ["--agent", "impala", "--batch-size", "16", "--mix", "queue=1/2", "elite-1@32=1/2"]
    parse(RunCommand, flags)
    with pytest.raises(ConfigError, match=r"elite-1@32 holds 32 unrolls, and --agent impala draws 40 different ones"):
        parse(RunCommand, [*flags, "--candidates", "5"])
