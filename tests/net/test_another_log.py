"""Readers whose server begins another log: keys of the old one name other items, and do nothing there."""

import numpy as np
import pytest

from apexrl.config.sections import ReplayConfig
from apexrl.net import RecordClient, ReplayClient
from apexrl.net.replay_server import ReplayServer
from tests.system.processes import wait_for

CONFIG = ReplayConfig(capacity=1000, tables=("hard=priority:0:1", "any=uniform:0:1"))
FIELDS = {"id": "int64"}
SIZES = {"any": 4, "hard": 1}


def fill(server, count):
    with RecordClient(server.endpoints, "writer", FIELDS) as writer:
        for i in range(count):
            writer.insert({"id": i}, 1.0, 20)
        assert writer.flush(20)


@pytest.mark.parametrize("kind", ["records", "keys"])
def test_keys_of_the_old_log_change_nothing_in_the_new_one(kind):
    with ReplayServer(CONFIG) as server:
        ends, ports = server.endpoints, [int(endpoint.rpartition(":")[2]) for endpoint in server.endpoints]
        make = {
            "records": lambda: RecordClient(ends, "r", None, SIZES),
            "keys": lambda: ReplayClient(ends[1], "r", SIZES),
        }
        reader = make[kind]()
        fill(server, 4)
        old = reader.sample("any", 20).keys
        assert sorted(old) == [0, 1, 2, 3]
    with reader, ReplayServer(CONFIG, "127.0.0.1", *ports) as server:
        fill(server, 5)
        inner = reader if kind == "keys" else reader._reader
        wait_for(lambda: reader.has_batch("any") and inner._generation == 2, 20, "the new log")
        assert reader.delete("hard", old, 20) == 0 and reader.delete("hard", [*old.tolist(), 4], 20) == 1
        reader.update_priorities("hard", old, np.zeros(4))
        # Keys that the new log hands out are its own.
        new = np.concatenate([reader.sample("any", 20).keys for _ in range(20)])
        assert reader.delete("hard", np.unique(new), 20) == len(set(new.tolist()) - {4})
