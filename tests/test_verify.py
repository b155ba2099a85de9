"""Both rules of verification as tensor functions: they say what their definitions say, request by request and node by
node, whatever the batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.decode.propose import Front
from fledge.decode.sampling import BatchSampling, see, seen_by_node, seen_tokens
from fledge.decode.shapes import Chain
from fledge.decode.verify import (
    Processing,
    accept_by_match,
    draw_along_the_path,
    residual,
    verify,
)
from fledge.types import Sampling, Tree, Verdict
from support.decoding import Remembers
from support.trees import tree_lists
from support.verification import match_by_definition, rejection_by_definition

V, W = 25, 18
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(repetition_penalty=1.3),
    dict(temperature=0.8, seed=2),
    dict(temperature=1.2, top_k=3),
    dict(temperature=1.0, top_p=0.8, seed=7),
    dict(temperature=1.3, top_k=8, top_p=0.7, repetition_penalty=1.5),
]


@dataclass
class Case:
    """Trees to verify, of as many requests with different options, and chains drawn from distributions."""

    samplings: list[Sampling]
    numbers: list[int]
    prefixes: list[list[int]]
    tree: Tree
    chain: Tree
    target_ids_W: Tensor
    logits_BNV: Tensor

    @property
    def given(self) -> tuple[Tensor, Tensor, BatchSampling]:
        """The arguments between the tree and the tokens seen."""
        length_B = torch.tensor([len(p) - 1 for p in self.prefixes])
        return self.logits_BNV, length_B, BatchSampling.of(self.samplings, self.numbers, "cpu")

    @property
    def seen_BV(self) -> Tensor:
        return seen_tokens(self.prefixes, V, torch.device("cpu"))

    def by_match(self, b: int, sampling: Sampling | None = None) -> tuple[list[int], list[int]]:
        tokens, parents = tree_lists(self.tree)[b]
        given = sampling or self.samplings[b], self.numbers[b], self.prefixes[b]
        return match_by_definition(*given, tokens, parents, self.logits_BNV[b])

    def by_rejection(self, b: int, sampling: Sampling | None = None) -> tuple[list[int], list[int]]:
        tokens, parents = tree_lists(self.chain)[b]
        given = sampling or self.samplings[b], self.numbers[b], self.prefixes[b], tokens
        if self.samplings[b].greedy:  # both the draft and the target are certain
            return match_by_definition(*given, parents, self.logits_BNV[b])
        q_KV = torch.zeros(len(self.chain.q_BKW[b]), V, dtype=torch.float64)
        q_KV[:, self.target_ids_W] = self.chain.q_BKW[b]
        return rejection_by_definition(*given, q_KV, self.logits_BNV[b])


def case(seed: int, kind: str = "any") -> Case:
    """Random trees that are often right. `kind` "ties" rounds the logits, "impossible" makes some of them -inf.

    Which of equal scores top-p keeps is open in transformers, so that ties come without it.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    B, N = draw.randint(1, 6), draw.randint(2, 7)
    options = [o for o in OPTIONS if kind != "ties" or "top_p" not in o]
    samplings = [Sampling(**o, draft="sample") for o in draw.choices(options, k=B)]
    prefixes = [[draw.randrange(V) for _ in range(draw.randint(1, 9))] for _ in range(B)]
    logits_BNV = 2 * torch.randn(B, N, V, generator=generator, dtype=torch.float64)
    if kind == "ties":
        logits_BNV = logits_BNV.round()
    if kind == "impossible":
        logits_BNV[torch.rand(B, N, V, generator=generator) < 0.3] = -torch.inf
    trees = [random_tree(draw, prefix[-1], logits_NV) for prefix, logits_NV in zip(prefixes, logits_BNV, strict=True)]
    tokens, parents = (torch.tensor(x) for x in zip(*trees, strict=True))
    # drafts that have an idea of the target, over a part of its vocabulary
    ids = torch.randperm(V, generator=generator)[:W].sort().values
    noise = torch.randn(B, N - 1, W, generator=generator, dtype=torch.float64)
    of_batch = BatchSampling.of(samplings, range(B), "cpu")
    scores = logits_BNV[:, :-1].index_select(2, ids).clamp_min(-9) + 0.7 * noise
    q_BKW = of_batch.settle(of_batch.temper(scores)).softmax(-1)
    drawn = ids[torch.multinomial(q_BKW.flatten(0, 1), 1, generator=generator)].view(B, N - 1)
    count_B = torch.tensor([draw.randint(1, N) for _ in range(B)]) if draw.random() < 0.5 else None
    chain = Tree(torch.cat([tokens[:, :1], drawn], dim=1), None, N - 1, count_B, q_BKW)
    return Case(samplings, [draw.randrange(100) for _ in range(B)], prefixes, Tree(tokens, parents, N - 1), chain, ids,
                logits_BNV)  # fmt: skip


