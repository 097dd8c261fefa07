import numpy as np
import pytest
import torch
import torch.nn.functional as F

from apexrl.networks.frame_layout import FrameLayout
from apexrl.types import EnvironmentSpec
from tests.streams import slow_screens


def layout_of(shape, dtype="uint8", stacked=4):
    return FrameLayout.of(EnvironmentSpec("Shape-v0", shape, dtype, stacked, 6, 1))


def random_stacks(layout, batch=3):
    frames = torch.randint(0, 256, (batch, layout.stacked_frames, *layout.frame_shape), dtype=torch.uint8)
    return frames.to(layout.dtype)


def test_layouts_are_compared_by_what_they_describe():
    assert layout_of((84, 84)) == layout_of((84, 84)) != layout_of((84, 84), stacked=3)
    assert len({layout_of((84, 84)), layout_of((84, 84)), layout_of((3,))}) == 2


def test_gray_screens_are_stored_in_blocks_of_pixels():
    layout = layout_of((84, 36))
    stacks = random_stacks(layout)
    stored = layout.store_stacks(stacks)
    assert layout.stored_shape == (21, 9, 16) == stored.shape[2:]
    assert np.array_equal(slow_screens(stored), stacks)
    assert torch.equal(layout.store(stacks[:, 1]), stored[:, 1])


@pytest.mark.parametrize("shape", [(), (3,), (10, 7), (35, 36), (84, 86), (84, 84, 3)])
def test_other_frames_are_stored_as_they_come(shape):
    layout = layout_of(shape, "uint8" if len(shape) > 1 else "float32")
    stacks = random_stacks(layout)
    assert layout.stored_shape == shape
    assert torch.equal(layout.store_stacks(stacks), stacks)


@pytest.mark.parametrize(("shape", "prepared"), [((), (4,)), ((3,), (12,)), ((10, 7), (4, 10, 7))])
def test_vectors_become_one_vector_and_pictures_channels(shape, prepared):
    layout = layout_of(shape, "float32")
    stacks = random_stacks(layout)
    assert torch.equal(layout.prepare(stacks, torch.float64), stacks.view(3, *prepared).double())


def test_colours_become_channels_after_one_another():
    layout = layout_of((40, 50, 3), stacked=2)
    stacks = random_stacks(layout)
    prepared = layout.prepare(stacks, torch.float32)
    assert prepared.shape == (3, 6, 40, 50)
    for h in range(2):
        for colour in range(3):
            assert torch.equal(prepared[:, 3 * h + colour], stacks[:, h, :, :, colour].float())


@pytest.mark.parametrize("stacked", [1, 4])
def test_a_ring_with_its_turned_kernel_gives_what_stacks_in_order_give(stacked):
    layout = layout_of((84, 84), stacked=stacked)
    kernel = layout.kernel(torch.rand(8, stacked, 8, 8))
    ring = layout.ring(3, torch.float32, torch.device("cpu"))
    ring.copy_(torch.randint(0, 256, ring.shape))
    turned = layout.turned_kernels(kernel)
    assert len(turned) == stacked
    for newest in range(stacked):
        found = F.conv2d(layout.prepare_ring(ring, newest, torch.float32), turned[newest], stride=layout.stride)
        stacks = layout.in_order(ring, newest).to(torch.uint8)
        assert torch.equal(stacks[:, -1], ring.select(layout.ring_axis, newest).to(torch.uint8))
        expected = F.conv2d(layout.prepare(stacks, torch.float32), kernel, stride=layout.stride)
        assert torch.allclose(found, expected, rtol=1e-5)
