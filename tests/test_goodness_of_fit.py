"""Chi-square tests that sampled verification has the target's distribution.

Whole sequences, drawn in rounds of drafting and verification, are compared with their exact probabilities. The same
test must reject broken samplers.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
from fledge.decode.shapes import Chain
from fledge.decode.sources import Front
from fledge.decode.verify import TargetSampler
from fledge.kernels import sampling as keyed
from fledge.kernels.sampling import RESIDUAL, gumbel_argmax, uniforms
from fledge.types import Sampling, Verdict
from support.mutations import replace_function

V, LENGTH, DEPTH, DRAWS = 6, 3, 2, 100_000
PROMPT = (4, 1)
DRAFT_IDS = torch.tensor([0, 1, 3, 4])
SAMPLINGS: dict[str, dict[str, float]] = {
    "temperature": dict(temperature=0.8),
    "top_p and repetition": dict(temperature=1.1, top_p=0.85, repetition_penalty=1.6),
}


def target_logits(prefix: Sequence[int]) -> Tensor:
    """The target model: random logits that depend on the whole prefix, float32 [V]."""
    seed = sum((t + 1) * 7**i for i, t in enumerate(prefix))
    return 1.3 * torch.randn(V, generator=torch.Generator().manual_seed(seed))


def draft_logits(prefix: Sequence[int]) -> Tensor:
    """The draft model: the target's logits plus noise, over the draft's vocabulary, float32 [W]."""
    noise = torch.randn(
        V, generator=torch.Generator().manual_seed(10**6 + sum((t + 2) * 11**i for i, t in enumerate(prefix)))
    )
    return (target_logits(prefix) + noise)[DRAFT_IDS]


def exact_probabilities(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of every sequence, computed with transformers' processors in the order that `generate` uses."""
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
    """The p-value of Pearson's chi-square test; sequences expected fewer than five times are pooled in one cell."""
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


