import numpy as np
import pytest
import torch

from apexrl.learning.experience.row import RowLayout
from apexrl.learning.experience.unroll_store import whole

COLUMNS = {
    "flags": ("uint8", 5, ()),
    "number": ("int64", 1, ()),
    "ratio": ("float16", 3, (2,)),
    "previous": ("int64", 2, ()),
    "reward": ("float32", 4, ()),
}


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_columns_of_all_types_come_back_whatever_lies_before_them(num_rows):
    layout, rng = RowLayout(), np.random.default_rng(0)
    for name, (dtype, entries, shape) in COLUMNS.items():
        layout.add(name, entries, dtype, shape)
    rows = np.zeros((num_rows, layout.words), np.int32)
    written = {
        name: rng.integers(0, 200, (num_rows, entries, *shape)).astype(dtype)
        for name, (dtype, entries, shape) in COLUMNS.items()
    }
    for name, values in written.items():
        for row, value in zip(rows, values, strict=True):
            layout.write(row, name, value)
    assert layout.words % 2 and layout.columns["previous"].start % 2  # no whole number of the widest
    for name, values in written.items():
        found = whole(torch.from_numpy(rows), layout.columns[name])
        assert np.array_equal(found.numpy(), values) and found.numpy().dtype == values.dtype, name
