"""Captured rounds: requests come and go, a round is launched ahead of its results, and the tokens stay the same.

On the CPU, a graph is replaced by running what was captured again (`rerun`), into the tensors of the first run. What
CUDA graphs require beyond that is checked on a GPU by `test_random_settings.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fledge.decode import batch as batches
from fledge.decode import rounds
from fledge.decode.engine import Engine
from fledge.types import Sampling, Tree, TreeShape
from support.decoding import prompts
from support.targets import P_EAGLE, tiny_draft, tiny_target
from support.trees import good_pair

WAYS: dict[str, dict[str, Any]] = {
    "chain": dict(depth=4),
    "chain, unstable": dict(depth=4, stable=False),
    "tree": dict(mode="tree", nodes=12, width=4, depth=4),
    "tree, unstable": dict(mode="tree", nodes=12, width=4, depth=4, stable=False),
    "shape": dict(mode="tree", shape=TreeShape((-1, 0, 0, 1, 1), (0, 0, 1, 0, 1))),
}


def rerun(work: Callable[[], Any], memory: Any, device: torch.device) -> tuple[Callable[[], None], Any]:
    """Stands in for `rounds.capture` on the CPU."""
    results = work()

    def replay() -> None:
        again = work()
        pairs = [(results, again)]
        if isinstance(results, Tree):
            vars(results).pop("_ancestors", None)  # a graph would compute them again
            pairs = [(getattr(results, name), x) for name, x in vars(again).items() if isinstance(x, torch.Tensor)]
        for kept, changed in pairs:
            kept.copy_(changed)

    return torch.inference_mode()(replay), results


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Captures rounds on the CPU. Returns a list of the numbers of places that graphs were captured for."""
    sizes: list[int] = []
    monkeypatch.setattr(
        batches, "can_capture", lambda target, drafter: target.implementation == "native" and drafter.capturable
    )
    monkeypatch.setattr(batches, "graph_memory", lambda: None)
    monkeypatch.setattr(rounds, "warm_up", lambda work, device: work())
    monkeypatch.setattr(rounds, "capture", torch.inference_mode()(rerun))
    begin = rounds.CapturedRounds.__init__
    monkeypatch.setattr(
        rounds.CapturedRounds,
        "__init__",
        lambda self, of, size, *given: sizes.append(size) or begin(self, of, size, *given),
    )
    return sizes


@pytest.mark.parametrize("way", WAYS)
def test_requests_come_and_go(way: str, captured: list[int]) -> None:
    """Nine requests of different lengths in a batch of three get the tokens of decoding without a draft, greedy,
    sampled and penalized side by side, and a graph is captured for each number of places and kind of sampling once."""
    target, draft, _ = good_pair(native=True)
    engine = Engine(target, draft, **WAYS[way])
    asked = [p for p in prompts(20, longest=14, seed=2) if len(p) > 1][:9]
    mixed = [
        Sampling(),
        Sampling(temperature=1.0, seed=2),
        Sampling(temperature=0.7, top_k=9, repetition_penalty=1.2),
    ] * 3
    for sampling in ([Sampling()] * 9, mixed):
        options = dict(sampling=sampling, max_new_tokens=25, batch=3)
        fast = engine.generate_all(asked, **options)
        count = len(captured)
        assert engine.generate_all(asked, **options)[4].tokens == fast[4].tokens
        assert len(captured) == count, "graphs are kept for the next call"
        plain = engine.generate_all(asked, speculate=False, **options)
        assert [c.tokens for c in fast] == [c.tokens for c in plain]
        alone = [
            engine.generate(p, sampling=s, request=i, max_new_tokens=25)
            for i, (p, s) in enumerate(zip(asked, sampling, strict=True))
        ]
        assert [c.tokens for c in fast] == [c.tokens for c in alone]
        assert [[r.accepted for r in c.trace.rounds] for c in fast] == [
            [r.accepted for r in c.trace.rounds] for c in alone
        ]
    assert {1, 2, 4} <= set(captured)


def test_one_pass_drafts(captured: list[int]) -> None:
    target = tiny_target(dtype=torch.float64, native=True)
    engine = Engine(target, tiny_draft(target, **P_EAGLE), depth=3)
    asked = prompts(5, seed=6)
    fast, plain = (engine.generate_all(asked, batch=2, max_new_tokens=20, speculate=s) for s in (True, False))
    assert captured and [c.tokens for c in fast] == [c.tokens for c in plain]


def test_an_engine_goes_on_after_an_abandoned_stream(captured: list[int]) -> None:
    """A stream that is closed half-way leaves nothing behind in the graphs' places."""
    target, draft, asked = good_pair(native=True)
    engine = Engine(target, draft, depth=4)
    expected = engine.generate(asked[0], max_new_tokens=30).tokens
    for stop in (1, 3):
        stream = engine.stream(asked[1], max_new_tokens=30)
        for _ in range(stop):
            next(stream)
        stream.close()
        assert engine.generate(asked[0], max_new_tokens=30).tokens == expected


def test_processors_are_called_without_graphs(captured: list[int]) -> None:
    """Requests with logits processors decode step by step beside graphs of other calls, to the same tokens."""
    target, draft, asked = good_pair(native=True)
    engine = Engine(target, draft, depth=4)
    prefixes: list[int] = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        prefixes.append(input_ids.shape[1])
        return scores

    without = engine.generate(asked[0], max_new_tokens=12).tokens
    count = len(captured)
    assert engine.generate(asked[0], max_new_tokens=12, processors=[note]).tokens == without
    assert len(captured) == count and prefixes == [*range(len(asked[0]), len(asked[0]) + 12)]


def test_places_without_a_request_stay_in_their_slots(captured: list[int]) -> None:
    """Three requests in four places: the fourth writes to slots of its own however long the others take."""
    target, draft, asked = good_pair(native=True)
    engine = Engine(target, draft, depth=4)
    engine.generate_all(asked[:3], batch=3, max_new_tokens=40)
    (batch,) = engine._idle_batches[True]
    (graphs,) = [g for key, g in batch.graphs.items() if key[0] == 4]
    assert graphs.rounds.cache.lengths[3] == graphs.rounds.drafter.source.cache.lengths[3] == 0
