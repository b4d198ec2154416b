from __future__ import annotations

import threading

import pytest

from tokennorm.data import Prefetch
from tokennorm.errors import ConfigError, DataError

PATIENCE_SECONDS = 60


class Numbers:
    """Windows 0, 1, 2, ... and the place after the last one yielded."""

    def __init__(self, count: int, breaks_at: int | None = None) -> None:
        self.count, self.place, self.breaks_at = count, 0, breaks_at
        self.made: list[int] = []
        self.third = threading.Event()

    def __iter__(self):
        while self.place < self.count:
            number = self.place
            if number == self.breaks_at:
                raise DataError(f"window {number}")
            self.made.append(number)
            if number >= 2:
                self.third.set()
            self.place += 1
            yield [number]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


def test_the_same_windows_in_the_same_order_with_the_place_of_the_one_that_was_taken():
    windows = Prefetch(Numbers(7), 3)
    assert windows.state_dict() == {"place": 0}
    for number, window in enumerate(windows):
        assert window == [number]
        assert windows.state_dict() == {"place": number + 1}, "not that of what lies prepared"
    assert number == 6
    assert threads() == []
    assert list(windows) == []


def test_windows_are_prepared_while_the_first_one_is_used_and_no_more_than_asked_for():
    numbers = Numbers(100)
    windows = iter(Prefetch(numbers, 2))
    assert next(windows) == [0]
    assert numbers.third.wait(PATIENCE_SECONDS), "the third was made though only the first was taken"
    # One taken, two ready, one in the thread's hand.
    assert max(numbers.made) <= 3
    windows.close()
    assert threads() == [], "given up half way, the thread ends"


def test_a_run_goes_on_after_the_window_that_was_taken():
    first = Prefetch(Numbers(9), 4)
    taken = [window for window, _ in zip(first, range(4), strict=False)][:3]
    assert taken == [[0], [1], [2]]
    again = Prefetch(Numbers(9), 4)
    again.load_state_dict({"place": 3})
    assert list(again) == [[i] for i in range(3, 9)]
    source = Numbers(9)
    source.load_state_dict({"place": 7})
    assert list(Prefetch(source)) == [[7], [8]]


def test_an_error_comes_where_its_window_would_have():
    taken = []
    with pytest.raises(DataError, match="window 2"):
        taken.extend(Prefetch(Numbers(5, breaks_at=2), 4))
    assert taken == [[0], [1]]
    assert threads() == []
    with pytest.raises(ConfigError, match="prefetch of 0 windows"):
        Prefetch(Numbers(1), 0)