def random_tree(draw: random.Random, root: int, logits_NV: Tensor) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree with a node for each row, whose siblings differ and are likely."""
    tokens, parents, used = [root], [-1], {}
    for n in range(1, len(logits_NV)):
        parent = draw.randrange(n)
        taken = used.setdefault(parent, set())
        token = draw.choice([t for t in logits_NV[parent].topk(V).indices.tolist() if t not in taken][:2])
        taken.add(token)
        tokens.append(token)
        parents.append(parent)
    return tokens, parents


@pytest.mark.parametrize("kind", ["any", "ties", "impossible"])
def test_both_rules_are_their_definitions(kind: str) -> None:
    """Trees and chains of different lengths, of requests with different options in one batch."""
    lengths = set()
    for seed in range(60):
        made = case(seed, kind)
        by_match = verify(made.tree, *made.given, seen_BV=made.seen_BV).to_lists()
        by_rejection = verify(made.chain, *made.given, made.target_ids_W, made.seen_BV).to_lists()
        for b in range(len(made.samplings)):
            assert by_match[b] == made.by_match(b), (seed, b)
            assert by_rejection[b] == made.by_rejection(b), (seed, b)
            lengths |= {len(by_match[b][0]), -len(by_rejection[b][0])}
    assert {1, 2, 3, 4, -1, -2, -3, -4} <= lengths


@pytest.mark.parametrize("kind", ["any", "ties", "impossible"])
def test_drawing_along_the_path_is_drawing_at_all_nodes(kind: str) -> None:
    """The same verdict, padding included, for trees and chains."""
    for seed in range(60):
        made = case(seed, kind)
        for tree in (made.tree, replace(made.chain, q_BKW=None)):
            logits_BNV, length_B, sampling = made.given
            seen_BNV = seen_by_node(tree, made.seen_BV)
            found = draw_along_the_path(tree, logits_BNV, length_B, sampling, seen_BNV)
            expected = accept_by_match(tree, sampling.process(logits_BNV, seen_BNV), length_B, sampling)
            for name, x in vars(expected).items():
                assert torch.equal(getattr(found, name), x), (seed, name)


def one_of(tree: Tree, b: int) -> Tree:
    """The tree of one request."""
    rows = {name: x[b, None] for name, x in vars(tree).items() if isinstance(x, Tensor) and name[0] != "_"}
    return replace(tree, **rows)


def test_each_request_gets_what_it_gets_alone() -> None:
    """With its own options alone, so that other code runs: no filters, no penalties, nothing drawn."""
    for seed in range(30):
        made = case(seed)
        logits_BNV, length_B, sampling = made.given
        by_match = verify(made.tree, logits_BNV, length_B, sampling, None, made.seen_BV).to_lists()
        by_rejection = verify(made.chain, logits_BNV, length_B, sampling, made.target_ids_W, made.seen_BV).to_lists()
        for b, (options, number) in enumerate(zip(made.samplings, made.numbers, strict=True)):
            given = logits_BNV[b, None], length_B[b, None], BatchSampling.of([options], [number], "cpu")
            seen = made.seen_BV[b, None]
            assert verify(one_of(made.tree, b), *given, None, seen).to_lists() == [by_match[b]]
            alone = verify(one_of(made.chain, b), *given, made.target_ids_W, seen).to_lists()
            assert alone == [by_rejection[b]]


@pytest.mark.parametrize("drawn", [False, True], ids=["match", "rejection"])
def test_padding_is_never_accepted(drawn: bool) -> None:
    """A chain all of whose tokens are right is accepted up to its count, and the next token is the target's there."""
    right, B = [3, 5, 7, 9], 4
    logits_BNV = torch.full((B, 4, V), -100.0)
    logits_BNV[:, range(4), right] = 0.0
    token_BN = torch.tensor([[1, *right[:3]]] * B)
    q_BKW = torch.nn.functional.one_hot(token_BN[:, 1:], V).double() if drawn else None
    tree = Tree(token_BN, None, 3, torch.tensor([1, 2, 3, 4]), q_BKW)
    sampling = BatchSampling.of([Sampling(temperature=float(drawn), draft="sample")] * B, range(B), "cpu")
    verdict = verify(tree, logits_BNV, torch.zeros(B, dtype=torch.int64), sampling, torch.arange(V))
    assert verdict.to_lists() == [(list(range(n)), right[:n]) for n in (1, 2, 3, 4)]
    assert verdict.path_BR.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]]
    assert verdict.token_BR.tolist() == [[3, 0, 0, 0], [3, 5, 0, 0], [3, 5, 7, 0], [3, 5, 7, 9]]
    assert {x.dtype for x in vars(verdict).values()} == {torch.int64}


