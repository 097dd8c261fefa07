"""The replay server: asyncio and two ROUTER sockets around `ReplayService`. One task owns the sockets and all state."""

import asyncio
import logging
import secrets
import time

import zmq
import zmq.asyncio

from apexrl.config import ReplayConfig
from apexrl.net.sessions import ReplayService
from apexrl.net.sockets import bind, make_socket

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 100
EXPIRY_PERIOD_SECONDS = 1.0
MAX_MESSAGES_AT_ONCE = 1024


class ReplayServer:
    """Moves messages between the sockets and the service. Must be made and run in one event loop's thread."""

    def __init__(self, config: ReplayConfig, host: str, actor_port: int, learner_port: int, seed: int):
        """Binds both ports.

        Raises: ConfigError when a port cannot be had.
        """
        self.service = ReplayService(config, server=secrets.token_hex(8), seed=seed)
        self._context = zmq.asyncio.Context()
        self._sockets = {role: make_socket(self._context, zmq.ROUTER) for role in ("actor", "learner")}
        for socket in self._sockets.values():
            socket.sndhwm = socket.rcvhwm = 0  # what is open is bounded by acknowledgements and demand
        self.actor_endpoint = bind(self._sockets["actor"], host, actor_port)
        self.learner_endpoint = bind(self._sockets["learner"], host, learner_port)
        logger.info("actors at %s, learners at %s", self.actor_endpoint, self.learner_endpoint)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set."""
        # Messages are taken and sent through plain views of the sockets: woken once, everything there is drained.
        # All sends happen before the next poll, which asks libzmq again before it waits: no wake-up is missed.
        plain: dict[str, zmq.Socket[bytes]] = {
            role: zmq.Socket.shadow(socket) for role, socket in self._sockets.items()
        }
        poller = zmq.asyncio.Poller()
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        next_expiry = 0.0
        while not stop.is_set():
            await poller.poll(POLL_MILLISECONDS)
            now = time.monotonic()
            for role, socket in plain.items():
                self._drain(role, socket, now)
            self.service.advance()
            if now >= next_expiry:
                self.service.expire(now)
                next_expiry = now + EXPIRY_PERIOD_SECONDS
            for role, peer, frames in self.service.outbox:
                plain[role].send_multipart((peer, *frames), zmq.NOBLOCK, copy=len(frames) == 1)
            self.service.outbox.clear()

    def close(self) -> None:
        """Closes the sockets."""
        for socket in self._sockets.values():
            socket.close(linger=200)
        self._context.term()

    def _drain(self, role: str, socket: zmq.Socket, now: float) -> None:
        for _ in range(MAX_MESSAGES_AT_ONCE):
            try:
                peer, *frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.service.receive(role, peer, frames, now)
