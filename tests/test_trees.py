"""Draft trees: which nodes they hold, that each node attends only to its own path, and that they change no token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.decode import propose as propose_module
from fledge.decode import shapes
from fledge.decode.drafting import Drafting
from fledge.decode.engine import Engine
from fledge.decode.load import load
from fledge.decode.rounds import RoundState
from fledge.drafts.draft import Draft
from fledge.drafts.draft_decoder import DraftDecoder
from fledge.drafts.kv_cache import KVCache, TreeRows
from fledge.ops import trees as tree_operations
from fledge.ops.attention_tree import Visible
from fledge.ops.trees import Candidates, FreshRows
from fledge.targets.cache import TargetCache
from fledge.targets.native import NativeDecoder
from fledge.targets.transformers import TransformersTarget
from fledge.types import Prompt, Sampling, Tree, TreeShape, Verdict
from support.decoding import SAMPLINGS, Remembers, assert_same, both, fit_head, prompts, spoken
from support.devices import on_device
from support.mutations import replace_function
from support.targets import BOTH_IMPLEMENTATIONS, DFLASH, P_EAGLE, exact_target, read_alone, tiny_draft, tiny_target
from support.trees import SHAPES, good_pair, paths_of, propose_one, proposer_of, slots_of, tree_lists

SLIDING = dict(sliding_window=8)


def engine_of(target: TransformersTarget, draft: Draft, **options: Any) -> Engine:
    return load(target, draft, **{"mode": "tree", **options})


class Reread:
    """Causal attention of a draft to all keys and values that it was given before, without a cache."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen.setdefault(layer, []).append((k, v))
        every = (torch.cat(x) for x in zip(*self.seen[layer], strict=True))
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in every)
        scores = torch.einsum("shd,nhd->hsn", q, keys) * q.shape[2] ** -0.5
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(keys.shape[0] - q.shape[0] + 1)
        return torch.einsum("hsn,nhd->shd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


@torch.inference_mode()
def path_logp(draft: Draft, token_R: Tensor, aux_RAD: Tensor, path: Sequence[int]) -> Tensor:
    """The draft's log-probabilities [W] after a path of draft ids, computed as a chain without a cache."""
    R, attend = token_R.numel(), Reread()
    position = torch.arange(R + len(path))
    out = draft.step(token_R, draft.fuse(aux_RAD), position[:R], attend)[-1:]
    for k, token in enumerate(path):
        token_1, at = draft.target_ids()[torch.tensor([token])], position[R + k : R + k + 1]
        out = draft.step(token_1, draft.split_output(out)[0], at, attend)
    return draft.logits(draft.split_output(out)[1])[0].float().log_softmax(-1)


def tree_by_force(
    draft: Draft, token_R: Tensor, aux_RAD: Tensor, depth: int, nodes: int, width: int
) -> list[tuple[int, ...]]:
    """The nodes of EAGLE-2's tree in order, as paths of draft ids; each path is drafted separately as a chain."""
    pool: list[tuple[float, tuple[int, ...]]] = []
    front: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(depth):
        scored = []
        for score, path in front:
            best = path_logp(draft, token_R, aux_RAD, path).topk(width)
            scored += [
                (score + p, (*path, t)) for p, t in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        pool += scored
        front = sorted(scored, key=lambda s: -s[0])[:width]
    best = sorted(range(len(pool)), key=lambda i: (-pool[i][0], i))[: nodes - 1]
    return [pool[i][1] for i in sorted(best)]


@pytest.mark.parametrize("vocabulary", [400, 150])
@pytest.mark.parametrize(("depth", "nodes", "width"), [(1, 5, 10), (2, 12, 3), (4, 25, 4), (5, 60, 3), (3, 100, 5)])
@pytest.mark.parametrize("variant", [{}, dict(num_hidden_layers=2, norm_output=True, fc_norm=True)])
def test_the_dynamic_tree_is_eagle_2s(variant: dict, depth: int, nodes: int, width: int, vocabulary: int) -> None:
    """The tree equals the one found by drafting each path separately, in the same order, and parents precede their
    children. A second round, whose cache has held a tree before, gives the right tree too."""
    target = exact_target()
    draft = tiny_draft(target, draft_vocab_size=vocabulary, **variant)
    proposer = proposer_of(draft, mode="tree", depth=depth, nodes=nodes, width=width)
    tokens = prompts(1, seed=depth)[0][:3] + list(range(40, 52))
    token_R, aux = slots_of(target, tokens)
    for a, b in ((0, 9), (9, token_R.numel())):
        tree = propose_one(proposer, token_R[a:b], aux[a:b])
        expected = tree_by_force(draft, token_R[:b], aux[:b], depth, nodes, width)
        expected = [tuple(draft.target_ids()[torch.tensor(path)].tolist()) for path in expected]
        assert paths_of(tree) == expected
        assert tree.token_BN[0, 0] == token_R[b - 1]
        assert all(p < n for n, p in enumerate(tree_lists(tree)[0][1]))


@pytest.mark.parametrize("nodes", [2, 5, 9])
def test_a_tree_one_wide_is_the_chain(nodes: int) -> None:
    target, draft, asked = good_pair()
    for prompt in asked[:3]:
        slots = slots_of(target, [*prompt, 5, 6])
        tree = propose_one(proposer_of(draft, mode="tree", depth=8, nodes=nodes, width=1), *slots)
        chain = propose_one(proposer_of(draft, depth=nodes - 1), *slots)
        assert tree_lists(tree) == tree_lists(chain)


@pytest.mark.parametrize("name", SHAPES)
def test_fixed_trees(name: str) -> None:
    """A child of rank r is the r-th likeliest token after its path, counted from 0."""
    target, shape = exact_target(), SHAPES[name]
    draft = tiny_draft(target, draft_vocab_size=150)
    proposer = proposer_of(draft, mode="tree", shape=shape)
    token_R, aux = slots_of(target, list(range(40, 52)))
    for a, b in ((0, 7), (7, token_R.numel())):
        tree = propose_one(proposer, token_R[a:b], aux[a:b])
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
            logp = path_logp(draft, token_R[:b], aux[:b], paths[parent])
            paths.append((*paths[parent], int(logp.topk(rank + 1).indices[rank])))
        assert paths_of(tree) == [tuple(draft.target_ids()[torch.tensor(p)].tolist()) for p in paths[1:]]


FORK = TreeShape((-1, 0, 0), (0, 0, 1))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: TreeShape((-1,), (0,)), "one rank for each parent"),
        (lambda: TreeShape((-1, 0), (0, 0, 0)), "one rank for each parent"),
        (lambda: TreeShape((0, 0), (0, 0)), "the first node must be the root"),
        (lambda: TreeShape((-1, 0, 3), (0, 0, 0)), "parent must precede it"),
        (lambda: TreeShape((-1, 0, 0), (0, 1, 1)), "same rank"),
        (lambda: TreeShape.from_paths([[0], [1, 0]]), r"a node at \[1, 0\] but not its parent"),
        (lambda: TreeShape.from_paths([[0], [0], [1], [1, 0]]), "a duplicate path"),
        (lambda: TreeShape.from_paths([[], [0]]), "an empty path"),
        (lambda: engine_of(*good_pair()[:2], confidence=0.5), "leave it out"),
        (lambda: engine_of(*good_pair()[:2], nodes=1), "a tree of 1 nodes drafts nothing"),
        (lambda: engine_of(*good_pair()[:2], width=0), "a tree with a width of 0 drafts nothing"),
        (lambda: engine_of(*good_pair()[:2], shape=FORK, depth=3), "a fixed shape has its own depth; leave depth out"),
        (
            lambda: engine_of(*good_pair()[:2], shape=FORK, width=3),
            "has its own nodes and width; leave nodes and width",
        ),
        (lambda: engine_of(*good_pair()[:2], mode="forest"), "'forest' is none of chain, tree"),
        (lambda: engine_of(*good_pair()[:2], mode="chain", nodes="auto"), "no effect in a chain; give mode 'tree'"),
        (lambda: engine_of(*good_pair()[:2], mode=None, nodes=60, width=3), "no effect in a chain; give mode 'tree'"),
    ],
)
def test_invalid_trees_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


