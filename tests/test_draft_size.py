"""How much is drafted is chosen while decoding: the choice is close to the best one, and no choice changes a token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fledge.decode import batch as batches
from fledge.decode.draft_size import (
    AGAIN,
    EVIDENCE,
    HELD,
    MEMORY,
    MOST_ROWS,
    NOTHING,
    REST,
    SETTLED,
    TIMED,
    AcceptanceRates,
    DraftSize,
    NestedTrees,
    SizeChooser,
    fitting,
)  # fmt: skip
from fledge.decode.drafting import DEPTHS, FAR, FIRST_NODES, MANY_NODES, NODES, Drafting
from fledge.decode.load import load
from fledge.types import Sampling
from support.decoding import prompts
from support.sizes import RandomSizes
from support.targets import P_EAGLE, tiny_draft, tiny_target
from support.trees import good_pair

CHAINS = [DraftSize(d, d + 1) for d in (5, 1, 2, 3, 7, 10)]
WAYS: dict[str, dict[str, Any]] = {
    "chain": dict(depth="auto"),
    "nodes": dict(mode="tree", nodes="auto", width=4, depth=3),
    "depth of a tree": dict(mode="tree", nodes=10, width=3, depth="auto"),
    "depth and nodes": dict(mode="tree", nodes="auto", depth="auto", width=4),
}


# -- the choice -------------------------------------------------------------------------------------------------------


class World:
    """Requests of `answer` tokens, one after the other, each drafted token of which is accepted with probability
    `rate`. A round takes the seconds that `drafting` and `verification` say of its depth and its nodes, plain rounds of
    an engine that rests `plain`."""

    def __init__(self, rate: float, step: float, rows: float, plain: float = 1.0, answer: int = 100):
        self.rate, self.plain, self.answer = rate, plain, answer
        self.drafting: Callable[[int], float] = lambda depth: 0.1 + step * depth
        self.verification: Callable[[int], float] = lambda nodes: 1.0 + rows * (nodes - 1)
        self.chooser, self.draw = SizeChooser(CHAINS), random.Random(0)
        self.size, self.due = CHAINS[0], 0
        self.used: Counter[DraftSize] = Counter()

    def speed(self, requests: int) -> float:
        """Decodes this many requests, alone; the tokens per second."""
        tokens, seconds = 0, 0.0
        for _ in range(requests):
            rests, left = self.chooser.rests(1), self.answer
            while left > 0:
                self.due -= 1
                if not rests and self.due <= 0:
                    chosen = self.chooser.choose(1, self.size)
                    self.due, rests = SETTLED if self.chooser.settled else HELD, chosen == NOTHING
                    self.size = self.size if rests else chosen
                accepted, times = self.round(NOTHING if rests else self.size)
                tokens, left, seconds = tokens + accepted + 1, left - accepted - 1, seconds + sum(times)
        return tokens / seconds

    def round(self, size: DraftSize) -> tuple[int, list[float]]:
        accepted = 0
        while accepted < size.depth and self.draw.random() < self.rate:
            accepted += 1
        noise = 1 + 0.1 * self.draw.random() + 5 * (self.draw.random() < 0.02)
        times = [0.0, self.plain] if size == NOTHING else [self.drafting(size.depth), self.verification(size.nodes)]
        self.used[size] += 1
        self.chooser.add(size, [accepted], (noise * times[0], noise * times[1]))
        return accepted, times

    def best(self) -> float:
        """The speed of the best size."""
        tokens = {s: sum(self.rate**k for k in range(s.depth + 1)) for s in CHAINS}
        return max(
            1 / self.plain, *(t / (self.drafting(s.depth) + self.verification(s.nodes)) for s, t in tokens.items())
        )


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(("step", "rows"), [(0.02, 0.0), (0.1, 0.02), (0.1, 0.1), (0.5, 0.0)])
def test_the_choice_is_close_to_the_best(rate: float, step: float, rows: float) -> None:
    """After a short time, and where drafting pays and where it does not."""
    world = World(rate, step, rows)
    world.speed(20)
    assert world.speed(100) > 0.93 * world.best()


class TreeWorld(World):
    """The same with trees of which each is the start of the larger ones. A tree of n nodes is accepted for
    `tokens` * n**`growth` tokens on average."""

    def __init__(self, tokens: float, growth: float, rows: float):
        super().__init__(0.0, 0.0, rows)
        self.tokens, self.growth = tokens, growth
        self.sizes = [DraftSize(15, n) for n in (FIRST_NODES, *(n for n in MANY_NODES if n != FIRST_NODES))]
        self.chooser, self.size = SizeChooser(self.sizes, nested=True), self.sizes[0]

    def round(self, size: DraftSize) -> tuple[int, list[float]]:
        chance, path = self.draw.random(), []
        for n in MANY_NODES if size.depth else ():
            if n <= size.nodes:
                path += [n - 1] * (int(self.tokens * n**self.growth + chance) - len(path))
        times = [0.0, 1.0] if size == NOTHING else [self.drafting(0), self.verification(size.nodes)]
        self.used[size] += 1
        noise = 1 + 0.02 * self.draw.random()
        self.chooser.add(size, [len(path)], (noise * times[0], noise * times[1]), [path])
        return len(path), times

    def best(self) -> float:
        tokens = {s: 1 + self.tokens * s.nodes**self.growth for s in self.sizes}
        return max(t / (self.drafting(0) + self.verification(s.nodes)) for s, t in tokens.items())


@pytest.mark.parametrize("growth", [0.03, 0.1, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("rows", [0.0005, 0.002, 0.01, 0.05])
def test_the_choice_of_a_tree_is_close_to_the_best(growth: float, rows: float) -> None:
    """Whatever a larger tree is accepted for: smaller trees are measured with it, and larger ones are tried."""
    world = TreeWorld(1.4, growth, rows)
    world.speed(20)
    assert world.speed(100) > 0.95 * world.best()


def test_a_tree_says_what_its_start_is_accepted_for() -> None:
    trees = NestedTrees([4, 16, 8])
    for _ in range(10 * MEMORY):
        trees.add(16, [[1, 3, 5], [2, 9], []])
    assert trees.tokens(4) == pytest.approx(1 + 1, abs=0.05)
    assert trees.tokens(8) == pytest.approx(1 + 4 / 3, abs=0.05)
    assert trees.tokens(16) == pytest.approx(1 + 5 / 3, abs=0.05)
    for _ in range(10 * MEMORY):  # of another text; what the largest tree adds stays known
        trees.add(8, [[1, 5]])
    assert trees.tokens(8) == pytest.approx(1 + 2, abs=0.05)
    assert trees.tokens(16) == pytest.approx(1 + 2 * 5 / 4, abs=0.05)


def test_large_trees_are_for_few_requests() -> None:
    sizes = [DraftSize(15, n) for n in MANY_NODES]
    assert fitting(sizes, 1) == fitting(sizes, 4) == sizes and fitting(sizes, 1000) == sizes[:2]
    fixed = [DraftSize(d, 60) for d in (5, 1, 7)]
    assert fitting(fixed, 1000) == [DraftSize(5, 60), DraftSize(7, 60)], "the deepest, which take no more rows"
    assert [max(fitting(sizes, n)).nodes * n for n in (8, 16, 32, 64)] == [MOST_ROWS] * 4
    assert fitting(CHAINS, 128) == CHAINS, "chains are as deep as wanted"
    chooser = SizeChooser(sizes, nested=True)
    for _ in range(2 * TIMED):
        size = chooser.choose(64, sizes[-1])
        assert size.nodes <= 16
        chooser.add(size, [1] * 64, (1.0, float(size.nodes)), [[1]] * 64)
    assert chooser.choose(64, sizes[-1]).nodes == 8 and chooser.choose(128, sizes[-1]).nodes <= 16


def test_drafting_is_tried_less_and_less_often() -> None:
    world = World(0.1, 0.2, 0.05)
    world.speed(100)
    drafted = sum(n for size, n in world.used.items() if size.depth)
    assert 3 * EVIDENCE < drafted < 400 and world.used[NOTHING] > 9000
    world.used.clear()
    world.speed(100)
    assert sum(n for size, n in world.used.items() if size.depth) < 200


def test_drafting_comes_back() -> None:
    """Where texts become easier for the draft, and goes where they become harder."""
    world = World(0.1, 0.1, 0.02)
    world.speed(30)
    assert world.chooser.rests(1) and world.chooser.reason.startswith("a round that drafts")
    world.rate = 0.9
    world.speed(60)
    assert world.speed(30) > 0.93 * world.best() > 1.5
    world.rate = 0.1
    world.speed(30)
    assert world.speed(60) > 0.95


def test_a_rest_that_is_slower_than_assumed_ends() -> None:
    """The seconds of plain rounds are known once the engine has rested."""
    world = World(0.6, 0.25, 0.05, plain=1.5)
    world.speed(40)
    assert world.speed(20) > 0.95 * world.best() and not world.chooser.rests(1)


def test_a_slower_machine_is_noticed() -> None:
    world = World(0.8, 0.02, 0.0)
    world.speed(60)
    assert world.size.depth == 10
    world.drafting = lambda depth: 0.5 * depth
    world.speed(2 * AGAIN // 20)
    assert world.speed(60) > 0.95 * world.best()


def test_the_nearest_number_of_requests_tells_the_seconds() -> None:
    """Until those of the present number are known."""
    chooser = SizeChooser(CHAINS)
    for requests, scale in ((16, 1.0), (2, 0.1)):
        for size in (DraftSize(5, 6), DraftSize(1, 2)):
            for _ in range(TIMED):
                chooser.add(size, [0] * requests, (scale * size.depth, scale * (10 + size.nodes)))
    assert chooser._seconds(12, DraftSize(5, 6)) == 5 + 16
    assert chooser._seconds(1, DraftSize(5, 6)) == pytest.approx(0.5 + 1.6)
    assert chooser._seconds(16, DraftSize(3, 4)) == pytest.approx(3 + 14), "on the line between"
    assert chooser._seconds(16, DraftSize(10, 11)) == pytest.approx(10 + 21), "and beyond"
    assert chooser._seconds(16, NOTHING) == pytest.approx(11), "a verification of the root alone"
    for _ in range(TIMED):
        chooser.add(NOTHING, [0] * 16, (0.0, 7.0))
    assert chooser._seconds(16, NOTHING) == 7


def test_delayed_rounds_count_little() -> None:
    chooser = SizeChooser(CHAINS[:2])
    for delay in (0.0, 9.0, 0.0, 0.0):
        chooser.add(CHAINS[0], [5], (5.0 + delay, 1.0))
        chooser.add(CHAINS[1], [1], (1.0, 1.0 + delay))
    assert chooser._seconds(1, CHAINS[0]) == 6 and chooser._seconds(1, CHAINS[1]) == 2


def test_an_engine_does_not_rest_before_the_acceptance_is_known() -> None:
    world = World(0.0, 1.0, 1.0)
    while world.chooser.choose(1, world.size) != NOTHING:
        for _ in range(HELD):
            world.round(world.size)
        world.size = world.chooser.choose(1, world.size)
        if world.size == NOTHING:
            break
    assert world.chooser.rates.tried[0] >= EVIDENCE


def test_rates() -> None:
    """The mean of the latest rounds by depth; a depth never drafted is a little worse than the one above."""
    draw, rates = random.Random(0), AcceptanceRates(4)
    for _ in range(10 * MEMORY):
        rates.add(3, [sum(draw.random() < 0.5 for _ in range(1)), 3])
    assert rates.tokens(1) == pytest.approx(1.75, abs=0.05)
    assert rates.tokens(3) == pytest.approx(1.75 + 2 * 0.5, abs=0.15)
    assert rates.tokens(4) - rates.tokens(3) == pytest.approx(0.95 * 0.5, abs=0.05)
    for _ in range(10 * MEMORY):
        rates.add(1, [0])
    assert rates.tokens(4) == pytest.approx(1, abs=0.04), "older rounds are forgotten"


def test_sizes_of_drafting() -> None:
    """Chains may be deeper than those trained. The trained depth comes first."""
    draft = tiny_draft(tiny_target())
    trained = draft.config.provenance.depth or 5
    resolved = Drafting(depth="auto").for_draft(draft.config)
    assert resolved.sizes[0] == DraftSize(trained, trained + 1)
    assert {s.depth for s in resolved.sizes} == {trained, *(d for d in DEPTHS if d <= max(2 * trained, FAR))}
    trees = Drafting(mode="tree", nodes="auto", depth=4).for_draft(draft.config)
    assert sorted(s.nodes for s in trees.sizes) == sorted(NODES) and trees.verified == max(NODES)
    one_pass = tiny_draft(tiny_target(), **P_EAGLE).config.with_provenance(depth=15)
    trees = Drafting(mode="tree", nodes="auto").for_draft(one_pass)
    assert trees.sizes[0] == DraftSize(15, FIRST_NODES)
    assert set(trees.sizes) == {DraftSize(15, n) for n in MANY_NODES}
    assert trees.sizes == Drafting(mode="tree", nodes="auto", depth="auto").for_draft(one_pass).sizes
    assert Drafting(mode="tree", nodes=50, depth="auto").for_draft(one_pass).sizes == (DraftSize(15, 50),)
    assert {s.depth for s in Drafting(depth="auto").for_draft(one_pass).sizes} == {1, 2, 3, 5, 7, 10, 15}
    assert Drafting(depth=3).for_draft(draft.config).sizes == (DraftSize(3, 4),)
    assert Drafting(depth=3).for_draft(draft.config).chooser() is None


def test_options_that_auto_excludes() -> None:
    target = tiny_target()
    for options, message in (
        (dict(depth="auto", stable=False), "stable draft cache"),
        (dict(depth="auto", confidence=0.3), "ends chains early; leave it or 'auto' out"),
        (dict(depth="automatic"), "neither a number nor auto"),
        (dict(mode="tree", nodes="auto", shape=None, depth="auto", stable=False), "stable draft cache"),
    ):
        with pytest.raises(ValueError, match=message):
            load(target, tiny_draft(target), **options)


# -- decoding ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes change every other round."""
    monkeypatch.setattr(batches, "HELD", 2)
    monkeypatch.setattr(batches, "SETTLED", 2)


