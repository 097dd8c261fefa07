"""Strangers on all four ports of a run: `python -m tests.system.foreigners KIND JOURNAL SEED SECONDS PORTS ...`.

Each kind is one function below. It does its worst for some seconds and leaves; a run that goes on must not notice.
Messages are made of the project's own structs, with whatever fields those have (`build`), and sent raw.
"""

import contextlib
import os
import random
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import zmq
import zstandard

from apexrl.errors import ApexError
from apexrl.net import InsertClient, wire
from apexrl.net.identity import marked, new_routing_id
from apexrl.net.metrics_channel import Evaluation, Report, checksum
from apexrl.net.parameter_channel import ParameterSubscriber
from apexrl.net.protocols import PROTOCOL
from apexrl.networks.parameters import decode_parameters, encode_parameters
from apexrl.replay.journal import read_identity, segment_paths
from apexrl.replay.segment import scan
from apexrl.types import StreamSpec, Unroll, UnrollHeader
from tests.system import fuzz
from tests.system.raw_actor import RawActor
from tests.system.test_parameter_abuse import attack as subscribe
from tests.system.test_replay_abuse import throw_garbage
from tests.system.witness import numbered_unroll

HOST = fuzz.HOST
MAX_PICTURE_BYTES = 16 * 2**20
NUM_SUBSCRIPTIONS = 100_000
INSERT_SECONDS = 90.0
HUGE = 3e38


class Site(NamedTuple):
    """Where a run is attacked, and for how long."""

    journal: Path
    spec: StreamSpec
    rng: random.Random
    seconds: float
    actor_port: int
    batch_port: int
    parameter_port: int
    metrics_port: int

    def deadline(self) -> float:
        return time.monotonic() + self.seconds


