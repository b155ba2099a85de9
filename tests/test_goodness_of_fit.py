"""Sampled verification is distributed as the target alone: chi-square tests of whole sequences, drawn through rounds of
drafting and verifying, against probabilities enumerated token by token; and the same test on broken samplers."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from fledge.decode import verify
from fledge.decode.propose import Front
from fledge.decode.sampling import BatchSampling, see
from fledge.decode.shapes import Chain
from fledge.ops.sampling import RESIDUAL, TOKEN, coupled, gumbel_argmax, hash_keys, uniforms
from fledge.types import Sampling, Tree, Verdict
from support.mutations import replace_function

V, LENGTH, DEPTH, DRAWS = 6, 3, 2, 100_000
PROMPT = (4, 1)
DRAFT_IDS = torch.tensor([0, 1, 3, 4])
SAMPLINGS: dict[str, dict[str, float]] = {
    "temperature": dict(temperature=0.8),
    "top_p and repetition": dict(temperature=1.1, top_p=0.85, repetition_penalty=1.6),
}


def target_logits(prefix: Sequence[int]) -> Tensor:
    """A model made up of its prefixes: any two have unrelated logits, float32 [V]."""
    seed = sum((t + 1) * 7**i for i, t in enumerate(prefix))
    return 1.3 * torch.randn(V, generator=torch.Generator().manual_seed(seed))


def draft_logits(prefix: Sequence[int]) -> Tensor:
    """A draft that has an idea of the target, over its own vocabulary, float32 [W]."""
    noise = torch.randn(
        V, generator=torch.Generator().manual_seed(10**6 + sum((t + 2) * 11**i for i, t in enumerate(prefix)))
    )
    return (target_logits(prefix) + noise)[DRAFT_IDS]


def exact_probabilities(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Every sequence's probability, token by token with transformers' processors in the order of `generate`."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))

    def after(prefix: tuple[int, ...]) -> list[float]:
        scores = processors(torch.tensor([prefix]), target_logits(prefix)[None].clone())
        return scores[0].double().softmax(-1).tolist()

    found = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*said, token): p * here for said, p in found.items() for token, here in enumerate(after(PROMPT + said))
        }
    return found


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square over the sequences, those expected fewer than five times taken together."""
    n = sum(counts.values())
    rare = [s for s, p in expected.items() if p * n < 5]
    cells = [(counts[s], p * n) for s, p in expected.items() if p * n >= 5]
    pooled = sum(expected[s] for s in rare) * n
    if pooled >= 5:
        cells.append((sum(counts[s] for s in rare), pooled))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    return float(
        torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2.0).double(), torch.tensor(statistic / 2.0).double())
    )


@functools.cache
def tables() -> tuple[Tensor, Tensor]:
    """The target's and the draft's logits after every prefix that decoding meets, float32 [P, V] and [P, W].

    Prefixes are the prompt and up to LENGTH + DEPTH - 1 tokens, in the order of `after`.
    """
    said = [s for n in range(LENGTH + DEPTH) for s in itertools.product(range(V), repeat=n)]
    target = [target_logits(PROMPT + s) for s in said]
    return torch.stack(target), torch.stack([draft_logits(PROMPT + s) for s in said])


def after(prefix: Tensor, token: Tensor) -> Tensor:
    """The place in `tables` of prefixes (given by theirs, int64) followed by a token each. The prompt's place is 0."""
    return V * prefix + 1 + token


class TableSource:
    """A source of chains whose draft is the function `draft_logits` of each request's prefix, with the target's noise
    where drafting is coupled. Only the `candidates` likeliest tokens are drafted."""

    sequential = True

    def __init__(self, sampling: BatchSampling, prefix_B: Tensor, length_B: Tensor, candidates: int):
        self.sampling, self.prefix_B, self.candidates = sampling, prefix_B, candidates
        self.decoder, self.cache = self, SimpleNamespace(length_B=length_B)
        self.target_id_W, self.level = DRAFT_IDS, 0

    def logits(self) -> Tensor:
        logits_B1W, sampling = tables()[1][self.prefix_B][:, None], self.sampling
        if self.candidates < len(DRAFT_IDS):  # as a candidate selector
            values, places = logits_B1W.topk(self.candidates)
            logits_B1W = torch.full_like(logits_B1W, -torch.inf).scatter(-1, places, values)
        if not sampling.couples:
            return logits_B1W
        state_B1 = sampling.keys(self.cache.length_B[:, None] + 1 + self.level, TOKEN)
        return coupled(logits_B1W, state_B1, sampling.temperature_B, DRAFT_IDS)

    def expand(self, front: Front) -> Tensor:
        self.prefix_B, self.level = after(self.prefix_B, front.token_BF[:, 0]), self.level + 1
        return self.logits()

    def rest_of_chain(self, token_B1: Tensor, levels: int) -> None:
        """No call has several levels."""

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return DRAFT_IDS[draft_ids]