def test_sampled_trees_are_refused() -> None:
    engine = engine_of(*good_pair()[:2])
    with pytest.raises(ValueError, match="sampled drafts need a chain, since"):
        engine.generate([5, 6], sampling=Sampling(temperature=1, draft="sample"))


@st.composite
def parents(draw) -> list[int]:
    return [-1, *(draw(st.integers(0, n)) for n in range(draw(st.integers(0, 20))))]


@given(parents())
def test_ancestors(parent: list[int]) -> None:
    depth = [0]
    for p in parent[1:]:
        depth.append(depth[p] + 1)
    for slack in (0, 3):
        found = Tree(torch.zeros(1, len(parent)), torch.tensor([parent]), max(depth) + slack).ancestors()[0]
        for n in range(len(parent)):
            path, at = set(), n
            while at >= 0:
                path.add(at)
                at = parent[at]
            assert set(found[n].nonzero().flatten().tolist()) == path


# -- the target -------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "llama": dict(family="llama"),
    "phi3": dict(family="phi3"),
    "qwen3": dict(family="qwen3"),
    "mistral, window": dict(family="mistral", **SLIDING),
    "phi3, window": dict(family="phi3", **SLIDING),
    "qwen3 by turns": dict(family="qwen3", use_sliding_window=True, max_window_layers=4, **SLIDING),
}


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("name", KINDS)
def test_every_node_sees_its_path(name: str, native: bool) -> None:
    """A node's logits and features equal those of its path run as a chain, also beyond a sliding window. After the
    cache keeps an accepted path, the next logits are right too."""
    target = tiny_target(dtype=torch.float64, native=native, **KINDS[name])
    target.check_masks()
    tokens = torch.randint(400, (40,), generator=torch.Generator().manual_seed(1))
    tree = Tree(tokens[None, 20:28], torch.tensor([[-1, 0, 0, 1, 1, 2, 4, 6]]), 4)
    cache = target.new_cache([60])
    target.prefill([Prompt(tokens[:20].tolist())], cache)
    found, features = target.verify(tree, cache, (2, 4, 5))
    for node, path in {3: [0, 1, 3], 5: [0, 2, 5], 7: [0, 1, 4, 6, 7]}.items():
        line = torch.cat([tokens[:20], tree.token_BN[0, path]])
        logits, expected = read_alone(target, line.tolist(), (2, 4, 5))
        torch.testing.assert_close(found[0, node], logits[-1], rtol=0, atol=1e-10)
        torch.testing.assert_close(features.aux_TAD[node], expected.aux_TAD[-1], rtol=0, atol=1e-10)
    cache.keep(torch.tensor([[0, 1, 4, 6, 7]]), torch.tensor([5]))
    assert cache.lengths == [25]
    after, _ = target.verify(Tree.chain(tokens[None, 30:40]), cache)
    direct, _ = read_alone(target, [*line.tolist(), *tokens[30:40].tolist()])
    torch.testing.assert_close(after[0], direct[25:], rtol=0, atol=1e-10)


