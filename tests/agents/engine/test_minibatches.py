"""Updates that take several steps from one draw."""

import numpy as np
import pytest
import torch

from apexrl.agents.contract import UnrollBatch
from apexrl.agents.engine.minibatches import rows_of, shuffled
from apexrl.agents.engine.plain import Learning, Losses, PartOptimizer, Target
from apexrl.agents.engine.plain_learner import PlainLearner
from apexrl.errors import ApexError
from apexrl.learning.experience.draw import Draw
from apexrl.learning.updates.updater import Updater
from apexrl.networks.dueling import make_network
from tests.agents.engine.test_plain_learner import NETWORK, UPDATE, Beside
from tests.agents.impala_parts import random_batches, spec_of
from tests.devices import CPU
from tests.fake_graph import FakeDeviceStream
from tests.learning.twins import update_both
from tests.learning.updates.test_update_graph import Doubling
from tests.learning.updates.test_updater import SIZE, VECTORS, World
from tests.lockstep import ALGORITHM, TABLE


class Surrogate(Learning):
    """Goes through each draw three times in halves; what it compares with is of before the first step."""

    acting, num_steps = ("policy",), 6

    def parts(self):
        return {"policy": make_network(self.spec, self.network)}

    def from_online(self, online, batches, from_target):
        return online["policy"](batches[TABLE].observation).float()

    def minibatches(self, batches, known):
        for _ in range(3):
            for rows in torch.arange(SIZE).chunk(2):
                yield {TABLE: rows_of(batches[TABLE], rows, self.spec)}, known[rows]

    def losses(self, online, batches, known):
        batch, before = batches[TABLE], known()
        values = online["policy"](batch.observation).float()
        errors = batch.n_step_return.unsqueeze(1) - values
        loss = (batch.weight.unsqueeze(1) * (errors.square() + 0.1 * (values - before).square())).sum()
        return Losses({"policy": loss}, len(values), metrics={"moved": (values - before).abs().mean()})


class Miscounting(Surrogate):
    num_steps = 5


def world_of(make_unroll, kind=Surrogate, device_stream=None, team=None, spec=VECTORS):
    world = World(make_unroll, spec, CPU, device_stream=device_stream)
    torch.manual_seed(7)
    world.updater = Updater(PlainLearner(kind(ALGORITHM, NETWORK, UPDATE, spec, CPU)), world.device_stream, team)
    return world


