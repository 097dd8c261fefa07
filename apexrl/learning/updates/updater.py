"""Runs the updates of any learner: on a CPU eagerly with a second thread, on a GPU as a captured graph."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apexrl.agents.contract import Batches, Learner, Outcome
from apexrl.agents.families import family_of, implementation
from apexrl.config.commands import LearnerCommand
from apexrl.errors import ApexError, ConfigError
from apexrl.learning.experience.draw import Draw, SampledKeys
from apexrl.learning.experience.run_moments import RunMoments
from apexrl.learning.experience.unroll_store import UnrollStore
from apexrl.learning.updates.side_thread import SideThread
from apexrl.learning.updates.team import OWN_STATE, Team
from apexrl.learning.updates.update_graph import Inputs, Parts, UpdateGraph, Work, advanced, inputs_for, inputs_of
from apexrl.networks.checkpoint import ACTING
from apexrl.networks.device_stream import DeviceStream, Event, wait
from apexrl.networks.headers import LEARNING
from apexrl.types import StreamSpec

NUM_UPDATES = LEARNING + "num_updates"  # a tensor where not every update takes a step of all parts
FOLLOWED_UPDATES = 100  # from one update at which the normalizer follows what was seen to the next


class Result(NamedTuple):
    """One of the results of an update: a metric, or numbers of the rows of a table."""

    kind: str  # priorities, rows or metrics, as an `Outcome` has them
    name: str
    shape: tuple[int, ...]  # [B, ..] of rows, () of a scalar
    table: str  # whose rows it is of; empty of a scalar


class Pending(NamedTuple):
    """The results of an update, on their way from the device: to be read after the event."""

    keys: dict[str, np.ndarray]  # [M] keys of the rows that were updated from, by table
    results: tuple[Result, ...]  # in the order of `values`
    values: Tensor  # all results, flat: float32 in host memory
    event: Event

    def result(self) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Returns the new priorities [M] by table, and the metrics that are scalars; waits for them if need be.

        Raises: ApexError when the device does not get there in time, or the learner gave too few results.
        """
        wait(self.event)
        for _, name, shape, table in self.results:
            if table and shape[0] < len(self.keys[table]):
                raise ApexError(
                    f"the learner gives {shape[0]} numbers of {name} for {len(self.keys[table])} rows of {table}"
                )
        priorities = {result.table: values for result, values in self._of("priorities")}
        return priorities, {result.name: float(metric) for result, metric in self._of("metrics") if not result.table}

    def row_metrics(self) -> dict[str, float]:
        """Returns the metrics of rows, over those that were updated from and are finite; call `result` first."""
        metrics: dict[str, float] = {}
        for result, rows in self._of("metrics"):
            if result.table:
                finite = rows[np.isfinite(rows)]  # one that is not would hide the others
                reduced = finite.max if result.name.endswith("_max") else finite.mean
                metrics[result.name] = float(reduced()) if finite.size else math.nan
        return metrics

    def rows(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the results [M, ...] of the rows that were updated from, by table and name; call `result` first."""
        rows: dict[str, dict[str, np.ndarray]] = {}
        for result, values in self._of("rows"):
            rows.setdefault(result.table, {})[result.name] = values
        return rows

    def _of(self, kind: str) -> Iterator[tuple[Result, np.ndarray]]:
        """Yields the results of a kind with their values: [M, ..] of rows, without those that only fill the batch."""
        values, start = self.values.numpy(), 0
        for result in self.results:
            end = start + math.prod(result.shape)
            if result.kind == kind:
                found = values[start:end].reshape(result.shape)
                yield result, found[: len(self.keys[result.table])] if result.table else found
            start = end


class Updater:
    """Owns a learner's updates: warm-up, graph, second thread, and the number of updates. Used from one thread."""

    def __init__(
        self, learner: Learner, device_stream: DeviceStream, team: Team | None = None, moments: RunMoments | None = None
    ):
        """Takes over a learner whose tensors lie on the stream's device; alone, unless a team is given.

        Args:
          moments: of the run, where its batches are normalized.
        """
        self.num_updates = 0
        self._moments = moments
        self._team = team or Team()
        self.learner = learner
        self._device_stream = device_stream
        self._graphs: dict[int, UpdateGraph] = {}  # by shard: each has a store of its own
        self._side = SideThread(learner) if device_stream.cuda is None and learner.has_side_work else None
        self._results: tuple[Result, ...] = ()  # as the last update gave them
        self._told: Mapping[str, float] | None = None  # what the learner was told last of its numbers
        self._scale = 1.0  # of our gradients beside those of the others
        self._work = Work(self._steps, None if self._team.size == 1 else self._add_up)

    def schedule(self, numbers: Mapping[str, float]) -> None:
        """Tells the learner its numbers that may change, by field, where they have."""
        if numbers != self._told:
            self._told = numbers
            with self._device_stream.exclusive():
                self.learner.schedule(numbers)

    def prepare(self, store: UnrollStore, shard: int = 0) -> None:
        """Makes the graph for a shard's draws before there are any. A CPU needs none.

        Raises: ConfigError when the GPU has too little memory.
        """
        if self._device_stream.cuda is None:
            return
        with self._device_stream.memory_kept():
            if store.num_bytes:  # else it is given up already
                with self._device_stream.exclusive():
                    inputs = inputs_for(store, self._device_stream)
                self._make_graph(shard, inputs)

    def update(self, draw: Draw | None, upcoming: Draw | None = None, scale: float = 1.0) -> Pending | None:
        """Takes one optimizer step; returns its results, None when nothing of a table's sample is left.

        In a team all learners take the step together. One that has no draw, or nothing left of it, adds nothing.

        Args:
          upcoming: the draw of the next call, where it is known: the second thread begins with it.
          scale: of our gradients beside those of the others.
        """
        self._scale = scale
        is_first = self._moments is not None and not self._moments.has_followed
        if is_first or self.num_updates % FOLLOWED_UPDATES == 0:
            self.follow_moments()
        pending: Pending | None = None
        if draw is not None and self._device_stream.cuda is None and draw.is_gathered:
            pending = self._update_eagerly(draw, upcoming)
        elif draw is not None:
            pending = self._update_by_graph(draw)
        if pending is None:
            if self._team.size == 1:
                return None
            with self._device_stream.exclusive():
                for _ in range(self.learner.num_steps):
                    self.learner.gradient.zero_()
                    self._add_up()
                    self.learner.apply()
        self.num_updates += 1
        if self.learner.is_copy_due(self.num_updates):
            self._forget()
            with self._device_stream.exclusive():
                self.learner.copy_target()
        return pending

    def follow_moments(self) -> None:
        """Normalizes from now on by all that the learners of a team have seen; all of them call it at once.

        Raises: PeerError when a learner is gone or says nothing in time.
        """
        if self._moments is not None:
            self._moments.follow(self._team)

    def parameters(self) -> tuple[dict[str, Tensor], Event]:
        """Returns the tensors that actors need, good after the event; on a CPU they are not copies."""
        return self._device_stream.fetch(self._acting_tensors())

    def state_dict(self) -> dict[str, Tensor]:
        """Returns all tensors of the learner under flat names; on a CPU they are not copies."""
        tensors, event = self._device_stream.fetch(self._tensors())
        wait(event)
        return tensors

    def load_state_dict(self, state: Mapping[str, Tensor], num_updates: int) -> None:
        """Restores the result of `state_dict`, in place: a captured update goes on with it.

        Raises: ConfigError when networks or optimizer are of another kind or size.
        """
        own = self._tensors()
        state = {name: tensor for name, tensor in state.items() if name.startswith((ACTING, LEARNING))}
        if NUM_UPDATES not in own:
            state.pop(NUM_UPDATES, None)
        elif NUM_UPDATES not in state:
            state[NUM_UPDATES] = torch.tensor(num_updates)
        others = [name for name in own.keys() | state.keys() if _shape(own, name) != _shape(state, name)]
        if wrong := sorted(name for name in others if not name.startswith(OWN_STATE)):
            raise ConfigError(
                f"the checkpoint is of another network or optimizer ({wrong[:3]} differ): "
                "go on with the flags, such as --optimizer, and with the version of apexrl with which it was begun"
            )
        self._forget()
        with self._device_stream.exclusive(), torch.no_grad():
            for name in own.keys() - set(others):
                own[name].copy_(state[name])
        if self._moments is not None:
            self._moments.restored()
        self.num_updates = num_updates
        self._told = None  # the tensors of schedules were replaced too

    def _update_eagerly(self, draw: Draw, upcoming: Draw | None) -> Pending:
        parts = self._steps(draw.batches(), None if self._side is None else self._side.begin(draw))
        values = advanced(parts)
        if self._side is not None:
            self._side.look_ahead(upcoming)
        while values is None:
            self._add_up()
            values = advanced(parts)
        keys = {table: sample.keys for table, sample in draw.samples.items()}
        return self._pending(keys, values)

    def _update_by_graph(self, draw: Draw) -> Pending | None:
        """Starts an update by the shard's graph, which is made first where there is none for such draws."""
        if draw.shard not in self._graphs or not self._graphs[draw.shard].takes(draw):
            named = [sample for sample in draw.samples.values() if isinstance(sample, SampledKeys)]
            with self._device_stream.memory_kept():
                with self._device_stream.exclusive():
                    if not all(sample.held().any() for sample in named):
                        return None  # its store may be given up already
                    inputs = inputs_of(draw, self._device_stream)
                self._make_graph(draw.shard, inputs)
        with self._device_stream.exclusive():
            started = self._graphs[draw.shard].run(draw)
            return None if started is None else self._pending(*started)

    def _make_graph(self, shard: int, inputs: dict[str, Inputs]) -> None:
        wait(self._device_stream.event())
        self._graphs.pop(shard, None)  # its memory is needed
        self._graphs[shard] = UpdateGraph(self._device_stream, inputs, self._work, self._changed().values())

    def _steps(self, batches: Batches, known: Callable[[], Any] | None = None) -> Parts:
        """Takes the steps of an update, and pauses where the gradients of a step are there. Nothing waits for a GPU.

        Args:
          known: waits for the second thread's result; None: computes it here.
        Returns: priorities, results and metrics as one tensor.
        """
        learner, steps = self.learner, []
        here = known or (lambda: learner.from_online(batches, learner.from_target(batches)))
        for minibatch, known_of_it in learner.minibatches(batches, here):
            outcome = learner.gradients(minibatch, known_of_it)
            _check_sizes(_results_of(outcome, minibatch), minibatch, learner.num_steps)
            yield
            steps.append(outcome.metrics | learner.apply())
        return self._joined(outcome, steps, batches)

    def _add_up(self) -> None:
        """Adds the gradients of all learners up."""
        if self._team.size > 1:
            self._team.add_up(self.learner.gradient, self._scale)

    @torch.no_grad()
    def _joined(self, outcome: Outcome, steps: list[dict[str, Tensor]], batches: Batches) -> Tensor:
        """Returns the results of an update's only step, or the means of the metrics of all, as one tensor."""
        metrics = steps[0] if len(steps) == 1 else {
            name: torch.stack([step[name].float() for step in steps]).mean(dim=0) for name in steps[0]
        }  # fmt: skip
        found = _results_of(outcome._replace(metrics=metrics), batches)
        self._results = tuple(result for result, _ in found)
        return torch.cat([values.float().flatten() for _, values in found])

    def _pending(self, keys: dict[str, np.ndarray], values: Tensor) -> Pending:
        return Pending(keys, self._results, values, self._device_stream.event())

    def _forget(self) -> None:
        if self._side is not None:
            self._side.forget()

    def _tensors(self) -> dict[str, Tensor]:
        if self._moments is None:
            return self._changed()
        acting, learning = self._moments.acting_tensors, self._moments.learning_tensors
        return self._changed() | _prefixed(ACTING, acting) | _prefixed(LEARNING, learning)

    def _changed(self) -> dict[str, Tensor]:
        """Returns the tensors that updates change. An algorithm may make some of them as it is asked."""
        with self._device_stream.exclusive():
            acting, learning = self.learner.acting_tensors(), self.learner.learning_tensors()
        return _prefixed(ACTING, acting) | _prefixed(LEARNING, learning)

    def _acting_tensors(self) -> dict[str, Tensor]:
        with self._device_stream.exclusive():
            tensors = self.learner.acting_tensors()
        return tensors if self._moments is None else tensors | self._moments.acting_tensors


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _results_of(outcome: Outcome, batches: Batches) -> list[tuple[Result, Tensor]]:
    """Returns all results of an outcome. Metrics of rows are of the only table that is wanted."""
    first = next(iter(batches))
    found = [("priorities", "priorities", table, values) for table, values in outcome.priorities.items()]
    found += [("rows", name, table, values) for table, named in outcome.rows.items() for name, values in named.items()]
    found += [("metrics", name, first if metric.ndim else "", metric) for name, metric in outcome.metrics.items()]
    return [(Result(kind, name, values.shape, table), values) for kind, name, table, values in found]


def _check_sizes(results: Iterable[tuple[Result, Tensor]], batches: Batches, num_steps: int) -> None:
    """Raises ApexError when results of rows are not of the rows of their batch; where unrolls burn in, of its last.

    Those of a minibatch would not be of the rows of the draw.
    """
    for (kind, name, shape, table), _ in results:
        if not table:
            continue
        given = f"the learner gives the metric {name}" if kind == "metrics" else f"the learner gives {name}"
        if num_steps > 1:
            raise ApexError(f"{given} of rows: an update of several steps gives scalars, and no priorities")
        if kind == "metrics" and len(batches) > 1:
            raise ApexError(f"{given} of rows: where it wants several tables, give scalars")
        if table not in batches:
            raise ApexError(f"{given} of {table}: {', '.join(batches)} is wanted")
        num_rows = len(batches[table].weight)
        is_fitting = len(shape) == 1 or (len(shape) > 1 and kind != "priorities")
        if not is_fitting or num_rows % max(shape[0], 1):
            raise ApexError(f"{given} of the shape {list(shape)} for {num_rows} rows of {table}")


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


def make_updater(
    command: LearnerCommand, spec: StreamSpec, device_stream: DeviceStream, team: Team | None = None,
    moments: RunMoments | None = None,
) -> Updater:  # fmt: skip
    """Returns an updater with new networks, which follow from the seed; those of a team begin with the first one's."""
    if moments is not None:
        moments.begin(spec)
    torch.manual_seed(command.seed + (0 if team is None else team.rank))  # the noise of updates is each learner's own
    make = implementation(family_of(command.agent)).make_learner
    with device_stream.exclusive():
        learner = make(command.algorithm, command.network, command.update, spec, device_stream.device)
    return Updater(learner, device_stream, team, moments)
