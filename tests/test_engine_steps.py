"""`Engine.add`, `step` and `abort`: requests come and go at any time, and each gets the answer of its prompt alone."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fledge.decode.batch import FIRST_PART, LEAST_PART, PREFILL_TOKENS, STALL, Batch
from fledge.decode.engine import Engine
from fledge.decode.load import load
from fledge.drafts.kv_cache import SlotPool
from fledge.types import Sampling
from support.decoding import prompts
from support.http_server import ask, serving
from support.targets import BOTH_IMPLEMENTATIONS, tiny_draft, tiny_target
from support.trees import good_pair

WAYS: dict[str, dict[str, Any]] = {
    "chain": dict(depth=3), "tree": dict(mode="tree", depth=3, nodes=8), "auto": dict(depth="auto"),
}  # fmt: skip


def free_slots(pool: SlotPool) -> int:
    return sum(end - first for first, end in pool._free)


def run_to_the_end(engine: Engine) -> None:
    while engine.step():
        pass


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("way", WAYS)
def test_requests_that_come_at_any_time(way: str, native: bool) -> None:
    """With and without the draft, and with options of their own."""
    target = tiny_target(dtype=torch.float64, native=native)
    engine, alone = load(target, tiny_draft(target), **WAYS[way]), load(target)
    asked, draw, added = prompts(12, longest=20, seed=4), random.Random(0), []
    samplings = [Sampling(), Sampling(temperature=0.9, seed=3), Sampling(temperature=0.7, top_k=7, seed=1)]
    for i, prompt in enumerate(asked):
        options = dict(max_new_tokens=4 + i, sampling=samplings[i % 3], request=i)
        added.append((engine.add(prompt, speculate=i % 4 != 3, **options), prompt, options))
        for _ in range(draw.randint(0, 3)):
            engine.step()
    run_to_the_end(engine)
    for request, prompt, options in added:
        expected = alone.generate(prompt, **options)
        assert request.over and request.done.tokens == expected.tokens and request.done.finish == expected.finish
        assert request.take() == expected.text and request.done.text == expected.text
    assert engine.step() == [] and (not native or target.pool.slots == 0)


def test_requests_are_decoded_together() -> None:
    """As many as there are places; the others wait."""
    target, draft, asked = good_pair(native=True)
    engine = load(target, draft, depth=2)
    engine.places = 3
    added = [engine.add(prompt, max_new_tokens=8) for prompt in asked[:5]]
    most = 0
    while updated := engine.step():
        most = max(most, len(updated))
    assert most == 3 and all(r.over for r in added) and len({r.number for r in added}) == 5


def test_aborted_requests_leave_no_trace() -> None:
    """Before they begin, at the first token and later; the others go on to the same tokens."""
    target, draft, asked = good_pair(native=True)
    engine = load(target, draft, depth=2)
    expected = [engine.generate(prompt, max_new_tokens=30).tokens for prompt in asked[:6]]
    engine.places = 4
    added = [engine.add(prompt, max_new_tokens=30) for prompt in asked[:6]]
    engine.abort(added[5])
    engine.step()
    engine.abort(added[0])
    for _ in range(3):
        engine.step()
    before = free_slots(target.pool)
    engine.abort(added[1])
    engine.abort(added[1])
    assert free_slots(target.pool) > before
    run_to_the_end(engine)
    assert [r.done.tokens for r in added[2:5]] == expected[2:5] and added[5].done.tokens == []
    for gone, whole in zip(added[:2], expected[:2], strict=True):
        assert gone.over and gone.done.finish == "" and gone.done.tokens == whole[: len(gone.done.tokens)] != whole
    assert target.pool.slots == 0


def test_an_exception_ends_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, asked = good_pair(native=True)
    engine, verify = load(target, draft, depth=2), target.verify

    def fails(*given: Any) -> Any:
        raise KeyboardInterrupt

    engine.add(asked[0], max_new_tokens=9)
    engine.step()
    monkeypatch.setattr(target, "verify", fails)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert target.pool.slots == 0 and engine.step() == []
    monkeypatch.setattr(target, "verify", verify)
    again = engine.add(asked[0], max_new_tokens=9)
    run_to_the_end(engine)
    assert again.done.tokens == engine.generate(asked[0], max_new_tokens=9).tokens


def test_ten_clients_of_a_server_that_come_stream_and_leave() -> None:
    """On an HTTP server of 123 lines. Answers equal `generate` alone, and when all have left, the caches are empty."""
    target = tiny_target(dtype=torch.float64, native=True)
    engine, alone = load(target, tiny_draft(target), depth=3), load(target)
    asked, failures = prompts(30, longest=30, seed=8), []

    def client(number: int) -> None:
        draw = random.Random(number)
        try:
            for i in range(number, 30, 10):
                time.sleep(0.02 * draw.random())
                options = dict(max_new_tokens=draw.randint(3, 40), temperature=draw.choice([0.0, 0.8]), request=i)
                leaves = draw.choice([None, None, 1, 2])
                pieces = ask(address, leaves, prompt=asked[i], **options)
                expected = alone.generate(asked[i], **options)
                tokens = [token for piece in pieces for token in piece["tokens"]]
                text = "".join(piece["text"] for piece in pieces)
                if leaves is None:
                    assert (tokens, text) == (expected.tokens, expected.text)
                assert expected.tokens[: len(tokens)] == tokens and expected.text.startswith(text)
        except BaseException as e:
            failures.append(e)

    with serving(engine) as address:
        with pytest.raises(ValueError, match="400"):
            ask(address, prompt=[])
        clients = [threading.Thread(target=client, args=[number]) for number in range(10)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(120)
        end = time.monotonic() + 60
        while target.pool.slots and time.monotonic() < end:
            time.sleep(0.01)
        assert not failures and target.pool.slots == 0


def test_the_parts_of_a_prompt_take_a_set_time_on_a_gpu() -> None:
    """By the speed of the part before; the first part is short. A CPU, and a target that cannot, read no parts."""

    def tokens(device: str, speed: float, parts: bool = True) -> int:
        target = SimpleNamespace(device=torch.device(device), prefills_in_parts=parts)
        return Batch._part_tokens(SimpleNamespace(target=target, prefill_speed=speed))

    assert tokens("cuda", 0.0) == FIRST_PART
    assert [tokens("cuda", speed) for speed in (1.0, 20_000.0, 1e9)] == [LEAST_PART, STALL * 20_000, PREFILL_TOKENS]
    assert tokens("cpu", 20_000.0) == tokens("cuda", 20_000.0, parts=False) == PREFILL_TOKENS


@pytest.mark.parametrize("first_drafts", [True, False])
@pytest.mark.parametrize("drafts", [True, False])
def test_a_long_prompt_is_read_between_rounds(
    drafts: bool, first_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """In parts, while requests run, in the same batch or another, to the same tokens; also if it is aborted between two
    parts."""
    target, draft, asked = good_pair(native=True)
    engine, alone = load(target, draft, depth=2), load(target)
    long = [t % 400 for t in range(3, 203)]
    expected = [alone.generate(p, max_new_tokens=40).tokens for p in (asked[0], long)]
    monkeypatch.setattr(Batch, "_part_tokens", lambda self: 16)
    for abort in (False, True):
        first = engine.add(asked[0], max_new_tokens=40, speculate=first_drafts)
        engine.step()
        second = engine.add(long, max_new_tokens=40, speculate=drafts)
        rounds = [engine.step() for _ in range(6)]
        assert rounds == [[first]] * 6, "a round between each two parts"
        if abort:
            engine.abort(second)
        run_to_the_end(engine)
        assert first.done.tokens == expected[0] and (abort or second.done.tokens == expected[1])
        assert target.pool.slots == 0
