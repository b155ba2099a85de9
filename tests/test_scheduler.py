"""Requests begin together, and none waits long for that."""

from __future__ import annotations

import random

import pytest

from fledge.decode import batch as batches
from fledge.decode import scheduler
from fledge.decode.engine import Engine
from fledge.decode.scheduler import PATIENCE, Beginning
from support.trees import good_pair


def simulate(batch: int, answers: list[int]) -> tuple[int, int, int]:
    """The rounds and beginnings of so many requests, of which each takes as many rounds as its answer says, and the
    most rounds that a place was free while some waited."""
    beginning, waiting, running = Beginning(batch), list(answers), []
    rounds = begun = free = longest = 0
    while waiting or running:
        count = beginning.count(len(running), len(waiting))
        assert 0 <= count <= min(batch - len(running), len(waiting))
        begun += count > 0
        running += [waiting.pop() for _ in range(count)]
        free = free + 1 if waiting and len(running) < batch else 0
        longest = max(longest, free)
        running = [left - 1 for left in running if left > 1]
        rounds += 1
    return rounds, begun, longest


def test_beginning_together_saves_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 16 requests of unequal lengths, there are half as many beginnings for few rounds more, and a place is free for
    at most PATIENCE rounds; where answers are long, that is what ends the wait."""
    draw = random.Random(0)
    for mean, long in ((60, False), (4000, True)):
        answers = [max(4, round(draw.expovariate(1 / mean))) for _ in range(400)]
        rounds, begun, longest = simulate(16, answers)
        with monkeypatch.context() as alone:
            alone.setattr(scheduler, "TOGETHER", 16)
            rounds_alone, begun_alone, _ = simulate(16, answers)
        assert begun < (0.95 if long else 0.65) * begun_alone and rounds < 1.04 * rounds_alone
        assert longest == PATIENCE if long else longest <= PATIENCE


def test_when_requests_begin() -> None:
    full = Beginning(16)
    assert full.count(0, 3) == 3 and full.count(0, 40) == 16, "if nothing runs, none waits"
    assert full.count(15, 9) == 0 and full.count(14, 9) == 2
    assert full.count(15, 1) == 1, "there is no other to wait for"
    assert [full.count(15, 9) for _ in range(PATIENCE + 2)] == [0] * PATIENCE + [1, 0]
    assert full.count(16, 9) == 0 and full.count(3, 0) == 0
    assert [Beginning(n).count(n - 1, 9) for n in range(2, 16)] == [1] * 14, "in small batches, each begins at once"
    assert Beginning(64).count(57, 99) == 0 and Beginning(64).count(56, 99) == 8


def test_prefills_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine prefills requests together, to the tokens of each alone, and a stream begins at once."""
    target, draft, asked = good_pair(native=True)
    engine, together = Engine(target, draft, depth=2), []
    asked = [[*p[: 1 + i % 5], 7 + i] for i, p in enumerate(asked * 5)]
    expected = [engine.generate(p, max_new_tokens=6 + i % 9).tokens for i, p in enumerate(asked)]
    begin = batches.Joining.__init__
    monkeypatch.setattr(
        batches.Joining, "__init__", lambda self, of, given: together.append(len(given)) or begin(self, of, given)
    )
    create = engine._request
    monkeypatch.setattr(
        engine, "_request", lambda p, n, **o: create(p, n, **o | dict(max_new_tokens=6 + asked.index(p) % 9))
    )
    done = engine.generate_all(asked, batch=16)
    assert [c.tokens for c in done] == expected
    assert together[0] == 16 and sum(together) == len(asked) and min(together[:-1]) >= 2
    together.clear()
    assert engine.generate(asked[0]).tokens == expected[0] and together == [1]
