"""What a round takes where requests rest, relative to a round that drafts nothing among others that draft.

The first takes less time, since nothing is kept for a draft and the host does less, which matters where rounds are
short. Drafting has to be faster than the first, but while it goes on, only the second can be timed
(`fledge/decode/adaptive.py`).
"""

from __future__ import annotations

import statistics
from collections import Counter, deque

LEAST_RELIEF = 0.75  # the least factor that is believed, as measurements may be wrong
MOST_RELIEF = 0.97  # a factor above it is taken for 1, as measurements do not tell the two apart
LATEST = 16  # the most rounds among drafting ones that count
FEWEST_IDLE, FEWEST_RESTING = 3, 16  # the fewest rounds of both kinds that tell it
ATTEMPTS = 4  # the most to find it out


class Relief:
    """The relief, a factor of up to 1, by the number of requests. Sizes are those of graphs (`graph_size`)."""

    def __init__(self) -> None:
        self.idle: dict[int, deque[float]] = {}  # the latest seconds of rounds that drafted nothing among others
        self.known: dict[int, float] = {}
        self.attempts: Counter[int] = Counter()

    def of(self, size: int) -> float:
        """The relief of so many requests; where it is not known, that of the nearest number, or 1."""
        return self.known[min(self.known, key=lambda s: abs(s - size))] if self.known else 1.0

    def add_idle(self, size: int, seconds: float) -> None:
        """Adds a round that drafted nothing among others that draft."""
        self.idle.setdefault(size, deque(maxlen=LATEST)).append(seconds)

    def forget_idle(self) -> None:
        """Forgets all such rounds."""
        self.idle.clear()

    def add_resting(self, size: int, seconds: float, rounds: int) -> None:
        """Adds the mean seconds of rounds of requests that rest. The relief follows from them and from the latest
        rounds among others that draft, which count once."""
        if rounds < FEWEST_RESTING or not self.is_measured(size):
            return
        found = max(seconds / statistics.median(self.idle.pop(size)), LEAST_RELIEF)
        found = found if found < MOST_RELIEF else 1.0
        self.known[size] = (self.known.get(size, found) + found) / 2

    def is_measured(self, size: int) -> bool:
        """Whether resting requests would tell it."""
        return len(self.idle.get(size, ())) >= FEWEST_IDLE
