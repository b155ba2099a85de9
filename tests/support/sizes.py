"""A stand-in for the choice of draft sizes, so that tests do not depend on times."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fledge.decode.draft_size import NOTHING, DraftSize
from fledge.decode.engine import Engine


class RandomSizes:
    """Chooses at random: `rest` is the probability of a rest, wherever one may begin or end. `added` are the sizes of
    the rounds."""

    settled, reason = False, "at random"

    def __init__(self, engine: Engine, seed: int, rest: float = 0.2):
        self.draw, self.sizes, self.rest = random.Random(seed), engine.drafting.sizes, rest
        self.added: list[DraftSize] = []
        engine.chooser = self

    def choose(self, requests: int, current: DraftSize) -> DraftSize:
        return NOTHING if self.draw.random() < self.rest else self.draw.choice(self.sizes)

    def rests(self, requests: int) -> bool:
        return self.draw.random() < self.rest

    def add(
        self, size: DraftSize, accepted: Sequence[int], seconds: tuple[float, float], paths: Sequence[Sequence[int]]
    ) -> None:
        assert [*map(len, paths)] == accepted
        assert all(0 < node < size.nodes for path in paths for node in path)
        assert max(accepted) <= size.depth and len(seconds) == 2 and (size.depth > 0 or seconds[0] == 0)
        self.added.append(size)
