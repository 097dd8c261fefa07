"""The actor's loop: it plays with the newest parameters, and gives complete unrolls to the thread that sends them."""

import logging
import socket
import time
import zlib

from apexrl.acting.player import Lease, Player
from apexrl.acting.sending import FLUSH_SECONDS, UnrollSender, patiently
from apexrl.agents.contract import Actor
from apexrl.agents.families import family_of, implementation
from apexrl.clocks import Absence
from apexrl.config.commands import ActorCommand, WorkerCommand
from apexrl.errors import ConfigError, PeerTimeout, WireError
from apexrl.lifecycle import CpuMeter, Stop, measured, process_name, resident_bytes
from apexrl.net.insert_client import InsertClient
from apexrl.net.keyring import load_keyring
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS, MetricsClient
from apexrl.net.parameter_channel import ParameterSubscriber
from apexrl.net.sockets import address
from apexrl.networks.config import own_network
from apexrl.networks.device import choose_device
from apexrl.networks.parameters import Parameters
from apexrl.streams import difference
from apexrl.types import StreamSpec
from apexrl.unroll import UnrollCodec

logger = logging.getLogger(__name__)


class ActorLoop:
    """One actor process: owns its environments, its agent and its connections."""

    def __init__(self, command: ActorCommand):
        """Makes the environments and the connections; waits for nobody.

        Raises: ConfigError when the environment or the device cannot be had.
        """
        self._command = command
        self._device = choose_device(command.device)
        wires = command.wires
        logger.info("makes %d environments of %s", command.acting.environments_per_worker, command.env.env)
        self._player = Player(command)
        self.spec = self._player.spec
        index, relay = 0, ""
        if isinstance(command, WorkerCommand):
            index, relay = command.worker_index, command.parameter_endpoint
        name = process_name(index)
        keyring = load_keyring(wires.keys, "actor")
        self._shard = shard_of(index, wires.shards)
        replay = address(wires.replay_host, wires.of_shard(self._shard).actor_port)
        self._client = InsertClient(replay, name, self.spec, command.acting.environments_per_worker, keyring)
        endpoint = relay or address(wires.learner_host, wires.parameter_port)
        # The relay of this host speaks in the clear, and on the loopback only.
        self.parameters = ParameterSubscriber(endpoint, None if relay else keyring)
        self._metrics = MetricsClient(address(wires.learner_host, wires.metrics_port), name, keyring)
        self._reported: dict[str, float] = {}  # totals at the last report
        self._meter = CpuMeter()

    def run(self, stop: Stop) -> None:
        """Plays until stopped.

        Raises: PeerTimeout when the replay or the learner is away for longer than the patience, PeerRefused when the
          replay refuses us.
        """
        patience = self._command.wires.patience_seconds
        sending = None
        stop.heed_signals()
        try:
            patiently(self._client, patience, lambda seconds: self._client.connect(seconds, stop.is_set))
            codec = UnrollCodec(self.spec, self._command.acting.compression_level)
            sender = UnrollSender(self._client, codec, patience, stop)
            sending = stop.thread(sender.run, "sender")
            agent = self.wait_for_agent(stop)
            if agent is not None:
                self._play(agent, sender, stop)
        finally:
            stop.set()
            if sending is not None:
                sending.join(FLUSH_SECONDS + 1)
            self.parameters.close()
            self._metrics.close()
            self._player.close()

    def wait_for_agent(self, stop: Stop) -> Actor | None:
        """Returns an agent with the first parameters that fit, None when stopped."""
        absence, said = Absence(), time.monotonic()
        while not stop.is_set():
            parameters = self.parameters.fetch(200)
            if parameters is not None:
                check_fits(parameters, self.spec, self._command)
                try:
                    family = family_of(self._command.agent)
                    return implementation(family).make_actor(self._command.algorithm, parameters, self._device)
                except WireError as error:
                    self.parameters.drop(error)
            if absence.look(is_away=True) > self._command.wires.patience_seconds:
                raise PeerTimeout(f"no parameters from {self.parameters.endpoint} in time: is the learner running?")
            if time.monotonic() - said > 10:
                said = time.monotonic()
                logger.info("waiting for parameters at %s", self.parameters.endpoint)
        return None

    def _play(self, agent: Actor, sender: UnrollSender, stop: Stop) -> None:
        logger.info("plays, with the network of update %d", agent.header.params_version)
        self._metrics.run = agent.header.run
        player = self._player
        player.begin(agent, self._of_all(sender.lease).slots[0])
        while not stop.is_set():
            stop.heed_signals()
            if player.is_fetch_due:
                self.fetch(agent)
            player.explore(agent, self._of_all(sender.lease))
            for complete in player.play(agent):
                while not sender.offer(complete) and not stop.is_set():
                    self._report_when_due(agent, sender)
            self._report_when_due(agent, sender)
        self._report(agent, sender)

    def _of_all(self, lease: Lease) -> Lease:
        """Returns the lease of a shard's slots as one of the slots of all shards, which take turns."""
        shards = self._command.wires.shards
        return Lease(tuple(slot * shards + self._shard for slot in lease.slots), lease.ladder_size * shards)

    def fetch(self, agent: Actor) -> None:
        """Takes newer parameters; those that do not fit are dropped, and the old ones stay in use."""
        parameters = self.parameters.fetch()
        if parameters is None:
            return
        try:
            unfit = why_unfit(parameters, self.spec, self._command)
            if unfit:
                raise WireError(unfit)
            agent.load(parameters)
            self._metrics.run = agent.header.run
        except WireError as error:
            self.parameters.drop(error)

    def _report_when_due(self, agent: Actor, sender: UnrollSender) -> None:
        if self._player.stopwatch.elapsed() > REPORT_PERIOD_SECONDS:
            self._report(agent, sender)

    def _report(self, agent: Actor, sender: UnrollSender) -> None:
        """Tells the learner the metrics since the last report. Time that no part of the loop took was waiting."""
        elapsed = self._player.stopwatch.elapsed()
        steps = float(self._player.steps)
        totals = {"steps": steps, "sending": sender.busy_seconds} | sender.waited_seconds
        since = {name: total - self._reported.get(name, 0.0) for name, total in totals.items()}
        self._reported = totals
        steps_per_second = since.pop("steps") / elapsed
        sending = since.pop("sending") / elapsed
        shares = self._player.stopwatch.shares("actor/time/")
        metrics = {f"actor/waits_for/{reason}": seconds / elapsed for reason, seconds in since.items()}
        self._metrics.report(
            {
                "actor/frames_per_second": steps_per_second * self.spec.frames_per_step,
                "actor/agent_steps_per_second": steps_per_second,
                "actor/agent_steps_total": steps,
                "actor/environment_failures_total": float(self._player.num_failures),
                "actor/params_version": float(agent.header.params_version),
                "actor/dropped_parameters_total": float(self.parameters.num_dropped),
                "system/actors_cores": self._meter.cores(),
                "actor/sent_bytes_total": float(sender.bytes_sent),
                "actor/time/sending": sending,
            }
            | shares
            | {"actor/time/waiting": 1 - sum(shares.values())}
            | metrics
            | measured("system/actors_memory_bytes", resident_bytes)
        )


def shard_of(worker_index: int, num_shards: int) -> int:
    """Returns the shard of an actor process: the workers of a host take turns, and hosts begin at different ones."""
    return (zlib.crc32(socket.gethostname().encode()) + worker_index) % num_shards


def why_unfit(parameters: Parameters, spec: StreamSpec, command: ActorCommand) -> str:
    """Returns why a learner's parameters are not for us, or an empty string. They name no module but ours."""
    header = parameters.header
    theirs = {"agent": header.agent, "network": own_network(header.network)}
    for flag, name in theirs.items():
        if name != (own := getattr(command, flag)):
            return (
                f"they are of the {flag} {name or 'of the family'}, ours is {own or 'that of the family'}: "
                f"give the same --{flag} everywhere"
            )
    if header.spec != spec:
        return f"they are for another stream ({difference(header.spec, spec)}): give actors and learner the same flags"
    return ""


def check_fits(parameters: Parameters, spec: StreamSpec, command: ActorCommand) -> None:
    """Raises ConfigError when a learner's parameters are not for us."""
    unfit = why_unfit(parameters, spec, command)
    if unfit:
        raise ConfigError(f"the parameters do not fit: {unfit}")
