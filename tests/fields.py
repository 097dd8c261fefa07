"""Unrolls with fields of every kind, and a slow reader of blocks: the oracle of the codec and the builder."""

import numpy as np

from apexrl.types import Unroll


def random_array(rng, dtype, shape):
    """Numbers that a stream of any kind may hold."""
    if dtype in ("uint8", "int32"):
        return rng.integers(0, 3, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def random_unroll(spec, seed):
    """An unroll of random content."""
    rng = np.random.default_rng(seed)
    steps = spec.unroll_steps
    return Unroll(
        random_array(rng, spec.frame_dtype, (spec.unroll_frames, *spec.frame_shape)),
        random_array(rng, spec.action.dtype, (steps, *spec.action.shape)),
        random_array(rng, "float32", steps),
        rng.integers(0, 2, steps).astype(np.float32),
        rng.integers(0, 2, steps + 1).astype(bool),
        {f.name: random_array(rng, f.dtype, (spec.num_entries(f), *f.shape)) for f in spec.extras},
    )


def slow_arrays(unroll):
    """The arrays of an unroll by the names of their fields, frames included."""
    frames, actions, rewards, discounts, starts, extras = unroll
    own = {"frame": frames, "action": actions, "reward": rewards, "discount": discounts, "start": starts}
    return own | dict(extras)


def slow_block(spec, unroll):
    """The bytes of an unroll before they are compressed, put together number by number."""
    arrays = slow_arrays(unroll)
    dtypes = {"frame": spec.frame_dtype, "action": "float32" if spec.action_bounds else "int32", "reward": "float32"}
    dtypes |= {"discount": "float32", "start": "uint8"} | {extra.name: extra.dtype for extra in spec.extras}
    block = b""
    for name in ("frame", "action", "reward", "discount", *(extra.name for extra in spec.extras), "start"):
        for number in arrays[name].ravel():
            block += np.array(number).astype(np.dtype(dtypes[name]).newbyteorder("<")).tobytes()
    return block
