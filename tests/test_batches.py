"""Requests decoded together: each answer is the one that its prompt gets when decoded alone."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fledge.decode import batch as batch_module
from fledge.decode import scheduler
from fledge.decode.batch import Batch
from fledge.decode.draft_size import NOTHING
from fledge.decode.engine import Completion, Engine
from fledge.decode.load import load
from fledge.decode.propose import Proposer
from fledge.decode.rounds import RoundState
from fledge.drafts import kv_cache
from fledge.drafts.kv_cache import KVCache, SlotPool, TreeRows
from fledge.targets import cache as cache_module
from fledge.targets.cache import GrowingLayer, TargetCache
from fledge.targets.native import NativeTarget
from fledge.targets.transformers import TransformersTarget
from fledge.types import Prompt, Sampling, Verdict
from support.decoding import SAMPLINGS, Remembers, assert_same, prompts
from support.mutations import replace_function
from support.targets import BOTH_IMPLEMENTATIONS, P_EAGLE, SLIDING, exact_target, tiny_draft, tiny_target
from support.trees import SHAPES, good_pair

WAYS: dict[str, dict[str, Any]] = {
    "chain": dict(depth=4),
    "chain, confidence": dict(depth=6, confidence=0.05),
    "chain, unstable": dict(depth=4, stable=False),
    "tree": dict(mode="tree", depth=4, nodes=20, width=4),
    "tree, unstable": dict(mode="tree", depth=4, nodes=20, width=4, stable=False),
    "shape": dict(mode="tree", shape=SHAPES["mixed"]),
}


def alone(engine: Engine, asked: list[list[int]], **options: Any) -> list[Completion]:
    return [engine.generate(p, request=i, **options) for i, p in enumerate(asked)]


def accepted(done: list[Completion]) -> list[list[tuple[int, int]]]:
    return [[(r.drafted, r.accepted) for r in c.trace.rounds] for c in done]


@functools.cache
def answers(way: str | None, batch: int | None, native: bool) -> list[Completion]:
    """The answers to prompts of several lengths, which end at different times: with a draft, or without (None), and
    together, or each alone (None)."""
    target, draft, asked = good_pair(native=native)
    engine = load(target, draft, **WAYS[way]) if way else load(target)
    asked, options = [*asked, *prompts(4, seed=5)], dict(max_new_tokens=25)
    return alone(engine, asked, **options) if batch is None else engine.generate_all(asked, batch=batch, **options)


@pytest.mark.parametrize(("batch", "native"), [(2, False), (3, False), (16, False), (3, True)])
@pytest.mark.parametrize("way", WAYS)
def test_each_answer_is_as_alone(way: str, batch: int, native: bool) -> None:
    """Tokens, text and rounds are those of the prompt alone, and waiting requests take the free places."""
    together, one = answers(way, batch, native), answers(way, None, native)
    for a, b in zip(together, one, strict=True):
        assert_same(a, b)
        assert a.text == b.text
    assert accepted(together) == accepted(one)
    plain = answers(None, batch, native)
    assert [c.tokens for c in plain] == [c.tokens for c in one] and not any(c.trace.rounds for c in plain)


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("kind", SLIDING)
@pytest.mark.parametrize("way", ["chain", "tree"])
def test_sliding_windows(kind: str, way: str, native: bool) -> None:
    target = tiny_target(dtype=torch.float64, native=native, **SLIDING[kind])
    engine = load(target, tiny_draft(target), **WAYS[way])
    asked = [(p * 8)[:n] for p, n in zip(prompts(5, seed=3), (3, 40, 17, 60, 1), strict=True)]
    for a, b in zip(
        engine.generate_all(asked, max_new_tokens=20), alone(engine, asked, max_new_tokens=20), strict=True
    ):
        assert_same(a, b)


@pytest.mark.parametrize(("memory", "native"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("way", ["chain", "tree"])
def test_sampled(name: str, way: str, memory: bool, native: bool) -> None:
    """Each request has its own random draws, and its logits processors see its own prefix."""
    target, draft, asked = good_pair(native=native)
    engine = load(target, draft, **WAYS[way])
    sampling = [Sampling(**SAMPLINGS[name], processors=(Remembers(),) if memory else ()) for _ in range(9)]
    together = engine.generate_all(asked, max_new_tokens=20, sampling=sampling[-1], batch=4)
    for i, (p, done) in enumerate(zip(asked, together, strict=True)):
        assert_same(done, engine.generate(p, request=i, max_new_tokens=20, sampling=sampling[i]))


@pytest.mark.parametrize(("memory", "native"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("draft_rule", ["coupled", "sample"])
@pytest.mark.parametrize("confidence", [0.0, 0.05])
def test_each_has_its_own_sampling(confidence: float, draft_rule: str, memory: bool, native: bool) -> None:
    """Greedy and sampled requests, with and without filters, penalties and processors, are decoded together as alone,
    in batches whose members change."""
    target, draft, asked = good_pair(native=native)
    engine = load(target, draft, depth=4, confidence=confidence)

    def samplings() -> list[Sampling]:
        several = [{}, *SAMPLINGS.values()]
        return [
            Sampling(
                **several[i % 8] | dict(seed=i), draft=draft_rule, processors=[Remembers()] * (memory and i % 3 == 1)
            )
            for i in range(len(asked))
        ]

    numbers = [5 * i for i in range(len(asked))]
    together = engine.generate_all(asked, max_new_tokens=20, sampling=samplings(), request=numbers, batch=5)
    for p, done, number, sampling in zip(asked, together, numbers, samplings(), strict=True):
        alone = engine.generate(p, request=number, max_new_tokens=20, sampling=sampling)
        assert_same(done, alone)
        assert accepted([done]) == accepted([alone])


def test_samplings_that_do_not_fit() -> None:
    target, draft, asked = good_pair()
    engine, drawn = load(target, draft, depth=4), Sampling(temperature=1.0, draft="sample")
    with pytest.raises(ValueError, match="sampling has 2 values for 3 prompts; give one for all prompts, or a list"):
        engine.generate(asked[:3], sampling=[Sampling()] * 2)
    with pytest.raises(ValueError, match="request has 4 values for 3 prompts; give the first prompt's number, or a"):
        engine.generate(asked[:3], request=[1, 2, 3, 4])
    with pytest.raises(ValueError, match="some have draft='greedy' and some draft='sample'; use one of them for all"):
        engine.generate(asked[:2], sampling=[Sampling(), drawn])
    with pytest.raises(
        TypeError, match=r"sampling must be a fledge\.Sampling, or a list of them, not a value of type d"
    ):
        engine.generate(asked[:2], sampling=[Sampling(), {}])
    with pytest.raises(ValueError, match=r"give sampling=Sampling\(\.\.\) or temperature, not both"):
        engine.generate(asked[:2], sampling=[Sampling()] * 2, temperature=1.0)
    with pytest.raises(TypeError, match=r"sampling must be a fledge\.Sampling, not a value of type list"):
        engine.generate(asked[0], sampling=[Sampling()])
    tree = load(target, draft, mode="tree", depth=3, nodes=9)
    with pytest.raises(ValueError, match="sampled drafts need a chain"):
        tree.generate(asked[:2], sampling=[Sampling(draft="sample"), drawn])


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("confidence", [0.0, 0.05])
def test_sampled_drafts(confidence: float, native: bool) -> None:
    """With sampled drafts, each request has its own draws, for draft and target, also if chain lengths differ."""
    target, draft, asked = good_pair(native=native)
    engine = load(target, draft, depth=4, confidence=confidence)
    options = dict(max_new_tokens=25, sampling=Sampling(temperature=0.8, draft="sample", seed=3))
    together, one = engine.generate_all(asked, batch=5, **options), alone(engine, asked, **options)
    assert [c.tokens for c in together] == [c.tokens for c in one]
    assert accepted(together) == accepted(one)


def test_stops() -> None:
    """Each request ends at its own stop token or stop string, while the others continue."""
    target, draft, asked = good_pair()
    engine = load(target, draft, depth=4)
    free = engine.generate_all(asked, max_new_tokens=30)
    words = [c.text[len(c.text) // 2 :][:2] for c in free]
    options = dict(max_new_tokens=30, stop=[w for w in words[:2] if w])
    together, one = engine.generate_all(asked, batch=3, **options), alone(engine, asked, **options)
    assert [(c.text, c.finish, c.tokens) for c in together] == [(c.text, c.finish, c.tokens) for c in one]
    assert len({len(c.tokens) for c in together}) > 1


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 399), min_size=1, max_size=30), min_size=1, max_size=7),
    st.integers(1, 5), st.integers(1, 12), st.booleans(), st.booleans(),
)  # fmt: skip
def test_any_prompts(asked: list[list[int]], batch: int, new: int, tree: bool, native: bool) -> None:
    target = exact_target(native)
    how = dict(mode="tree", nodes=9, width=3) if tree else {}
    engine = load(target, tiny_draft(target, draft_vocab_size=150), depth=3, **how)
    options = dict(max_new_tokens=new)
    for a, b in zip(engine.generate_all(asked, batch=batch, **options), alone(engine, asked, **options), strict=True):
        assert_same(a, b)


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("most", [1, 20, 40])
def test_prompts_are_read_together_and_apart(most: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers do not depend on how many prompts one prefill pass holds. A request with one new token ends right
    after prefill."""
    target, draft, asked = good_pair(native=native)
    engine = load(target, draft, depth=3)
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS", most)
    asked = [[7], *asked, [8], [9, 10]]
    together = engine.generate_all(asked, batch=5, max_new_tokens=6)
    assert [c.tokens for c in together] == [c.tokens for c in alone(engine, asked, max_new_tokens=6)]
    assert all(len(c.tokens) == 1 for c in engine.generate_all(asked, batch=5, max_new_tokens=1))


