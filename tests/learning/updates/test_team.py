"""Several learners make the updates of one, through real processes and gloo."""

import contextlib
import functools
import os
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file

from apexrl.config.commands import LearnerCommand
from apexrl.config.flags import default_command
from apexrl.errors import ApexError, ConfigError, PeerError
from apexrl.learning.loop import make_updater
from apexrl.learning.updates import team as teams
from apexrl.learning.updates.team import RankStanding, Team, checksum
from apexrl.learning.updates.updater import Updater
from apexrl.networks.checkpoint import ACTING
from apexrl.networks.device_stream import DeviceStream
from tests.learning.team_rank import CASES, make_learner
from tests.system.processes import ROOT

UPDATES = 40
RANK = """
import os, torch, traceback
from apexrl.learning.updates import team as teams
from apexrl.learning.updates.team import *
from apexrl.lifecycle import end_at_once
teams.PATIENCE_SECONDS = 20.0
try:
    team = Team(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
{}
    end_at_once(0)
except Exception:
    traceback.print_exc()
    end_at_once(1)
"""


def start(size, port, *arguments):
    """Starts the processes of a team; their output is kept."""
    common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *map(str, arguments)]
    return [
        subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]


@pytest.fixture(scope="module")
def learned(tmp_path_factory, free_ports):
    """Returns the states of a team of a size, by case."""

    @functools.cache
    def of_size(size):
        directory = tmp_path_factory.mktemp(f"team-{size}")
        team = start(size, free_ports(1)[0], "-m", "tests.learning.team_rank", UPDATES, directory)
        said = [process.communicate(timeout=600)[1] for process in team]
        assert all(process.returncode == 0 for process in team), "\n".join(said)
        return {name: load_file(directory / f"{name}.safetensors") for name in CASES}

    return of_size


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long("learners and guests"))])
@pytest.mark.parametrize("case", CASES)
def test_a_team_with_parts_of_each_batch_makes_the_updates_of_one_learner(learned, case, size):
    """The rows, their importance weights, and the clip are those of the whole batch; only rounding differs."""
    alone, together = learned(1)[case], learned(size)[case]
    begun = Updater(make_learner(*CASES[case]), DeviceStream(torch.device("cpu"))).state_dict()
    assert alone.keys() == together.keys() == begun.keys()
    for name, expected in alone.items():
        if name.startswith(ACTING):
            scale = expected.abs().max().item()
            assert (expected - begun[name]).abs().max().item() > 1e-3 * scale, name
            assert (together[name] - expected).abs().max().item() <= 1e-5 * scale, name


def outcomes(size, port, code):
    """The exit statuses and the errors of a team's processes, each of which runs the code with its `team`."""
    team = start(size, port, "-c", RANK.format(textwrap.indent(code.strip(), "    ")))
    said = [process.communicate(timeout=600)[1] for process in team]
    return [process.returncode for process in team], said


def test_every_learner_hears_where_all_stand(free_ports):
    statuses, said = outcomes(
        3,
        free_ports(1)[0],
        """
def standing(rank):
    waits_for = ("", "min_size actors", "something new")[rank]
    flags = rank == 0, rank == 1, rank == 2, rank == 0, False, rank == 0
    return RankStanding(*flags, waits_for, 2**50 + rank, 10.0**rank)
heard = [standing(0), standing(1)._replace(waits_for="min_size"), standing(2)._replace(waits_for="another reason")]
assert team.agree(standing(team.rank)) == heard
assert team.share({"a": torch.ones(2)}, b"of %d" % team.rank) == b"of 0"
tensors = {"a": torch.full((2, 3), float(team.rank)), "learning.last_batch.x": torch.full((1,), float(team.rank))}
assert team.share(tensors, b"") == b"" and tensors["a"].sum() == 0 and tensors["learning.last_batch.x"] == team.rank
team.check_equal(tensors)
gradient = torch.tensor([1.0, 2.0])
team.add_up(gradient, 2.0)
assert gradient.tolist() == [6.0, 6.0]
team.close()
""",
    )
    assert statuses == [0, 0, 0], said


def test_networks_that_differ_end_the_run_and_are_named(free_ports):
    statuses, said = outcomes(3, free_ports(1)[0], "team.check_equal({'a': torch.ones(5) + 1e-6 * (team.rank == 2)})")
    assert statuses == [1, 1, 1]
    assert all(ApexError.__name__ in text and "learners [2] differ from that of learner 0" in text for text in said)


