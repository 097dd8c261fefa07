"""Arrays of one type as arrays of another, where no number becomes another one. Numpy alone."""

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


def exactly(values: Any, dtype: DTypeLike, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Returns values in another type; the values themselves where nothing differs.

    Floats are rounded to the precision of a float type, and may become infinite. All else has to stay the same number.

    Args:
      shape: of the result; dimensions of one may be missing or too many in the values.
    Raises: ValueError when the values are no numbers, have another shape, or would become others. It names the first.
    """
    array, dtype = np.asarray(values), np.dtype(dtype)
    if array.dtype == dtype and shape in (None, array.shape):
        return array
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{_short(values)}, where numbers are needed")
    if shape is not None and array.shape != shape:
        if [size for size in array.shape if size != 1] != [size for size in shape if size != 1]:
            raise ValueError(f"the shape {array.shape}, where {shape} is needed")
        array = array.reshape(shape)
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        if dtype.kind == array.dtype.kind == "f":
            return cast
        changed = (cast != array) | (cast.astype(array.dtype) != array)  # numpy compares integers and floats as floats
    if changed.any():
        place = tuple(np.argwhere(changed)[0])
        where = f" at {', '.join(map(str, place))}" if math.prod(array.shape) > 1 else ""
        raise ValueError(f"{array[place]}{where}, where {_needed(dtype)} are needed")
    return cast


def _needed(dtype: np.dtype) -> str:
    if dtype.kind == "b":
        return "truth values (or 0 and 1)"
    if dtype.kind == "f":
        return f"numbers that are exact in {dtype}"
    limits = np.iinfo(dtype)
    return f"whole numbers from {limits.min} to {limits.max}" if dtype.itemsize < 8 else "whole numbers"


def _short(values: Any) -> str:
    array = np.asarray(values)
    return f"{values!r:.40}" if array.size == 1 else f"an array of {array.dtype}"
