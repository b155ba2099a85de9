"""Requests begin together, and none waits long for that."""

from __future__ import annotations

import random

import pytest

from fledge.decode import batch as batches
from fledge.decode import scheduler
from fledge.decode.load import load
from fledge.decode.scheduler import Beginning
from support.trees import good_pair


def simulate(batch: int, answers: list[int], begin: float, round_: float) -> tuple[float, int, float]:
    """The seconds in which requests are answered, each in as many rounds as its answer says, if a beginning takes
    `begin` seconds and a round `round_`; the beginnings; and the most seconds that a place was free while some
    waited."""
    now = begun = 0
    free = longest = 0.0
    beginning, waiting, running = Beginning(batch, lambda: now), list(answers), []
    while waiting or running:
        count = beginning.count(len(running), len(waiting))
        assert 0 <= count <= min(batch - len(running), len(waiting))
        begun += count > 0
        running += [waiting.pop() for _ in range(count)]
        now += begin * (count > 0) + round_
        free = free + round_ if waiting and len(running) < batch else 0.0
        longest = max(longest, free)
        running = [left - 1 for left in running if left > 1]
    return now, begun, longest


# the seconds of a beginning and of a round: of a small model on a GPU, of a large one, and of a small one on a CPU
MACHINES = {"small": (0.006, 0.0003), "large": (0.005, 0.007), "cpu": (0.001, 0.05)}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("mean", [60, 1000])
def test_beginning_together_saves_time(machine: str, mean: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 16 requests of unequal lengths, it is much faster than beginning at each free place where rounds are quick,
    and little slower where they are not. No place is free for longer than all beginnings of others would take."""
    draw = random.Random(0)
    answers = [max(4, round(draw.expovariate(1 / mean))) for _ in range(400)]
    took, begun, longest = simulate(16, answers, *MACHINES[machine])
    monkeypatch.setattr(scheduler, "BEGINNING", 0.0)
    alone, begun_alone, _ = simulate(16, answers, *MACHINES[machine])
    assert took < 1.02 * alone
    assert longest <= 16 * 0.005 + MACHINES[machine][1]
    if machine == "small":
        assert begun < 0.6 * begun_alone and took < (0.6 if mean == 60 else 0.95) * alone


def test_when_requests_begin() -> None:
    now = 0.0
    full = Beginning(16, lambda: now)
    assert full.count(0, 3) == 3 and full.count(0, 40) == 16, "if nothing runs, none waits"
    assert full.count(15, 1) == 1, "there is no other to wait for"
    assert full.count(16, 9) == 0 and full.count(3, 0) == 0
    asked = []
    for running in [15] * 5 + [13] * 6:  # a round takes 10 ms: 50 ms are lost with one free place, then 30 a round
        asked.append(full.count(running, 9))
        now += 0.01
    assert asked == [0, 0, 0, 0, 0, 3, 0, 0, 3, 0, 0], "the next round would lose too much"


@pytest.mark.parametrize("batch", [2, 4, 16])
@pytest.mark.parametrize("mean", [8, 20, 60])
def test_slow_rounds_wait_for_nobody(batch: int, mean: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a round takes much longer than a beginning, no round is run with a place that could be filled."""
    draw = random.Random(0)
    answers = [max(2, round(draw.expovariate(1 / mean))) for _ in range(300)]
    took, _, longest = simulate(batch, answers, 0.005, 0.2)
    monkeypatch.setattr(scheduler, "BEGINNING", 0.0)
    assert took == simulate(batch, answers, 0.005, 0.2)[0] and not longest


def test_prefills_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine prefills requests together, to the tokens of each alone, and a stream begins at once."""
    monkeypatch.setattr(scheduler, "BEGINNING", 10.0)  # seconds: none begins alone, however slow the machine is
    target, draft, asked = good_pair(native=True)
    engine, together = load(target, draft, depth=2), []
    asked = [[*p[: 1 + i % 5], 7 + i] for i, p in enumerate(asked * 5)]
    expected = [engine.generate(p, max_new_tokens=6 + i % 9).tokens for i, p in enumerate(asked)]
    begin = batches.Joining.__init__
    monkeypatch.setattr(
        batches.Joining, "__init__", lambda self, of, given: together.append(len(given)) or begin(self, of, given)
    )
    create = engine._request
    monkeypatch.setattr(
        engine, "_request", lambda p, n, drafts, _, *rest: create(p, n, drafts, 6 + asked.index(p) % 9, *rest)
    )
    done = engine.generate_all(asked, batch=16)
    assert [c.tokens for c in done] == expected
    assert together[0] == 16 and sum(together) == len(asked) and min(together[:-1]) >= 2
    together.clear()
    assert engine.generate(asked[0]).tokens == expected[0] and together == [1]
