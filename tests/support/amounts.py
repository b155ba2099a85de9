"""A stand-in for the choice of what is drafted, so that tests do not depend on times."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fledge.decode.adaptive import NOTHING, Amount
from fledge.decode.budget import Budget
from fledge.decode.engine import Engine


class RandomAmounts:
    """Chooses at random, nothing as often as all amounts together. `guesses` are those that were reported: (right,
    made). `rest` is the probability of a pause, or of its end, wherever one may begin or end."""

    def __init__(self, engine: Engine, seed: int, rest: float = 0.3):
        self.draw, self.amounts, self.rest = random.Random(seed), engine.drafting.amounts, rest
        self.guesses: list[tuple[int, int]] = []
        self.settled = self.pausing = self.trying = self.comparing = False
        self.least, self.budget = engine.chooser.least, Budget()
        self.exchanges = 0
        engine.chooser = self

    def next(self, requests: int, current: Amount) -> Amount:
        self.pausing = self.draw.random() < self.rest / 3
        return NOTHING if self.draw.random() < 0.5 else self.draw.choice(self.amounts)

    def rests(self, requests: int, waiting: int = 0) -> bool:
        self.trying, self.pausing = self.draw.random() < 0.5, False
        self.comparing = self.draw.random() < 0.5
        return self.draw.random() < self.rest

    def stops(self, requests: int, waiting: int = 0) -> bool:
        self.pausing |= self.draw.random() < self.rest / 3
        self.comparing = self.draw.random() < 0.5
        return self.pausing

    def returns(self, requests: int, waiting: int) -> bool:
        return self.draw.random() < self.rest

    def gave_up(self) -> None:
        self.pausing = False
        self.exchanges += 1

    def probes(self, requests: int) -> bool:
        return self.draw.random() < 0.5

    def add(self, amount: Amount, accepted: Sequence[int], seconds: float | None, drafted: int) -> None:
        assert max(accepted) <= drafted <= amount.depth

    def add_plain(self, requests: int, seconds: float, rounds: int) -> None:
        pass

    def add_reading(self, requests: int, seconds: float) -> None:
        pass

    def add_answer(self, tokens: int) -> None:
        pass

    def add_guesses(self, right: int, guesses: int, rounds: int) -> None:
        self.guesses.append((right, guesses))
