"""Two networks that learn from each other's losses, on the learner that runs plain algorithms."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from apexrl.agents.apex_dqn_config import ApexUpdate
from apexrl.agents.engine.plain import Learning, Losses, PartOptimizer, Slope, Target
from apexrl.agents.engine.plain_learner import PlainLearner
from apexrl.errors import ApexError
from apexrl.learning.experience.draw import Draw
from apexrl.learning.updates.updater import Updater
from apexrl.networks import device as devices
from apexrl.networks.config import DuelingConfig
from apexrl.networks.dueling import make_network
from tests.devices import CPU
from tests.fake_graph import FakeDeviceStream
from tests.learning.updates.test_updater import SCREENS, SIZE, VECTORS, World
from tests.lockstep import ALGORITHM, TABLE

UPDATE = ApexUpdate(SIZE, "adam", 1e-3, optimizer_epsilon=1e-5, max_gradient_norm=40.0)
NETWORK = DuelingConfig((4, 4, 4), 16)


class PolicyAndCritic(Learning):
    """A critic learns the values of actions, and a policy prefers those that the critic values."""

    acting = ("policy",)
    target = Target(rate=0.25, parts=("critic",))

    def parts(self):
        return {name: make_network(self.spec, self.network) for name in ("policy", "critic")}

    def from_target(self, target, batches):
        return target["critic"](batches[TABLE].next_observation).float()

    def losses(self, online, batches, known):
        batch = batches[TABLE]
        values = online["critic"](batch.observation).float()
        chances = online["policy"](batch.observation).float().softmax(dim=1)
        errors = batch.n_step_return + batch.discount * known().max(dim=1).values - values[:, 0]
        policy, critic = -(batch.weight * (chances * values).sum(dim=1)).sum(), (batch.weight * errors.square()).sum()
        return self.given({"policy": policy, "critic": critic}, errors)

    def given(self, losses, errors):
        return Losses(losses, len(errors), {TABLE: errors.abs()}, {"td_error": errors.abs()})


class Delayed(PolicyAndCritic):
    @property
    def optimizers(self):
        return {"policy": PartOptimizer(learning_rate=1e-2, max_gradient_norm=1e-3, period_updates=2)}


class Beside(Delayed):
    """The same in another order: the policy's loss has a pass of its own, where it is due."""

    calls = 0

    def losses(self, online, batches, known):
        losses = super().losses(online, batches, known)

        def of_policy():
            self.calls += 1
            return {"policy": PolicyAndCritic.losses(self, online, batches, known).of_parts["policy"]}

        return losses._replace(of_parts={"critic": losses.of_parts["critic"]}, beside=of_policy)


class Together(PolicyAndCritic):
    acting = ("critic", "policy")
    target = Target(period_updates=3)

    def given(self, losses, errors):
        total = losses["policy"] + losses["critic"]
        return super().given({"policy": total, "critic": total}, errors)


class Asking(PolicyAndCritic):
    """Asks for the targets before it computes with a network that gave them."""

    target = None

    def from_online(self, online, batches, from_target):
        return online["critic"](batches[TABLE].next_observation).float()

    def losses(self, online, batches, known):
        found = known()
        return super().losses(online, batches, lambda: found)


class Forgetful(PolicyAndCritic):
    def given(self, losses, errors):
        return super().given({"critic": losses["critic"]}, errors)


def learner_of(kind, spec=VECTORS, **changes):
    torch.manual_seed(7)
    return PlainLearner(kind(ALGORITHM, NETWORK, dataclasses.replace(UPDATE, **changes), spec, CPU))


def world_of(make_unroll, kind, device_stream=None, spec=VECTORS):
    world = World(make_unroll, spec, CPU, device_stream=device_stream)
    world.updater = Updater(learner_of(kind, spec), world.device_stream)
    return world


def batches_of(world):
    return {TABLE: world.store.gather(TABLE, *world.sample()).batch}


def update(learner, batches):
    outcome = learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
    return outcome, learner.apply()


def copies(module):
    return [tensor.detach().clone() for tensor in module.parameters()]


