"""Where the learners of all hosts meet: torch's key-value store, at one address of the first host.

The store has no keys: who reaches it can read and write it. Torch's own rendezvous opens it on every interface of the
host, so this one hands it a socket that is bound already.
"""

import contextlib
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from apexrl.errors import ConfigError

BACKEND = "apexrl"


class Meeting(RendezvousHandler):
    """The hosts of a run, each with a fixed rank; the first one has the store, and all learners use it, too."""

    def __init__(self, parameters: RendezvousParameters):
        """Connects to nobody yet.

        Args:
          parameters: the endpoint HOST:PORT, and in the configuration `rank`, `listens_at` and `timeout` in seconds.
        """
        self._host, port = parameters.endpoint.rsplit(":", 1)
        self._port = int(port)
        self._parameters = parameters
        self._rank = int(parameters.get("rank"))
        self._listens_at: str = parameters.get("listens_at")
        self._timeout = timedelta(seconds=int(parameters.get("timeout")))
        self._store: Store | None = None

    def get_backend(self) -> str:
        """Returns the name of this rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the learners use this store, instead of opening one of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for all hosts.

        Raises: ConfigError when the port cannot be had; RuntimeError when the hosts do not come in time.
        """
        hosts = self._parameters.max_nodes
        if self._store is None:
            listening = bound(self._listens_at, self._port).detach() if self._rank == 0 else None
            self._store = TCPStore(
                self._host, self._port, hosts, self._rank == 0, self._timeout, master_listen_fd=listening
            )
        store = PrefixStore(self._parameters.run_id, self._store)
        return RendezvousInfo(store, self._rank, hosts, RendezvousStoreInfo(self._host, self._port))

    def is_closed(self) -> bool:
        """Returns False: the hosts are those of the command line."""
        return False

    def set_closed(self) -> None:
        """Does nothing: a run that has ended meets no more."""

    def num_nodes_waiting(self) -> int:
        """Returns 0: no host joins later."""
        return 0

    def get_run_id(self) -> str:
        """Returns the name under which the hosts know each other."""
        return self._parameters.run_id

    def shutdown(self) -> bool:
        """Returns True: the store ends with this process."""
        return True


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address of this host, and does not listen yet.

    Raises: ConfigError when the address cannot be had.
    """
    with contextlib.ExitStack() as held:
        listening = held.enter_context(socket.socket())
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"the learners cannot meet at {host}:{port} ({error.strerror}): choose another --meeting-port or stop "
                "the program there, and give --bind-host an IPv4 address of this host"
            ) from error
        held.pop_all()
    return listening


rendezvous_handler_registry.register(BACKEND, Meeting)
