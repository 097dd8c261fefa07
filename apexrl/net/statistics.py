"""The report of a replay service about itself: metrics by name, its peers, and a line for the log."""

import collections
import dataclasses

from apexrl.net import wire
from apexrl.net.learner_sessions import TableSession
from apexrl.net.open_log import OpenLog
from apexrl.replay.kinds import Table
from apexrl.replay.priority_table import PriorityTable
from apexrl.replay.replay import Replay
from apexrl.replay.unroll_tables import FifoTable, LifoTable

QUANTILES = (10, 50, 90)


@dataclasses.dataclass
class Vitals:
    """Measurements that the owner of a log takes of it."""

    synced_seconds: float = 0.0  # when the journal was last synced
    waited_seconds: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))


def metrics_of(open_log: OpenLog | None, vitals: Vitals, now: float) -> dict[str, float]:
    """Returns the metrics of one log of a server by name: counts, bytes, seconds; samples and inserts since it began.

    Figures of one table are named table/NAME/...; its counts are of transitions, or of unrolls if it holds those.
    `transitions_inserted` counts those of the log, whatever tables sample it. `transitions_sampled` adds up all tables,
    an unroll as its unroll_starts transitions. `samples_per_insert` adds up the tables' own: how often a transition is
    sampled in all.
    """
    metrics: dict[str, float] = {
        "actors": 0 if open_log is None else len(open_log.actors.sessions),
        "learners": 0 if open_log is None else len(open_log.learners.sessions),
        "slots": 0 if open_log is None else open_log.actors.leases.ladder_size,
    }
    metrics |= {f"waited_seconds_{what}": seconds for what, seconds in vitals.waited_seconds.items()}
    if open_log is None:
        return metrics
    replay = open_log.replay
    followers = [session for session in open_log.learners.sessions.values() if session.asked.follows_log]
    metrics |= {
        "unrolls_not_applied": sum(replay.log.end_number - session.applied_number for session in followers),
        "journal_failed": float(bool(open_log.actors.journal_fault)),
    }
    if replay.journal is not None:
        metrics |= {
            "journal_bytes": replay.journal.num_bytes,
            "journal_unsynced_bytes": replay.journal.unsynced_bytes,
            "journal_unsynced_seconds": now - vitals.synced_seconds,
        }
    return metrics | log_metrics(replay, now)


def log_metrics(replay: Replay, now: float) -> dict[str, float]:
    """Returns the metrics of a log and its tables by name."""
    log = replay.log
    oldest = log.get(log.first_number)
    metrics: dict[str, float] = {
        "size": log.num_transitions,
        "fill": replay.fill,
        "age_seconds": now - oldest.arrived_seconds if oldest is not None else 0.0,
        "transitions_inserted": log.num_inserted,
        "transitions_sampled": sum(_transitions_sampled(table, replay) for table in replay.tables.values()),
        "samples_per_insert": sum(table.limiter.samples_per_insert_so_far() for table in replay.tables.values()),
        "log_bytes": log.num_bytes,
        "bytes_per_transition": log.num_bytes / max(log.num_transitions, 1),
    }
    for name, table in replay.tables.items():
        metrics |= {f"table/{name}/{what}": value for what, value in _table_metrics(table).items()}
    return metrics


def peers_of(open_log: OpenLog, now: float) -> tuple[wire.PeerStanding, ...]:
    """Returns all peers, and why each has to wait."""
    waits_for = open_log.actors.waits_for()
    return (
        *(
            wire.PeerStanding("actor", s.actor, now - s.last_seen, waits_for if s.told[0] >= s.told[1] else "")
            for s in open_log.actors.sessions.values()
        ),
        *(
            wire.PeerStanding("learner", s.asked.learner, now - s.last_seen, _why_waiting(s.tables, open_log.replay))
            for s in open_log.learners.sessions.values()
        ),
    )


def summary(metrics: dict[str, float], before: dict[str, float], seconds: float) -> str:
    """Returns the line for the log, with rates since the metrics before."""

    def rate(name: str) -> float:
        return (metrics.get(name, 0.0) - before.get(name, 0.0)) / max(seconds, 1e-9)

    waits = {
        name.removeprefix("waited_seconds_"): (value - before.get(name, 0.0)) / seconds
        for name, value in metrics.items()
        if name.startswith("waited_seconds_")
    }
    dropped = {name.removeprefix("dropped_"): int(value) for name, value in metrics.items() if "dropped_" in name}
    parts = [
        f"{metrics.get('size', 0):,.0f} transitions ({metrics.get('fill', 0):.0%})",
        f"oldest {metrics.get('age_seconds', 0):.0f} s",
        f"in {rate('transitions_inserted'):,.0f}/s, out {rate('transitions_sampled'):,.0f}/s",
        f"{metrics['actors']:.0f} actors, {metrics['learners']:.0f} learners",
        f"{metrics.get('unrolls_not_applied', 0):.0f} unrolls on the way",
    ]
    parts += [f"{what.replace('_', ' waits for ', 1)} {share:.0%}" for what, share in waits.items() if share >= 0.005]
    if "journal_bytes" in metrics:
        parts.append(
            f"journal {metrics['journal_bytes'] / 1e6:.1f} MB, {metrics['journal_unsynced_bytes'] / 1e6:.2f} MB to sync"
        )
    parts += [f"dropped {count} {kind}" for kind, count in dropped.items()]
    parts.append(f"memory {metrics['memory_bytes'] / 1e6:.0f} MB")
    return "; ".join(parts)


def _transitions_sampled(table: Table, replay: Replay) -> int:
    return table.limiter.sampled * (1 if table.granularity == "transitions" else replay.spec.unroll_starts)


def _table_metrics(table: Table) -> dict[str, float]:
    metrics: dict[str, float] = {
        "inserted": table.limiter.inserted,
        "sampled": table.limiter.sampled,
        "samples_per_insert": table.limiter.samples_per_insert_so_far(),
    }
    if isinstance(table, FifoTable | LifoTable):
        metrics["missed"] = table.num_missed
    if isinstance(table, PriorityTable):
        metrics["stale_priorities"] = table.num_stale
        quantiles = table.priority_quantiles(tuple(q / 100 for q in QUANTILES))
        metrics |= {f"priority_quantile_{q}": float(v) for q, v in zip(QUANTILES, quantiles, strict=True)}
    return metrics


def _why_waiting(tables: list[TableSession], replay: Replay) -> str:
    return " ".join(filter(None, dict.fromkeys(table.why_waiting(replay) for table in tables)))