def build(kind: type, **values: Any) -> Any:
    """Returns a message with these values; fields that they do not name get something of their type."""
    types = typing.get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in values:
            values[field.name] = types[field.name]() if types[field.name] in (str, bytes, int, float) else b""
    known = {field.name for field in msgspec.structs.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


def garbage(site: Site) -> None:
    """Connections that speak no ZMTP, or stop speaking it at a bad moment."""
    deadline = site.deadline()
    while time.monotonic() < deadline:
        for port in site[4:]:
            with contextlib.suppress(OSError):
                throw_garbage(port, site.rng)


def fuzzed(site: Site) -> None:
    """Mutated messages, before and behind the door of both replay ports."""
    fuzz.SPEC, fuzz.K = site.spec, site.spec.unroll_starts
    fuzz.BLOCK = block_of(numbered_unroll(site.spec, 1))
    context, seed = zmq.Context(), site.rng.randrange(10**6)
    enemies = [
        fuzz.Enemy(context, "actor", site.actor_port, seed),
        fuzz.Enemy(context, "learner", site.batch_port, seed + 1),
    ]
    deadline = site.deadline()
    while time.monotonic() < deadline:
        for enemy in enemies:
            with contextlib.suppress(AssertionError):  # a server that is being restarted takes no messages
                enemy.step(deadline)
    context.destroy(linger=0)


def crowd(site: Site) -> None:
    """Five hundred actors that greet and say nothing more."""
    context = zmq.Context()
    links = []
    for i in range(500):
        identity = new_routing_id()
        name = marked(f"stranger-{i}", identity)
        links.append(fuzz.dealer(context, site.actor_port, identity))
        hello = build(wire.Hello, protocol=PROTOCOL, actor=name, num_streams=4, spec=site.spec, first_sequence=0)
        with contextlib.suppress(zmq.Again):
            links[-1].send(wire.encode(hello), zmq.NOBLOCK)
    time.sleep(site.seconds)
    context.destroy(linger=0)


def numbers(site: Site) -> None:
    """Legal unrolls whose rewards or discounts are not finite."""
    whole = numbered_unroll(site.spec, 2)
    odd = [np.full_like(whole.rewards, value) for value in (np.nan, np.inf, -np.inf)]
    unrolls = [whole._replace(rewards=values) for values in odd] + [whole._replace(discounts=values) for values in odd]
    _insert(site, unrolls)


def overflow(site: Site) -> None:
    """Legal unrolls of finite numbers whose n-step return overflows, and frames that are not finite where they can."""
    whole = numbered_unroll(site.spec, 3)
    huge = np.full_like(whole.rewards, HUGE)
    unrolls = [whole._replace(rewards=huge), whole._replace(rewards=-huge), whole._replace(discounts=huge)]
    if site.spec.frame_dtype == "float32":
        unrolls += [whole._replace(frames=np.full_like(whole.frames, value)) for value in (np.nan, np.inf, HUGE)]
    _insert(site, unrolls)


def shapes(site: Site) -> None:
    """Another spec, blocks and priorities of wrong sizes, streams that were not announced, bombs."""
    for changes in ({"env": "Other-v0"}, {"frame_shape": (2, 2)}, {"num_actions": 2**31 - 1}, {"unroll_starts": 1}):
        with contextlib.suppress(ApexError):
            _insert(site._replace(spec=msgspec.structs.replace(site.spec, **changes)), [], greet_seconds=3)
    whole = numbered_unroll(site.spec, 4)
    count = site.spec.num_priorities
    fuzz.SPEC, fuzz.BLOCK = site.spec, block_of(whole)
    right = np.ones(count, np.float32)
    inserts = [(header_of(site, i, right), bomb) for i, bomb in enumerate(fuzz.make_bombs())]
    wrong = (np.ones(count + 1), np.ones(0), -right, right * np.nan, right * np.inf, right * np.float32(HUGE))
    inserts += [(header_of(site, 20 + i, priorities), fuzz.BLOCK) for i, priorities in enumerate(wrong)]
    inserts.append((header_of(site, 40, right)._replace(stream=2**31 - 1), fuzz.BLOCK))
    inserts.append((header_of(site, 41, right)._replace(first_step=2**53), fuzz.BLOCK))
    actions = np.full_like(whole.actions, 2**31 - 1)
    inserts.append((header_of(site, 42, right), block_of(whole._replace(actions=actions))))
    name = f"stranger-{site.rng.randrange(10**9)}"
    with contextlib.closing(RawActor(f"tcp://{HOST}:{site.actor_port}", name, site.spec, 2)) as actor:
        deadline = time.monotonic() + INSERT_SECONDS
        for i, insert in enumerate(inserts):
            is_sent = actor.insert(*insert, deadline - time.monotonic())
            assert i or is_sent, "the limiter let no insert in"
        actor.flush(10)


def names(site: Site) -> None:
    """Inserts in the name of actors that are alive, numbered as far ahead as a number can be."""
    context, last = zmq.Context(), 2**53
    block = block_of(numbered_unroll(site.spec, 5))
    priorities = np.ones(site.spec.num_priorities, np.float32).tobytes()
    valid = np.packbits(np.ones(site.spec.unroll_starts, bool)).tobytes()
    thefts = []
    for victim in recent_actors(site.journal):
        greeting = {"protocol": PROTOCOL, "actor": victim, "num_streams": 1, "spec": site.spec}
        messages = [[wire.encode(build(wire.Hello, **greeting, first_sequence=first))] for first in (0, last)]
        messages.append([wire.encode(wire.Insert(last, victim, 0, 0, 0, 0.1, valid, priorities)), block])
        for identity in (victim.encode(), new_routing_id()):
            thefts.append((fuzz.dealer(context, site.actor_port, identity), messages))
    deadline = site.deadline() + 3 * site.seconds  # again and again: most of the time a limiter lets nobody insert
    while time.monotonic() < deadline:
        for link, messages in thefts:
            for frames in messages:
                with contextlib.suppress(zmq.Again):
                    link.send_multipart(frames, zmq.NOBLOCK)
        time.sleep(0.1)
    context.destroy(linger=0)


def reports(site: Site) -> None:
    """Reports of thousands of tags under ever new names, and of numbers that are none."""
    run = decode_parameters(published(site)).header.run

    def made() -> Iterator[Report]:
        for i in range(200):
            tags = {f"{site.rng.randrange(10**12)}/{'x' * 50}/{j}": 1.0 for j in range(100 if i % 2 else 5000)}
            yield build(Report, sender=f"stranger-{i}", run=run, scalars=tags)
        odd = dict(enumerate((float("nan"), float("inf"), 1e308, -1e308)))
        usual = ("actor/frames_per_second", "replay/fill", "learner/updates_per_second", "", "y" * 100_000)
        for i, value in odd.items():
            yield build(Report, sender=f"odd-{i}", run=run, scalars=dict.fromkeys(usual, value))

    _tell(site, made())


def evaluations(site: Site) -> None:
    """Splendid evaluations of networks that the learner never published."""
    encoded = published(site)
    header, tensors = decode_parameters(encoded)
    foreign = msgspec.structs.replace(header, spec=msgspec.structs.replace(header.spec, env="Foreign-v0"))
    later = msgspec.structs.replace(header, params_version=2**40)
    versions = [  # each more splendid than the one before, so that the worst one that is taken stays
        encoded + b" ",
        encode_parameters(later, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}),
        encode_parameters(header, {name: tensor * 0.5 for name, tensor in tensors.items()}),
        encode_parameters(header, {"evil": torch.zeros(3)}),
        encode_parameters(foreign, {"evil": torch.zeros(3)}),
        b"no parameters",
    ]
    known = {name: getattr(header, name) for name in header.__struct_fields__}
    of_others = {**known, "run": "another", "checksum": checksum(encoded), "parameters": encoded}
    made = [_evaluation(1e9, **of_others), _evaluation(1e9, **known)]
    made += [_evaluation(1e9 + i, **known, checksum=checksum(data), parameters=data) for i, data in enumerate(versions)]
    _tell(site, iter(made))


