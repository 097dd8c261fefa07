import pytest

from apexrl.agents.impala_config import ImpalaAlgorithm, ImpalaUpdate, tables, wants
from apexrl.agents.mix import parts_of, table_texts
from apexrl.config import ReplayConfig, RunCommand, TableConfig, tables_of
from apexrl.errors import ConfigError
from apexrl.flags import parse

LASER = ("queue=1/4", "uniform=1/2", "uniform@300=1/4")


def test_the_queue_sets_the_pace_and_capacities_reach_the_tables():
    assert tables(ImpalaUpdate(mix=LASER)) == ("queue=fifo", "uniform=uniform:0", "uniform@300=uniform:0::300")
    served = tables_of(ReplayConfig(min_size_to_sample=2000, tables=tables(ImpalaUpdate(mix=LASER))), 20)
    assert served == {
        "queue": TableConfig("fifo", 1.0, 1),
        "uniform": TableConfig("uniform", 0.0, 100),
        "uniform@300": TableConfig("uniform", 0.0, 100, 300),
    }


def test_without_a_queue_each_table_keeps_the_pace():
    assert table_texts(parts_of(("uniform=1/2", "uniform@300=1/2"))) == ("uniform=uniform", "uniform@300=uniform:::300")
    served = tables_of(ReplayConfig(samples_per_insert=3.0, tables=tables(ImpalaUpdate(mix=("uniform=1",)))), 20)
    assert served["uniform"].samples_per_insert == 3.0


def test_shares_of_a_batch_are_whole_unrolls():
    found = wants(ImpalaAlgorithm(), ImpalaUpdate(mix=LASER, batch_size=8))
    assert [(want.table, want.batch_size) for want in found] == [("queue", 2), ("uniform", 4), ("uniform@300", 2)]
    with pytest.raises(ConfigError, match=r"--batch-size 10 cannot be divided as --mix asks: 8 and 12 can"):
        wants(ImpalaAlgorithm(), ImpalaUpdate(mix=LASER, batch_size=10))


@pytest.mark.parametrize(
    "mix",
    [("queue",), ("lifo=1",), ("queue@3=1",), ("uniform@0=1",), ("uniform@=1",), ("uniform=0", "queue=1"),
     ("queue=1/2",), ("uniform=1/2", "uniform=1/2"), ("queue=1/0",)],
)  # fmt: skip
def test_mixes_that_make_no_sense_are_refused(mix):
    with pytest.raises(ConfigError, match="--mix"):
        parts_of(mix)


def test_a_batch_has_to_fit_the_capacity_that_it_is_drawn_from():
    flags = ["--agent", "impala", "--batch-size", "16", "--mix", "queue=1/2"]
    parse(RunCommand, [*flags, "uniform@8=1/2"])
    with pytest.raises(ConfigError, match=r"uniform@7 holds 7 unrolls, and --agent impala draws 8 different ones"):
        parse(RunCommand, [*flags, "uniform@7=1/2"])
    with pytest.raises(ConfigError, match=r"uniform holds 7 unrolls"):
        parse(RunCommand, [*flags, "uniform=1/2", "--capacity", "140", "--min-size-to-sample", "20"])