def by_hand(world):
    """The same update, step by step."""
    learner = world.updater.learner
    batches = {TABLE: world.store.gather(TABLE, *world.sample()).batch}
    before = learner.from_online(batches, None)
    moved = []
    for rows in [torch.arange(SIZE // 2), torch.arange(SIZE // 2, SIZE)] * 3:
        part = {TABLE: rows_of(batches[TABLE], rows, VECTORS)}
        outcome = learner.gradients(part, lambda rows=rows: before[rows])
        moved.append({name: float(metric) for name, metric in (outcome.metrics | learner.apply()).items()})
    world.updater.num_updates += 1
    return (), {name: pytest.approx(np.mean([step[name] for step in moved]), rel=1e-6) for name in moved[0]}


def metrics_of(pending):
    """The results of an update: it gives no priorities."""
    priorities, metrics = pending.result()
    assert not priorities
    return (), metrics | pending.row_metrics()


def eagerly(world):
    return metrics_of(world.updater.update(Draw(0, {TABLE: world.store.gather(TABLE, *world.sample())})))


@pytest.mark.parametrize("team", [None, Doubling()], ids=["alone", "team"])
def test_every_minibatch_is_a_step_of_its_own(make_unroll, team):
    world, plain = world_of(make_unroll, team=team), world_of(make_unroll)
    for number in range(1, 4):
        (_, found), (_, expected) = eagerly(world), by_hand(plain)
        assert found == expected and found["moved"] > 0 and world.updater.num_updates == number
        states = [one.updater.state_dict() for one in (world, plain)]
        assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    assert team is None or team.calls == 18


@pytest.mark.parametrize("team", [None, Doubling()], ids=["alone", "team"])
def test_a_graph_captures_all_steps(make_unroll, team):
    graph, plain = world_of(make_unroll, device_stream=FakeDeviceStream(), team=team), world_of(make_unroll)
    for _ in range(3):
        draw = graph.keys(*graph.sample())
        update_both(graph, plain, lambda draw=draw: metrics_of(graph.updater.update(draw)), lambda: eagerly(plain))
    assert graph.device_stream.num_captures == (1 if team is None else 7)


class Delayed(Surrogate):
    """Learns at every second update, and has a target that follows at each."""

    target, optimizers = Target(rate=0.25), {"policy": PartOptimizer(period_updates=2)}


@pytest.mark.parametrize("on_graph", [False, True], ids=["plainly", "graph"])
@pytest.mark.parametrize("team", [None, Doubling()], ids=["alone", "team"])
def test_periods_and_targets_count_updates_not_steps(make_unroll, on_graph, team):
    world = world_of(make_unroll, Delayed, FakeDeviceStream() if on_graph else None, team)
    learner = world.updater.learner
    for number in range(1, 5):
        online, target = ([*map(torch.clone, part.parameters())] for part in (learner.online, learner.target))
        world.updater.update(world.keys(*world.sample())) if on_graph else eagerly(world)
        has_moved = not all(map(torch.equal, online, learner.online.parameters()))
        assert has_moved == (number % 2 == 0) and learner.learning_tensors()["num_updates"] == number
        for was, is_now, leader in zip(target, learner.target.parameters(), learner.online.parameters(), strict=True):
            torch.testing.assert_close(is_now, was + 0.25 * (leader - was))


class InHalves(Beside):
    num_steps = 2

    def minibatches(self, batches, known):
        for rows in torch.arange(SIZE).chunk(2):
            yield {TABLE: rows_of(batches[TABLE], rows, self.spec)}, known[rows]

    def given(self, losses, errors):
        return Losses(losses, len(errors), metrics={"td_error": errors.abs().mean()})


def test_losses_beside_are_computed_in_all_steps_of_the_updates_that_are_due(make_unroll):
    world = world_of(make_unroll, InHalves)
    for number in range(1, 6):
        eagerly(world)
        assert world.updater.learner.learning.calls == 2 * (number // 2)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"priorities": {TABLE: torch.ones(SIZE // 2)}}, "the learner gives priorities of rows: an update of several"),
        ({"metrics": {"q": torch.ones(SIZE // 2)}}, "gives the metric q of rows: an update of several steps gives sca"),
        ({"rows": {TABLE: {"distance": torch.ones(SIZE // 2)}}}, "gives distance of rows: an update of several steps"),
    ],
)
def test_results_of_the_rows_of_a_minibatch_are_refused(make_unroll, changes, complaint):
    class Mistaken(Surrogate):
        def losses(self, *given):
            return super().losses(*given)._replace(**changes)

    with pytest.raises(ApexError, match=complaint):
        eagerly(world_of(make_unroll, Mistaken))


def test_a_wrong_number_of_minibatches_is_said(make_unroll):
    with pytest.raises(ApexError, match=r"gives 6 of a draw, `num_steps` is 5"):
        eagerly(world_of(make_unroll, Miscounting))


def test_every_epoch_goes_through_all_rows_in_its_own_order():
    torch.manual_seed(0)
    rows = [part.tolist() for part in shuffled(12, 3, 2, CPU)]
    assert [len(part) for part in rows] == [4] * 6
    epochs = rows[0] + rows[1] + rows[2], rows[3] + rows[4] + rows[5]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    with pytest.raises(ValueError, match="12 rows cannot be divided into 5 minibatches"):
        next(shuffled(12, 5, 1, CPU))


def test_rows_of_unrolls_keep_all_that_belongs_to_them():
    batch, rows = random_batches(0, {"queue": 8}, lstm=True)["queue"], torch.tensor([6, 1])
    found = rows_of(batch, rows, spec_of(lstm=True))
    assert isinstance(found, UnrollBatch)
    assert torch.equal(found.observation, batch.observation[:, rows]) and torch.equal(found.weight, batch.weight[rows])
    assert found.extras.keys() == batch.extras.keys()
    for name, values in found.extras.items():
        dim = [place for place, size in enumerate(batch.extras[name].shape[:2]) if size == 8][-1]
        assert torch.equal(values, batch.extras[name].index_select(dim, rows)), name
