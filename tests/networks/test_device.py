import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from apexrl.networks import device

SUBNORMAL = 1e-39


def product(factor):
    return (torch.full((32,), SUBNORMAL) * factor).unique().tolist()


def test_the_smallest_numbers_are_zeros_in_a_prepared_thread_and_those_that_it_begins(monkeypatch):
    monkeypatch.setattr(device, "keep_freed_memory", lambda: None)  # it would change this process
    found = {}

    def prepared():
        device.prepare_for_updates(torch.get_num_threads())
        found["own"] = product(1)
        with ThreadPoolExecutor(1) as begun:
            found["begun"] = begun.submit(product, 1).result(60)

    thread = threading.Thread(target=prepared)
    thread.start()
    thread.join(60)
    assert found == {"own": [0.0], "begun": [0.0]}
    assert product(2) != [0.0]  # in a thread that is not prepared


@pytest.mark.parametrize(
    ("vendor", "has_amx", "has_avx512", "is_faster"),
    [
        ("AuthenticAMD", False, True, True),
        ("AuthenticAMD", False, False, False),
        ("GenuineIntel", True, True, True),
        ("GenuineIntel", False, True, False),  # it takes twice as long for them
        ("GenuineIntel", False, False, False),
        (None, False, True, True),
    ],
)
def test_products_are_in_bfloat16_where_that_is_faster(monkeypatch, tmp_path, vendor, has_amx, has_avx512, is_faster):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_avx512)
    monkeypatch.setattr(device, "PROCESSORS", tmp_path / "cpuinfo")
    if vendor:
        device.PROCESSORS.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t: sse4_2\n")
    assert device.cpu_has_bfloat16() == is_faster


def test_our_networks_have_the_usual_number_type_and_device():
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with device.usual_defaults():
            made = torch.zeros(1)
        assert (made.dtype, made.device.type) == (torch.float32, "cpu")
        assert (torch.zeros(1).dtype, torch.zeros(1).device.type) == (torch.float64, "meta")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
