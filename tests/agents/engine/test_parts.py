"""Parts of an author's networks: those that are refused, and when the others learn, on the plain learner."""

import pytest
import torch
from torch import nn

from apexrl.agents.engine.plain import Learning
from apexrl.errors import ApexError
from apexrl.learning.experience.draw import Draw
from apexrl.networks.checkpoint import load_checkpoint, save_checkpoint
from apexrl.networks.dueling import make_network
from apexrl.networks.headers import CheckpointHeader, Counters
from tests.agents.engine.test_plain_learner import Beside, PolicyAndCritic, learner_of, world_of
from tests.lockstep import TABLE


def test_parts_that_share_a_module_are_named():
    """Each has a buffer of its own, so that a parameter lies in one."""

    def parts(self):
        made = PolicyAndCritic.parts(self)
        made["critic"].torso = made["policy"].torso
        return made

    with pytest.raises(ApexError, match=r"`parts` policy and critic share torso\.first\.weight: make what they share"):
        learner_of(type("Sharing", (PolicyAndCritic,), {"parts": parts}))


def test_a_part_may_use_a_module_twice(tmp_path):
    class Tied(PolicyAndCritic):
        target = None

        def parts(self):
            made = super().parts()
            made["critic"].again = made["critic"].torso
            return made

    learner, path = learner_of(Tied), tmp_path / "checkpoint"
    assert learner.online["critic"].again.first.weight.grad is not None
    tensors = learner.learning_tensors()
    save_checkpoint(path, CheckpointHeader(learner.learning.spec, "x", "{}", Counters()), tensors)
    assert all((load_checkpoint(path).tensors[name] == tensor).all() for name, tensor in tensors.items())


def test_parameters_of_any_layout_have_places_of_their_own():
    """Views with gaps, and kernels of three dimensions, for which torch knows no faster order."""

    class Odd(PolicyAndCritic):
        def parts(self):
            made = super().parts()
            made["critic"].gaps = nn.Parameter(torch.arange(64.0).view(8, 8)[:, :4])
            made["critic"].next = nn.Parameter(torch.full((8, 8), -1.0))
            made["critic"].video = nn.Conv3d(1, 2, 3)
            return made

    critic = learner_of(Odd).online["critic"]
    assert (critic.gaps == torch.arange(64.0).view(8, 8)[:, :4]).all() and (critic.next == -1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_another_type_are_named(dtype):
    def parts(self):
        made = {name: make_network(self.spec, self.network) for name in ("policy", "critic")}
        made["critic"].value.to(dtype)
        return made

    with pytest.raises(ApexError, match=rf"`parts` has critic\.value\.weight of {dtype}: give float32"):
        learner_of(type("Precise", (PolicyAndCritic,), {"parts": parts}))


def test_whole_numbers_of_a_part_for_actors_are_named():
    """As floats of 16 bits those beyond 2,048 would be others, and those beyond 65,504 end the run."""

    def parts(self):
        made = PolicyAndCritic.parts(self)
        made["policy"].register_buffer("calls", torch.zeros((), dtype=torch.int64))
        return made

    with pytest.raises(ApexError, match=r"actors cannot get: calls has int64 numbers, .*with persistent=False"):
        learner_of(type("Counted", (PolicyAndCritic,), {"parts": parts}))


class Alone(Beside):
    """Leaves nothing to a second thread but the losses beside."""

    target, from_target = None, Learning.from_target

    def losses(self, online, batches, known):
        batch = batches[TABLE]
        return super().losses(online, batches, lambda: online["critic"](batch.next_observation).detach().float())


def test_losses_beside_are_computed_where_they_are_due_also_without_other_side_work(make_unroll):
    world = world_of(make_unroll, Alone)
    for number in range(1, 6):
        world.updater.update(Draw(0, {TABLE: world.store.gather(TABLE, *world.sample())}))
        assert world.updater.learner.learning.calls == number // 2
