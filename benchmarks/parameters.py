"""The parameter channel's cost: `python -m benchmarks.parameters [--subscribers N] [--seconds S]`.

It publishes the parameters of Nature's network again and again, encrypted, to subscribers in another process, each of
which stands for an actor host. It prints the bytes of a message, and the messages and bytes for a CPU-second of the
publisher. A learner publishes at most five times a second, to every host.
"""

import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import tyro

from apexrl.net.keyring import load_keyring, make_keys
from apexrl.net.parameter_channel import ParameterPublisher, ParameterSubscriber
from benchmarks.replay import ROOT

JOIN_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Options:
    """The choice of a measurement."""

    subscribers: int = 8
    """Hosts that fetch the parameters."""
    seconds: float = 10.0
    """Seconds of the measurement."""
    endpoint: str = ""
    """For the process of the subscribers: where they subscribe."""
    keys: str = ""
    """For the process of the subscribers: its keys."""


def encoded_parameters(version: int) -> bytes:
    """Returns the parameters of an untrained network of Nature's size as a learner sends them."""
    from apexrl.networks.config import DuelingConfig, to_text
    from apexrl.networks.dueling import make_network
    from apexrl.networks.headers import ParametersHeader
    from apexrl.networks.parameters import encode_parameters
    from apexrl.types import EnvironmentSpec, StreamSpec

    kind = ("Pong", (84, 84), "uint8", 4, 6, 4)
    network = make_network(EnvironmentSpec(*kind), DuelingConfig())
    header = ParametersHeader(version, StreamSpec(*kind), "apex-dqn", to_text(DuelingConfig()))
    return encode_parameters(header, network.state_dict())


def publish(options: Options) -> dict[str, Any]:
    """Publishes a new version whenever all subscribers have the last one; returns the figures."""
    with tempfile.TemporaryDirectory(prefix="apexrl-parameters-") as name:
        keys = Path(name) / "keys"
        make_keys(keys, ("learner", "actor"))
        publisher = ParameterPublisher("127.0.0.1", 0, load_keyring(str(keys), "learner"))
        thread = threading.Thread(target=publisher.run, daemon=True)
        thread.start()
        flags = ["--subscribers", options.subscribers, "--endpoint", publisher.endpoint, "--keys", keys]
        command = [sys.executable, "-m", "benchmarks.parameters", *map(str, flags)]
        reader = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        values = [encoded_parameters(version) for version in (1, 2)]
        assert reader.stdout is not None
        try:
            publisher.publish(values[0])
            _expect(reader)
            rounds, cpu, started = 0, time.process_time(), time.perf_counter()
            while time.perf_counter() - started < options.seconds:
                rounds += 1
                publisher.publish(values[rounds % 2])
                _expect(reader)
            cpu, elapsed = time.process_time() - cpu, time.perf_counter() - started
        finally:
            reader.kill()
            reader.wait()
            publisher.close()
            thread.join(10)
    messages = rounds * options.subscribers
    return {
        "bytes": len(values[0]),
        "messages_per_cpu_second": messages / cpu,
        "bytes_per_cpu_second": messages * len(values[0]) / cpu,
        "messages_per_second": messages / elapsed,
    }


def _expect(reader: "subprocess.Popen[str]") -> None:
    """Waits until all subscribers have a value.

    Raises: RuntimeError when their process has ended.
    """
    assert reader.stdout is not None
    if not reader.stdout.readline():
        raise RuntimeError(f"the process of the subscribers ended with status {reader.wait(10)}")


def subscribe(options: Options) -> None:
    """Fetches values, and writes a line whenever all subscribers have one more. Ends when killed.

    Raises: TimeoutError when one gets none in time.
    """
    keyring = load_keyring(options.keys, "actor")
    subscribers = [ParameterSubscriber(options.endpoint, keyring) for _ in range(options.subscribers)]
    while True:
        missing, deadline = set(subscribers), time.monotonic() + JOIN_SECONDS
        while missing:
            missing -= {each for each in missing if each.fetch_encoded() is not None}
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(missing)} subscribers have had no parameters for {JOIN_SECONDS:.0f} s")
            time.sleep(0.002)
        print("all", flush=True)


def main(options: Options) -> None:
    """Measures and prints; or subscribes, as the process that the measurement starts."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.endpoint:
        subscribe(options)
    else:
        print(json.dumps(publish(options)))


if __name__ == "__main__":
    main(tyro.cli(Options, config=(tyro.conf.OmitArgPrefixes,)))