def test_each_loss_moves_the_part_of_its_name_alone(make_unroll):
    world = world_of(make_unroll, PolicyAndCritic)
    learner, batches = world.updater.learner, batches_of(world)
    online = learner.online
    losses = learner.learning.losses(online, batches, lambda: learner.learning.from_target(learner.target, batches))
    expected = {
        name: torch.autograd.grad(loss, online[name].parameters(), retain_graph=True)
        for name, loss in losses.of_parts.items()
    }
    learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
    for name, gradients in expected.items():
        for parameter, gradient in zip(online[name].parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    assert learner.gradient[-1] == SIZE


def test_parts_that_share_a_loss_have_its_gradient(make_unroll):
    world = world_of(make_unroll, Together)
    learner, batches = world.updater.learner, batches_of(world)
    total = learner.learning.losses(
        learner.online, batches, lambda: learner.target["critic"](batches[TABLE].next_observation)
    )
    expected = torch.autograd.grad(total.of_parts["critic"], learner.online.parameters())
    learner.gradients(batches, lambda: learner.from_online(batches, learner.from_target(batches)))
    for parameter, gradient in zip(learner.online.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_soft_target_moves_by_its_rate_at_each_update_and_nothing_is_computed_ahead(make_unroll):
    world = world_of(make_unroll, PolicyAndCritic)
    learner = world.updater.learner
    before = copies(learner.target)
    assert list(learner.target) == ["critic"] and learner.from_target(batches_of(world)) is None
    update(learner, batches_of(world))
    for was, is_now, leader in zip(
        before, learner.target.parameters(), learner.online["critic"].parameters(), strict=True
    ):
        torch.testing.assert_close(is_now, was + 0.25 * (leader - was))
    assert not learner.is_copy_due(100)


def test_a_part_with_a_period_moves_at_each_of_so_many_updates(make_unroll):
    world = world_of(make_unroll, Delayed)
    learner = world.updater.learner
    moved = []
    for _ in range(4):
        before = {name: copies(part) for name, part in learner.online.items()}
        update(learner, batches_of(world))
        moved.append(
            {name: not all(map(torch.equal, before[name], part.parameters())) for name, part in learner.online.items()}
        )
    assert [one["policy"] for one in moved] == [False, True, False, True] and all(one["critic"] for one in moved)


def test_a_loss_beside_the_others_moves_its_part_alike_and_is_computed_where_it_is_due(make_unroll):
    beside, plain = (world_of(make_unroll, kind) for kind in (Beside, Delayed))
    assert beside.updater.learner.has_side_work  # a second thread computes it
    for _ in range(5):
        for world in (beside, plain):
            world.updater.update(Draw(0, {TABLE: world.store.gather(TABLE, *world.sample())}))
    assert beside.updater.learner.learning.calls == 2
    state, expected = beside.updater.state_dict(), plain.updater.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_loss_beside_of_another_part_is_refused(make_unroll):
    class Wrong(Beside):
        optimizers = PolicyAndCritic.optimizers

        def losses(self, *given):
            return super().losses(*given)._replace(beside=dict)

    world = world_of(make_unroll, Wrong)
    with pytest.raises(ApexError, match=r"losses of the parts \[\]; `parts` are \['policy'\]"):
        update(world.updater.learner, batches_of(world))


class Own(PolicyAndCritic):
    own_rate = 1e-2

    @property
    def optimizers(self):
        return {"policy": PartOptimizer(self.own_rate)}


class Halved(Own):
    own_rate = 5e-3


def test_numbers_that_change_are_those_of_the_next_update(make_unroll):
    """The rate of a part of its own changes by the same factor."""
    batches = batches_of(world_of(make_unroll, Own))
    changing = learner_of(Own, learning_rate="1e-3:0", max_gradient_norm="40:0")
    still = learner_of(Halved, learning_rate=5e-4, max_gradient_norm=2e-3)
    changing.schedule({"learning_rate": 5e-4, "max_gradient_norm": 2e-3})
    still.schedule({"learning_rate": 1.0, "max_gradient_norm": 1.0})  # says nothing to what stays
    before = copies(still.online)
    for learner in (changing, still):
        update(learner, batches)
    after = copies(changing.online)
    torch.testing.assert_close(after, copies(still.online))
    assert not all(map(torch.equal, after, before))


@pytest.mark.parametrize("kind", [PolicyAndCritic, Delayed, Beside, Together])
@pytest.mark.parametrize("spec", [VECTORS, SCREENS], ids=["vectors", "screens"])
def test_a_captured_graph_makes_the_same_updates(make_unroll, kind, spec):
    graph, plain = (world_of(make_unroll, kind, stream, spec) for stream in (FakeDeviceStream(), None))
    for _ in range(7):
        (found, metrics), (expected, others) = graph.by_keys(*graph.sample()), plain.by_keys(*plain.sample())
        assert np.array_equal(found, expected) and metrics == others
    state, expected = graph.updater.state_dict(), plain.updater.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize("kind", [PolicyAndCritic, Delayed, Beside, Together])
def test_a_restored_learner_goes_on_as_if_it_had_never_stopped(make_unroll, kind):
    world, other = world_of(make_unroll, kind), world_of(make_unroll, kind)
    for _ in range(3):
        world.by_keys(*world.sample())
    state = {name: tensor.clone() for name, tensor in world.updater.state_dict().items()}
    with torch.no_grad():
        for tensor in other.updater.learner.online.parameters():
            tensor.zero_()
    other.updater.load_state_dict(state, 3)
    other.rng = world.rng
    for _ in range(3):
        keys = world.sample()
        (found, _), (expected, _) = other.by_keys(*keys), world.by_keys(*keys)
        assert np.array_equal(found, expected)
    after = world.updater.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in other.updater.state_dict().items())


def test_actors_get_the_parts_that_act_and_a_checkpoint_the_others(make_unroll):
    alone, both = learner_of(PolicyAndCritic), learner_of(Together)
    names = set(make_network(VECTORS, NETWORK).state_dict())
    assert set(alone.acting_tensors()) == names
    assert {f"critic.{name}" for name in names} <= set(alone.learning_tensors())
    assert set(both.acting_tensors()) == names | {f"policy.{name}" for name in names}


def test_a_gradient_is_not_lost_where_values_without_one_come_first(make_unroll, monkeypatch):
    """Autocast keeps weights that it has cast: those of a computation without a gradient have none."""
    monkeypatch.setattr(devices, "fastest_dtype", lambda *_: torch.bfloat16)
    world = world_of(make_unroll, Asking, spec=SCREENS)
    learner = world.updater.learner
    update(learner, batches_of(world))
    for name, parameter in learner.online.named_parameters():
        assert parameter.grad.any(), name


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"of_parts": {"policy": torch.ones(3, requires_grad=True)}},
            r"a loss of policy that has the shape \[3\]: sum",
        ),
        ({"of_parts": {"policy": torch.ones(())}}, "a loss of policy that depends on no parameter"),
        ({"of_parts": {"policy": 0.5}}, "a loss of policy as a float: give a tensor, or a Slope"),
        ({"of_parts": {"polcy": torch.ones(())}}, r"losses of the parts \['critic', 'polcy', 'policy'\]"),
        (
            {"of_parts": {"policy": Slope(torch.ones(2), torch.ones(2))}},
            "a loss of policy that depends on no parameter",
        ),
        ({"of_parts": {"policy": Slope(torch.ones(2, requires_grad=True), torch.ones(3))}}, r"a Slope of policy with"),
        ({"num_terms": torch.ones(3)}, r"`losses` gives num_terms of the shape \[3\]: give one number"),
        ({"metrics": {"loss": 0.5}}, "gives the metric of loss as a float: give a tensor"),
        ({"priorities": {TABLE: np.ones(SIZE)}}, f"gives priorities of {TABLE} as a ndarray: give a tensor"),
    ],
)
def test_an_authors_mistake_is_named(make_unroll, changes, complaint):
    class Mistaken(PolicyAndCritic):
        def given(self, losses, errors):
            found = super().given(losses, errors)
            parts = {"of_parts": found.of_parts | changes["of_parts"]} if "of_parts" in changes else {}
            return found._replace(**(changes | parts))

    world = world_of(make_unroll, Mistaken)
    with pytest.raises(ApexError, match=complaint):
        update(world.updater.learner, batches_of(world))