@pytest.mark.parametrize(("native", "passes"), [(True, [[30, 2, 3, 4], [30]]), (False, [[30], [2, 3, 4], [30]])])
def test_the_tokens_of_a_prefill_pass(native: bool, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted over all prompts, with padding where a target pads."""
    target, _, _ = good_pair(native=native)
    engine, seen = load(target), []
    engine.generate_all([[5], [6]], max_new_tokens=1)  # the first call checks what the target supports
    monkeypatch.setattr(batch_module, "PREFILL_TOKENS", 40)
    prefill = target.prefill
    monkeypatch.setattr(target, "prefill", lambda p, *more: seen.append([*map(len, p)]) or prefill(p, *more))
    engine.generate_all([[5] * n for n in (30, 2, 3, 4, 30)], batch=5, max_new_tokens=2)
    assert seen == passes


def watch_after_dismissals(monkeypatch: pytest.MonkeyPatch, watch: Callable[[Batch], int]) -> list[int]:
    """Returns a list to which `watch` of a batch is added when complete requests have left it."""
    seen, dismiss = [], Batch._dismiss

    def watched(self: Batch) -> None:
        dismiss(self)
        if self.running:
            seen.append(watch(self))

    monkeypatch.setattr(Batch, "_dismiss", watched)
    return seen


def test_a_transformers_cache_shrinks_when_a_long_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a long request ends, the target's cache shrinks while the others continue, and the answers stay the same."""
    target, draft, asked = good_pair()
    engine = load(target, draft, **WAYS["chain"])
    monkeypatch.setattr(cache_module, "MIN_CAPACITY", 8)
    seen = watch_after_dismissals(monkeypatch, lambda batch: batch.cache.layers[0].buffers[0].shape[-2])
    asked = [[5] * 400, *asked, *asked]
    together = engine.generate_all(asked, batch=4, max_new_tokens=12)
    assert max(seen) > 400 and seen[-1] < 200
    assert [c.tokens for c in together] == [c.tokens for c in alone(engine, asked, max_new_tokens=12)]


@pytest.mark.parametrize("way", ["chain", "tree, unstable"])
def test_segments_of_ended_requests_are_used_again(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests, one after the other in the places of a batch, need the slots of the longest that are decoded
    together, in the pools of draft and target. Where one ended, the next one finds old values, and its answer stays the
    same."""
    _, draft, asked = good_pair()
    target = tiny_target(dtype=torch.float64, native=True)  # no other test has used its pool
    engine = load(target, draft, **WAYS[way])
    monkeypatch.setattr(kv_cache, "MIN_SLOTS", 8)
    asked = [[5] * 400, *6 * asked]
    seen = watch_after_dismissals(monkeypatch, lambda batch: max(batch.cache.pool.slots, batch.proposer.pool.slots))
    together = engine.generate_all(asked, batch=4, max_new_tokens=12)
    # at most 50 slots of a segment are for a round, and a pool grows by a quarter at least
    longest = 1.25 * (400 + 12 + 3 * (12 + 12) + 4 * 50)
    assert 400 < max(seen) < longest < sum(map(len, asked)) + 12 * len(asked)
    assert [c.tokens for c in together] == [c.tokens for c in alone(engine, asked, max_new_tokens=12)]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[SlotPool]:
    """All pools that are made in the test."""
    made: list[SlotPool] = []
    replace_function(monkeypatch, SlotPool, "__init__", lambda begin, pool, *of: made.append(pool) or begin(pool, *of))
    return made


@pytest.mark.parametrize("way", [*WAYS, "no draft"])
def test_nothing_is_left_in_the_pools(way: str, pools: list[SlotPool]) -> None:
    """After requests that end by stop tokens, stop strings and lengths, or right after their prompt, in several
    batches, all segments are free, and so is their memory."""
    target = tiny_target(native=True)
    engine = load(target, None if way == "no draft" else tiny_draft(target), **WAYS.get(way, {}))
    asked = prompts(9, seed=4)
    free = engine.generate_all(asked, batch=3, max_new_tokens=20)
    target.model.generation_config.eos_token_id = [free[0].tokens[7]]
    engine.generate_all(asked, batch=3, max_new_tokens=20, stop=[c.text[5:7] for c in free if c.text[5:7]])
    engine.generate_all([*asked, [5] * 450], batch=4, max_new_tokens=1)
    engine.generate_all([*asked, [5] * 450], batch=4, max_new_tokens=3)
    list(engine.stream(asked[0], max_new_tokens=9))
    assert target.pool in pools and len(pools) > (way != "no draft")
    assert [pool.slots for pool in pools] == [0] * len(pools)


def test_an_interrupted_exchange_frees_each_segment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests go on in a batch without a draft, and an exception comes between (Ctrl-C, or no memory), the pool
    has no free slots twice, which two later requests would share."""
    target = tiny_target(dtype=torch.float64, native=True)
    alone, asked = load(target), prompts(6)
    expected = [c.tokens for c in alone.generate_all(asked, max_new_tokens=20)]
    other = alone.stream(asked[0], max_new_tokens=400)
    next(other)  # keeps the pool
    engine = load(target, tiny_draft(target), depth="auto")
    monkeypatch.setattr(engine.chooser, "choose", lambda requests, size: NOTHING)
    take_over, new_cache = Batch.take_over, target.new_cache

    def refuse(sizes: Sequence[int] = ()) -> KVCache:
        raise KeyboardInterrupt

    def interrupted(batch: Batch, drafting: Batch) -> Any:
        monkeypatch.setattr(target, "new_cache", refuse)
        return take_over(batch, drafting)

    monkeypatch.setattr(Batch, "take_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate_all([[*prompt, *[7] * i] for i, prompt in enumerate(asked)], max_new_tokens=20, batch=3)
    monkeypatch.setattr(target, "new_cache", new_cache)
    free = sorted(target.pool._free)
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(free))
    assert [c.tokens for c in alone.generate_all(asked, max_new_tokens=20)] == expected
    other.close()


@pytest.mark.parametrize(
    ("owner", "name"), [(Proposer, "append"), (KVCache, "append"), (KVCache, "select")], ids=["draft", "join", "select"]
)
def test_a_kept_batch_is_empty_after_an_exception(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where batches are kept with their graphs for the next requests."""
    monkeypatch.setattr(batch_module, "can_capture", lambda target, drafter: True)
    monkeypatch.setattr(Batch, "_replays", lambda batch: False)
    target = tiny_target(dtype=torch.float64, native=True)
    engine, prompt = load(target, tiny_draft(target), depth=3), prompts(1)[0]
    expected = engine.generate(prompt, max_new_tokens=12).tokens
    for at in range(4):
        calls, whole = itertools.count(), getattr(owner, name)

        def once(*given: Any, calls: Any = calls, at: int = at, whole: Any = whole) -> Any:
            if next(calls) == at:
                raise torch.OutOfMemoryError("no memory")
            return whole(*given)

        monkeypatch.setattr(owner, name, once)
        with suppress(torch.OutOfMemoryError):
            engine.generate(prompt, max_new_tokens=12)
        monkeypatch.setattr(owner, name, whole)
        assert all(not batch.cache.segments and not batch.running for batch in engine._idle_batches[True])
        assert engine.generate(prompt, max_new_tokens=12).tokens == expected


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
@pytest.mark.parametrize("way", [way for way in WAYS if "unstable" not in way])
def test_rows_stay_in_their_segments(way: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request writes or moves slots outside its own segment, of target and draft, up to the end of its answer."""
    target, draft, asked = good_pair(native=True)
    tried = [WAYS[way]]
    if method == "peagle":
        draft = tiny_draft(target, **P_EAGLE)
        tried = [{name: value for name, value in WAYS[way].items() if name != "width"}]  # whose trees have no width
    else:
        tried.append(WAYS[way] | dict(stable=False))
    writes, moves = 0, 0

    def check(cache: KVCache, slot_BR: Tensor) -> None:
        for (first, size), slots in zip(cache.segments, slot_BR.tolist(), strict=True):
            assert first <= min(slots) and max(slots) < first + size

    def written(begin: Any, rows: TreeRows, cache: KVCache, n: int, *given: Any, **options: Any) -> None:
        nonlocal writes
        begin(rows, cache, n, *given, **options)
        check(cache, rows.slot_M.view(len(cache.segments), n))
        writes += 1

    def moved(keep: Any, cache: KVCache, path_BR: Tensor | None, count_B: Tensor) -> None:
        nonlocal moves
        if path_BR is not None:
            first_B1 = (cache.start_B + cache.length_B)[:, None]
            check(cache, first_B1 + path_BR)
            check(cache, first_B1 + torch.arange(path_BR.shape[1]))
            moves += 1
        keep(cache, path_BR, count_B)

    replace_function(monkeypatch, TreeRows, "__init__", written)
    replace_function(monkeypatch, KVCache, "keep", moved)
    for options, new in itertools.product(tried, (2, 3, 9, 30)):
        load(target, draft, **options).generate_all(asked, batch=4, max_new_tokens=new)
    assert writes and (moves or "chain" in way)


class Fails:
    """A logits processor that fails at its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the third call")
        return scores


@pytest.mark.parametrize("way", [*WAYS, "no draft"])
@pytest.mark.parametrize("end", ["closed", "failed", "failed in the prompt"])
def test_abandoned_requests_leave_nothing_in_the_target(way: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that its consumer closes, and decoding that raises, free their segments in the target's pool, which
    other engines use too. On a GPU, a closed stream's batch keeps one for its graphs, which the next stream uses."""
    target = tiny_target(native=True)
    engine = load(target, None if way == "no draft" else tiny_draft(target), **WAYS.get(way, {}))
    if end == "closed":
        held = []
        for _ in range(2):
            stream = engine.stream([5, 6, 7], max_new_tokens=40, into=(so_far := Completion()))
            piece = next(stream)
            stream.close()
            assert piece and so_far.text == target.tokenizer.decode(so_far.tokens, skip_special_tokens=True)
            assert so_far.finish == ""
            held.append(target.pool.slots)
        assert held[0] == held[1] and (held[0] == 0 or target.device.type == "cuda")
    else:
        engine.generate_all(prompts(3), max_new_tokens=2)  # the first call checks what the target supports
        if end == "failed in the prompt":
            monkeypatch.setattr(NativeTarget, "check_numbers", lambda *_: 1 / 0)
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            engine.generate_all(prompts(3), max_new_tokens=20, sampling=Sampling(processors=[Fails()]))
        assert target.pool.slots == 0


def test_no_memory_for_the_draft_leaves_nothing_in_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(native=True)
    engine = load(target, tiny_draft(target), depth=4)

    def reserve(real: Callable[..., None], pool: SlotPool, slots: int) -> None:
        if pool is not target.pool:
            raise torch.OutOfMemoryError("as on a full GPU")
        real(pool, slots)

    replace_function(monkeypatch, SlotPool, "reserve", reserve)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            engine.generate([5, 6, 7], max_new_tokens=40)
        assert target.pool.slots == 0


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that were created in this mode, and their peak. Views of `known` tensors, which
    were there before, count nothing."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {x.untyped_storage()._cdata: 0 for x in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)
        self.peak = max(self.peak, self.now)
        return out

    def _forget(self, storage: int) -> None:
        self.now -= self.sizes.pop(storage)


def peak_of(engine: Engine, asked: list[list[int]], **options: Any) -> tuple[int, list[Completion]]:
    with LiveBytes(engine.draft.parameters()) as counted:
        done = engine.generate_all(asked, **options)
    return counted.peak, done


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize(("way", "place"), [("chain", 0), ("tree", 12)])
def test_a_long_prompt_does_not_enlarge_the_caches_of_short_ones(
    way: str, place: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt among short ones takes less than twice the memory of decoding both apart, wherever it stands in the
    list, and every answer stays the same."""
    target, draft, _ = good_pair(native=native)
    engine, options = load(target, draft, **WAYS[way]), dict(max_new_tokens=6)
    monkeypatch.setattr(cache_module, "MIN_CAPACITY", 8)
    monkeypatch.setattr(kv_cache, "MIN_SLOTS", 8)
    monkeypatch.setattr(scheduler, "SMALL_BATCH_SLOTS", 64)
    short, long = prompts(20, longest=6, seed=2), [5] * 450
    engine.generate_all(short[:2], **options)  # the first call checks what the target supports
    apart = peak_of(engine, short, batch=16, **options)[0] + peak_of(engine, [long], **options)[0]
    asked = [*short[:place], long, *short[place:]]
    together, done = peak_of(engine, asked, batch=16, **options)
    assert together < 2 * apart
    assert [c.tokens for c in done] == [c.tokens for c in alone(engine, asked, **options)]
    monkeypatch.setattr(scheduler, "SMALL_BATCH_SLOTS", 1 << 20)
    in_one = peak_of(engine, asked, batch=16, **options)[0]
    if native:
        assert in_one < 2 * apart, "segments have the lengths of their requests"
    else:
        assert in_one > 4 * apart, "in a single batch it takes much more memory"


def test_prompts_of_like_length_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts share one batch if its cache has at most twice the slots that they need; otherwise there are several."""
    target, draft, _ = good_pair()
    engine, batches = load(target, draft, depth=3), []
    monkeypatch.setattr(scheduler, "SMALL_BATCH_SLOTS", 64)
    begin = Batch.__init__
    monkeypatch.setattr(Batch, "__init__", lambda self, *of: batches.append(1) or begin(self, *of))
    engine.generate_all([[5] * n for n in range(40, 140, 10)], max_new_tokens=12)
    assert len(batches) == 1
    engine.generate_all([[5] * n for n in (10, 10, 10, 450)], max_new_tokens=12)
    assert len(batches) == 3


@pytest.mark.parametrize("change", ["select", "append"])
def test_a_cache_moves_layer_by_layer(change: str) -> None:
    """While a cache is copied, at most one layer's old buffers are alive besides the new ones."""
    target = exact_target()
    with LiveBytes() as counted:
        cache, other = target.new_cache([320, 220]), target.new_cache([320])
        target.prefill([Prompt([5] * 300), Prompt([7] * 200)], cache)
        target.prefill([Prompt([9] * 300)], other)
        old = sum(b.nbytes for b in cache.layers[0].buffers)
        before = counted.peak = counted.now
        cache.select([0, 1]) if change == "select" else cache.append(other)
        new = sum(b.nbytes for b in cache.layers[0].buffers)
    assert counted.peak - before <= len(cache.layers) * (new - old) + 2 * new < len(cache.layers) * new


def test_neighbours_do_not_matter() -> None:
    """A prompt's answer does not depend on the other prompts of its batch or on their order."""
    target, draft, asked = good_pair()
    engine, draw = load(target, draft, mode="tree", depth=4, nodes=20), random.Random(0)
    plain = {tuple(p): engine.generate(p, max_new_tokens=20).tokens for p in asked}
    for _ in range(3):
        draw.shuffle(asked)
        for p, done in zip(asked, engine.generate_all(asked, max_new_tokens=20, batch=4), strict=True):
            assert done.tokens == plain[tuple(p)]


def test_none_and_too_long() -> None:
    target = exact_target()
    engine = load(target, tiny_draft(target))
    assert engine.generate_all([]) == []
    with pytest.raises(ValueError, match="has a context of"):
        engine.generate_all([[5, 6], [5] * 600], max_new_tokens=4)
    with pytest.raises(ValueError, match="batch is 0"):
        engine.generate_all([[5]], batch=0)


def test_a_target_that_mixes_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = exact_target()
    engine = load(target, tiny_draft(target))
    placed = TransformersTarget._positions_and_masks

    def mixing(self, tree, cache):
        inputs = placed(self, tree, cache)
        return {**inputs, "attention_mask": torch.zeros_like(inputs["attention_mask"])}

    monkeypatch.setattr(TransformersTarget, "_positions_and_masks", mixing)
    with pytest.raises(ValueError, match="each request must see only its own text; decode them one by one"):
        engine.generate_all([[5, 6], [7, 8, 9]], batch=2)


def start_all_at_one_place(open_slots: Any, cache: TargetCache, n: int) -> Tensor:
    slot_BN = open_slots(cache, n)
    wrong = slot_BN.amax(0, keepdim=True).expand_as(slot_BN)
    for layer in cache.layers:
        layer.next_slot_BN = wrong
    return wrong


def see_everything(placed: Any, *given: Any) -> dict[str, Any]:
    inputs = placed(*given)
    return inputs | {"attention_mask": torch.zeros_like(inputs["attention_mask"])}


def go_on_from_the_first_requests_states(
    after: Any, state: RoundState, verdict: Verdict, aux_BNAD: Tensor, **how: bool
) -> RoundState:  # fmt: skip
    return after(state, verdict, aux_BNAD[:1].expand_as(aux_BNAD), **how)


def write_at_one_place(begin: Any, rows: TreeRows, cache: KVCache, n: int, *given: Any, **options: Any) -> None:
    begin(rows, cache, n, *given, **options)
    rows.slot_M = rows.slot_M[:n].repeat(len(cache.segments))


def see_beyond_its_own(read: Any, rows: TreeRows, *given: Any, **options: Any) -> Tensor:
    right, longest = rows.cache, copy.copy(rows.cache)
    longest.length_B = right.length_B.amax().expand_as(right.length_B)
    rows.cache = longest
    out = read(rows, *given, **options)
    rows.cache = right
    return out


def keep_the_first_request(select: Any, cache: TargetCache | KVCache, sequences: Sequence[int]) -> None:
    select(cache, [0] * len(sequences))


def keep_the_first_requests_state(select: Any, state: RoundState, index_B: Tensor) -> RoundState:
    return select(state, 0 * index_B)


def write_the_first_requests_states_alone(
    update: Any, layer: GrowingLayer, keys: Tensor, values: Tensor, *more: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    first = torch.zeros(keys.shape[0], 1, 1, 1, dtype=keys.dtype)
    first[0] = 1
    one = layer.next_slot_BN is None
    return update(layer, keys if one else keys * first, values if one else values * first, *more, **options)


MUTATIONS = [  # (owner of the function, its name, its replacement)
    (TargetCache, "allocate", start_all_at_one_place),
    (TransformersTarget, "_positions_and_masks", see_everything),
    (RoundState, "after", go_on_from_the_first_requests_states),
    (RoundState, "select", keep_the_first_requests_state),
    (TreeRows, "__init__", write_at_one_place),
    (TreeRows, "read", see_beyond_its_own),
    (TargetCache, "select", keep_the_first_request),
    (KVCache, "select", keep_the_first_request),
    (GrowingLayer, "update", write_the_first_requests_states_alone),
]
CASES = [(*m, False) for m in MUTATIONS] + [(*m, True) for m in MUTATIONS if m[0] in (KVCache, TreeRows)]
IDS = [f"{owner.__name__}: {wrong.__name__}{', native' * native}" for owner, _, wrong, native in CASES]


@pytest.mark.parametrize(("owner", "name", "wrong", "native"), CASES, ids=IDS)
def test_breaking_it_is_noticed(
    owner: Any, name: str, wrong: Any, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mistake is noticed; one in caches of segments both where draft and target use them and in the draft's alone,
    of which only the accepted tokens tell."""
    target, draft, asked = good_pair()
    if native:
        target = tiny_target(dtype=torch.float64, native=True)  # whose pool the mistake may damage
    engine = load(target, draft, depth=4)
    asked = [*asked[:4], [9] * 30, [8]]
    one = alone(engine, asked, max_new_tokens=25)
    replace_function(monkeypatch, owner, name, wrong)
    monkeypatch.setattr(TransformersTarget, "check_masks", lambda self, requests=1: None)
    try:
        broken = engine.generate_all(asked, batch=3, max_new_tokens=25)
    except (AssertionError, KeyError, IndexError, RuntimeError):
        return
    assert [c.tokens for c in broken] != [c.tokens for c in one] or accepted(broken) != accepted(one)


@pytest.mark.gpu
@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu(way: str, native: bool) -> None:
    """On a GPU in float64, each answer is the one that the target alone gives to its prompt."""
    made, draft, asked = good_pair()
    kind = NativeTarget if native else TransformersTarget
    target = kind(copy.deepcopy(made.model).to("cuda"), made.tokenizer)
    engine = load(target, copy.deepcopy(draft).to("cuda"), **WAYS[way])
    together = engine.generate_all(asked, batch=4, max_new_tokens=25)
    for done, prompt in zip(together, asked, strict=True):
        assert_same(done, engine.generate(prompt, max_new_tokens=25, speculate=False))