def nodes_of(tree: Tree, prefix_B: Tensor) -> Tensor:
    """The prefixes that end with each node of chains whose roots end those given, int64 [B, N]."""
    nodes = [prefix_B]
    for token_B in tree.token_BN[:, 1:].T:
        nodes.append(after(nodes[-1], token_B))
    return torch.stack(nodes, dim=1)


def drawn(
    options: Sampling, draws: int = DRAWS, candidates: int = len(DRAFT_IDS)
) -> tuple[Counter[tuple[int, ...]], Counter[int]]:
    """Sequences of as many requests, and how many tokens their rounds accepted.

    All requests are one batch, decoded in rounds as the engine does, with tables for models.
    """
    said = torch.zeros(draws, LENGTH + DEPTH, dtype=torch.int64)
    said_B, prefix_B = torch.zeros(draws, dtype=torch.int64), torch.zeros(draws, dtype=torch.int64)
    root_B = torch.full((draws,), PROMPT[-1])
    seen_BV = torch.zeros(draws, V, dtype=torch.bool).index_fill(1, torch.tensor(PROMPT), True)
    rounds: Counter[int] = Counter()
    numbers = torch.arange(draws)
    while numbers.numel():
        sampling = BatchSampling.of([options], [0], "cpu")
        rows = {name: x.expand(numbers.numel()) for name, x in vars(sampling).items() if name.endswith("_B")}
        sampling = replace(sampling, **rows | {"request_B": numbers})
        prefix, seen = prefix_B[numbers], seen_BV[numbers]
        length_B = len(PROMPT) - 1 + said_B[numbers]
        source = TableSource(sampling, prefix, length_B, candidates)
        tree, _ = Chain(DEPTH).grow(source, root_B[numbers], source.logits())
        node_BN = nodes_of(tree, prefix)
        # through the module, where mistakes are put
        verdict = verify.verify(tree, tables()[0][node_BN], length_B, sampling, DRAFT_IDS, seen)
        see(seen, verdict)
        seen_BV[numbers] = seen
        rounds.update((verdict.count_B - 1).tolist())
        for r in range(DEPTH + 1):
            committed, token = numbers[r < verdict.count_B], verdict.token_BR[r < verdict.count_B, r]
            said[committed, said_B[committed]] = token
            said_B[committed] += 1
            prefix_B[committed], root_B[committed] = after(prefix_B[committed], token), token
        numbers = numbers[said_B[numbers] < LENGTH]
    return Counter(map(tuple, said[:, :LENGTH].tolist())), rounds


