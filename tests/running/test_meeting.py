"""The store at which learners meet listens where it is told, and nowhere else."""

import threading

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from apexrl.errors import ConfigError
from apexrl.running.meeting import BACKEND


def meeting(port, rank, hosts=1, listens_at="127.0.0.1", timeout=100):
    config = {"rank": str(rank), "listens_at": listens_at, "timeout": str(timeout)}
    return get_rendezvous_handler(RendezvousParameters(BACKEND, f"127.0.0.1:{port}", "run", hosts, hosts, **config))


def addresses_of(port):
    """The addresses at which this process listens on a port."""
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


@pytest.mark.parametrize("listens_at", ["127.0.0.1", "0.0.0.0"])
def test_hosts_meet_at_one_address(free_ports, listens_at):
    [port] = free_ports(1)
    first, second = (meeting(port, rank, 2, listens_at) for rank in range(2))
    found = []
    thread = threading.Thread(target=lambda: found.append(first.next_rendezvous()))
    thread.start()
    info = second.next_rendezvous()
    thread.join(100)
    assert addresses_of(port) == {listens_at}
    found[0].store.set("word", "heard")
    assert info.store.get("word") == b"heard"
    assert (info.rank, info.world_size, found[0].rank) == (1, 2, 0)
    address = info.bootstrap_store_info
    assert first.use_agent_store and (address.master_addr, address.master_port) == ("127.0.0.1", port)


def test_a_port_in_use_is_a_clear_error(free_ports):
    [port] = free_ports(1)
    info = meeting(port, 0).next_rendezvous()
    with pytest.raises(ConfigError, match=rf"cannot meet at 127\.0\.0\.1:{port} .*--meeting-port"):
        meeting(port, 0).next_rendezvous()
    assert info.rank == 0


def test_hosts_that_do_not_come_are_an_error(free_ports):
    with pytest.raises(RuntimeError):
        meeting(free_ports(1)[0], 0, 2, timeout=1).next_rendezvous()