def returns(site: Site) -> None:
    """Evaluations whose returns are not finite, whose games have no length, or of no version."""
    encoded = published(site)
    header = decode_parameters(encoded).header
    of_ours = {"run": header.run, "checksum": checksum(encoded)}
    odd = (float("nan"), float("inf"), -float("inf"), 1e308)
    versions = (header.params_version, 0, -(2**63), 2**63 - 1)
    made = [_evaluation(value, params_version=version, **of_ours) for value in odd for version in versions]
    _tell(site, iter([*made, build(Evaluation, params_version=0, exploration=0.0, returns=(), steps=(), seconds=0.0)]))


def pictures(site: Site) -> None:
    """Evaluations with pictures of 16 MB each."""
    _tell(site, (_evaluation(0.0, params_version=0, picture=os.urandom(MAX_PICTURE_BYTES)) for _ in range(12)))


def subscriptions(site: Site) -> None:
    """Subscriptions of megabytes, and a hundred thousand short ones, to the parameters."""
    for kind in (b"SUB", b"DEALER"):
        for sizes in ([2**22] * 3, [33] * NUM_SUBSCRIPTIONS):
            subscribe(site.parameter_port, kind, sizes)


def recent_actors(journal: Path) -> list[str]:
    """Returns the actors of the newest unrolls in a journal: an enemy's best case, who knows all names."""
    entries = [entry for path in segment_paths(journal)[-2:] for entry in scan(path.read_bytes()).entries]
    return sorted({wire.decode_insert(entry.message).actor for entry in entries[-300:]})


def block_of(unroll: Unroll) -> bytes:
    """Returns an unroll's block as a peer makes it that checks nothing."""
    frames, actions, rewards, discounts, starts, extras = unroll
    arrays = frames, actions, rewards, discounts, *extras.values(), starts
    return zstandard.ZstdCompressor().compress(b"".join(array.tobytes() for array in arrays))


def published(site: Site) -> bytes:
    """Returns the parameters that the learner publishes now, which name its run."""
    subscriber = ParameterSubscriber(f"tcp://{HOST}:{site.parameter_port}")
    encoded = subscriber.fetch_encoded(20_000)
    subscriber.close()
    assert encoded is not None, "no parameters are published"
    return encoded


def header_of(site: Site, i: int, priorities: np.ndarray) -> UnrollHeader:
    """Returns the header of a stranger's i-th insert."""
    return UnrollHeader(0, i * site.spec.unroll_starts, 0, 0.1, np.ones(site.spec.unroll_starts, bool), priorities, ())


@contextlib.contextmanager
def _client(site: Site, connect_seconds: float = 60) -> Iterator[InsertClient]:
    name = f"stranger-{site.rng.randrange(10**9)}"
    client = InsertClient(f"tcp://{HOST}:{site.actor_port}", name, site.spec, 2)
    try:
        client.connect(connect_seconds)
        yield client
    finally:
        client.close()


def _insert(site: Site, unrolls: list[Unroll], greet_seconds: float = 60) -> None:
    priorities = np.full(site.spec.num_priorities, 10, np.float32)  # great enough to be sampled soon
    with _client(site, greet_seconds) as client:
        _send(client, [(header_of(site, i, priorities), block_of(unroll)) for i, unroll in enumerate(unrolls)])


def _send(client: InsertClient, inserts: list[tuple[UnrollHeader, bytes]]) -> None:
    """Inserts as many as the limiter lets in; fails when it let none in."""
    deadline = time.monotonic() + INSERT_SECONDS
    for i, (header, block) in enumerate(inserts):
        client.insert(header, block, INSERT_SECONDS + 1, lambda: time.monotonic() > deadline)
        assert i or time.monotonic() <= deadline, "the limiter let no insert in"
    client.flush(10)


def _evaluation(value: float, **known: Any) -> Evaluation:
    return build(
        Evaluation, **{"exploration": 0.0, "returns": (value, value), "steps": (5, 5), "seconds": 1.0, **known}
    )


def _tell(site: Site, messages: Iterator[Report | Evaluation]) -> None:
    """Sends messages to the metrics port, until one does not leave."""
    context = zmq.Context()
    link = context.socket(zmq.PUSH)
    link.sndtimeo, link.sndhwm = 20_000, 16
    link.connect(f"tcp://{HOST}:{site.metrics_port}")
    with contextlib.suppress(zmq.Again):
        for message in messages:
            link.send(msgspec.msgpack.encode(message))
    link.close(linger=20_000)
    context.term()


KINDS = {
    kind.__name__: kind
    for kind in (
        *(garbage, fuzzed, crowd, numbers, overflow, shapes, names),
        *(reports, evaluations, returns, pictures, subscriptions),
    )
}


def main(kind: str, journal: str, seed: str, seconds: str, *ports: str) -> None:
    identity = read_identity(Path(journal))
    assert identity is not None, f"{journal} is no journal"
    site = Site(Path(journal), identity.spec, random.Random(int(seed)), float(seconds), *map(int, ports))
    KINDS[kind](site)


if __name__ == "__main__":
    main(*sys.argv[1:])
