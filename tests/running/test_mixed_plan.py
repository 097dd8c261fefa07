"""A run with a journal beside it, as it is planned."""

import pytest

from apexrl.config.flags import Asked
from apexrl.errors import ConfigError
from apexrl.running.plan import describe, make_plan
from tests.running.test_offline_plan import journal  # noqa: F401 - a fixture
from tests.running.test_plan import planned


def test_a_run_with_a_journal_beside_it_is_planned_and_resumed(journal, monkeypatch):  # noqa: F811
    monkeypatch.chdir(journal.parent)
    flags = ["--env", "Catch-v0", "--run-dir", "runs/x", "--mix-journal", "journal=1/2"]
    made = planned(*flags)
    assert made.command.learning.mix_journal == f"{journal}=1/2"
    assert dict(describe(made))["mixed in"].startswith(f"1/2 of each batch that replays, from {journal}")
    assert make_plan(Asked.of(made.command, []), made.command).command == made.command
    for more, why in (
        (["--env", "CartPole-v1"], "does not fit: its env is Catch-v0, not CartPole-v1"),
        (
            ["--agent", "impala", "--mix", "uniform=1"],
            "no field behavior_log_probs.*apex-dqn or pqn.* can learn from it",
        ),
        (["--num-learners", "2"], "leave out --num-learners, --shards"),
        (["--reproducible"], "leave out --from-journal, --guest and --reproducible"),
        (["--from-journal", str(journal)], "leave out --from-journal, --guest and --reproducible"),
        (["--mix-journal", "nowhere=1/2"], "nowhere is no journal"),
    ):
        with pytest.raises(ConfigError, match=why):
            planned(*flags, *more)
