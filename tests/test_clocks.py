"""Even times, with clocks that the tests turn."""

import time

from apexrl import clocks
from apexrl.clocks import LONGEST_LOOK_SECONDS, Absence, time_of_day
from apexrl.errors import PeerTimeout
from apexrl.learning.waiter import Waiter


def turn(monkeypatch, seconds):
    now = time.monotonic() + seconds
    monkeypatch.setattr(clocks.time, "monotonic", lambda: now)


def test_the_time_of_day_does_not_follow_a_clock_that_is_set(monkeypatch):
    before = time_of_day()
    monkeypatch.setattr(clocks.time, "time", lambda: 0.0)
    assert 0 <= time_of_day() - before < 600


def test_the_time_in_which_we_stood_still_ourselves_is_nobodys_absence(monkeypatch):
    absence = Absence()
    turn(monkeypatch, 1000.0)
    assert absence.look(is_away=True) == LONGEST_LOOK_SECONDS
    turn(monkeypatch, 1.0)
    assert LONGEST_LOOK_SECONDS < absence.look(is_away=True) <= LONGEST_LOOK_SECONDS + 1.001
    assert absence.look(is_away=False) == 0 == absence.look(is_away=False)


def test_a_replay_that_is_away_ends_the_wait_also_where_something_comes_without_it(monkeypatch):
    waiter, came = Waiter(3.0), 0
    try:
        for _ in range(9):
            turn(monkeypatch, 1.0)
            waiter.check("replay_connection", something_came=True)
            came += 1
    except PeerTimeout as error:
        assert "the replay server was away for 3 s" in str(error)
    assert 2 <= came <= 3
    for _ in range(9):
        turn(monkeypatch, 1.0)
        waiter.check("limiter")
