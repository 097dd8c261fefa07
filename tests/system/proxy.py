"""A TCP proxy that does to connections what bad networks do, one fault after another by a seeded plan.

delay    bytes of either direction come late, in order
cut      connections end in the middle of a message
linger   connections end for the client; bytes that it had sent reach the server later, when a new connection is in use
swallow  bytes from the server are lost for seconds, the other direction passes; then those connections end
"""

import asyncio
import collections
import contextlib
import random
import threading
from typing import NamedTuple

KINDS = ("delay", "cut", "linger", "swallow")
LONGEST_SECONDS = {"delay": 2.0, "cut": 0.5, "linger": 1.0, "swallow": 6.0}
CHUNK_BYTES = 65_536
STEP_SECONDS = 0.02


class Fault(NamedTuple):
    """A fault that lasts for some seconds, and the pause after it."""

    kind: str
    seconds: float
    pause_seconds: float


def plan(seed: int, rounds: int) -> list[Fault]:
    """Returns rounds of faults, each with every kind once; a round takes about 9 seconds."""
    rng = random.Random(seed)
    return [
        Fault(kind, LONGEST_SECONDS[kind] * rng.uniform(0.6, 1), rng.uniform(0.3, 1.0))
        for _ in range(rounds)
        for kind in rng.sample(KINDS, len(KINDS))
    ]


class _Link:
    """One connection of a client and its connection to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter):
        self.client, self.server = client, server
        self.fault = ""  # cut or linger, once chosen
        self.is_deaf = False  # something for the client was swallowed

    def abort(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()


class Proxy:
    """Passes bytes between a port and a server's port in a thread of its own; a context manager."""

    def __init__(self, port: int, server_port: int, seed: int, rounds: int):
        """Only passes bytes until `begin`, and after so many rounds of faults."""
        self.counts: collections.Counter[str] = collections.Counter()
        self._port, self._server_port = port, server_port
        self._rng = random.Random(seed)
        self._plan = plan(seed, rounds)
        self._fault = ""
        self._links: set[_Link] = set()
        self._begun, self._healed, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._closed.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def begin(self) -> None:
        """Begins the plan."""
        self._begun.set()

    @property
    def is_healed(self) -> bool:
        """True when the plan has come to its end; raises what made the proxy fail."""
        if self._error is not None:
            raise self._error
        return self._healed.is_set()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error

    async def _serve(self) -> None:
        tasks: set[asyncio.Task] = set()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await self._connect(reader, writer)

        server = await asyncio.start_server(take, "127.0.0.1", self._port)
        faults = asyncio.create_task(self._go_through_plan())
        while not self._closed.is_set() and not (faults.done() and faults.exception()):
            await asyncio.sleep(0.05)
        server.close()
        for task in [faults, *tasks]:
            task.cancel()
        results = await asyncio.gather(faults, *tasks, return_exceptions=True)
        for link in list(self._links):
            link.abort()
        await asyncio.sleep(0)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _go_through_plan(self) -> None:
        for fault in self._plan:
            while not (self._begun.is_set() and self._links):
                await asyncio.sleep(STEP_SECONDS)
            self._fault = fault.kind
            if fault.kind in ("cut", "linger"):
                for link in self._links:
                    link.fault = fault.kind
            await asyncio.sleep(fault.seconds)
            self._fault = ""
            for link in self._links:
                if link.is_deaf:
                    self.counts["swallow"] += 1
                    link.abort()
            await asyncio.sleep(fault.pause_seconds)
        self._healed.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self._server_port)
        except ConnectionError:
            writer.transport.abort()
            return
        link = _Link(writer, server)
        self._links.add(link)
        pumps = [
            asyncio.create_task(self._pump(link, reader, server, to_server=True)),
            asyncio.create_task(self._pump(link, answers, writer, to_server=False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if link.fault == "linger":
                await asyncio.wait(pumps)
        finally:
            self._links.discard(link)
            for pump in pumps:
                pump.cancel()
            results = await asyncio.gather(*pumps, return_exceptions=True)
            link.abort()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_server: bool
    ) -> None:
        """Passes bytes of one direction until the connection ends."""
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(CHUNK_BYTES):
                if link.fault == "cut":
                    self.counts["cut"] += 1
                    writer.write(chunk[: self._rng.randrange(len(chunk))])
                    await writer.drain()
                    writer.close()  # the written part still arrives
                    await writer.wait_closed()
                    return
                if link.fault == "linger" and to_server:
                    await self._linger(link, chunk, reader, writer)
                    return
                if self._fault == "delay":
                    self.counts["delay"] += 1
                    await asyncio.sleep(self._rng.uniform(0, 0.3))
                if not to_server and (link.is_deaf or self._fault == "swallow"):
                    link.is_deaf = True
                    self.counts["swallowed_bytes"] += len(chunk)
                    continue
                writer.write(chunk)
                await writer.drain()

    async def _linger(
        self, link: _Link, chunk: bytes, reader: asyncio.StreamReader, server: asyncio.StreamWriter
    ) -> None:
        """Holds the client's bytes, cuts the client off, and passes the held bytes on when it is back."""
        self.counts["linger"] += 1
        held = [chunk]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0.05, 0.5)):
                while chunk := await reader.read(CHUNK_BYTES):
                    held.append(chunk)
        link.client.transport.abort()
        await asyncio.sleep(self._rng.uniform(0.3, 2.5))
        for chunk in held:
            server.write(chunk)
            await asyncio.sleep(STEP_SECONDS)
        await server.drain()