def test_the_first_of_equal_logits_is_chosen() -> None:
    tree = Tree.chain(torch.tensor([[4, 2, 6]]))
    logits_BNV = torch.zeros(1, 3, 9)
    logits_BNV[0, 0, [2, 6]] = logits_BNV[0, 1, [6, 8]] = logits_BNV[0, 2, [1, 3]] = 1.0
    sampling = BatchSampling.of([Sampling()], [0], "cpu")
    assert verify(tree, logits_BNV, torch.tensor([0]), sampling).to_lists() == [([0, 1, 2], [2, 6, 1])]


def test_a_residual_of_nothing_is_the_targets() -> None:
    p_BV = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]]).double()
    q_BV = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.75, 0.25]]).double()
    assert residual(p_BV, q_BV).tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]]


def test_tokens_of_a_verdict_are_seen() -> None:
    """The padding is not."""
    seen_BV = torch.zeros(2, 6, dtype=torch.bool)
    see(
        seen_BV,
        Verdict.of(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 3]), torch.tensor([[4, 1, 1], [5, 2, 2]])),
    )
    assert [row.nonzero()[:, 0].tolist() for row in seen_BV] == [[4], [2, 5]]


@pytest.mark.parametrize("drawn", [False, True], ids=["match", "rejection"])
def test_processors_see_the_accepted_path(drawn: bool) -> None:
    """Each request's own, once a node and in order; beside requests without."""
    seen = 0
    for seed in range(40):
        made, draw = case(seed), random.Random(seed)
        memories = [Remembers() if draw.random() < 0.7 else None for _ in made.samplings]
        processing = [Processing([m], p) if m else None for m, p in zip(memories, made.prefixes, strict=True)]
        tree, ids = (made.chain, made.target_ids_W) if drawn else (made.tree, None)
        found = verify(tree, *made.given, ids, made.seen_BV, processing).to_lists()
        for b, memory in enumerate(memories):
            again = Remembers()
            sampling = replace(made.samplings[b], processors=[again] if memory else [])
            path, tokens = found[b]
            assert (path, tokens) == (made.by_rejection if drawn else made.by_match)(b, sampling), (seed, b)
            if memory:
                assert memory.prefixes == [tuple(made.prefixes[b] + tokens[:i]) for i in range(len(path))]
                seen += len(path)
    assert seen > 100