def test_a_target_that_mixes_paths_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformersTarget, "_positions_and_masks", lambda self, tree, cache: {})
    with pytest.raises(ValueError, match=r"each node of a tree must see only its own path; draft chains"):
        tiny_target().check_masks()


def test_masks_that_a_model_does_not_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        TransformersTarget, "_positions_and_masks", lambda self, tree, cache: {"attention_mask": torch.ones(1, 2, 3, 4)}
    )
    with pytest.raises(ValueError, match="cannot verify trees"):
        tiny_target().check_masks()


# -- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocabulary", "native"), [(400, False), (300, False), (300, True)])
@pytest.mark.parametrize(("depth", "nodes", "width"), [(1, 8, 8), (3, 10, 2), (5, 30, 4), (8, 60, 3)])
def test_greedy_is_vanilla(depth: int, nodes: int, width: int, vocabulary: int, native: bool) -> None:
    """In float64 the tokens are exactly the same, while rounds accept different numbers of drafted tokens."""
    target, draft, asked = good_pair(vocabulary, native)
    engine = engine_of(target, draft, depth=depth, nodes=nodes, width=width)
    taken = set()
    for prompt in asked:
        fast, plain = both(engine, prompt, max_new_tokens=40)
        assert_same(fast, plain)
        taken |= {r.accepted for r in fast.trace.rounds}
    assert {0, 1} <= taken and (depth < 3 or max(taken) >= 3)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(3, 399), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(2, 40),
    st.integers(1, 6),
    st.booleans(),
)
def test_greedy_is_vanilla_whatever_the_tree(
    prompt: list[int], depth: int, nodes: int, width: int, native: bool
) -> None:
    target, draft, _ = good_pair(native=native)
    assert_same(*both(engine_of(target, draft, depth=depth, nodes=nodes, width=width), prompt, max_new_tokens=12))


