"""The types of `apexrl.train`'s flags are those of the configuration."""

import inspect

from apexrl import train
from apexrl.config.commands import RunCommand
from apexrl.config.fields import values_of
from apexrl.config.flags import default_command
from apexrl.train_flags import TrainFlags
from deploy import flags


def test_the_types_are_those_of_the_code():
    assert flags.TYPES_FILE.read_text() == flags.text_of_types(), "python -m deploy flags writes it anew"
    assert inspect.signature(train).parameters["flags"].annotation == "Unpack[TrainFlags]"


def test_every_flag_of_a_run_has_a_type_but_the_environment():
    names = {name for agent in flags.agents() for name in values_of(default_command(RunCommand, agent))}
    assert names - {"env"} == TrainFlags.__annotations__.keys()
    assert not TrainFlags.__required_keys__