def test_processors_are_left_alone_after_the_last_token() -> None:
    """The verdict ends with the token that ends the answer, which is accepted, and is not gone on from."""
    memory, said = Remembers(), []
    logits_BNV = torch.full((2, 4, V), -100.0)
    logits_BNV[:, range(4), [3, 5, 7, 9]] = 0.0
    sampling = BatchSampling.of([Sampling()] * 2, [0, 1], "cpu")
    processing = [Processing([memory], [2, 1], lambda token: said.append(token) or token == 5), None]
    tree = Tree.chain(torch.tensor([[1, 3, 5, 7]] * 2))
    found = verify(tree, logits_BNV, torch.tensor([1, 1]), sampling, processing=processing).to_lists()
    assert found == [([0, 1], [3, 5]), ([0, 1, 2, 3], [3, 5, 7, 9])]
    assert said == [3, 5] and memory.prefixes == [(2, 1), (2, 1, 3)]


class GivenLogits:
    """A source whose draft has the same logits after any token, float32 [B, K, W]."""

    sequential = False

    def __init__(self, logits_BKW: Tensor, sampling: BatchSampling | None, length_B: Tensor):
        self.logits_BKW, self.sampling, self.level = logits_BKW, sampling, 0
        self.decoder, self.cache = self, SimpleNamespace(length_B=length_B)
        self.target_id_W = torch.arange(logits_BKW.shape[2], device=logits_BKW.device)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def expand(self, front: Front) -> Tensor:
        self.level += 1
        return self.logits_BKW[:, self.level, None]

    def rest_of_chain(self, token_B1: Tensor, levels: int) -> None:
        """No call has several levels."""


