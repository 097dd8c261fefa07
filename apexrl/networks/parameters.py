"""One version of the network as a record, and as bytes: versioned raw tensors in half precision, never a pickle.

Means and deviations of observations keep float32: those of numbers far from 0 would lose all that differs.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import safetensors.torch
import torch

from apexrl.errors import ApexError, WireError
from apexrl.networks.headers import ParametersHeader
from apexrl.networks.normalizer import PREFIX

_LENGTH = struct.Struct("<I")


class Parameters(NamedTuple):
    """One version of the parameters that actors use."""

    header: ParametersHeader
    tensors: dict[str, torch.Tensor]


def why_no_parameters(tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns why such tensors of a network cannot travel, "" where they can: whole numbers would be others then."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            return (
                f"{name} has {str(tensor.dtype).removeprefix('torch.')} numbers, and actors get floats of 16 bits: "
                "register it with persistent=False where it is always the same, or leave it out"
            )
    return ""


def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns copies in the host's memory, in the precision in which they travel."""
    return {name: t.detach().to("cpu", _dtype_of(name), copy=True).contiguous() for name, t in tensors.items()}


def encode_parameters(header: ParametersHeader, tensors: dict[str, torch.Tensor]) -> bytes:
    """Returns header and tensors as bytes; floating-point tensors travel as float16.

    Raises: ApexError when a value is not finite in float16: nobody could act with it.
    """
    return encode_halves(header, halved(tensors))


def encode_halves(header: ParametersHeader, halves: dict[str, torch.Tensor]) -> bytes:
    """Does what `encode_parameters` does, with tensors out of `halved`."""
    beyond = [name for name, tensor in halves.items() if not tensor.isfinite().all()]
    if beyond:
        raise ApexError(
            f"the network has diverged by update {header.params_version} ({beyond[0]} holds values beyond float16): "
            "lower --learning-rate; the run can go on from its last checkpoint (--resume)"
        )
    encoded = msgspec.msgpack.encode(header)
    return _LENGTH.pack(len(encoded)) + encoded + safetensors.torch.save(halves)


def decode_parameters(data: bytes) -> Parameters:
    """Returns the parameters with float32 tensors.

    Raises: WireError when the bytes are something else.
    """
    header, end = _split(data)
    try:
        tensors = safetensors.torch.load(data[end:])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:  # also of torch
        raise WireError(f"malformed parameters: {error}") from error
    if any(tensor.dtype != _dtype_of(name) for name, tensor in tensors.items()):
        raise WireError("malformed parameters: every tensor has to be float16, and those of a normalizer float32")
    return Parameters(header, {name: tensor.float() for name, tensor in tensors.items()})


def decode_header(data: bytes) -> ParametersHeader:
    """Returns the header of encoded parameters, without their tensors.

    Raises: WireError when the bytes are something else.
    """
    return _split(data)[0]


def _dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name.startswith(PREFIX) else torch.float16


def _split(data: bytes) -> tuple[ParametersHeader, int]:
    """Returns the header, and where the tensors begin."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        return msgspec.msgpack.decode(data[_LENGTH.size : end], type=ParametersHeader), end
    except (struct.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"malformed parameters: {error}") from error
