"""The actor's loop: step a vector of environments, and send the steps as prioritized unrolls."""

import collections
import logging
import socket
import time
import zlib
from collections.abc import Iterator

import numpy as np

from apexrl.acting.foreign import ForeignEnvironment
from apexrl.acting.sending import FLUSH_SECONDS, Lease, Round, UnrollSender, patiently
from apexrl.agents.contract import Actor, Extras, Observation
from apexrl.agents.families import family_of, implementation
from apexrl.casts import exactly
from apexrl.config.commands import ActorCommand, WorkerCommand
from apexrl.environments.renewal import Failures
from apexrl.environments.vector import ACTED, VectorEnvironment
from apexrl.errors import ApexError, ConfigError, PeerTimeout, WireError
from apexrl.lifecycle import CpuMeter, Stop, Stopwatch, measured, process_name, resident_bytes
from apexrl.losses.windows import valid_starts
from apexrl.net.insert_client import InsertClient
from apexrl.net.keyring import load_keyring
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS, MetricsClient
from apexrl.net.parameter_channel import ParameterSubscriber
from apexrl.net.sockets import address
from apexrl.networks.config import own_network
from apexrl.networks.device import choose_device
from apexrl.networks.parameters import Parameters
from apexrl.streams import difference
from apexrl.types import Episode, StreamSpec, TimeSteps
from apexrl.unroll import UnrollBuilder, UnrollCodec

logger = logging.getLogger(__name__)


class EnvironmentGroup:
    """Some of an actor's environments, which step while the actions for the others are chosen. Owned by the loop."""

    def __init__(self, envs: VectorEnvironment, spec: StreamSpec, streams: range):
        """Takes the environments of some streams of the process."""
        self.streams = streams
        self.exploration = np.zeros(len(streams))
        self.steps = 0
        self._envs = envs
        self._spec = spec
        self._episodes: list[list[Episode]] = [[] for _ in streams]
        self._num_unrolls = 0
        # The parameters that chose the actions of an unroll, and those of the step behind it.
        self._versions: collections.deque[int] = collections.deque(maxlen=spec.unroll_steps + 1)

    def reset(self, agent: Actor, seed: int) -> None:
        """Begins the games."""
        size = len(self.streams)
        self._seen = Observation(self._envs.reset(seed), np.ones(size, bool), np.zeros(size, np.float32))
        self._state = agent.initial_state(size)
        self._builder = UnrollBuilder(self._spec, self._seen.frames)
        self._actions: np.ndarray | None = None

    def receive(self) -> TimeSteps | None:
        """Waits for the step that was begun last; None at the beginning."""
        return None if self._actions is None else self._envs.receive()

    def add(self, step: TimeSteps) -> None:
        """Takes a step into the unrolls and the counts."""
        assert self._actions is not None
        self._builder.add(self._actions, step)
        self._seen = Observation(step.frames, step.starts, step.rewards)
        self.steps += int((~step.starts).sum())
        for i in np.flatnonzero(step.episode_steps):
            episode = Episode(float(step.episode_returns[i]), int(step.episode_steps[i]), float(self.exploration[i]))
            self._episodes[i].append(episode)

    def act(self, agent: Actor, rng: np.random.Generator) -> Extras:
        """Chooses actions and begins the next step; returns the extras of the observations.

        Raises: ApexError when the actions are not those of the environments.
        """
        actions, extras, self._state = agent.act(self._seen, self.exploration, self._state, rng)
        self._actions = self._envs.send(actions)
        self._versions.append(agent.header.params_version)
        return extras

    def observe(self, agent: Actor, extras: Extras) -> Round | None:
        """Takes the extras of the observations; returns the unrolls of all streams when they are complete.

        Raises: ApexError when extras or priorities are not those of the spec, or a priority is negative or not finite.
        """
        complete = self._builder.observe(extras)
        if complete is None:
            return None
        unrolls, extras = complete
        valid = valid_starts(unrolls.starts, self._spec.unroll_starts)
        can_be_drawn = valid.any(axis=0, keepdims=True) if self._spec.has_unroll_priorities else valid
        priorities = agent.priorities(unrolls, extras)
        if priorities is None:
            priorities = np.ones_like(can_be_drawn, np.float32)
        try:
            priorities = np.where(can_be_drawn, exactly(priorities, np.float32, can_be_drawn.shape), np.float32(0))
        except ValueError as error:
            raise ApexError(f"the agent gives priorities of {error}") from error
        if not np.isfinite(priorities).all():
            raise ApexError(
                f"values are not finite (parameters {agent.header.params_version}): has the learner diverged?"
            )
        if priorities.min() < 0:
            raise ApexError(f"the agent gives the priority {priorities.min()}: at least 0 is needed")
        first_step = self._num_unrolls * self._spec.unroll_starts
        episodes = [tuple(ended) for ended in self._episodes]
        self._num_unrolls += 1
        self._episodes = [[] for _ in self.streams]
        return Round(
            self.streams[0],
            first_step,
            self._versions[0],
            self.exploration.copy(),
            valid,
            priorities,
            episodes,
            unrolls,
        )

    def close(self) -> None:
        """Frees the environments."""
        self._envs.close()


