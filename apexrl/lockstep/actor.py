"""The acting half of a reproducible run: it plays round after round, and inserts complete unrolls at once."""

import time

import torch

from apexrl.acting.player import Lease, Player
from apexrl.agents.families import family_of, implementation
from apexrl.config.commands import ActorCommand
from apexrl.lockstep.local_log import LocalLog
from apexrl.networks.parameters import decode_parameters
from apexrl.unroll import UnrollCodec


class LockstepActor:
    """Owns the games and their agent, as the only actor of a run; its `player` counts them."""

    def __init__(self, command: ActorCommand):
        """Makes the environments.

        Raises: ConfigError when an environment cannot be had.
        """
        self._command = command
        self.player = Player(command)
        self._codec = UnrollCodec(self.player.spec, command.acting.compression_level)

    def begin(self, encoded: bytes) -> None:
        """Begins the games with encoded parameters."""
        make_actor = implementation(family_of(self._command.agent)).make_actor
        self._loaded = encoded
        self._agent = make_actor(self._command.algorithm, decode_parameters(encoded), torch.device("cpu"))
        slots = tuple(range(self._command.acting.environments_per_worker))
        self.player.begin(self._agent, slots[0])
        self.player.explore(self._agent, Lease(slots, len(slots)))

    def play(self, published: bytes, log: LocalLog) -> None:
        """Takes one step in each environment; looks for newer parameters first when it is time."""
        if self.player.is_fetch_due and published is not self._loaded:
            self._loaded = published
            self._agent.load(decode_parameters(published))
        for complete in self.player.play(self._agent):
            streams = range(len(complete.episodes))
            blocks = [self._codec.encode(complete.unrolls.stream(i)) for i in streams]
            log.insert([complete.header(i) for i in streams], blocks, time.monotonic())

    def close(self) -> None:
        """Frees the environments."""
        self.player.close()
