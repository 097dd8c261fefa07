"""The actor's loop: step a vector of environments, and send what happened as prioritized unrolls."""

import logging
import time

import numpy as np

from apexrl.acting.sending import FLUSH_SECONDS, Round, UnrollSender
from apexrl.agents.apex_dqn import ApexActor
from apexrl.agents.exploration import epsilon_ladder
from apexrl.config import ActorCommand
from apexrl.environments.vector import VectorEnvironment, make_environment, make_spec
from apexrl.errors import ApexError, ConfigError, PeerError, WireError
from apexrl.lifecycle import Stop, Stopwatch, process_name, resident_bytes
from apexrl.net.insert_client import InsertClient
from apexrl.net.keyring import load_keyring
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS, MetricsClient
from apexrl.net.parameter_channel import ParameterSubscriber
from apexrl.net.sockets import address
from apexrl.networks.device import choose_device
from apexrl.networks.parameters import Parameters
from apexrl.types import Episode, StreamSpec, TimeSteps
from apexrl.unroll import UnrollBuilder, UnrollCodec

logger = logging.getLogger(__name__)


class EnvironmentGroup:
    """Some of an actor's environments, which step while the actions for the others are chosen. Owned by the loop."""

    def __init__(self, envs: VectorEnvironment, spec: StreamSpec, streams: range):
        """Takes the environments of some streams of the process."""
        self.streams = streams
        self.epsilons = np.zeros(len(streams))
        self.steps = 0
        self._envs = envs
        self._spec = spec
        self._episodes: list[list[Episode]] = [[] for _ in streams]
        self._num_unrolls = 0

    def reset(self, agent: ApexActor, seed: int) -> None:
        """Begins the games."""
        self._frames = self._envs.reset(seed)
        self._starts = np.ones(len(self.streams), bool)
        self._state = agent.initial_state(len(self.streams))
        self._builder = UnrollBuilder(self._spec, self._frames)
        self._actions: np.ndarray | None = None

    def receive(self) -> TimeSteps | None:
        """Waits for the step that was begun last; None at the beginning."""
        return None if self._actions is None else self._envs.receive()

    def add(self, step: TimeSteps) -> None:
        """Takes a step into the unrolls and the counts."""
        assert self._actions is not None
        self._builder.add(self._actions, step)
        self._frames, self._starts = step.frames, step.starts
        self.steps += int((~step.starts).sum())
        for i in np.flatnonzero(step.episode_steps):
            episode = Episode(float(step.episode_returns[i]), int(step.episode_steps[i]), float(self.epsilons[i]))
            self._episodes[i].append(episode)

    def act(self, agent: ApexActor, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Chooses actions and begins the next step; returns what the agent computed of the observations."""
        self._actions, extras = agent.act(self._frames, self._starts, self.epsilons, self._state, rng)
        self._envs.send(self._actions)
        return extras

    def observe(self, agent: ApexActor, extras: dict[str, np.ndarray]) -> Round | None:
        """Takes what the agent computed; returns the unrolls of all streams when they are complete.

        Raises: ApexError when a priority is not finite.
        """
        complete = self._builder.observe(extras)
        if complete is None:
            return None
        unrolls, extras = complete
        priorities = agent.priorities(unrolls, extras)
        if not np.isfinite(priorities).all():
            raise ApexError(
                f"values or rewards are not finite (parameters {agent.params_version}): "
                "has the learner diverged, or does the environment give NaN?"
            )
        first_step = self._num_unrolls * self._spec.unroll_starts
        episodes = [tuple(ended) for ended in self._episodes]
        self._num_unrolls += 1
        self._episodes = [[] for _ in self.streams]
        epsilons = self.epsilons.copy()
        return Round(self.streams[0], first_step, agent.params_version, epsilons, priorities, episodes, unrolls)

    def close(self) -> None:
        """Frees the environments."""
        self._envs.close()


class ActorLoop:
    """One actor process: owns its environments, its agent and its connections."""

    def __init__(self, command: ActorCommand):
        """Makes the environments and the connections; waits for nobody.

        Raises: ConfigError when the environment or the device cannot be had.
        """
        self._command = command
        self._device = choose_device(command.device)
        acting, wires = command.acting, command.wires
        num_envs = acting.environments_per_worker
        shares = [share for share in np.array_split(np.arange(num_envs), acting.environment_groups) if len(share)]
        environments = [make_environment(command.env, len(share)) for share in shares]
        self.spec = make_spec(command.env, environments[0], command.agent.unroll_starts, command.agent.n_steps)
        self._groups = [
            EnvironmentGroup(envs, self.spec, range(int(share[0]), int(share[-1]) + 1))
            for envs, share in zip(environments, shares, strict=True)
        ]
        name = process_name(max(command.worker_index, 0))
        keyring = load_keyring(wires.keys, "actor")
        replay = address(wires.replay_host, wires.actor_port)
        self._client = InsertClient(replay, name, self.spec, num_envs, keyring)
        endpoint = command.parameter_endpoint or address(wires.learner_host, wires.parameter_port)
        # The relay of this host speaks in the clear, and on the loopback only.
        self._parameters = ParameterSubscriber(endpoint, None if command.parameter_endpoint else keyring)
        self._metrics = MetricsClient(address(wires.learner_host, wires.metrics_port), name, keyring)
        self._ladder: tuple[tuple[int, ...], int] = ((), 0)
        self._stopwatch = Stopwatch()
        self._reported: dict[str, float] = {}  # totals at the last report

    def run(self, stop: Stop) -> None:
        """Plays until stopped.

        Raises: PeerError when the replay or the learner is away for longer than the patience.
        """
        patience = self._command.wires.patience_seconds
        sending = None
        try:
            self._client.connect(patience, stop.is_set)
            codec = UnrollCodec(self.spec, self._command.acting.compression_level)
            sender = UnrollSender(self._client, codec, patience, stop)
            sending = stop.thread(sender.run, "sender")
            agent = self._wait_for_agent(stop)
            if agent is not None:
                self._play(agent, sender, stop)
        finally:
            stop.set()
            if sending is not None:
                sending.join(FLUSH_SECONDS + 1)
            self._parameters.close()
            self._metrics.close()
            for group in self._groups:
                group.close()

    def _wait_for_agent(self, stop: Stop) -> ApexActor | None:
        """Returns an agent with the first parameters that fit, None when stopped."""
        deadline = time.monotonic() + self._command.wires.patience_seconds
        said = time.monotonic()
        while not stop.is_set():
            parameters = self._parameters.fetch(200)
            if parameters is not None:
                check_spec(parameters, self.spec)
                try:
                    return ApexActor(self._command.agent, parameters, self._device)
                except WireError as error:
                    self._parameters.drop(error)
            if time.monotonic() > deadline:
                raise PeerError(f"no parameters from {self._parameters.endpoint} in time: is the learner running?")
            if time.monotonic() - said > 10:
                said = time.monotonic()
                logger.info("waiting for parameters at %s", self._parameters.endpoint)
        return None

    def _play(self, agent: ApexActor, sender: UnrollSender, stop: Stop) -> None:
        self._metrics.run = agent.run
        # The slots are ours alone in the whole cluster, so no other actor plays the same games.
        seeds = np.random.SeedSequence([self._command.seed, sender.ladder[0][0]])
        rng = np.random.default_rng(seeds)
        for group, seed in zip(self._groups, seeds.generate_state(len(self._groups)), strict=True):
            group.reset(agent, int(seed >> 1))
        period = max(self._command.acting.parameter_period_frames // self.spec.frames_per_step, 1)
        rounds = 0
        while not stop.is_set():
            if rounds % period == 0:
                self._fetch(agent)
            self._climb_ladder(sender)
            for index, group in enumerate(self._groups):
                if rounds < index * self.spec.unroll_starts // len(self._groups):
                    continue  # begins later, so that the groups' unrolls are not complete at one time
                complete = self._advance(group, agent, rng)
                while complete is not None and not sender.offer(complete) and not stop.is_set():
                    self._report_when_due(agent, sender)
            rounds += 1
            self._report_when_due(agent, sender)
        self._report(agent, sender)

    def _advance(self, group: EnvironmentGroup, agent: ApexActor, rng: np.random.Generator) -> Round | None:
        """Takes one step in a group; returns its unrolls when they are complete."""
        watch = self._stopwatch
        started = time.perf_counter()
        step = group.receive()
        started = watch.lap("emulator", started)
        if step is not None:
            group.add(step)
            started = watch.lap("assembly", started)
        extras = group.act(agent, rng)
        started = watch.lap("inference", started)
        complete = group.observe(agent, extras)  # only now, so that the emulator does not wait for it
        watch.lap("assembly", started)
        return complete

    def _fetch(self, agent: ApexActor) -> None:
        """Takes newer parameters; those that do not fit are dropped, and the old ones stay in use."""
        parameters = self._parameters.fetch()
        if parameters is None:
            return
        try:
            if parameters.header.spec != self.spec:
                raise WireError(f"they are for {parameters.header.spec}, we play {self.spec}")
            agent.load(parameters)
            self._metrics.run = agent.run
        except WireError as error:
            self._parameters.drop(error)

    def _climb_ladder(self, sender: UnrollSender) -> None:
        """Takes the epsilons of our slots when the lease or the size of the ladder has changed."""
        ladder = sender.ladder
        if ladder == self._ladder:
            return
        self._ladder = ladder
        size = max(ladder[1], max(ladder[0]) + 1)
        acting = self._command.acting
        epsilons = epsilon_ladder(np.array(ladder[0]), size, acting.epsilon_base, acting.epsilon_exponent)
        for group in self._groups:
            group.epsilons = epsilons[group.streams.start : group.streams.stop]

    def _report_when_due(self, agent: ApexActor, sender: UnrollSender) -> None:
        if self._stopwatch.elapsed() > REPORT_PERIOD_SECONDS:
            self._report(agent, sender)

    def _report(self, agent: ApexActor, sender: UnrollSender) -> None:
        """Tells the learner the figures since the last report; what no part of the loop took was waiting."""
        elapsed = self._stopwatch.elapsed()
        steps = float(sum(group.steps for group in self._groups))
        totals = {"steps": steps, "sending": sender.busy_seconds} | sender.waited_seconds
        since = {name: total - self._reported.get(name, 0.0) for name, total in totals.items()}
        self._reported = totals
        steps_per_second = since.pop("steps") / elapsed
        sending = since.pop("sending") / elapsed
        shares = self._stopwatch.shares("actor/time/")
        figures = {f"actor/waits_for/{reason}": seconds / elapsed for reason, seconds in since.items()}
        self._metrics.report(
            {
                "actor/frames_per_second": steps_per_second * self.spec.frames_per_step,
                "actor/agent_steps_per_second": steps_per_second,
                "actor/agent_steps_total": steps,
                "actor/params_version": float(agent.params_version),
                "actor/dropped_parameters_total": float(self._parameters.num_dropped),
                "system/actors_memory_bytes": float(resident_bytes()),
                "actor/sent_bytes_total": float(sender.bytes_sent),
                "actor/time/sending": sending,
            }
            | shares
            | {"actor/time/waiting": 1 - sum(shares.values())}
            | figures
        )


def check_spec(parameters: Parameters, spec: StreamSpec) -> None:
    """Raises ConfigError when the learner learns something else than we play."""
    theirs = parameters.header.spec
    if theirs != spec:
        raise ConfigError(f"the learner learns {theirs}, we play {spec}: use the same --env and --n-steps everywhere")
