"""Lines of programs: nothing in them controls a terminal, and a flood of one kind is a few lines and a count."""

import ast
import io
import logging
import pickle

import pytest

from apexrl.errors import ConfigError, PeerTimeout
from apexrl.lines import ALIKE, ALIKE_SECONDS, Repeats, log_to, printable, say
from tests.system.processes import ROOT

STRANGE = ["\x1b]0;title\x07", "\x1b[2J", "\x00", "\x7f", "\x9b31m", "\r", "\u2028", "\u202e", "\u200f", "\udc80"]


@pytest.fixture
def log():
    """A log as programs make it: the logger that writes it, and its text."""
    text = io.StringIO()
    log_to(handler := logging.StreamHandler(text), form="12:00:00 role: %(message)s")
    logger = logging.Logger("role")
    logger.addHandler(handler)
    return logger, text


@pytest.mark.parametrize("strange", STRANGE)
def test_what_controls_a_terminal_is_written_as_an_escape(strange):
    shown = printable(f"a{strange}b")
    assert shown.isprintable() and "\\" in shown
    assert printable(shown) == shown


@pytest.mark.parametrize("text", ["", "plain", "läufe/eins zwei ü", "日本　語", "a\n\tb", "non\xa0breaking"])
def test_what_people_write_stays(text):
    assert printable(text) == text


@pytest.mark.parametrize("strange", STRANGE)
def test_no_error_and_no_printed_line_controls_a_terminal(strange, capsys):
    error = ConfigError(f"no game {strange}")
    assert str(error).isprintable()
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(PeerTimeout()) == ""
    say(f"plays {strange}", 3)
    assert capsys.readouterr().out == f"plays {printable(strange)} 3\n"


@pytest.mark.parametrize("strange", STRANGE)
def test_no_record_of_a_log_controls_a_terminal(log, strange):
    logger, text = log
    logger.warning("actor %s joined", strange)
    try:
        raise ValueError(strange)
    except ValueError:
        logger.exception("failed")
    assert text.getvalue().replace("\n", "").isprintable()
    assert "ValueError: " in text.getvalue()


def test_no_text_of_a_peer_looks_like_a_record_of_its_own(log):
    logger, text = log
    logger.warning("dropped: %s", "one\n12:00:00 role: actor worker 1 ended with status 1; restart 1 in 0.5 s")
    assert [line.startswith("12:00:00") for line in text.getvalue().splitlines()] == [True, False]


def test_a_flood_of_one_place_is_some_lines_and_a_count(log):
    logger, text = log
    now = [1000.0]
    log_to(handler := logging.StreamHandler(text), form="%(message)s", clock=lambda: now[0])
    logger.handlers = [handler]

    def say_all(count):
        for i in range(count):
            logger.info("actor %d joined", i)

    say_all(5 * ALIKE)
    logger.info("another place")
    lines = text.getvalue().splitlines()
    assert len(lines) == ALIKE + 1 and lines[-1] == "another place"
    assert lines[0] == "actor 0 joined" and lines[ALIKE - 1].endswith("(more like this are counted now, and not said)")
    now[0] += ALIKE_SECONDS
    say_all(2)
    told = f"actor 0 joined ({4 * ALIKE} more like this before)"
    assert text.getvalue().splitlines()[-2:] == [told, "actor 1 joined"]


def test_repeats_let_some_through_in_a_while():
    now = [0.0]
    repeats = Repeats(10.0, most=2, clock=lambda: now[0])
    assert [repeats.let_through() for _ in range(4)] == [True, True, False, False] and repeats.is_full
    now[0] = 9.0
    assert not repeats.let_through()
    now[0] = 10.0
    assert repeats.let_through() and repeats.more() == " (3 more like this before)" and repeats.more() == ""


def test_programs_print_and_log_by_this_module_alone():
    own = {"lines.py", "lifecycle.py"}  # a full output that is said
    for path in (path for path in (ROOT / "apexrl").rglob("*.py") if path.name not in own):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        assert not {ast.unparse(call.func) for call in calls} & {"print", "logging.basicConfig"}, path