@pytest.mark.parametrize("candidates", [len(DRAFT_IDS), 2])
@pytest.mark.parametrize("rule", ["coupled", "sample"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sequences_are_the_targets(name: str, rule: str, candidates: int) -> None:
    """100,000 sequences through rounds: walking with coupled drafts, and rejection with others; drafted from all of the
    draft's tokens, and from two candidates."""
    sampling = Sampling(**SAMPLINGS[name], draft=rule, seed=1)
    expected = exact_probabilities(sampling)
    assert abs(sum(expected.values()) - 1) < 1e-9
    counts, rounds = drawn(sampling, candidates=candidates)
    assert all(expected[s] > 0 for s in counts), "a sequence that the target never says"
    assert min(rounds[k] for k in range(DEPTH + 1)) > DRAWS / 20, "rejections and acceptance were both to occur"
    assert p_value(counts, expected) > 1e-3


def skip_the_residual(residual: Any, p_BV: Tensor, q_BV: Tensor) -> Tensor:
    return p_BV


def redraw_after_a_mismatch(
    rule: Any, tree: Tree, logits_BNV: Tensor, length_B: Tensor, sampling: BatchSampling, seen_BNV: Tensor
) -> Verdict:
    verdict = rule(tree, logits_BNV, length_B, sampling, seen_BNV)
    last_B1 = verdict.count_B[:, None] - 1
    scores_BNV = sampling.process(logits_BNV, seen_BNV)
    state_B1 = sampling.keys(length_B[:, None] + 1 + last_B1, RESIDUAL)
    again_BN = gumbel_argmax(scores_BNV, state_B1.expand(-1, DEPTH + 1))
    wrong_BR = verdict.token_BR.scatter(1, last_B1, again_BN.gather(1, last_B1))
    # where a drafted token stood, and was not the target's
    return replace(verdict, token_BR=torch.where(last_B1 < DEPTH, wrong_BR, verdict.token_BR))


def leave_the_last_token_out(seen_by_node: Any, tree: Tree, seen_BV: Tensor) -> Tensor:
    return seen_by_node(tree, seen_BV).scatter(2, tree.token_BN[..., None], False)


def see_the_committed_prefix_alone(seen_by_node: Any, tree: Tree, seen_BV: Tensor) -> Tensor:
    return seen_BV[:, None].expand(-1, tree.token_BN.shape[1], -1)


def accept_too_often(uniforms: Any, *given: Any) -> Tensor:
    return 0.9 * uniforms(*given)


def accept_always(uniforms: Any, *given: Any) -> Tensor:
    return 0 * uniforms(*given)


BROKEN: dict[str, tuple[str, str, Any]] = {  # name -> (draft, function of verify, what replaces it)
    "residual skipped": ("sample", "residual", skip_the_residual),
    "mismatch redrawn": ("coupled", "draw_along_the_path", redraw_after_a_mismatch),
    "a node without its last token": ("coupled", "seen_by_node", leave_the_last_token_out),
    "every node on the committed prefix": ("sample", "seen_by_node", see_the_committed_prefix_alone),
    "accepted too often": ("sample", "uniforms", accept_too_often),
    "always accepted": ("sample", "uniforms", accept_always),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_samplers_are_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that the rules pass above finds each of these mistakes beyond doubt, with a fifth of the draws."""
    rule, *mutation = BROKEN[name]
    sampling = Sampling(**SAMPLINGS["top_p and repetition"], draft=rule, seed=1)
    expected = exact_probabilities(sampling)
    replace_function(monkeypatch, verify, *mutation)
    assert p_value(drawn(sampling, DRAWS // 5)[0], expected) < 1e-6


def chi_square_uniform(counts: Tensor) -> float:
    mean = counts.sum() / counts.numel()
    statistic = ((counts - mean) ** 2 / mean).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2.0).double(), statistic.double() / 2))


def pairs(a: Tensor, b: Tensor, bins: int = 10) -> float:
    """p-value of two samples being uniform and independent, on a grid."""
    cell = (a * bins).long() * bins + (b * bins).long()
    return chi_square_uniform(torch.bincount(cell, minlength=bins * bins).double())


def draws(keys: Iterator[tuple[int, int, int, int]], n: int) -> Tensor:
    """The first n uniforms of each key, float64 [keys, n]. Keys of one purpose are made together."""
    every = list(keys)
    out = torch.empty(len(every), n, dtype=torch.float64)
    for purpose in {key[3] for key in every}:
        rows = [i for i, key in enumerate(every) if key[3] == purpose]
        parts = torch.tensor([every[i][:3] for i in rows]).T
        out[rows] = uniforms(hash_keys(*parts, purpose), n)
    return out


def keys(component: int) -> Iterator[tuple[int, int, int, int]]:
    """Keys that differ in one component alone, by one at a time."""
    for i in range(10_000):
        key = [5, 6, 7, 2]
        key[component] = i
        yield tuple(key)


def test_uniforms_within_a_key() -> None:
    """Inside (0, 1), uniform, neighbours independent; the first n do not depend on how many are asked for."""
    for key in ((0, 0, 0, 0), (1, 2, 3, 1), (-1, 10**12, 4096, 3)):
        (u,) = draws(iter([key]), 200_000)
        assert u.min() > 0 and u.max() < 1
        assert chi_square_uniform(torch.bincount((u * 1000).long(), minlength=1000).double()) > 1e-3
        assert pairs(u[:-1:2], u[1::2]) > 1e-3
        assert pairs(u[:-151], u[151:]) > 1e-3
        assert torch.equal(draws(iter([key]), 17)[0], u[:17])
    for shift in range(52):
        bit = ((u * 2.0**52).long() >> shift) & 1
        assert abs(bit.double().mean() - 0.5) < 0.005


@pytest.mark.parametrize("component", range(4), ids=["seed", "request", "position", "purpose"])
def test_uniforms_across_keys(component: int) -> None:
    """Keys that are neighbours give unrelated draws, at the same place and at the next."""
    u = draws(keys(component), 3)
    assert u.unique().numel() == u.numel()
    for i, j in itertools.product(range(3), repeat=2):
        assert pairs(u[:-1, i], u[1:, j]) > 1e-4
    assert all(
        chi_square_uniform(torch.bincount((u[:, i] * 50).long(), minlength=50).double()) > 1e-4 for i in range(3)
    )


def test_keys_are_not_mixed_up() -> None:
    """The components have places: permuted keys, and keys with equal sums, are other keys."""
    small = list(itertools.product(range(3), repeat=4))
    first = draws(iter(small), 1)
    assert first.unique().numel() == len(small)
    assert torch.equal(draws(iter(small), 5)[:, :1], first)


def test_gumbel_argmax_never_draws_the_impossible() -> None:
    """-inf is never drawn, a certain token always, and float32 scores are as good as float64 ones."""
    state = hash_keys(torch.tensor(0), torch.arange(5000), torch.tensor(0), 0)
    scores = torch.tensor([-float("inf"), 0.0, -float("inf"), 1.0])
    drawn = Counter(gumbel_argmax(scores.expand(5000, 4), state).tolist())
    assert set(drawn) == {1, 3}
    assert abs(drawn[3] / 5000 - torch.sigmoid(torch.tensor(1.0)).item()) < 0.03
    certain = torch.full((100, 4), -float("inf"))
    certain[:, 2] = -1e4
    assert set(gumbel_argmax(certain, state[:100]).tolist()) == {2}