@pytest.mark.parametrize("way", WAYS)
def test_no_token_changes(way: str, short: None) -> None:
    """Whatever is drafted, and for requests that come and go."""
    target, draft, _ = good_pair(native=True)
    engine = load(target, draft, **WAYS[way])
    asked = prompts(6, longest=14, seed=3)
    samplings = [Sampling(), Sampling(temperature=0.8, seed=1), Sampling(repetition_penalty=1.2)] * 2
    plain = engine.generate_all(asked, sampling=samplings, max_new_tokens=30, speculate=False)
    used: set[DraftSize] = set()
    for seed in range(3):
        sizes = RandomSizes(engine, seed, rest=0.1)
        fast = engine.generate_all(asked, sampling=samplings, max_new_tokens=30, batch=seed + 1)
        assert [c.tokens for c in fast] == [c.tokens for c in plain]
        used.update(sizes.added)
    assert len(used) > 3 and target.pool.slots == 0


@pytest.mark.parametrize("options", [dict(P_EAGLE), dict(method="eagle1")], ids=["peagle", "eagle1"])
def test_other_methods(options: dict[str, Any], short: None) -> None:
    target = tiny_target(dtype=torch.float64, native=True)
    engine = load(target, tiny_draft(target, **options), depth="auto")
    asked = prompts(4, seed=6)
    RandomSizes(engine, 0)
    fast, plain = (engine.generate_all(asked, batch=2, max_new_tokens=30, speculate=s) for s in (True, False))
    assert [c.tokens for c in fast] == [c.tokens for c in plain]


