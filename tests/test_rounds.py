"""Captured rounds: requests come and go, a round is launched ahead of its results, and the tokens stay the same.

On the CPU, a graph is replaced by running what was captured again (`rerun`), into the tensors of the first run. What
CUDA graphs require beyond that is checked on a GPU by `test_random_settings.py`, and with two GPUs by
`test_two_gpus.py`.
"""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fledge import cli
from fledge.decode import batch as batches
from fledge.decode import engine as engines
from fledge.decode import rounds, scheduler
from fledge.decode.engine import Engine
from fledge.decode.load import load
from fledge.decode.propose import NoDrafter
from fledge.decode.request import Completion
from fledge.decode.rounds import RoundState
from fledge.decode.sampling import BatchSampling
from fledge.decode.scheduler import Prepared, prepare
from fledge.drafts import kv_cache
from fledge.targets.compatibility import connect_draft
from fledge.targets.loading import target_of
from fledge.types import Sampling, Tree, TreeShape
from support.decoding import prompts
from support.sizes import RandomSizes
from support.targets import DFLASH, P_EAGLE, tiny_draft, tiny_target
from support.trees import good_pair, proposer_of

WAYS: dict[str, dict[str, Any]] = {
    "chain": dict(depth=4),
    "chain, unstable": dict(depth=4, stable=False),
    "tree": dict(mode="tree", nodes=12, width=4, depth=4),
    "tree, unstable": dict(mode="tree", nodes=12, width=4, depth=4, stable=False),
    "shape": dict(mode="tree", shape=TreeShape((-1, 0, 0, 1, 1), (0, 0, 1, 0, 1))),
}
ONE_PASS: dict[str, dict[str, Any]] = {
    "one pass": P_EAGLE,
    "block": DFLASH | dict(windows=(6, None)),
    "causal block": DFLASH | dict(block_causal=True),
}


def rerun(work: Callable[[], Any], memory: Any, device: torch.device) -> tuple[Callable[[], None], Any]:
    """Stands in for `rounds.capture` on the CPU."""
    results = work()

    def replay() -> None:
        again = work()
        if isinstance(results, Tree):
            vars(results).pop("_ancestors", None)  # a graph would compute them again
            for name, x in vars(again).items():
                if isinstance(x, torch.Tensor):
                    getattr(results, name).copy_(x)
        elif isinstance(results, torch.Tensor):
            results.copy_(again)

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

    def captured(self: rounds.CapturedRounds, of: rounds.Rounds, size: int, *given: Any) -> None:
        sizes.append(size)
        begin(self, of, size, *given)
        self.replay_draft, self.replay_verify = (
            only_with_its_buffers(self, f) for f in (self.replay_draft, self.replay_verify)
        )

    monkeypatch.setattr(rounds.CapturedRounds, "__init__", captured)
    return sizes


def only_with_its_buffers(made: rounds.CapturedRounds, replay: Callable[[], None]) -> Callable[[], None]:
    """A replay that may only run while the caches have the buffers that it was captured with, whose addresses a graph
    would read."""
    drafter = made.rounds.drafter
    pools = [made.rounds.cache.pool, *([] if drafter.draft is None else [drafter.pool])]
    buffers = [pool.buffer for pool in pools]

    def run() -> None:
        assert all(pool.buffer is x for pool, x in zip(pools, buffers, strict=True)), "the buffer no longer exists"
        replay()

    return run


