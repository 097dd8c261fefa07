"""A journal of format 1, byte by byte as protocol 3 wrote it: it is refused with one clear line, and left as it is."""

import pytest

from apexrl.errors import ConfigError
from apexrl.replay.journal import IDENTITY_FILE, LOCK_FILE, SNAPSHOT_FILE
from apexrl.tools import replay_tool
from tests.net.peers import Peers

IDENTITY = (
    b'{"format":1,"log":"0123456789abcdef","lives":[0],"spec":{"env":"Tiny-v0","frame_shape":[2],"frame_dtype":"uint8",'
    b'"stacked_frames":2,"num_actions":3,"frames_per_step":1,"unroll_starts":4,"n_steps":1}}'
)
HEADER = bytes.fromhex(
    "6170784897b463c80300000000000000aa0000000000000085a6666f726d617401a36c6f67b03031323334353637383961626364656"
    "6a46c69666500ac66697273745f6e756d62657203a47370656388a3656e76a754696e792d7630ab6672616d655f73686170659102ab"
    "6672616d655f6474797065a575696e7438ae737461636b65645f6672616d657302ab6e756d5f616374696f6e7303af6672616d65735"
    "f7065725f7374657001ad756e726f6c6c5f73746172747304a76e5f737465707301"
)
RECORD = bytes.fromhex(
    "61707855f49b37220300000000000000b00000000500000089a474797065a6496e73657274a873657175656e636507a56163746f72b"
    "f686f73742d302d346630306366303638353539656235396638313634363465a673747265616d01aa66697273745f7374657040ae70"
    "6172616d735f76657273696f6ecd012ca7657073696c6f6ecb3fd0000000000000aa7072696f726974696573c4100000803f0000003"
    "f0000000000000040a8657069736f6465739193cbbff8000000000000ccc8cb3fd0000000000000626c6f636b"
)
SEGMENT = "unrolls-0000000000000003.log"
KINDS = {
    "whole": {IDENTITY_FILE: IDENTITY, SEGMENT: HEADER + RECORD},
    "its end cut off": {IDENTITY_FILE: IDENTITY, SEGMENT: HEADER + RECORD[:-3]},
    "damaged": {IDENTITY_FILE: IDENTITY, SEGMENT: HEADER + RECORD[:30] + b"?" + RECORD[31:] + RECORD},
    "without its identity": {SEGMENT: HEADER + RECORD + RECORD[:-3]},
    "identity alone": {IDENTITY_FILE: IDENTITY},
}


def content_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != LOCK_FILE}


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_journal_is_refused_and_left_as_it_is(spec, tmp_path, kind):
    files = KINDS[kind] | {SNAPSHOT_FILE: b"apxS of format 1"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            Peers(spec, tmp_path)
        text = str(caught.value)
        assert f"{tmp_path} has format 1, this version reads format 2" in text and "\n" not in text
        assert "start a new run or give another --journal-dir" in text
    assert content_of(tmp_path) == files
    with pytest.raises(ConfigError, match="has format 1"):
        replay_tool.summary(tmp_path)
    assert content_of(tmp_path) == files