@pytest.mark.parametrize("seed", range(4))
def test_greedy_is_vanilla_for_a_thousand_prompts(seed: int) -> None:
    """Each of four seeds decodes 250 prompts in float64: 10 random tree shapes, with 25 prompts decoded together for
    each shape. Two seeds are decoded by each implementation of the target."""
    target, draft, _ = good_pair(400 if seed % 2 else 300, native=seed >= 2)
    draw, accepted = random.Random(seed), 0
    for _ in range(10):
        depth, nodes, width = draw.randint(1, 7), draw.randint(2, 60), draw.randint(1, 8)
        engine = engine_of(target, draft, depth=depth, nodes=nodes, width=width)
        asked = [[draw.randint(3, 399) for _ in range(draw.randint(1, 20))] for _ in range(25)]
        fast, plain = (
            engine.generate_all(asked, batch=25, max_new_tokens=12, speculate=speculate) for speculate in (True, False)
        )
        assert [c.tokens for c in fast] == [c.tokens for c in plain], (depth, nodes, width)
        accepted += sum(r.accepted for c in fast for r in c.trace.rounds)
    assert accepted


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("name", KINDS)
def test_greedy_is_vanilla_for_every_family(name: str, native: bool) -> None:
    target = tiny_target(dtype=torch.float64, native=native, **KINDS[name])
    draft = tiny_draft(target, hidden_size=256, intermediate_size=256)
    asked = prompts(4, seed=5)
    fit_head(target, draft, [spoken(load(target), p, 30)[0] for p in asked], 3)
    engine = engine_of(target, draft, depth=3, nodes=20, width=4)
    accepted = set()
    for prompt in asked:
        fast, plain = both(engine, prompt, max_new_tokens=30)
        assert_same(fast, plain)
        accepted |= {r.accepted for r in fast.trace.rounds}
    assert len(accepted) > 1 and max(accepted) == 3


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_is_vanilla_with_fixed_trees(name: str, native: bool) -> None:
    target, draft, asked = good_pair(native=native)
    engine = engine_of(target, draft, shape=SHAPES[name])
    for prompt in asked:
        assert_same(*both(engine, prompt, max_new_tokens=40))


