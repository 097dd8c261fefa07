"""A torso of the user's own, which `--network module:name` names: layers from the parts of an observation to features.

The name is called with the shape of each part [H, *part], and returns a module that takes a dictionary of these parts
[B, H, *part] as float32, and returns features [B, N]. It may be called more than once: critics have each their own.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from apexrl.config.sections import NetworkConfig
from apexrl.errors import ConfigError, reason_of
from apexrl.networks.frame_layout import FrameLayout
from apexrl.networks.parameters import why_no_parameters
from apexrl.own_modules import own
from apexrl.types import EnvironmentSpec

WHOLE = "observation"  # the name of an observation that has no parts
CONTRACT = "it takes {part: [B, H, *shape] float32}, branches on no number of them, and returns features [B, N]"
EXAMPLES = 2  # observations with which a module is tried


class OwnTorso(nn.Module):
    """The user's module as a `Torso`. It stays in float32, but for what autocast does in it."""

    order: Tensor

    def __init__(self, spec: EnvironmentSpec, config: NetworkConfig):
        super().__init__()
        self.layout, self._asked = FrameLayout.of(spec), f"--network {config.network}"
        self._has_colours, stacked = len(spec.frame_shape) == 3, spec.stacked_frames
        self._parts = parts_of(config.inputs) or {WHOLE: spec.frame_shape}
        if sum(map(math.prod, self._parts.values())) != spec.frame_size:
            raise ConfigError(f"--inputs {' '.join(config.inputs)}: {spec.env} has observations {spec.frame_shape}")
        shapes = {name: (stacked, *shape) for name, shape in self._parts.items()}
        make = own(config.network, "--network")
        try:
            self.module = make(dict(shapes))
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{self._asked} fails with shapes {shapes}: {reason_of(error)}") from error
        if not isinstance(self.module, nn.Module):
            raise ConfigError(f"{self._asked} gives {self.module!r:.200}: give a torch.nn.Module")
        if normed := [name for name, part in self.module.named_modules() if isinstance(part, _BatchNorm)]:
            raise ConfigError(
                f"{self._asked} normalizes batches in {normed[0] or 'itself'}, and actors have none: give LayerNorm or "
                "GroupNorm"
            )
        if fault := why_no_parameters(self.module.state_dict()):
            raise ConfigError(f"{self._asked}: {fault}")
        self.register_buffer("order", torch.eye(stacked)[:, :, None, None], persistent=False)
        self.num_features = self._tried()

    def kernel(self) -> Tensor:
        """Returns the weights that leave frames in their order. An actor turns them, and keeps its frames in places."""
        return self.order

    def features(self, prepared: Tensor, kernel: Tensor) -> Tensor:
        """Returns [B, num_features] of prepared stacks."""
        frames = self.layout.pixels(prepared).float()
        if self.layout.in_blocks and kernel is not self.order:
            frames = F.conv2d(frames, kernel.float())
        frames = frames.unflatten(1, (self.order.shape[0], -1))
        if self._has_colours:
            frames = frames.movedim(2, -1)
        parts = frames.flatten(2).split([math.prod(shape) for shape in self._parts.values()], dim=2)
        named = zip(self._parts.items(), parts, strict=True)
        features: Tensor = self.module({name: part.reshape(*part.shape[:2], *shape) for (name, shape), part in named})
        return features.to(prepared.dtype)

    def to(self, dtype: torch.dtype) -> "OwnTorso":  # type: ignore[override]
        """Returns itself: a module may have constants of its own."""
        return self

    def check_exportable(self) -> None:
        """Raises ConfigError when the module cannot be traced for any number of rows."""
        batch = torch.export.Dim("batch", min=1)
        dynamic = ({name: {0: batch} for name in self._parts},)
        try:
            torch.export.export(copy.deepcopy(self.module).to("meta"), (self._examples(),), dynamic_shapes=dynamic)
        except Exception as error:
            raise ConfigError(
                f"{self._asked} cannot be exported: {reason_of(error)}; its forward has to take any number of rows"
            ) from error

    def _examples(self) -> dict[str, Tensor]:
        stacked = self.order.shape[0]
        return {name: torch.zeros(EXAMPLES, stacked, *shape, device="meta") for name, shape in self._parts.items()}

    @torch.no_grad()
    def _tried(self) -> int:
        """Returns the features that the module gives, which a copy that takes no memory tells.

        Raises: ConfigError when it does not take its inputs, or gives something else.
        """
        inputs = self._examples()
        shapes = {name: tuple(example.shape) for name, example in inputs.items()}
        try:
            with torch.device("meta"):
                found = copy.deepcopy(self.module).to("meta")(inputs)
        except Exception as error:
            raise ConfigError(f"{self._asked} fails with inputs of {shapes}: {reason_of(error)}; {CONTRACT}") from error
        if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != EXAMPLES or not found.is_floating_point():
            given = f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise ConfigError(f"{self._asked} gives {given} for inputs of {shapes}: {CONTRACT}")
        return found.shape[1]


def parts_of(inputs: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parts of a vector by their names, in their order.

    Raises: ConfigError when one is not written as NAME=SHAPE.
    """
    parts = {}
    for part in inputs:
        name, _, shape = part.rpartition("=")
        sizes = shape.split("x")
        if not name or name in parts or not all(size.isdecimal() for size in sizes):
            raise ConfigError(f"--inputs {part}: give each part once, as NAME=SHAPE, such as map=9x9x3")
        parts[name] = tuple(map(int, sizes))
    return parts
