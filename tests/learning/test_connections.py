"""A learner's connections."""

import pytest
import torch

from apexrl.errors import ConfigError
from apexrl.learning.connections import MAX_PARAMETER_BYTES, check_size


def test_a_network_that_no_message_holds_is_refused():
    most = torch.empty(MAX_PARAMETER_BYTES // 2, dtype=torch.float16)
    check_size({"weight": most})
    with pytest.raises(ConfigError, match=r"64 MiB of parameters in half precision.* holds 62: make it smaller"):
        check_size({"weight": most, "bias": torch.empty(2**20, dtype=torch.float16)})