@pytest.mark.parametrize("way", WAYS)
def test_requests_come_and_go(way: str, captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine requests of different lengths in a batch of three get the tokens of decoding without a draft, greedy,
    sampled and penalized side by side, and a graph is captured for each number of places and kind of sampling once."""
    monkeypatch.setattr(scheduler, "BEGINNING", 0.0)  # the same requests run together in both calls
    target, draft, _ = good_pair(native=True)
    engine = load(target, draft, **WAYS[way])
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


@pytest.mark.parametrize("way", [dict(depth="auto"), dict(mode="tree", nodes="auto", width=4)], ids=["chain", "tree"])
def test_another_size_is_drafted(way: dict[str, Any], captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of several sizes take turns with the same requests."""
    monkeypatch.setattr(batches, "HELD", 3)
    target, draft, _ = good_pair(native=True)
    engine = load(target, draft, **way)
    asked = prompts(5, longest=14, seed=2)
    plain = engine.generate_all(asked, max_new_tokens=30, speculate=False)
    for seed in range(2):
        RandomSizes(engine, seed, rest=0)
        fast = engine.generate_all(asked, max_new_tokens=30, batch=3)
        assert [c.tokens for c in fast] == [c.tokens for c in plain]
        done = [r for c in fast for r in c.trace.rounds]
        assert all(r.t_verify > 0 and r.t_draft > 0 for r in done)
        if way.get("depth") == "auto":  # of trees, which may have less levels than their size allows
            assert len({r.drafted for r in done}) > 2


def pools_of(engine: Engine) -> list[int]:
    """The addresses of the caches of an engine's batches."""
    batches_of = [b for kind in engine._idle_batches.values() for b in kind]
    return [x.data_ptr() for b in batches_of for x in (b.cache.pool.buffer, *b.proposer.buffers())]


@pytest.mark.parametrize("way", [*WAYS, "chain, auto", "tree, auto"])
def test_nothing_is_captured_after_preparing(
    way: str, captured: list[int], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Requests of random lengths come and go, also some without the draft where drafting rests, with the graphs and
    caches that were prepared, to the tokens of decoding without a draft."""
    monkeypatch.setattr(kv_cache, "MIN_SLOTS", 1)
    monkeypatch.setattr(batches, "HELD", 3)
    target, draft, _ = good_pair(native=True)
    drafting = WAYS[way.removesuffix(", auto")]
    if way.endswith(", auto"):
        drafting = drafting | dict(depth="auto") | (dict(nodes="auto") if "nodes" in drafting else {})
    engine = load(target, draft, **drafting)
    asked = prompts(18, longest=30, seed=2)
    plain = load(target).generate_all(asked, batch=1, max_new_tokens=20)
    shown: list[Any] = []

    @contextmanager
    def count(label: str, total: int) -> Iterator[Callable[[], None]]:
        shown.append(total)
        yield lambda: shown.append(label)

    captured.clear()
    prepared = engine.prepare(3, tokens=50, count=count)
    sizes = len(engine.drafting.sizes)
    kinds = 3 * (1 if engine.chooser is None else sizes + 1)  # of 1, 2 and 4 places; without a draft at rest
    assert len(captured) == prepared.rounds == kinds and set(captured) == {1, 2, 4}
    assert shown == [kinds, *["capturing rounds"] * kinds] and prepared.bytes == 0 < prepared.seconds
    assert str(prepared).startswith(f"captured {kinds} rounds in ")
    before, count_before = pools_of(engine), len(captured)
    for seed in range(2):
        if engine.chooser is not None:
            RandomSizes(engine, seed)
        fast = engine.generate_all(asked, batch=3, max_new_tokens=20)
        assert [c.tokens for c in fast] == [c.tokens for c in plain]
        assert engine.generate(asked[4], max_new_tokens=20).tokens == plain[4].tokens
    assert len(captured) == count_before and pools_of(engine) == before
    assert engine.prepare(3, tokens=50).rounds == 0
    assert engine.prepare(3, tokens=50, temperature=1.0).rounds == kinds
    longer = engine.generate_all([p * 4 for p in asked[:6]], batch=3, max_new_tokens=40)
    assert [c.tokens for c in longer] == [
        c.tokens for c in load(target).generate_all([p * 4 for p in asked[:6]], batch=3, max_new_tokens=40)
    ]
    assert pools_of(engine) != before, "the caches have grown"


def test_checks_end_no_graphs(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of a target use separate caches: the prepared buffers, whose addresses are in the graphs, do not grow."""
    target, draft, _ = good_pair(native=True)
    engine = load(target, draft, depth="auto")
    engine.prepare(1, tokens=20)
    before = pools_of(engine)

    def refuse(sizes: Any) -> None:
        raise AssertionError("slots of the prepared buffer were asked for")

    monkeypatch.setattr(target.pool, "allocate", refuse)
    target.check_masks(requests=2)
    assert pools_of(engine) == before


def test_several_engines_are_prepared_together(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts and no draft, which share a target: none ends the graphs of another."""
    monkeypatch.setattr(kv_cache, "MIN_SLOTS", 1)
    target, draft, asked = good_pair(native=True)
    engines = [load(target, draft, depth=2), load(target, draft, depth=4)]
    arms = [*((engine, True) for engine in engines), (engines[0], False)]
    done = prepare(arms, 4, tokens=60)
    assert done.rounds == len(captured) == 9
    for engine, speculate in arms:
        engine.generate_all(asked * 3, batch=4, max_new_tokens=10, speculate=speculate)
    assert len(captured) == 9


def test_where_nothing_is_captured_nothing_is_prepared(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, _ = good_pair(native=True)

    def refuse(label: str, total: int) -> Any:
        raise AssertionError("there is nothing to count")

    engine = load(target, draft, depth=2)
    assert engine.prepare(4, processors=[lambda ids, scores: scores], count=refuse) == Prepared()
    monkeypatch.setattr(batches, "can_capture", rounds.can_capture)
    assert load(target, draft, depth=2).prepare(4, count=refuse) == Prepared() and not captured
    tree = load(target, draft, mode="tree", nodes=8, width=2, depth=3)
    for options, error in ((dict(temperature=1.0, draft="sample"), ValueError), (dict(batch=0), ValueError)):
        with pytest.raises(error):
            tree.prepare(**options)
    with pytest.raises(TypeError, match="top_n"):
        tree.prepare(top_n=4)


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_commands_say_what_they_captured(
    command: str, captured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Before the first request, and nothing is captured after that."""
    demo = Path(__file__).parents[1] / "fledge" / "demo"
    words = ["--target", demo / "target", "--draft", demo / "draft", "--depth", 2, "--max-new-tokens", 8]
    if command == "eval":
        (tmp_path / "two.jsonl").write_text('{"text": "What is 2 + 3?"}\n{"text": "Once upon a time"}\n')
        words += ["--prompts", tmp_path / "two.jsonl", "--batch", 2]
    else:
        words += ["--prompt", "What is 2 + 3?"]
    monkeypatch.setattr(sys, "argv", ["fledge", command, *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    said = capsys.readouterr().err
    count = 4 if command == "eval" else 1
    assert (
        f"captured {count} round{'s' * (count > 1)} in " in said
        and "capturing rounds" in said
        and len(captured) == count
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "drafting"),
    [
        ({}, dict(depth=4)),
        ({}, dict(mode="tree", nodes=12, width=4, depth="auto")),
        (ONE_PASS["block"], dict(depth=4)),
        (ONE_PASS["causal block"], dict(mode="tree", nodes="auto", depth=4)),
    ],
)
def test_nothing_is_captured_after_preparing_on_a_gpu(
    kind: dict[str, Any], drafting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny_target()
    target = target_of(made.model.to("cuda", torch.bfloat16), made.tokenizer, implementation="native")
    engine = load(target, tiny_draft(target, **kind).to("cuda"), **drafting)
    prepared = engine.prepare(3, tokens=60, temperature=0.8, top_k=9)
    assert prepared.rounds >= 3 and prepared.bytes > 0

    def refuse(*given: Any) -> None:
        raise AssertionError("a round was captured")

    monkeypatch.setattr(rounds, "capture", refuse)
    for seed in range(3):
        if engine.chooser is not None:
            RandomSizes(engine, seed)
        done = engine.generate_all(
            prompts(14, longest=30, seed=seed), batch=3, max_new_tokens=25, temperature=0.8, top_k=9, seed=seed
        )
        assert all(len(c.tokens) <= 25 for c in done)


def test_a_round_follows_the_one_before_into_another_stream(
    captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller may ask for each piece in another stream. A stream waits for that of the last round, once."""

    class Stream:
        def __init__(self) -> None:
            self.waited: list[Stream] = []

        def wait_stream(self, other: Stream) -> None:
            self.waited.append(other)

    streams = [Stream(), Stream()]
    current = streams[0]
    monkeypatch.setattr(rounds, "current_stream", lambda device: current)
    monkeypatch.setattr(batches, "current_stream", lambda device: current)
    target, draft, _ = good_pair(native=True)
    pieces = load(target, draft, depth=2).stream("one two three", max_new_tokens=40)
    for n in range(6):
        current = streams[n % 2]
        next(pieces)
    assert streams[0].waited == [streams[1]] * 2 and streams[1].waited == [streams[0]] * 3
    pieces.close()


@pytest.mark.gpu
@pytest.mark.parametrize("speculate", [True, False])
def test_each_round_in_another_stream(speculate: bool) -> None:
    """The tokens stay the same where rounds are asked for in two streams by turns, of which one is late."""
    made, draft, asked = good_pair()
    model, draft = (copy.deepcopy(x).to("cuda", torch.float32) for x in (made.model, draft))
    engine = load(target_of(model, made.tokenizer, implementation="native"), draft, depth=4)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for prompt in asked[:3]:
        given: dict[str, Any] = dict(max_new_tokens=30, speculate=speculate)
        expected, done = engine.generate(prompt, **given), Completion()
        pieces = engine.stream(prompt, into=done, **given)
        for n in itertools.count():
            with torch.cuda.stream(streams[n % 2]):
                torch.cuda._sleep(3_000_000 if n % 3 == 0 else 1)  # cycles
                if next(pieces, None) is None:
                    break
        assert done.tokens == expected.tokens


def test_places_take_requests_and_give_them_back() -> None:
    """Large and small tensors of several dtypes, as many requests as places, and fewer, after which the others are
    places without a request."""
    shapes = [((4, 3), torch.int64), ((4,), torch.float32), ((4, rounds.LARGE), torch.float32), ((4, 2), torch.int64)]
    idle = [torch.full(shape, -1, dtype=dtype) for shape, dtype in shapes]
    places = rounds.Places(4, torch.device("cpu"), [x.clone() for x in idle], [])
    for requests in (4, 3):
        theirs = [torch.arange(x[:requests].numel()).view_as(x[:requests]).to(x.dtype) for x in idle]
        places.load(theirs, requests)
        for mine, x in zip(places.tensors, theirs, strict=True):
            assert mine[:requests].equal(x) and bool((mine[requests:] == -1).all())
        assert places.active_B.tolist() == [1] * requests + [0] * (4 - requests)
        back = [torch.zeros_like(x) for x in theirs]
        places.store(back, requests)
        assert all(a.equal(b) for a, b in zip(back, theirs, strict=True))
    kept = [places.tensors[0], *(x + 1 for x in places.tensors[1:])]
    places.keep(kept)
    assert all(a.equal(b) for a, b in zip(places.tensors, kept, strict=True))


@pytest.mark.parametrize("way", [dict(depth=3), dict(mode="tree", depth=3, nodes=60), dict(depth="auto")])
@pytest.mark.parametrize("kind", ONE_PASS)
def test_one_pass_drafts(kind: str, way: dict[str, Any], captured: list[int]) -> None:
    target = tiny_target(dtype=torch.float64, native=True)
    engine = load(target, tiny_draft(target, **ONE_PASS[kind]), **way)
    asked = prompts(5, seed=6)
    fast, plain = (engine.generate_all(asked, batch=2, max_new_tokens=20, speculate=s) for s in (True, False))
    assert captured and [c.tokens for c in fast] == [c.tokens for c in plain]


def test_an_engine_goes_on_after_an_abandoned_stream(captured: list[int]) -> None:
    """A stream that is closed half-way leaves nothing behind in the graphs' places."""
    target, draft, asked = good_pair(native=True)
    engine = load(target, draft, depth=4)
    expected = engine.generate(asked[0], max_new_tokens=30).tokens
    for stop in (1, 3):
        stream = engine.stream(asked[1], max_new_tokens=30)
        for _ in range(stop):
            next(stream)
        stream.close()
        assert engine.generate(asked[0], max_new_tokens=30).tokens == expected


@pytest.mark.parametrize(
    ("draft_device", "dtype", "able"),
    [
        ("cuda:0", "float32", True),
        ("cuda:1", "bfloat16", True),
        ("cpu", "float32", False),
        ("cuda:1", "float64", False),
    ],
)
def test_the_draft_may_be_on_another_gpu(draft_device: str, dtype: str, able: bool) -> None:
    target = SimpleNamespace(implementation="native", device=torch.device("cuda:0"), dtype=torch.bfloat16)
    draft = SimpleNamespace(device=torch.device(draft_device), dtype=getattr(torch, dtype))
    assert rounds.can_capture(target, SimpleNamespace(draft=draft, capturable=True)) == able
    assert not rounds.can_capture(target, SimpleNamespace(draft=draft, capturable=False))
    assert rounds.apart(draft, target.device) == (draft_device != "cuda:0")
    assert not rounds.apart(NoDrafter(), target.device)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies between target and draft as if they were on two devices, and spoils what each leaves on its own while the
    other computes, so that only the copies can be read."""
    left: list[tuple[torch.Tensor, torch.Tensor]] = []
    copy_into = rounds.copy_into

    def cross(copies: Any, values: Any) -> None:
        copy_into(copies, values)
        if isinstance(values, RoundState):  # on the way to the draft
            left[:] = [(x, x.clone()) for x in rounds.tensors_of(values)]
            for x, _ in left:
                x.fill_(3)
        else:
            vars(copies).pop("_ancestors", None)  # a graph would compute them again
            values.token_BN.fill_(3)
            for x, before in left:
                x.copy_(before)

    monkeypatch.setattr(rounds, "apart", lambda drafter, device: drafter.draft is not None)
    monkeypatch.setattr(rounds, "copy_into", cross)


@pytest.mark.parametrize("way", [*WAYS, *ONE_PASS])
def test_two_devices(way: str, captured: list[int], request: pytest.FixtureRequest) -> None:
    """Copies to the draft and back change no token, with greedy, sampled and penalized requests and drafts that are
    drawn."""
    target, draft, _ = good_pair(native=True)
    if way in ONE_PASS:
        draft = tiny_draft(target, **ONE_PASS[way])
    asked = [p for p in prompts(20, longest=14, seed=2) if len(p) > 1][:6]
    drawn = [Sampling(temperature=1.0, seed=2, draft="sample"), Sampling(draft="sample")]
    mixed = [Sampling(), Sampling(temperature=0.7, top_k=9, repetition_penalty=1.2)]
    kinds = [mixed] if WAYS.get(way, {}).get("mode") else [mixed, drawn]
    done: list[list[Any]] = []
    for _ in range(2):
        engine = load(target, draft, **WAYS.get(way, dict(depth=3)))
        done.append([])
        for kind in kinds:
            done[-1] += engine.generate_all(asked, batch=3, sampling=kind * 3, max_new_tokens=20)
        done[-1].append(engine.generate(asked[0], max_new_tokens=20))
        request.getfixturevalue("two_devices")
    one, two = done
    assert [c.tokens for c in one] == [c.tokens for c in two]
    assert [[r.accepted for r in c.trace.rounds] for c in one] == [[r.accepted for r in c.trace.rounds] for c in two]


class OneDevice(TorchDispatchMode):
    """Asserts that all tensors of all operations are on a device."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, torch.Tensor)]
        assert all(x.device == self.device for x in tensors), f"{operation} is not on {self.device} only"
        return found


DRAWN: dict[str, Any] = dict(temperature=1.0, top_k=5, draft="sample")


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("chain", {}), ("chain", DRAWN), ("chain, unstable", {}), ("tree", {}), ("one pass", {}), ("one pass", DRAWN),
        ("block", {}), ("block", DRAWN), ("causal block", {}),
    ],
)  # fmt: skip
def test_each_graph_is_on_one_device(way: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft, which is on a device without values, and the target compute no operation with tensors of both."""
    target = tiny_target(native=True)
    kind = ONE_PASS.get(way, {})
    draft = tiny_draft(target, draft_vocab_size=400 if "block" in way else 100, **kind)
    ids_W = draft.target_ids()
    draft.to("meta")
    layers = connect_draft(draft, target)
    proposer = proposer_of(draft, **WAYS.get(way, dict(depth=3)))
    attention, copy_to = kv_cache.tree_attention, rounds.copy_to

    def to_values(values: Any, device: torch.device) -> Any:
        """Copies to the target, which would be of no values, as chains of token 1."""
        if device.type == "meta":
            return copy_to(values, device)
        ones = {f.name: getattr(values, f.name) for f in fields(values)}
        ones = {name: torch.ones(x.shape, dtype=x.dtype) for name, x in ones.items() if isinstance(x, torch.Tensor)}
        if "parent_BN" in ones:
            ones["parent_BN"] = ones["parent_BN"].cumsum(1) - 2
        return replace(values, **ones)

    def capture(work: Callable[[], Any], memory: Any, device: torch.device) -> tuple[Callable[[], None], Any]:
        with OneDevice(device):
            return work, work()

    # the definition reads lengths on the host
    monkeypatch.setattr(kv_cache, "use_triton", lambda q: q.is_meta)
    monkeypatch.setattr(
        kv_cache, "tree_attention", lambda q, *a, **k: q * 1 if q.device.type == "meta" else attention(q, *a, **k)
    )
    monkeypatch.setattr(rounds, "warm_up", lambda work, device: work())
    monkeypatch.setattr(rounds, "capture", capture)
    monkeypatch.setattr(rounds, "copy_to", to_values)
    monkeypatch.setattr(rounds.Rounds, "target_ids_W", ids_W)
    with torch.inference_mode():
        cache, spare = target.new_cache([50, 50]), (target.new_cache([40]), proposer.new_cache([40]))
        state = RoundState.first(torch.ones(2).long(), torch.ones(2, len(layers), 32), torch.ones(2).long())
        sampling = BatchSampling.of([Sampling(**options)] * 2, [0, 1], "cpu")
        of = rounds.Rounds(target, proposer, layers, cache, state.rows(proposer.levels + 1), sampling)
        made = rounds.CapturedRounds(of, 4, spare, None, ())
    assert made.drafted.token_BN.is_meta and not made.tree.token_BN.is_meta and made.results.shape[0] == 4


@pytest.mark.parametrize("speculate", [True, False])
def test_the_pool_grows_for_a_request_that_does_not_run(
    speculate: bool, captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that ends with its first token makes the pool grow while graphs of the other requests are loaded."""
    target, draft, (one, two, three, *_) = good_pair(native=True)
    long = [t % 400 for t in range(2, 222)]
    first = load(target).generate(long, max_new_tokens=1).tokens
    early = load(target).generate(two, max_new_tokens=9).tokens[-1]  # `long` then begins while `one` is running
    monkeypatch.setattr(type(target), "stop_ids", frozenset([*first, early]))
    asked = [one, two, long, three]
    alone = [load(target).generate(p, max_new_tokens=40).tokens for p in asked]
    assert alone[2] == first and len(alone[1]) < len(alone[0])
    engine = load(target, draft, depth=3)
    done = engine.generate_all(asked, batch=2, max_new_tokens=40, speculate=speculate)
    assert [c.tokens for c in done] == alone


def test_the_pool_grows_between_the_rounds_of_a_stream(captured: list[int]) -> None:
    """Another stream, of a longer prompt, or a check of the target, begins while the graphs of one are loaded."""
    target, draft, asked = good_pair(native=True)
    engine = load(target, draft, depth=3)
    long = [t % 400 for t in range(2, 300)]
    expected = [engine.generate(p, max_new_tokens=30, speculate=False).text for p in (asked[0], long)]
    engine = load(target, draft, depth=3)
    one = engine.stream(asked[0], max_new_tokens=30)
    pieces, before = [next(one) for _ in range(3)], target.pool.slots
    other = engine.stream(long, max_new_tokens=30)
    others = [next(other)]
    assert target.pool.slots > before > 0
    for _ in range(3):
        pieces.append(next(one))
        load(target, draft, mode="tree", nodes=6, width=2, depth=3)
        others.append(next(other))
    assert "".join([*pieces, *one]) == expected[0] and "".join([*others, *other]) == expected[1]


def test_processors_are_called_without_graphs(captured: list[int]) -> None:
    """Requests with logits processors decode step by step beside graphs of other calls, to the same tokens."""
    target, draft, asked = good_pair(native=True)
    engine = load(target, draft, depth=4)
    prefixes: list[int] = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        prefixes.append(input_ids.shape[1])
        return scores

    without = engine.generate(asked[0], max_new_tokens=12).tokens
    count = len(captured)
    assert engine.generate(asked[0], max_new_tokens=12, processors=[note]).tokens == without
    assert len(captured) == count and prefixes == [*range(len(asked[0]), len(asked[0]) + 12)]


@pytest.mark.parametrize(
    ("drafting", "sampling", "reason"),
    [
        ({}, dict(processors=[lambda input_ids, scores: scores]), "logits processors run on the host"),
        (dict(confidence=0.3), {}, "with a confidence, the host decides"),
        (dict(mode="tree", nodes=8), {}, ""),
    ],
    ids=["processors", "confidence", "captured"],
)
def test_rounds_that_are_not_captured_are_announced(
    drafting: dict[str, Any], sampling: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, where the target alone would be captured."""
    target, draft, asked = good_pair(native=True)

    def announced(**options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            engine.generate(asked[0], max_new_tokens=4, **options)
        return [str(w.message) for w in seen if w.category is rounds.EagerWarning]

    engine = load(target, draft, **drafting)
    assert not announced(**sampling), "nothing is captured on a CPU"
    monkeypatch.setattr(engines, "can_capture", lambda target, drafter: True)
    monkeypatch.setattr(engines, "has_kernels", lambda device, dtype: True)
    assert bool(reason) == len(found := announced(**sampling)) and all(reason in message for message in found)
    assert not announced(**sampling)
    monkeypatch.undo()
    monkeypatch.setattr(engines, "can_capture", lambda target, drafter: True)
    engine = load(target, draft)
    assert not announced(speculate=False)
    (message,) = announced()
    assert message.endswith("since the draft is in float64 on cpu")


def test_places_without_a_request_stay_in_their_slots(captured: list[int]) -> None:
    """Three requests in four places: the fourth writes to slots of its own however long the others take."""
    target, draft, asked = good_pair(native=True)
    engine = load(target, draft, depth=4)
    engine.generate_all(asked[:3], batch=3, max_new_tokens=40)
    (batch,) = engine._idle_batches[True]
    (graphs,) = [g for key, g in batch.graphs.items() if key[0] == 4]
    assert graphs.rounds.cache.lengths[3] == graphs.rounds.drafter.cache.lengths[3] == 0
