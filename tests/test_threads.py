"""One engine, or several of one target, used by several threads: every answer is the one that it would get alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fledge.decode.engine import Engine
from support.targets import BOTH_IMPLEMENTATIONS, tiny_draft, tiny_target

PROMPTS = [[5, 200, 77, 31], [9, 8], [3, 141, 59, 26, 53], [12, 34, 56], [7], [90, 80, 70, 60, 50, 40]]
NEW = 24


def whole(engine: Engine, prompt: list[int]) -> list[int]:
    return engine.generate(prompt, max_new_tokens=NEW).tokens


def streamed(engine: Engine, prompt: list[int]) -> list[int]:
    from fledge.decode.request import Completion

    done = Completion()
    for _ in engine.stream(prompt, max_new_tokens=NEW, into=done):
        pass
    return done.tokens


def in_a_batch(engine: Engine, prompt: list[int]) -> list[int]:
    return engine.generate_all([prompt, prompt[:1]], max_new_tokens=NEW)[0].tokens


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("drafting", [dict(depth=3), dict(mode="tree", depth=3, nodes=8), dict(depth="auto")], ids=str)
def test_threads_get_the_answers_that_they_would_get_alone(drafting: dict, native: bool) -> None:
    target = tiny_target(dtype=torch.float64, native=native)
    engines = [Engine(target, tiny_draft(target), **drafting), Engine(target)]
    expected = {tuple(p): engines[1].generate(p, max_new_tokens=NEW).tokens for p in PROMPTS}

    def ask(number: int) -> None:
        way: Callable = (whole, streamed, in_a_batch)[number % 3]
        prompt = PROMPTS[number % len(PROMPTS)]
        assert way(engines[number % 5 == 4], prompt) == expected[tuple(prompt)]

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(ask, number) for number in range(36)]:
            done.result(120)


def test_a_stream_that_waits_holds_nobody_up() -> None:
    target = tiny_target(dtype=torch.float64, native=True)
    engine = Engine(target, tiny_draft(target), depth=3)
    waiting = engine.stream(PROMPTS[0], max_new_tokens=NEW)
    next(waiting)
    with ThreadPoolExecutor(1) as threads:
        assert len(threads.submit(whole, engine, PROMPTS[1]).result(60)) <= NEW
    assert "".join(waiting)
