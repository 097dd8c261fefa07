"""The devices that tests run on. `pytest -m gpu` runs the cases that need a GPU, and no others."""

import pytest
import torch

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(GPU, id="cuda", marks=NEEDS_GPU)]