def test_a_round_accepts_the_same_whatever_was_drafted_before(short: None) -> None:
    """The draft has read all committed tokens when the size changes: at each place in the text, a chain of a depth
    accepts as many tokens as in an engine that always drafts this depth, up to the depth."""
    target, draft, asked = good_pair(native=True)
    engine, deepest = load(target, draft, depth="auto"), load(target, draft, depth=10)
    for seed, prompt in enumerate(asked[:3]):
        RandomSizes(engine, seed, rest=0)
        done, text = engine.generate(prompt, max_new_tokens=40), deepest.generate(prompt, max_new_tokens=60).tokens
        end = 1
        for r in done.trace.rounds[:-1]:
            ahead = deepest.generate([*prompt, *text[:end]], max_new_tokens=12).trace.rounds
            alone = deepest.generate([*prompt, *text[: end - 1]], max_new_tokens=12)
            assert ahead and alone.tokens[:1] == text[end - 1 : end]
            assert r.accepted == min(r.drafted, alone.trace.rounds[0].accepted)
            end += r.accepted + 1


class Operations(TorchDispatchMode):
    """Counts the operations on tensors, by name and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func), *(tuple(x.shape) for x in args if isinstance(x, torch.Tensor))] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_rest_does_the_work_of_decoding_without_a_draft(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operation by operation, and the seconds of its rounds are noted."""
    target, draft, asked = good_pair(native=True)
    engine = load(target, draft, depth="auto")
    sizes = RandomSizes(engine, 0, rest=1.0)
    seen: list[Counter[Any]] = []
    engine.generate_all(asked[:3], batch=batch, max_new_tokens=2)  # the first call checks what the target supports
    for speculate in (True, False):
        with Operations() as operations:
            done = engine.generate_all(asked[:6], batch=batch, max_new_tokens=12, speculate=speculate)
        seen.append(operations.seen)
    assert seen[0] == seen[1] and sum(seen[0].values()) > 1000
    assert not any(r.drafted for c in done for r in c.trace.rounds) and set(sizes.added) == {NOTHING}