class Player:
    """All environments of a process, in groups that step in turn. Owned by one thread."""

    def __init__(self, command: ActorCommand):
        """Makes the environments.

        Raises: ConfigError when an environment cannot be had.
        """
        acting, self._command = command.acting, command
        num_envs = acting.environments_per_worker
        shares = [share for share in np.array_split(np.arange(num_envs), acting.environment_groups) if len(share)]
        index = command.worker_index if isinstance(command, WorkerCommand) else 0
        first_copy = ACTED + index * num_envs
        self._failures = failures = Failures()
        environments = [
            ForeignEnvironment(command.env, len(share), failures=failures, first_copy=first_copy + int(share[0]))
            for share in shares
        ]
        spec = family_of(command.agent).stream(command.algorithm, environments[0].spec)
        self.spec = spec
        self.stopwatch = Stopwatch()
        self._groups = [
            EnvironmentGroup(envs, spec, range(int(share[0]), int(share[-1]) + 1))
            for envs, share in zip(environments, shares, strict=True)
        ]
        self._fetch_period_rounds = max(acting.parameter_period_frames // spec.frames_per_step, 1)
        self._num_rounds = 0
        self._lease = Lease((), 0)

    @property
    def steps(self) -> int:
        """Agent steps so far, of all environments."""
        return sum(group.steps for group in self._groups)

    @property
    def num_failures(self) -> int:
        """Failures of environments so far, which were made anew."""
        return self._failures.count

    @property
    def is_fetch_due(self) -> bool:
        """Whether the agent should look for newer parameters before the next round."""
        return self._num_rounds % self._fetch_period_rounds == 0

    def begin(self, agent: Actor, first_slot: int) -> None:
        """Begins the games."""
        # The slots are ours alone in the whole cluster, so no other actor plays the same games.
        seeds = np.random.SeedSequence([self._command.seed, first_slot])
        self._rng = np.random.default_rng(seeds)
        for group, seed in zip(self._groups, seeds.generate_state(len(self._groups)), strict=True):
            group.reset(agent, int(seed >> 1))

    def explore(self, agent: Actor, lease: Lease) -> None:
        """Takes the exploration of our slots when the lease or the size of the ladder has changed."""
        if lease == self._lease:
            return
        self._lease = lease
        size = max(lease.ladder_size, max(lease.slots) + 1)
        exploration = agent.explore(np.array(lease.slots), size)
        if np.shape(exploration) != (len(lease.slots),):
            raise ApexError(f"the agent gives exploration of shape {np.shape(exploration)} to {len(lease.slots)} slots")
        for group in self._groups:
            group.exploration = exploration[group.streams.start : group.streams.stop]

    def play(self, agent: Actor) -> Iterator[Round]:
        """Takes one step in each group; yields the unrolls of a group when they are complete."""
        for index, group in enumerate(self._groups):
            if self._num_rounds < index * self.spec.unroll_starts // len(self._groups):
                continue  # begins later, so that the groups' unrolls are not complete at one time
            complete = self._advance(group, agent)
            if complete is not None:
                yield complete
        self._num_rounds += 1

    def close(self) -> None:
        """Frees the environments."""
        for group in self._groups:
            group.close()

    def _advance(self, group: EnvironmentGroup, agent: Actor) -> Round | None:
        """Takes one step in a group; returns its unrolls when they are complete."""
        watch = self.stopwatch
        started = time.perf_counter()
        step = group.receive()
        started = watch.lap("emulator", started)
        if step is not None:
            group.add(step)
            started = watch.lap("assembly", started)
        extras = group.act(agent, self._rng)
        started = watch.lap("inference", started)
        complete = group.observe(agent, extras)  # only now, so that the emulator does not wait for it
        watch.lap("assembly", started)
        return complete


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
        deadline = time.monotonic() + self._command.wires.patience_seconds
        said = time.monotonic()
        while not stop.is_set():
            parameters = self.parameters.fetch(200)
            if parameters is not None:
                check_fits(parameters, self.spec, self._command)
                try:
                    family = family_of(self._command.agent)
                    return implementation(family).make_actor(self._command.algorithm, parameters, self._device)
                except WireError as error:
                    self.parameters.drop(error)
            if time.monotonic() > deadline:
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
