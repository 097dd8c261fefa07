"""Everything that speaks over sockets. The clients are for other programs too."""

from apexrl.net.insert_client import InsertClient
from apexrl.net.keyring import Keyring, load_keyring
from apexrl.net.log_client import LogAppend, LogBatch, LogClient, LogStart
from apexrl.net.record_client import RecordClient, Records
from apexrl.net.replay_client import ReplayClient, SampledUnrolls, StoredUnroll
from apexrl.net.shards import ShardedReplayClient

__all__ = [
    "InsertClient",
    "Keyring",
    "LogAppend",
    "LogBatch",
    "LogClient",
    "LogStart",
    "RecordClient",
    "Records",
    "ReplayClient",
    "SampledUnrolls",
    "ShardedReplayClient",
    "StoredUnroll",
    "load_keyring",
]