def test_flags_that_differ_end_all_learners_and_are_named(free_ports):
    statuses, said = outcomes(
        3,
        free_ports(1)[0],
        """
team.check_flags({"batch_size": 64, "double_q": True})
team.check_flags({"batch_size": 64 + team.rank // 2, "double_q": team.rank < 2, "learning_rate": (1e-4, 0.0)})
""",
    )
    assert statuses == [1, 1, 1]
    assert all(ConfigError.__name__ in text and "learners of one run need the same flags" in text for text in said)
    assert "the first one's: --batch-size 65 for --batch-size 64, --no-double-q for --double-q" in said[2]
    assert all("the first one's: learners [2] say which" in text for text in said[:2])


def test_a_learner_that_is_gone_is_said_to_the_others(free_ports):
    code = "team.agree(RankStanding())\nif team.rank == 1: os._exit(0)\nteam.agree(RankStanding())"
    statuses, said = outcomes(2, free_ports(1)[0], code)
    assert statuses == [1, 0] and PeerError.__name__ in said[0] and "learner 0 of 2 has lost another one" in said[0]


def test_learners_that_do_not_come_are_an_error(free_ports):
    code = "import sys\nteams.PATIENCE_SECONDS = 2.0\nteams.Team(0, 2)"
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(free_ports(1)[0])
    command = [sys.executable, "-c", "from apexrl.learning.updates import team as teams\n" + code]
    alone = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert alone.returncode == 1 and PeerError.__name__ in alone.stderr
    assert "learner 0 does not meet the 1 others" in alone.stderr and "GLOO_SOCKET_IFNAME" in alone.stderr


@pytest.mark.parametrize("local_size", ["2", "1"])
def test_learners_that_do_not_meet_may_meet_after_a_restart(monkeypatch, local_size):
    """Those of another host, and those of this one: the others may have died while they met."""

    def fail(*_, **__):
        raise RuntimeError("nobody is there")

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_size)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(teams.dist, "init_process_group", fail)
    with pytest.raises(PeerError, match=r"does not meet the 1 others \(nobody is there\)"):
        Team(0, 2)


def test_learners_meet_through_the_interface_that_reaches_the_first_host(monkeypatch):
    names = {address.address: name for name, of in psutil.net_if_addrs().items() for address in of}
    assert teams.interface_to("localhost") == names["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to other hosts")
        own = probe.getsockname()[0]
    assert teams.interface_to("192.0.2.1") == teams.interface_to(own) == names[own]
    with monkeypatch.context() as patched, pytest.raises(OSError, match=r"no interface has the address 127\.0\.0\.1"):
        patched.setattr(psutil, "net_if_addrs", dict)
        teams.interface_to("127.0.0.1")


def test_learners_meet_through_the_way_out_where_the_address_of_this_host_is_hidden(monkeypatch):
    """As on EC2, where a host takes the address by which others know it on its loopback interface."""
    routes = {"10.79.0.11": "10.79.0.11", teams.OUTSIDE: "10.79.0.30", "10.79.0.12": "10.79.0.30"}

    class Probe(contextlib.nullcontext):
        def __init__(self, *_):
            super().__init__(self)

        def connect(self, address):
            self.own = routes[address[0]]

        def getsockname(self):
            return self.own, 0

    addresses = {"lo": ["127.0.0.1", "10.79.0.11"], "ens5": ["10.79.0.30"]}
    found = {name: [SimpleNamespace(address=address) for address in own] for name, own in addresses.items()}
    monkeypatch.setattr(teams.socket, "socket", Probe)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert teams.interface_to("10.79.0.11") == teams.interface_to("10.79.0.12") == "ens5"


def test_one_learner_alone_exchanges_nothing():
    team = Team()
    standing = RankStanding(True, waits_for="anything at all", largest_weight=3.0)
    assert team.is_first and team.agree(standing) == [standing] and team.share({}, b"text") == b"text"
    assert team.gather([1.0, 2.0]).tolist() == [[1.0, 2.0]]
    team.check_equal({"a": torch.full((1,), torch.nan)})
    team.close()


def test_a_checksum_tells_names_values_and_order_apart():
    one, two = torch.ones(3), torch.zeros(())
    assert checksum({"a": one, "b": two}) == checksum({"b": two.clone(), "a": one.clone()})
    others = [{"b": one, "a": two}, {"a": one}, {"a": one, "b": two + 1}, {"a": one.view(3, 1) + 1e-7, "b": two}]
    assert len({checksum({"a": one, "b": two}), *map(checksum, others)}) == 5
    assert checksum({teams.OWN_STATE + "x": one}) == checksum({})


def test_the_noise_of_updates_is_each_learners_own(spec):
    noises = []
    for rank in (0, 1, 1):
        command = default_command(LearnerCommand)
        make_updater(command, spec, DeviceStream(torch.device("cpu")), SimpleNamespace(rank=rank, size=2))
        noises.append(torch.randn(4))
    assert torch.equal(noises[1], noises[2]) and not torch.equal(noises[0], noises[1])
