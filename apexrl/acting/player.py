"""The games of an actor: vectors of environments that step in turn, and prioritized unrolls of them. No sockets."""

import collections
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from apexrl.acting.foreign import ForeignEnvironment
from apexrl.agents.contract import Actor, Extras, Observation
from apexrl.agents.families import family_of
from apexrl.casts import exactly
from apexrl.config.commands import ActorCommand, WorkerCommand
from apexrl.environments.renewal import Failures
from apexrl.environments.vector import ACTED, VectorEnvironment
from apexrl.errors import ApexError
from apexrl.lifecycle import Stopwatch
from apexrl.losses.windows import valid_starts
from apexrl.types import Episode, StreamSpec, StreamUnrolls, TimeSteps, UnrollHeader
from apexrl.unroll import UnrollBuilder


class Lease(NamedTuple):
    """The environment slots leased to an actor: it is the only one in the whole cluster that has them."""

    slots: tuple[int, ...]  # one a stream
    ladder_size: int  # slots of the whole cluster


class Round(NamedTuple):
    """One unroll of each of E streams, with the actor's account of them."""

    first_stream: int
    first_step: int
    params_version: int
    exploration: np.ndarray  # [E]
    valid: np.ndarray  # [K, E] bool
    priorities: np.ndarray  # [P, E] float32
    episodes: list[tuple[Episode, ...]]  # [E]
    unrolls: StreamUnrolls

    def header(self, index: int) -> UnrollHeader:
        """Returns the account of one stream's unroll."""
        return UnrollHeader(
            self.first_stream + index,
            self.first_step,
            self.params_version,
            float(self.exploration[index]),
            self.valid[:, index],
            self.priorities[:, index],
            self.episodes[index],
        )


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
        self._failures = Failures()
        options = {"failures": self._failures, "making_seconds": command.wires.patience_seconds}
        environments = [
            ForeignEnvironment(command.env, len(share), first_copy=first_copy + int(share[0]), **options)
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
        # The slots are ours alone in the whole cluster, so no other actor plays the same games, and a run that is
        # resumed plays none again.
        begun = [version] if (version := agent.header.params_version) else []
        seeds = np.random.SeedSequence([self._command.seed, first_slot, *begun])
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