OF_THREE = {"parts": lambda self: dict.fromkeys(("policy", "critic", "torso"), make_network(self.spec, self.network))}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"acting": ("polcy",)}, r"`acting` names polcy, which is none of `parts`: they are policy, critic"),
        ({"acting": ()}, "`acting` names no part: actors need at least one of policy, critic"),
        ({"acting": "policy"}, "`acting` names p, which"),
        ({"called_once": ("q",)}, "`called_once` names q"),
        ({"acting": ("policy", "torso")} | OF_THREE, "`acting` names torso, and policy has a tensor of that"),
        ({"target": Target(parts=("critc",))}, "`target` names critc"),
        ({"target": Target(0.005)}, r"`target` has period_updates 0\.005: give a whole number, or a rate="),
        ({"optimizers": {"critc": PartOptimizer(1.0)}}, "`optimizers` names critc"),
    ],
)
def test_a_part_that_there_is_not_is_named(changes, complaint):
    with pytest.raises(ApexError, match=complaint):
        learner_of(type("Mistaken", (PolicyAndCritic,), changes))


def test_losses_that_are_none_are_named(make_unroll):
    world = world_of(make_unroll, type("Mistaken", (PolicyAndCritic,), {"given": lambda *_: None}))
    with pytest.raises(ApexError, match="`losses` gives a NoneType: give Losses"):
        update(world.updater.learner, batches_of(world))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"priorities": {TABLE: torch.ones(SIZE, 1)}}, r"priorities of the shape \[12, 1\] for 12 rows"),
        ({"priorities": {TABLE: torch.ones(SIZE + 1)}}, r"priorities of the shape \[13\] for 12 rows"),
        ({"priorities": {TABLE: torch.ones(())}}, r"priorities of the shape \[\]"),
        ({"priorities": {TABLE: torch.ones(SIZE - 1)}}, r"priorities of the shape \[11\] for 12 rows"),
        ({"priorities": {"other": torch.ones(SIZE)}}, f"priorities of other: {TABLE} is wanted"),
        ({"metrics": {"q": torch.ones(51)}}, r"the metric q of the shape \[51\] for 12 rows"),
        ({"rows": {TABLE: {"distance": torch.ones(51)}}}, r"distance of the shape \[51\] for 12 rows"),
        ({"rows": {"other": {"distance": torch.ones(SIZE)}}}, f"distance of other: {TABLE} is wanted"),
    ],
)
def test_results_that_are_not_of_the_rows_are_named(make_unroll, changes, complaint):
    class Mistaken(PolicyAndCritic):
        def given(self, losses, errors):
            found = super().given(losses, errors)
            return found._replace(**changes)

    world = world_of(make_unroll, Mistaken)
    with pytest.raises(ApexError, match=complaint):
        world.by_keys(*world.sample())