def grown(
    sampling: BatchSampling | None, logits_BKW: Tensor, length_B: Tensor, confidence: float
) -> tuple[Tree, Tensor]:
    """The chains, which are the same from the logits of one level at a time and of all at once."""
    chain, grown = Chain(logits_BKW.shape[1], confidence, logits_BKW.device), []
    for known in (1, logits_BKW.shape[1]):
        source = GivenLogits(logits_BKW, sampling, length_B)
        grown.append(chain.grow(source, length_B, logits_BKW[:, :known]))
    if logits_BKW.device.type == "cpu":
        (step, slot_BN), (whole, _) = grown
        for a, b in zip((*vars(step).values(), slot_BN), (*vars(whole).values(), grown[1][1]), strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    return grown[0]


def test_nothing_asks_for_a_value() -> None:
    """Chains are drafted and verified on tensors of no device, which have shapes and no values."""
    options = [Sampling(**o, draft="sample") for o in OPTIONS]
    sampling = BatchSampling.of(options, range(len(options)), "cpu").to(torch.device("meta"))
    B, K = len(options), 4
    with torch.device("meta"):
        length_B, logits_BNV = torch.zeros(B, dtype=torch.int64), torch.zeros(B, K + 1, V)
        seen_BV, ids = torch.zeros(B, V, dtype=torch.bool), torch.zeros(W, dtype=torch.int64)
    for confidence in (0.0, 0.5):
        for drafts in (sampling, None):
            tree, slot_BN = grown(drafts, torch.zeros(B, K, W, device="meta"), length_B, confidence)
            verdict = verify(tree, logits_BNV, length_B, sampling, ids, seen_BV)
            assert slot_BN.shape == verdict.path_BR.shape == verdict.token_BR.shape == (B, K + 1)
            see(seen_BV, verdict)
    parent_BN = torch.zeros(B, K + 1, dtype=torch.int64, device="meta")
    assert verify(Tree(parent_BN, parent_BN, 2), logits_BNV, length_B, sampling, None, seen_BV).path_BR.shape == (B, 3)
    with pytest.raises(RuntimeError):
        verdict.to_lists()


def test_chains_end_after_the_first_unlikely_token() -> None:
    """They have two nodes at least; slots are those of tokens that were expanded and are part of the chain."""
    chances = torch.tensor([[0.9, 0.9, 0.9, 0.9], [0.9, 0.4, 0.9, 0.9], [0.3, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.1]])
    others = ((1 - chances) / (W - 1))[..., None].expand(-1, -1, W - 1)
    logits_BKW = torch.cat([chances[..., None], others], dim=-1).log()
    tree, slot_BN = grown(None, logits_BKW, torch.zeros(4, dtype=torch.int64), 0.5)
    assert tree.count_B.tolist() == [5, 3, 2, 5] and tree.q_BKW is None and tree.levels == 4
    assert slot_BN.tolist() == [[-1, 0, 1, 2, -1], [-1, 0, -1, -1, -1], [-1] * 5, [-1, 0, 1, 2, -1]]
    tree, slot_BN = grown(None, logits_BKW, torch.zeros(4, dtype=torch.int64), 0.0)
    assert tree.count_B is None and slot_BN.tolist() == [[-1, 0, 1, 2, -1]] * 4


def test_each_request_drafts_as_it_does_alone() -> None:
    """By its own temperature and key; a greedy one beside others takes its likeliest tokens, of which it is certain."""
    options = [Sampling(**o, draft="sample") for o in OPTIONS]
    B, length_B = len(options), torch.arange(len(OPTIONS))
    logits_BKW = torch.randn(B, 3, W, generator=torch.Generator().manual_seed(4))
    together, _ = grown(BatchSampling.of(options, range(B), "cpu"), logits_BKW, length_B, 0.0)
    for b, sampling in enumerate(options):
        alone, _ = grown(BatchSampling.of([sampling], [b], "cpu"), logits_BKW[b, None], length_B[b, None], 0.0)
        assert torch.equal(alone.token_BN[0], together.token_BN[b])
        if sampling.greedy:
            assert together.token_BN[b, 1:].tolist() == logits_BKW[b].argmax(-1).tolist()
            assert together.q_BKW[b].gather(1, together.token_BN[b, 1:, None]).tolist() == [[1.0]] * 3
        else:
            assert torch.equal(alone.q_BKW[0], together.q_BKW[b])
            torch.testing.assert_close(alone.q_BKW[0], (logits_BKW[b].double() / sampling.temperature).softmax(-1))


def moved(made: Case, device: str) -> tuple[list[Tree], list[Any], Tensor]:
    """The trees, the arguments between the tree and the tokens seen, and these, on a device."""
    logits_BNV, length_B, sampling = made.given
    on = torch.device(device)
    given = [logits_BNV.to(on), length_B.to(on), sampling.to(on)]
    return [made.tree.to(on), made.chain.to(on)], given, made.seen_BV.to(on)


@pytest.mark.gpu
def test_rounds_can_be_captured() -> None:
    """Both rules and drafting wait for nothing on a GPU, and a CUDA graph of them says what they say on the CPU."""
    for seed in range(12):
        made = case(seed)
        drafts_BKW = torch.randn(len(made.samplings), 3, W, generator=torch.Generator().manual_seed(seed))

        def run(device: str, made: Case = made, drafts_BKW: Tensor = drafts_BKW) -> Callable[[], list[Tensor]]:
            trees, given, seen_BV = moved(made, device)
            ids, logits = made.target_ids_W.to(device), drafts_BKW.to(device)

            def round_of_all() -> list[Tensor]:
                drafted, _ = grown(given[2], logits, given[1], 0.3)
                verdicts = [verify(tree, *given, ids, seen_BV) for tree in trees]
                seen = seen_BV.clone()
                see(seen, verdicts[0])
                return [seen, drafted.token_BN, drafted.count_B, *(x for v in verdicts for x in vars(v).values())]

            return round_of_all

        expected, on_gpu = run("cpu")(), run("cuda")
        on_gpu()  # what libraries do once is done
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = on_gpu()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = on_gpu()
        graph.replay()
        for one, other, third in zip(expected, eager, captured, strict=True):
            assert torch.equal(one, other.cpu()) and torch.equal(one, third.cpu())
