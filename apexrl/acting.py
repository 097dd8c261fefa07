"""The actor's loop: step a vector of environments, and send what happened as prioritized unrolls."""

import logging
import secrets
import socket
import time

import numpy as np
import torch

from apexrl.agents.apex_dqn import ApexActor
from apexrl.config import ActorCommand
from apexrl.envs import make_environment, make_spec
from apexrl.errors import ApexError, ConfigError, PeerError
from apexrl.exploration import epsilon_ladder
from apexrl.lifecycle import Stop, Stopwatch, resident_bytes
from apexrl.net.insert_client import InsertClient
from apexrl.net.keyring import load_keyring
from apexrl.net.metrics_channel import REPORT_PERIOD_SECONDS, MetricsClient
from apexrl.net.parameter_channel import ParameterSubscriber
from apexrl.net.sockets import address
from apexrl.parameters import Parameters
from apexrl.types import Episode, StreamSpec, TimeSteps, Unroll, UnrollHeader
from apexrl.unroll import UnrollBuilder, UnrollCodec

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.5


def actor_name(index: int) -> str:
    """Returns a name that no other life of any actor process has."""
    return f"{socket.gethostname()[:32]}-{index}-{secrets.token_hex(4)}"


class ActorLoop:
    """One actor process: owns its environments, its agent and its connections."""

    def __init__(self, command: ActorCommand):
        """Makes the environments and the connections; waits for nobody.

        Raises: ConfigError when the environment cannot be made.
        """
        self._command = command
        self._num_envs = command.acting.environments_per_worker
        self._envs = make_environment(command.env, self._num_envs)
        self.spec = make_spec(command.env, self._envs, command.agent.unroll_starts, command.agent.n_steps)
        name = actor_name(max(command.worker_index, 0))
        wires = command.wires
        keyring = load_keyring(wires.keys, "actor")
        replay = address(wires.replay_host, wires.actor_port)
        self._client = InsertClient(replay, name, self.spec, self._num_envs, keyring)
        endpoint = command.parameter_endpoint or address(wires.learner_host, wires.parameter_port)
        # The relay of this host speaks in the clear, and on the loopback only.
        self._parameters = ParameterSubscriber(endpoint, None if command.parameter_endpoint else keyring)
        self._metrics = MetricsClient(address(wires.learner_host, wires.metrics_port), name, keyring)
        self._codec = UnrollCodec(self.spec, command.acting.compression_level)
        self._episodes: list[list[Episode]] = [[] for _ in range(self._num_envs)]
        self._epsilons = np.zeros(self._num_envs)
        self._ladder: tuple[tuple[int, ...], int] = ((), 0)
        self._num_unrolls = 0
        self._steps = 0
        self._reported_steps = 0
        self._stopwatch = Stopwatch()

    def run(self, stop: Stop) -> None:
        """Plays until stopped.

        Raises: PeerError when the replay or the learner is away for longer than the patience.
        """
        patience = self._command.wires.patience_seconds
        try:
            self._client.connect(patience, stop.is_set)
            parameters = self._wait_for_parameters(stop)
            if parameters is not None:
                self._play(parameters, stop)
        finally:
            if self._client.is_welcome and not self._client.flush(FLUSH_SECONDS):
                logger.warning("%d unrolls were not acknowledged at the end", self._client.num_unacknowledged)
            self._client.close()
            self._parameters.close()
            self._metrics.close()
            self._envs.close()

    def _wait_for_parameters(self, stop: Stop) -> Parameters | None:
        deadline = time.monotonic() + self._command.wires.patience_seconds
        said = time.monotonic()
        while not stop.is_set():
            parameters = self._parameters.fetch(200)
            self._client.poll()  # keeps our lease
            if parameters is not None:
                check_spec(parameters, self.spec)
                return parameters
            if time.monotonic() > deadline:
                raise PeerError(f"no parameters from {self._parameters.endpoint} in time: is the learner running?")
            if time.monotonic() - said > 10:
                said = time.monotonic()
                logger.info("waiting for parameters at %s", self._parameters.endpoint)
        return None

    def _play(self, parameters: Parameters, stop: Stop) -> None:
        agent = ApexActor(self._command.agent, parameters, torch.device("cpu"))
        # The slots are ours alone in the whole cluster, so no other actor plays the same games.
        seeds = np.random.SeedSequence([self._command.seed, self._client.slots[0]])
        rng = np.random.default_rng(seeds)
        observations = self._envs.reset(seed=int(seeds.generate_state(1)[0] >> 1))
        builder = UnrollBuilder(self.spec, observations)
        period = max(self._command.acting.parameter_period_frames // self.spec.frames_per_step, 1)
        next_report = time.monotonic() + REPORT_PERIOD_SECONDS
        step = 0
        while not stop.is_set():
            if step % period == 0:
                self._fetch(agent)
            self._client.poll()
            self._climb_ladder()
            actions, extras = agent.act(observations, self._epsilons, rng)
            complete = builder.observe(extras)
            if complete is not None:
                self._send(agent, *complete, stop)
            time_steps = self._envs.step(actions)
            builder.add(actions, time_steps)
            self._count(time_steps)
            observations = time_steps.observations
            step += 1
            if time.monotonic() > next_report:
                next_report = time.monotonic() + REPORT_PERIOD_SECONDS
                self._report(agent)
        self._report(agent)

    def _fetch(self, agent: ApexActor) -> None:
        parameters = self._parameters.fetch()
        if parameters is not None:
            check_spec(parameters, self.spec)
            agent.load(parameters)

    def _climb_ladder(self) -> None:
        """Takes the epsilons of our slots when the lease or the size of the ladder has changed."""
        ladder = (self._client.slots, self._client.ladder_size)
        if ladder == self._ladder:
            return
        self._ladder = ladder
        size = max(ladder[1], max(ladder[0]) + 1)
        acting = self._command.acting
        self._epsilons = epsilon_ladder(np.array(ladder[0]), size, acting.epsilon_base, acting.epsilon_exponent)

    def _send(self, agent: ApexActor, unrolls: Unroll, extras: dict[str, np.ndarray], stop: Stop) -> None:
        priorities = agent.priorities(unrolls, extras)
        if not np.isfinite(priorities).all():
            raise ApexError(
                f"values or rewards are not finite (parameters {agent.params_version}): "
                "has the learner diverged, or does the environment give NaN?"
            )
        first_step = self._num_unrolls * self.spec.unroll_starts
        self._num_unrolls += 1
        for stream in range(self._num_envs):
            header = UnrollHeader(
                stream,
                first_step,
                agent.params_version,
                float(self._epsilons[stream]),
                priorities[:, stream],
                tuple(self._episodes[stream]),
            )
            self._episodes[stream] = []
            block = self._codec.encode(Unroll(*(array[:, stream] for array in unrolls)))
            self._client.insert(header, block, self._command.wires.patience_seconds, stop.is_set)

    def _count(self, step: TimeSteps) -> None:
        self._steps += int((~step.starts).sum())
        for stream in np.flatnonzero(step.episode_steps):
            episode = Episode(
                float(step.episode_returns[stream]), int(step.episode_steps[stream]), float(self._epsilons[stream])
            )
            self._episodes[stream].append(episode)

    def _report(self, agent: ApexActor) -> None:
        waits = self._client.waited_seconds
        for reason in list(waits):
            self._stopwatch.add(reason, waits.pop(reason))
        elapsed = self._stopwatch.elapsed()
        steps_per_second = (self._steps - self._reported_steps) / elapsed
        self._reported_steps = self._steps
        self._metrics.report(
            {
                "actor/frames_per_second": steps_per_second * self.spec.frames_per_step,
                "actor/agent_steps_per_second": steps_per_second,
                "actor/agent_steps_total": float(self._steps),
                "actor/params_version": float(agent.params_version),
                "system/actors_memory_bytes": float(resident_bytes()),
                "actor/sent_bytes_total": float(self._client.bytes_sent),
            }
            | self._stopwatch.shares("actor/waits_for/")
        )


def check_spec(parameters: Parameters, spec: StreamSpec) -> None:
    """Raises ConfigError when the learner learns something else than we play."""
    theirs = parameters.header.spec
    if theirs != spec:
        raise ConfigError(f"the learner learns {theirs}, we play {spec}: use the same --env and --n-steps everywhere")
