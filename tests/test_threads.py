"""One engine, or several of one target, used by several threads: every answer is the one that it would get alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fledge.__main__ import SPINS
from fledge.decode.engine import Engine
from fledge.decode.load import load
from fledge.targets.loading import target_of
from support.targets import BOTH_IMPLEMENTATIONS, tiny_draft, tiny_target, tiny_tokenizer

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
    engines = [load(target, tiny_draft(target), **drafting), load(target)]
    expected = {tuple(p): engines[1].generate(p, max_new_tokens=NEW).tokens for p in PROMPTS}

    def ask(number: int) -> None:
        way: Callable = (whole, streamed, in_a_batch)[number % 3]
        prompt = PROMPTS[number % len(PROMPTS)]
        assert way(engines[number % 5 == 4], prompt) == expected[tuple(prompt)]

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(ask, number) for number in range(36)]:
            done.result(120)


@BOTH_IMPLEMENTATIONS
def test_engines_are_made_while_another_decodes(native: bool) -> None:
    """Whether a target verifies trees is found by running it, which must not come between the passes of a round."""
    target = tiny_target(dtype=torch.float64, native=native)
    engine, draft = load(target, tiny_draft(target), depth=3), tiny_draft(target)
    expected = engine.generate(PROMPTS[0], max_new_tokens=NEW).tokens
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(whole, engine, PROMPTS[0]) for _ in range(8)]
        made = [threads.submit(load, target, draft, mode="tree", nodes=8, width=2, depth=3) for _ in range(40)]
        assert [done.result(120) for done in asked] == [expected] * 8 and all(m.result(120) for m in made)


def test_targets_of_one_model_take_turns() -> None:
    """Hooks of the model read what its passes compute, whichever target runs it."""
    model = tiny_target(dtype=torch.float64).model
    targets = [target_of(model, tiny_tokenizer(), implementation="transformers") for _ in range(2)]
    engines = [load(target, tiny_draft(target), depth=3) for target in targets]
    expected = engines[0].generate(PROMPTS[0], max_new_tokens=NEW).tokens
    assert engines[0]._lock is engines[1]._lock is not load(tiny_target())._lock
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(whole, engines[i % 2], PROMPTS[0]) for i in range(8)]
        assert [done.result(120) for done in asked] == [expected] * 8


def test_a_stream_that_waits_holds_nobody_up() -> None:
    target = tiny_target(dtype=torch.float64, native=True)
    engine = load(target, tiny_draft(target), depth=3)
    waiting = engine.stream(PROMPTS[0], max_new_tokens=NEW)
    next(waiting)
    with ThreadPoolExecutor(1) as threads:
        assert len(threads.submit(whole, engine, PROMPTS[1]).result(60)) <= NEW
    assert "".join(waiting)


def test_waiting_threads_sleep_soon() -> None:
    """The command line says so before torch is imported, unless the user has."""
    code = (
        "import os, sys, fledge.__main__ as m, types\n"
        "assert 'torch' not in sys.modules\n"
        "sys.modules['fledge.cli'] = types.SimpleNamespace(main=lambda: print(os.environ.get('GOMP_SPINCOUNT')))\n"
        "m.main()"
    )
    plain = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    for given, said in (({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")):
        ran = subprocess.run([sys.executable, "-c", code], env=plain | given, capture_output=True, text=True)
        assert ran.stdout.strip() == said, ran.stderr
