"""The replay server keeps the log of experience and draws the learners' batches: `apexrl replay`, or replay.py."""

import asyncio
import signal
import time

import msgspec

from apexrl.config.commands import ReplayCommand
from apexrl.config.flags import of_own_shard, parse
from apexrl.errors import MALFORMED, ConfigError
from apexrl.lifecycle import CpuMeter, Stop, measured, resident_bytes, run_role
from apexrl.net.keyring import load_keyring
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS, MetricsClient
from apexrl.net.replay_server import ReplayServer
from apexrl.net.sockets import address
from apexrl.types import StreamSpec


async def serve(command: ReplayCommand, stop: Stop) -> None:
    """Serves until a signal or `stop` ends it, and reports statistics to the learner. The command is of its shard."""
    wires = command.wires
    keyring = load_keyring(wires.keys, "replay")
    ports = wires.bind_host, wires.actor_port, wires.batch_port
    stream = stream_of(command.stream) if command.stream else None
    server = ReplayServer(command.replay, *ports, command.seed, keyring=keyring, stream=stream)
    metrics = MetricsClient(address(wires.learner_host, wires.metrics_port), f"replay {wires.actor_port}", keyring)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    if keyring is not None or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        loop.add_signal_handler(signal.SIGHUP, ended.set if keyring is None else keyring.read_again_or_tell)
    serving = asyncio.create_task(server.run(ended))
    next_report, meter = time.monotonic() + REPORT_PERIOD_SECONDS, CpuMeter()
    try:
        while not serving.done():
            await asyncio.wait({serving}, timeout=0.5)
            if stop.is_set():  # the supervisor is gone, or the signal came before the handlers
                ended.set()
            now = time.monotonic()
            if now >= next_report:
                next_report = now + REPORT_PERIOD_SECONDS
                found = {f"replay/{name}": value for name, value in server.service.statistics(now).items()}
                open_log = server.service.open_log
                metrics.run = "" if open_log is None else open_log.replay.identity.log  # the learner follows this log
                own = measured("system/replay_memory_bytes", resident_bytes)
                metrics.report(found | own | {"system/replay_cores": meter.cores()})
        await serving
    finally:
        server.close()
        metrics.close()


def stream_of(text: str) -> StreamSpec:
    """Returns the spec that --stream gives.

    Raises: ConfigError when it gives none.
    """
    try:
        return msgspec.json.decode(text, type=StreamSpec)
    except MALFORMED as error:
        raise ConfigError(f"--stream is no stream ({error}): leave it out, or give the spec of a log.json") from error


def main(stop: Stop) -> None:
    """Runs the server with the command line's configuration."""
    asyncio.run(serve(of_own_shard(parse(ReplayCommand)), stop))


def run() -> None:
    """Runs the role, and exits."""
    run_role("replay", main)


if __name__ == "__main__":
    run()