def uniforms_of_all(key: tuple[int, Tensor, int, int], n: int) -> Tensor:
    """`uniforms` for many requests at once, [requests, n], with bitwise equal results."""
    state = torch.zeros((), dtype=torch.int64)
    for part in key:
        state = keyed._mix_tensor(state + keyed._signed(keyed._GOLDEN) + part)
    counter = torch.arange(1, n + 1) * keyed._signed(keyed._GOLDEN) + state[:, None]
    return (((keyed._mix_tensor(counter) >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52


@functools.cache
def table(seed: int, position: int, purpose: int) -> Tensor:
    return uniforms_of_all((seed, torch.arange(DRAWS), position, purpose), V)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes the random numbers of all requests at once and looks them up: one request at a time takes minutes."""

    def looked_up(key: tuple[int, int, int, int], n: int, device: Any = "cpu") -> Tensor:
        seed, request, position, purpose = key
        return table(seed, position, purpose)[request, :n]

    def gumbel(keys: Sequence[tuple[int, int, int, int]], n: int, device: Any = "cpu") -> Tensor:
        return -(-torch.stack([looked_up(key, n) for key in keys]).log()).log()

    monkeypatch.setattr(verify, "uniforms", looked_up)
    for module in (keyed, verify):
        monkeypatch.setattr(module, "gumbel", gumbel)


def test_quick_draws_are_the_draws() -> None:
    requests = torch.arange(50)
    for position, purpose in itertools.product((0, 2, 5), range(4)):
        many = uniforms_of_all((3, requests, position, purpose), V)
        assert all(torch.equal(many[i], uniforms((3, i, position, purpose), V)) for i in range(50))


class CachedSampler(TargetSampler):
    """A sampler that caches the processed scores of each node, because all requests visit the same few nodes."""

    def __init__(self, sampling: Sampling):
        super().__init__(sampling)
        self.known: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def scores(self, prefix: Sequence[int], logits_V: Tensor) -> Tensor:
        key = (tuple(prefix), logits_V.data_ptr())
        if key not in self.known:
            self.known[key] = super().scores(prefix, logits_V)
        return self.known[key]


class FunctionSource:
    """A source whose draft logits are the function `draft_logits` of the prefix."""

    sequential = True

    def __init__(self) -> None:
        self.draft, self.cache = self, SimpleNamespace(lengths=[0])
        self.numbers, self.prefix = [0], ()
        self.known: dict[tuple[int, ...], Tensor] = {}

    def begin(self, prefix: tuple[int, ...], request: int) -> Tensor:
        self.numbers, self.cache.lengths, self.prefix = [request], [len(prefix) - 1], prefix
        return self._logits()

    def expand(self, front: Front) -> Tensor:
        self.prefix = (*self.prefix, int(front.token_BF))
        return self._logits()

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return DRAFT_IDS[draft_ids]

    def _logits(self) -> Tensor:
        if self.prefix not in self.known:
            self.known[self.prefix] = draft_logits(self.prefix)[None, None]
        return self.known[self.prefix]


@dataclass
class Harness:
    """Decodes sequences as the engine does, with the functions above as models. It caches what depends only on the
    prefix; the code under test computes it."""

    sampling: Sampling
    rounds: Counter[int] = field(default_factory=Counter)
    target: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    nodes: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sampler = CachedSampler(self.sampling)
        self._chain, self._source = Chain(DEPTH, self.sampling), FunctionSource()
        self._greedy: dict[tuple[int, ...], list[int]] = {}  # greedy drafts do not depend on the request

    def propose(self, prefix: tuple[int, ...], request: int) -> tuple[list[int], Tensor | None]:
        """A drafted chain, and the distributions it was sampled from over the target's vocabulary (None if greedy)."""
        if prefix in self._greedy:
            return self._greedy[prefix], None
        logits = self._source.begin(prefix, request)
        tree, _ = self._chain.grow(self._source, torch.tensor([prefix[-1]]), logits)
        drafted = tree.token_BN[0, 1:].tolist()
        if tree.q_BKW is None:
            self._greedy[prefix] = drafted
            return drafted, None
        q_KV = torch.zeros(DEPTH, V, dtype=torch.float64)
        q_KV[:, DRAFT_IDS] = tree.q_BKW[0]
        return drafted, q_KV

    def logits(self, prefix: tuple[int, ...], drafted: Sequence[int]) -> Tensor:
        path = (*prefix, *drafted)
        if path not in self.nodes:
            at = range(len(prefix), len(path) + 1)
            self.nodes[path] = torch.stack([target_logits(path[:i]) for i in at])
        return self.nodes[path]

    def sequence(self, request: int) -> tuple[int, ...]:
        sampler, prefix = self._sampler, PROMPT
        sampler.request = request
        while len(prefix) < len(PROMPT) + LENGTH:
            drafted, q_KV = self.propose(prefix, request)
            logits, chain = self.logits(prefix, drafted), [prefix[-1], *drafted]
            if q_KV is None:
                (verdict,) = verify.verify_by_match([sampler], [prefix], [(chain, range(-1, DEPTH))], logits[None])
            else:
                verdict = verify.verify_by_rejection(sampler, prefix, chain, q_KV, logits)
            committed = verdict.tokens
            self.rounds[len(committed) - 1] += 1
            prefix = (*prefix, *committed)
        return prefix[len(PROMPT) : len(PROMPT) + LENGTH]


def draw_sequences(sampling: Sampling, draws: int = DRAWS) -> tuple[Counter[tuple[int, ...]], Counter[int]]:
    """Decodes one sequence for each of `draws` requests. Counts the sequences, and the rounds by accepted tokens."""
    harness = Harness(sampling)
    return Counter(harness.sequence(i) for i in range(draws)), harness.rounds


@pytest.mark.parametrize("rule", ["greedy", "sample"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sequences_are_the_targets(name: str, rule: str, quick: None) -> None:
    """100,000 sequences have the target's distribution, with greedy drafts (verified by match) and with sampled drafts
    (verified by rejection)."""
    sampling = Sampling(**SAMPLINGS[name], draft=rule, seed=1)
    expected = exact_probabilities(sampling)
    assert abs(sum(expected.values()) - 1) < 1e-9
    counts, rounds = draw_sequences(sampling)
    assert all(expected[s] > 0 for s in counts), "a sequence that has probability 0 under the target"
    assert min(rounds[k] for k in range(DEPTH + 1)) > DRAWS / 20, "both rejections and full acceptance must occur"
    assert p_value(counts, expected) > 1e-3


def skip_the_residual(residual: Any, p: Tensor, q: Tensor) -> Tensor:
    return p


def redraw_after_a_mismatch(rule: Any, samplers: Any, prefixes: Any, nodes: Any, logits_BNV: Tensor) -> list[Verdict]:
    (verdict,) = rule(samplers, prefixes, nodes, logits_BNV)
    at = verdict.path[-1]
    if at < DEPTH:  # the token drafted there is not the target's
        scores = samplers[0].scores([*prefixes[0], *verdict.tokens[:-1]], logits_BNV[0, at])
        verdict.tokens[-1] = gumbel_argmax(scores, samplers[0].key(at, RESIDUAL))
    return [verdict]


def leave_the_last_token_out(processed: Any, samplers: Any, prefixes: Any, logits_BV: Tensor) -> Tensor:
    return processed(samplers, [prefix[:-1] for prefix in prefixes], logits_BV)


class OnCommittedPrefix:
    """A sampler that processes every node with the prefix committed before the round."""

    def __init__(self, sampler: TargetSampler, prefix: Sequence[int]):
        self.sampler, self.prefix = sampler, prefix

    def scores(self, prefix: Sequence[int], logits_V: Tensor) -> Tensor:
        return self.sampler.scores(self.prefix, logits_V)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)


def process_on_the_committed_prefix(rule: Any, sampler: Any, prefix: Any, *given: Any) -> Verdict:
    return rule(OnCommittedPrefix(sampler, prefix), prefix, *given)


def accept_too_often(uniforms: Any, *given: Any) -> Tensor:
    return 0.9 * uniforms(*given)


def accept_always(uniforms: Any, *given: Any) -> Tensor:
    return 0 * uniforms(*given)


BROKEN: dict[str, tuple[str, str, Any]] = {  # name -> (draft rule, function of verify, its replacement)
    "residual skipped": ("sample", "residual", skip_the_residual),
    "mismatch redrawn": ("greedy", "verify_by_match", redraw_after_a_mismatch),
    "a node without its last token": ("greedy", "processed", leave_the_last_token_out),
    "every node on the committed prefix": ("sample", "verify_by_rejection", process_on_the_committed_prefix),
    "accepted too often": ("sample", "uniforms", accept_too_often),
    "always accepted": ("sample", "uniforms", accept_always),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_samplers_are_rejected(name: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fifth of the draws, the chi-square test rejects each of these mistakes at p < 1e-6."""
    rule, *mutation = BROKEN[name]
    sampling = Sampling(**SAMPLINGS["top_p and repetition"], draft=rule, seed=1)
    expected = exact_probabilities(sampling)
    replace_function(monkeypatch, verify, *mutation)
    assert p_value(draw_sequences(sampling, DRAWS // 5)[0], expected) < 1e-6


def chi_square_uniform(counts: Tensor) -> float:
    mean = counts.sum() / counts.numel()
    statistic = ((counts - mean) ** 2 / mean).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2.0).double(), statistic.double() / 2))


def chi_square_pairs(a: Tensor, b: Tensor, bins: int = 10) -> float:
    """The p-value that two samples are uniform and independent, by a chi-square test on a grid."""
    cell = (a * bins).long() * bins + (b * bins).long()
    return chi_square_uniform(torch.bincount(cell, minlength=bins * bins).double())


def keys(component: int) -> Iterator[tuple[int, int, int, int]]:
    """Keys that differ in one component only, which counts up from 0."""
    for i in range(10_000):
        key = [5, 6, 7, 2]
        key[component] = i
        yield tuple(key)


def test_uniforms_within_a_key() -> None:
    """Draws of one key lie inside (0, 1), are uniform, and neighbours are independent; asking for fewer draws gives the
    first of them."""
    for key in ((0, 0, 0, 0), (1, 2, 3, 1), (-1, 10**12, 4096, 3)):
        u = uniforms(key, 200_000)
        assert u.min() > 0 and u.max() < 1
        assert chi_square_uniform(torch.bincount((u * 1000).long(), minlength=1000).double()) > 1e-3
        assert chi_square_pairs(u[:-1:2], u[1::2]) > 1e-3
        assert chi_square_pairs(u[:-151], u[151:]) > 1e-3
        assert torch.equal(uniforms(key, 17), u[:17])
    for shift in range(52):
        bit = ((u * 2.0**52).long() >> shift) & 1
        assert abs(bit.double().mean() - 0.5) < 0.005


@pytest.mark.parametrize("component", range(4), ids=["seed", "request", "position", "purpose"])
def test_uniforms_across_keys(component: int) -> None:
    """Neighbouring keys give independent draws, both at equal and at different indices."""
    u = torch.stack([uniforms(key, 3) for key in keys(component)])
    assert u.unique().numel() == u.numel()
    for i, j in itertools.product(range(3), repeat=2):
        assert chi_square_pairs(u[:-1, i], u[1:, j]) > 1e-4
    assert all(
        chi_square_uniform(torch.bincount((u[:, i] * 50).long(), minlength=50).double()) > 1e-4 for i in range(3)
    )


def test_keys_are_not_mixed_up() -> None:
    """The order of the components matters: permuted keys, and keys with equal sums, give different draws."""
    small = list(itertools.product(range(3), repeat=4))
    first = torch.stack([uniforms(key, 1) for key in small])
    assert first.unique().numel() == len(small)
    assert torch.equal(uniforms((1, 2, 3, 0), 5), uniforms((1, 2, 3, 0), 5))


def test_gumbel_argmax_never_draws_the_impossible() -> None:
    """Tokens with score -inf are never drawn, the only possible token is always drawn, and others are drawn with their
    probability."""
    scores = torch.tensor([-float("inf"), 0.0, -float("inf"), 1.0])
    drawn = Counter(gumbel_argmax(scores, (0, i, 0, 0)) for i in range(5000))
    assert set(drawn) == {1, 3}
    assert abs(drawn[3] / 5000 - torch.sigmoid(torch.tensor(1.0)).item()) < 0.03
    certain = torch.full((4,), -float("inf"))
    certain[2] = -1e4
    assert all(gumbel_argmax(certain, (0, i, 0, 0)) == 2 for i in range(100))