def test_a_loss_that_is_missing_is_named(make_unroll):
    world = world_of(make_unroll, Forgetful)
    with pytest.raises(
        ApexError, match=r"`losses` gives losses of the parts \['critic'\]; `parts` are \['critic', 'policy'\]"
    ):
        update(world.updater.learner, batches_of(world))


def test_a_part_without_parameters_is_kept_with_the_others(make_unroll):
    class Counting(PolicyAndCritic):
        target = None

        def parts(self):
            self.seen = nn.BatchNorm1d(1, affine=False, track_running_stats=True)
            return super().parts() | {"seen": self.seen}

        def losses(self, online, batches, known):
            self.seen.num_batches_tracked += 1
            next_values = online["critic"](batches[TABLE].next_observation).detach().float()
            return super().losses(online, batches, lambda: next_values)

    world = world_of(make_unroll, Counting)
    update(world.updater.learner, batches_of(world))
    assert world.updater.learner.learning_tensors()["seen.num_batches_tracked"] == 1


class Slowly(PolicyAndCritic):
    """Moves its targets by a share at every second update, as TD3 does."""

    target = Target(period_updates=2, rate=0.25, parts=("critic",))


def test_a_target_with_both_moves_by_its_rate_at_each_period(make_unroll):
    world = world_of(make_unroll, Slowly)
    learner = world.updater.learner
    assert [learner.is_copy_due(number) for number in (1, 2, 3, 4)] == [False, True, False, True]
    before = copies(learner.target["critic"])
    update(learner, batches_of(world))
    torch.testing.assert_close(copies(learner.target["critic"]), before, rtol=0, atol=0)
    learner.copy_target()
    expected = [0.75 * old + 0.25 * new for old, new in zip(before, copies(learner.online["critic"]), strict=True)]
    torch.testing.assert_close(copies(learner.target["critic"]), expected)
