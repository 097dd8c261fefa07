"""A network of one's own with two inputs: a small picture and a vector, out of a dictionary of observations.

Where to go is in the vector, where one is in the picture. A run with it takes a minute:

    cd examples; bash ../run.sh --env two_inputs:Errand-v0 --network two_inputs:TwoInputs --total-frames 30000
"""

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import nn


class TwoInputs(nn.Module):
    """Convolutions over the picture, a layer over the vector; --agent puts its own last layers behind both."""

    def __init__(self, shapes):  # {"map": (1, 5, 5, 3), "wish": (1, 2)}: the 1 counts stacked frames
        super().__init__()
        frames, height, width, colours = shapes["map"]
        self.convolutions = nn.Sequential(
            nn.Conv2d(frames * colours, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        )
        self.wish = nn.Linear(shapes["wish"][0] * shapes["wish"][1], 32)
        self.both = nn.Linear(16 * height * width + 32, 128)

    def forward(self, inputs):  # {"map": [B, 1, 5, 5, 3] of 0 to 255, "wish": [B, 1, 2]}, float32
        picture = inputs["map"].permute(0, 1, 4, 2, 3).flatten(1, 2) / 255
        seen = self.convolutions(picture).flatten(1)
        wish = torch.relu(self.wish(inputs["wish"].flatten(1)))
        return torch.relu(self.both(torch.cat([seen, wish], dim=1)))  # [B, features]


class Errand(gymnasium.Env):
    """Walk to the left or right end of a map of 5x5, whichever is wished for."""

    observation_space = Dict({"map": Box(0, 255, (5, 5, 3), np.uint8), "wish": Discrete(2)})
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.wish = 2, int(self.np_random.integers(2))
        return self._observation(), {}

    def step(self, action):
        self.place += 1 if action else -1
        ended = self.place in (0, 4)
        return self._observation(), float(ended and self.place == 4 * self.wish) - 0.1, ended, False, {}

    def _observation(self):
        picture = np.zeros((5, 5, 3), np.uint8)
        picture[2, self.place] = 255
        return {"map": picture, "wish": self.wish}


gymnasium.register("Errand-v0", Errand, max_episode_steps=20)
