"""The time that may go into finding out whether another way of decoding is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.005  # of the seconds of decoding, the most that go into finding out


class Budget:
    """Grants a share of the seconds of decoding for finding out what is faster.

    Seconds are those of `clock` while something is decoded (`working`). What finding out takes becomes a debt, which is
    paid off with SHARE of all further seconds, and nothing else is tried before, unless what was found out leads to it.
    So at any time, all that was `spent` but for the last debt is at most SHARE of the `seconds`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.seconds = self.spent = 0.0
        self._paid_at = 0.0  # the `seconds` at which the debt is paid off
        self._began: float | None = None  # finding out, as `seconds`
        self._workers, self._seen = 0, 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """While it is entered, something is decoded."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> float:
        """Within `working`: one of those who decode waits, for the consumer or for others. Returns the time."""
        now = self._count()
        self._workers -= 1
        return now

    def resume(self) -> float:
        """It goes on. Returns the time."""
        now = self._count()
        self._workers += 1
        return now

    def _count(self) -> float:
        """Counts the seconds up to now, and returns the time."""
        now = self.clock()
        if self._workers:
            self.seconds += now - self._seen
        self._seen = now
        return now

    @property
    def allows(self) -> bool:
        """Whether something may be found out now."""
        self._count()
        return self.seconds >= self._paid_at and self._began is None

    def begin(self) -> None:
        """Finding out begins."""
        self._count()
        self._began = self.seconds

    def end(self) -> None:
        """It ends, if it had begun."""
        if self._began is None:
            return
        self._count()
        took, self._began = self.seconds - self._began, None
        self.spent += took
        self._paid_at = max(self._paid_at, self.seconds) + took / SHARE