@pytest.mark.parametrize(("memory", "native"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_is_vanilla_at_the_same_seed(name: str, memory: bool, native: bool) -> None:
    """Each node is processed with its own prefix, and a processor that has state sees the same prefixes in order."""
    target, draft, asked = good_pair(native=native)
    engine = engine_of(target, draft, depth=4, nodes=30, width=4)
    for i, prompt in enumerate(asked[:4]):
        seen = [(Remembers(),) if memory else () for _ in range(2)]
        slow, quick = (Sampling(**SAMPLINGS[name], processors=p) for p in seen)
        plain = engine.generate(prompt, max_new_tokens=30, sampling=slow, request=i, speculate=False)
        assert_same(engine.generate(prompt, max_new_tokens=30, sampling=quick, request=i), plain)
        if memory:
            shown = seen[0][0].prefixes
            assert seen[1][0].prefixes[: len(shown)] == shown


DRAFTED = {
    "chain": dict(mode="chain", depth=5),
    "tree": dict(depth=5, nodes=30, width=4),
    "shape": dict(shape=SHAPES["mixed"]),
}


def first_free_slot(cache: KVCache) -> int:
    """The slot of the pool after the committed tokens of a cache's first sequence."""
    return cache.segments[0][0] + cache.lengths[0]


@BOTH_IMPLEMENTATIONS
@pytest.mark.parametrize("name", DRAFTED)
def test_an_unstable_cache_keeps_what_was_drafted(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an unstable cache the tokens stay the same, and the cache keeps the drafted keys and values of accepted
    nodes that were expanded."""
    target, draft, asked = good_pair(native=native)
    engine = engine_of(target, draft, stable=False, **DRAFTED[name])
    kept = 0

    def watched(make: Any, *args: Any) -> Any:
        proposer = make(*args)
        propose = proposer.propose

        def checked(state: RoundState) -> Tree:
            nonlocal kept
            start, before = first_free_slot(proposer.cache), proposer.pool.buffer.clone()
            path = state.path_BR[0, 1 : int(state.count_B)]
            slots = [slot for slot in proposer.slot_BN[0, path].tolist() if slot >= 0]
            tree = propose(state)
            for i, slot in enumerate(slots):
                held, drafted = proposer.pool.buffer[..., start + i, :], before[..., start + slot, :]
                torch.testing.assert_close(held, drafted, rtol=0, atol=0)
            kept += len(slots)
            return tree

        proposer.propose = checked
        return proposer

    replace_function(monkeypatch, Drafting, "proposer", watched)
    for prompt in asked:
        assert_same(*both(engine, prompt, max_new_tokens=40))
    assert kept > 5


def test_a_drafted_slot_holds_the_keys_of_its_path() -> None:
    """For every expanded node, the cache's scratch slot holds the keys and values that drafting its path as a chain
    gives."""
    target, draft, asked = good_pair()
    token_R, aux = slots_of(target, [*asked[0], 5, 6])
    for tree_of in (dict(depth=4, nodes=30, width=3), dict(shape=SHAPES["mixed"])):
        proposer, slots, compared = proposer_of(draft, mode="tree", **tree_of), [], 0
        proposer.end = slots.append
        tree = propose_one(proposer, token_R, aux)
        start, buffer = first_free_slot(proposer.cache), proposer.pool.buffer
        for path, slot in zip(paths_of(tree), slots[0][0].tolist()[1:], strict=True):
            if slot >= 0:
                chain = proposer_of(draft, depth=len(path) + 1)
                says = iter(path)
                with pytest.MonkeyPatch.context() as m:
                    m.setattr(shapes, "argmax_rows", lambda x, ids, s=says: ids.new_full(x.shape[:-1], next(s, 0)))
                    propose_one(chain, token_R, aux)
                own = chain.pool.buffer[..., first_free_slot(chain.cache) + len(path) - 1, :]
                torch.testing.assert_close(buffer[..., start + slot, :], own, rtol=0, atol=1e-9)
                compared += 1
        assert compared > 3


def test_a_tree_accepts_what_its_chain_would_and_more() -> None:
    """Decoding with a tree takes fewer rounds than with a chain of the same depth."""
    target, draft, asked = good_pair()
    rounds = {}
    for mode in ("chain", "tree"):
        engine = engine_of(target, draft, mode=mode, depth=4)
        rounds[mode] = sum(len(engine.generate(p, max_new_tokens=40).trace.rounds) for p in asked)
    assert rounds["tree"] < rounds["chain"]


def keep_the_first_nodes(keep: Any, cache: TargetCache | KVCache, path_BR: Tensor | None, count_B: Tensor) -> None:
    keep(cache, None if path_BR is None else torch.arange(path_BR.shape[1]).expand_as(path_BR), count_B)


def keep_a_node_too_many(keep: Any, cache: TargetCache | KVCache, path_BR: Tensor | None, count_B: Tensor) -> None:
    keep(cache, path_BR, count_B if path_BR is None else count_B + 1)  # a path ends with its last node again


def go_on_from_the_first_nodes_states(
    after: Any, state: RoundState, verdict: Verdict, aux_BNAD: Tensor, **how: bool
) -> RoundState:
    right = after(state, verdict, aux_BNAD, **how)
    return replace(right, aux_BRAD=aux_BNAD[:, : right.aux_BRAD.shape[1]])


def place_all_nodes_at_one_position(placed: Any, *given: Any) -> dict[str, Any]:
    inputs = placed(*given)
    return inputs | {"position_ids": inputs["position_ids"][:, :1].expand_as(inputs["position_ids"])}


def rotate_all_nodes_like_the_root(rotation: Any, decoder: NativeDecoder, position_M: Tensor) -> tuple[Tensor, Tensor]:
    is_tree = bool((position_M.diff() != 1).any())
    return rotation(decoder, position_M[:1].expand_as(position_M) if is_tree else position_M)


def see_all_nodes(ancestors: Any, tree: Tree) -> Tensor:
    return torch.ones_like(ancestors(tree))


def follow_any_child(matches: Any, *given: Any) -> Tensor:
    return torch.ones_like(matches(*given))


MUTATIONS = [  # (owner of the function, its name, its replacement)
    (TargetCache, "keep", keep_the_first_nodes),
    (KVCache, "keep", keep_the_first_nodes),
    (TargetCache, "keep", keep_a_node_too_many),
    (KVCache, "keep", keep_a_node_too_many),
    (RoundState, "after", go_on_from_the_first_nodes_states),
    (TransformersTarget, "_positions_and_masks", place_all_nodes_at_one_position),
    (NativeDecoder, "rotation", rotate_all_nodes_like_the_root),
    (Tree, "ancestors", see_all_nodes),
    (tree_operations, "matches", follow_any_child),
]


@pytest.mark.parametrize(
    ("owner", "name", "wrong"), MUTATIONS, ids=[f"{m[0].__name__}: {m[2].__name__}" for m in MUTATIONS]
)
def test_breaking_it_is_noticed(owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake changes the tokens or the number of accepted tokens, or stops the engine."""
    target, draft, asked = good_pair(native=owner in (KVCache, NativeDecoder))
    engine = engine_of(target, draft, depth=5, nodes=30, width=4)
    plain = [engine.generate(p, max_new_tokens=40) for p in asked]
    replace_function(monkeypatch, owner, name, wrong)
    try:
        broken = [engine.generate(p, max_new_tokens=40) for p in asked]
    except (AssertionError, KeyError, IndexError, RuntimeError):
        return
    rounds = [[r.accepted for r in done.trace.rounds] for done in broken]
    assert [b.tokens for b in broken] != [p.tokens for p in plain] or rounds != [
        [r.accepted for r in done.trace.rounds] for done in plain
    ]


def see_uncles(begin: Any, rows: TreeRows, cache: KVCache, n: int, visible: Any, **options: Any) -> None:
    drafts = isinstance(visible, Visible) and visible.mask_BSJ.shape[1] == n  # not the pass over committed tokens
    begin(rows, cache, n, Visible(torch.ones_like(visible.mask_BSJ)) if drafts else visible, **options)


def a_level_too_deep(fresh_rows: Any, token_BR: Tensor, *given: Any, **options: Any) -> FreshRows:
    rows = fresh_rows(token_BR, *given, **options)
    level_M = torch.arange(rows.position_M.numel()) >= token_BR.numel()
    return replace(rows, position_M=rows.position_M + level_M)


def read_the_first_ones_state(step: Any, *given: Any, row_M: Tensor | None = None) -> Tensor:
    if len(given) == 7:  # the pass over committed tokens gives it by its place
        return step(*given)
    return step(*given, row_M=None if row_M is None else 0 * row_M)


def forget_the_score_so_far(scores: Any, found: Candidates, level: int, logp_BMw: Tensor) -> Tensor:
    return logp_BMw


def see_cousins(own: Any, found: Candidates, level: int) -> Tensor:
    return own(found, level).sum(0).expand(found.width, -1)


DRAFTING = [
    (TreeRows, "__init__", see_uncles),
    (propose_module, "fresh_rows", a_level_too_deep),
    (DraftDecoder, "step", read_the_first_ones_state),
    (tree_operations, "cumulative_scores", forget_the_score_so_far),
    (tree_operations, "_own_bits", see_cousins),
]


@pytest.mark.parametrize(("owner", "name", "wrong"), DRAFTING, ids=[m[2].__name__ for m in DRAFTING])
def test_a_mistake_in_drafting_is_noticed(owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, asked = good_pair()
    slots = slots_of(target, [*asked[0], 5, 6])
    proposer = proposer_of(draft, mode="tree", depth=4, nodes=40, width=4)
    replace_function(monkeypatch, owner, name, wrong)
    tree = propose_one(proposer, *slots)
    monkeypatch.undo()
    assert paths_of(tree) != tree_by_force(draft, *slots, 4, 40, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash"])
@pytest.mark.parametrize(
    "way", [{}, dict(mode="tree", nodes=20), dict(mode="tree", nodes=60), dict(mode="tree", shape=SHAPES["mixed"])]
)
def test_nothing_waits_for_the_device(method: str, way: dict[str, Any]) -> None:
    """Drafting a round for two requests with different numbers of new slots never synchronises with the device."""
    target = tiny_target()
    draft = tiny_draft(target, **{"eagle3": {}, "peagle": P_EAGLE, "dflash": DFLASH}[method])
    on_device(target, draft)
    proposer = proposer_of(draft, depth=4, **way)
    states = draft.config.num_aux_hidden_states, draft.config.target_hidden_size
    token_BR, count_B = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([3, 1])
    aux_BRAD = torch.randn(2, 3, *states)
    state = RoundState(token_BR, aux_BRAD, count_B, torch.zeros_like(token_BR), count_B).to(torch.device("cuda"))
    proposer.append(proposer.new_cache([64, 64]))
    first = proposer.propose(state)  # the first call may synchronise, as libraries initialise
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree = proposer.propose(state)
        with pytest.raises(RuntimeError, match="synchroniz"):
            tree.token_BN.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tree.token_BN.shape == first.token_BN.shape and tree.token_BN[:, 0].tolist() == [7, 8]
