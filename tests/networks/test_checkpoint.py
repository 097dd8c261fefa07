import contextlib
import json
import pickle
import struct

import msgspec
import pytest
import torch

from apexrl.errors import ConfigError, WireError
from apexrl.networks.checkpoint import load_checkpoint, save_checkpoint
from apexrl.networks.config import DuelingConfig, to_text
from apexrl.networks.headers import CheckpointHeader, Counters, Identity, ParametersHeader, copy_checkpoint, load_header
from apexrl.networks.parameters import decode_parameters, encode_parameters

NETWORK = to_text(DuelingConfig((1, 2, 3), 4))


def test_round_trip(tmp_path, spec):
    header = CheckpointHeader(spec, "apex-dqn", NETWORK, Counters(updates=3, seconds=1.5, best_evaluation_return=-2.0))
    tensors = {"acting.a": torch.arange(3.0), "acting.b": torch.ones(2), "learning.a": torch.zeros(1)}
    tensors |= {f"learning.{dtype}": torch.ones(2, dtype=dtype) for dtype in (torch.int8, torch.int16, torch.uint8)}
    save_checkpoint(tmp_path / "c.safetensors", header, tensors)
    back = load_checkpoint(tmp_path / "c.safetensors")
    assert back.header == header
    assert all(torch.equal(back.tensors[name], tensors[name]) for name in tensors)
    parameters = back.parameters()
    assert parameters.header.params_version == 3 and set(parameters.tensors) == {"a", "b"}


def test_a_failed_write_leaves_the_old_file(tmp_path, spec):
    path = tmp_path / "c.safetensors"
    header = CheckpointHeader(spec, "apex-dqn", NETWORK, Counters(updates=1))
    save_checkpoint(path, header, {"acting.a": torch.ones(1)})
    with pytest.raises(AttributeError):
        save_checkpoint(path, header, {"acting.a": "not a tensor"})
    assert load_checkpoint(path).header.counters.updates == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_pickle_is_never_opened(tmp_path):
    path = tmp_path / "evil.safetensors"
    path.write_bytes(pickle.dumps({"acting.a": 1}))
    with pytest.raises(ConfigError, match="no checkpoint of this program"):
        load_checkpoint(path)


def test_a_file_cut_short_is_named(tmp_path, spec):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, CheckpointHeader(spec, "apex-dqn", NETWORK, Counters()), {"acting.a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"c\.safetensors"):
        load_checkpoint(path)


@pytest.mark.parametrize("shape", [[2**63, 0], [0, 2**62, 8]])
def test_a_shape_that_no_tensor_has_is_named(tmp_path, spec, shape):
    save_checkpoint(tmp_path / "c", CheckpointHeader(spec, "apex-dqn", "{}", Counters()), {"x": torch.zeros(2)})
    (tmp_path / "c").write_bytes(with_a_shape((tmp_path / "c").read_bytes(), "F32", shape))
    with pytest.raises(ConfigError, match="is no checkpoint of ours") if shape[0] else contextlib.nullcontext():
        load_checkpoint(tmp_path / "c")
    encoded = encode_parameters(ParametersHeader(1, spec, "apex-dqn", "{}"), {"x": torch.zeros(2)})
    (length,) = struct.unpack_from("<I", encoded)
    with pytest.raises(WireError, match="malformed parameters"):
        decode_parameters(encoded[: 4 + length] + with_a_shape(encoded[4 + length :], "F16", shape))


def with_a_shape(data, dtype, shape):
    """A file of safetensors with one more tensor, which is empty."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    end = len(data) - 8 - length
    header["odd"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def test_a_configuration_that_no_header_holds_is_refused(spec):
    inputs = tuple(f"part{i}=3x3" for i in range(200))
    with pytest.raises(ConfigError, match=r"--network and --inputs make 2[0-9]{3} characters, 2000 are the most"):
        Identity.of(spec, "apex-dqn", DuelingConfig(network="a:b", inputs=inputs))


def test_no_file_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "none.safetensors")


def test_a_copy_has_another_header_and_the_same_tensors(tmp_path, spec):
    path, copy = tmp_path / "c.safetensors", tmp_path / "fork" / "copy.safetensors"
    header = CheckpointHeader(spec, "apex-dqn", NETWORK, Counters(updates=1), run="of one run")
    tensors = {"acting.a": torch.rand(3, 2), "b": torch.arange(5), "c": torch.ones(3, dtype=torch.bfloat16)}
    save_checkpoint(path, header, tensors)
    other = msgspec.structs.replace(header, run="", counters=Counters(updates=10**9))
    copy_checkpoint(path, copy, other)
    back = load_checkpoint(copy)
    assert load_header(copy) == back.header == other and load_header(path) == header
    assert all(torch.equal(back.tensors[name], tensors[name]) for name in tensors)
