"""A stand-in for the choice of what is drafted, so that tests do not depend on times."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fledge.decode.adaptive import NOTHING, Amount
from fledge.decode.engine import Engine


class RandomAmounts:
    """Chooses at random, nothing as often as all amounts together. `guesses` are those that were reported: (right,
    made)."""

    def __init__(self, engine: Engine, seed: int, rest: float = 0.3):
        self.draw, self.amounts, self.rest = random.Random(seed), engine.drafting.amounts, rest
        self.guesses: list[tuple[int, int]] = []
        self.settled, self.rested = False, 0
        engine.chooser = self

    def next(self, requests: int, current: Amount) -> Amount:
        return NOTHING if self.draw.random() < 0.5 else self.draw.choice(self.amounts)

    def rests(self, batch: int) -> bool:
        return self.draw.random() < self.rest

    def changes(self, rests: bool, batch: int, waiting: int) -> bool:
        return self.draw.random() < self.rest

    def probes(self, batch: int) -> bool:
        return self.draw.random() < 0.5

    def add(self, amount: Amount, accepted: Sequence[int], seconds: float | None) -> None:
        pass

    def add_guesses(self, right: int, guesses: int, rounds: int) -> None:
        self.guesses.append((right, guesses))