@pytest.mark.parametrize("native", [False, True])
def test_running_requests_give_up_their_draft(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on without it at once, to the same tokens; requests that begin meanwhile rest too."""
    target, draft, asked = good_pair(native=native)
    engine = load(target, draft, depth="auto")
    plain = engine.generate_all(asked[:7], batch=3, max_new_tokens=30, speculate=False)
    sizes, calls = RandomSizes(engine, 0, rest=0), []

    def choose(requests: int, current: DraftSize) -> DraftSize:
        calls.append(requests)
        return NOTHING if len(calls) == 2 else sizes.sizes[0]

    monkeypatch.setattr(sizes, "choose", choose)
    done = engine.generate_all(asked[:7], batch=3, max_new_tokens=30)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    drafted = [[r.drafted for r in c.trace.rounds] for c in done]
    assert calls == [3, 3]
    for of_request in drafted[:3]:
        count = sum(map(bool, of_request))
        assert of_request == [of_request[0]] * count + [0] * (len(of_request) - count) and count
    assert any(0 in of_request for of_request in drafted[:3]) and not any(map(any, drafted[3:]))
    assert not native or target.pool.slots == 0


def test_an_engine_learns_from_all_its_requests() -> None:
    """Rounds of any request count, and a rest lasts beyond the request that began it."""
    target, draft, asked = good_pair(native=True)
    engine = load(target, draft, depth="auto")
    engine.generate_all(asked[:4], batch=2, max_new_tokens=30)
    chooser = engine.chooser
    assert chooser.rates.tried[0] > 4 and chooser.times[2]
    chooser.rates.tried[0] = chooser.rates.tried[0] + EVIDENCE
    for size, seconds in ((chooser.sizes[0], 50.0), (min(chooser.sizes), 50.0)):
        for _ in range(9):
            chooser.add(size, [0], (seconds, 1.0))
    chooser.rested = 0
    done = engine.generate_all(asked[4:6], batch=1, max_new_tokens=30)
    assert not any(r.drafted for c in done for r in c.trace.rounds) and 0 < chooser.rested < REST
