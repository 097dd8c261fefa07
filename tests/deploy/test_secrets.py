"""No key is in what the repository holds, in what Terraform keeps or in what a host is told."""

import itertools
import random
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from zmq.utils import z85

from tests.deploy.terraform import BUCKET, TERRAFORM, user_data
from tests.system.processes import ROOT

SECRET_TYPES = re.compile(
    r'"(aws_ssm_parameters?(_by_path)?|aws_secretsmanager\w+|aws_iam_access_key|aws_key_pair|tls_\w+|random_\w+)"'
)
KNOWN = ('resource "aws_ssm_parameter" "deadline"', 'data "aws_ssm_parameter" "base_image"')
SECRET_NAMES = re.compile(r'^variable "\w*(secret|password|access_key|token)\w*"', re.M)
Z85 = re.compile(f"[{re.escape(z85.Z85CHARS.decode())}]+")
KEY_CHARS = 40
KINDS = [re.compile(kind) for kind in ("[a-z]", "[A-Z]", "[0-9]", "[^a-zA-Z0-9]")]
LEAST_DIFFERENT, LEAST_CHANGES = 22, 18
"""Characters of a key, and changes of their kind from one to the next: 32 and 28 on average, less in one of 5,000."""


def texts_in(value: Any) -> Iterator[str]:
    """Yields every text in JSON, also the names."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, str):
        yield value


def keys_in(value: Any) -> set[str]:
    """Returns what could be a CURVE key: 40 characters of Z85, also behind a name or in brackets."""
    runs = {run for text in texts_in(value) for run in Z85.findall(text)}
    runs |= {run.partition(sign)[2] for run in runs for sign in "=:("}
    words = {run[start : start + KEY_CHARS] for run in runs if len(run) <= KEY_CHARS + 4 for start in range(5)}
    return {word for word in words if len(word) == KEY_CHARS and is_random(word)}


def is_random(word: str) -> bool:
    """Returns whether a word is like a key; hashes, paths and code have fewer kinds of characters, side by side."""
    kinds = [next(number for number, kind in enumerate(KINDS) if kind.match(char)) for char in word]
    changes = sum(one != other for one, other in itertools.pairwise(kinds))
    return len(set(word)) >= LEAST_DIFFERENT and changes >= LEAST_CHANGES


def test_no_secret_is_in_state_plan_or_user_data(applied, cluster):
    assert not keys_in(applied)
    assert not keys_in(cluster.planned({"results_bucket": BUCKET}))
    assert not keys_in(list(user_data(applied).values()))


def test_the_configuration_makes_and_asks_for_no_secret():
    for path in TERRAFORM.glob("*/*.tf"):
        text = path.read_text()
        for known in KNOWN:  # a time (`applied` below shows it), and the names of public images
            text = text.replace(known, "", 1)
        assert not SECRET_TYPES.search(text), path
        assert not SECRET_NAMES.search(path.read_text()), path


def test_no_secret_is_in_the_repository():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60, check=False)
    if listing.returncode != 0:
        pytest.skip(f"not a clone of the repository: {listing.stderr.decode().strip()}")
    contents = {name: (ROOT / name).read_bytes() for name in listing.stdout.decode().split("\0") if name}
    texts = {name: content.decode() for name, content in contents.items() if b"\0" not in content}
    assert len(texts) > 100
    found = {name: keys for name, text in texts.items() if (keys := keys_in(text))}
    assert not found


@pytest.mark.parametrize("written", ["{}", "x --key {} y", "APEXRL_KEY={}\n", 'key = "{}"', "`{}`.", "({}).", "a: {},"])
def test_a_secret_would_be_noticed(written):
    rng = random.Random(0)  # keys that are always the same: one of 5,000 does not look like a key
    for _ in range(20):
        public, secret = (z85.encode(rng.randbytes(32)).decode() for _ in range(2))
        assert {public, secret} <= keys_in({"a": [written.format(public), {written.format(secret): 1}]})
