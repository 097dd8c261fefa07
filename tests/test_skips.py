"""The end of a test run says why tests were skipped."""

from types import SimpleNamespace

from tests.conftest import pytest_terminal_summary


def summary_of(*reasons):
    lines = []
    skipped = [SimpleNamespace(longrepr=("test_x.py", 3, f"Skipped: {reason}")) for reason in reasons]
    reporter = SimpleNamespace(stats={"skipped": skipped}, section=lines.append, line=lines.append)
    pytest_terminal_summary(reporter)
    return lines


def test_skips_are_counted_by_reason_with_what_gets_them_to_run():
    lines = summary_of(
        "needs a GPU", "packer is missing", "needs a GPU", "moto not installed: bash tests/deploy/install.sh"
    )
    assert lines == [
        "4 tests were skipped",
        "    2 needs a GPU: run it on a machine with an NVIDIA GPU",
        "    1 packer is missing: bash tests/deploy/install.sh",
        "    1 moto not installed: bash tests/deploy/install.sh",
    ]


def test_a_run_without_skips_says_nothing_of_them():
    assert summary_of() == []
