"""The devices of the learners of a host, and which process is one of several. Loads no torch."""

import os

from apexrl.config.sections import LearningConfig
from apexrl.errors import ConfigError


def devices_of(learning: LearningConfig, num_learners: int, num_gpus: int) -> list[str]:
    """Returns the devices of the learners of a host that has so many GPUs.

    Raises: ConfigError when there are too few.
    """
    if learning.learner_devices:
        devices = learning.learner_devices.split(",")
        if len(devices) != num_learners:
            raise ConfigError(f"--learner-devices names {len(devices)} devices for {num_learners} learners: one each")
        return devices
    on_cpu = learning.device == "cpu" or (learning.device == "auto" and not num_gpus)
    if num_learners == 1 or on_cpu:
        return [learning.device] * num_learners
    if num_gpus < num_learners:
        raise ConfigError(
            f"{num_learners} learners want {num_learners} GPUs, {num_gpus} are here: give fewer "
            "--num-learners, or --device cpu"
        )
    return [f"cuda:{index}" for index in range(num_learners)]


def is_rank(num_learners: int) -> bool:
    """Returns whether torch's launcher has started this process as one of so many learners.

    An outer job of torch has a rank, too, and tells all processes in it.
    """
    return num_learners > 1 and "RANK" in os.environ and os.environ.get("WORLD_SIZE") == str(num_learners)
