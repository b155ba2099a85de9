"""Scores are processed as by transformers, for requests whose options differ; keys give the streams that they gave."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fledge.decode.rounds import tensors_of
from fledge.decode.sampling import BatchSampling, seen_by_node, seen_tokens
from fledge.ops import sampling as sampling_kernels
from fledge.ops.compiled import library
from fledge.ops.device import computed_by, to_device
from fledge.ops.sampling import (
    TOKEN,
    coupled,
    filter_top,
    filtered_argmax,
    gumbel,
    gumbel_argmax,
    hash_keys,
    uniforms,
)
from fledge.types import Sampling, Tree
from support.devices import by_both
from support.verification import scores_of, uniforms_of

V = 40
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalized": dict(repetition_penalty=1.3),
    "greedy, with filters": dict(top_k=2, top_p=0.1),
    "temperature": dict(temperature=0.7),
    "temperature 1": dict(temperature=1),
    "top_k": dict(temperature=1.0, top_k=5),
    "top_k beyond the vocabulary": dict(temperature=1.5, top_k=1000),
    "one token": dict(temperature=1.5, top_k=1),
    "top_p": dict(temperature=1.2, top_p=0.8),
    "a small top_p": dict(temperature=1.0, top_p=1e-6),
    "everything": dict(temperature=1.3, top_k=12, top_p=0.7, repetition_penalty=1.4),
    "rewarded repetition": dict(temperature=1.0, repetition_penalty=0.8),
}
PREFIXES = [[(7 * b + 3 * i) % V for i in range(1 + b % 5)] for b in range(len(OPTIONS))]


def sampling_of(**more: Any) -> BatchSampling:
    """The options of one request each."""
    samplings = [Sampling(**options, **more) for options in OPTIONS.values()]
    return BatchSampling.of(samplings, range(len(samplings)), "cpu")


def trees(parents: list[int]) -> Tree:
    """One tree for each of OPTIONS, whose roots end the prefixes."""
    token_BN = torch.randint(V, (len(OPTIONS), len(parents)), generator=torch.Generator().manual_seed(3))
    token_BN[:, 0] = torch.tensor([p[-1] for p in PREFIXES])
    return Tree(token_BN, torch.tensor(parents).expand_as(token_BN), len(parents) - 1)


def processed(sampling: BatchSampling, tree: Tree, logits_BNV: Tensor) -> Tensor:
    seen_BV = seen_tokens(PREFIXES, V, torch.device("cpu"))
    return sampling.process(logits_BNV, seen_by_node(tree, seen_BV))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["any", "impossible tokens", "ties"])
def test_scores_are_those_of_transformers(kind: str, dtype: torch.dtype) -> None:
    """To the last bit, for each node of each request on the tokens of its own path, in one batch of all options.

    Which of equal scores top-p keeps is open in transformers, so that ties, which bfloat16 has
    too, are compared as sorted scores there.
    """
    parents = [-1, 0, 0, 1, 1, 3]
    generator = torch.Generator().manual_seed(5)
    logits_BNV = (2 * torch.randn(len(OPTIONS), len(parents), V, generator=generator)).to(dtype)
    if kind == "impossible tokens":
        logits_BNV[torch.rand(logits_BNV.shape, generator=generator) < 0.3] = -torch.inf
    if kind == "ties":
        logits_BNV = logits_BNV.round()
    tree = trees(parents)
    found = processed(sampling_of(), tree, logits_BNV)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for b, options in enumerate(OPTIONS.values()):
        for n in range(len(parents)):
            path, node = [], n
            while node > 0:
                path.insert(0, int(tree.token_BN[b, node]))
                node = parents[node]
            expected = scores_of(Sampling(**options), [*PREFIXES[b], *path], logits_BNV[b, n])
            if (kind == "ties" or dtype == torch.bfloat16) and "top_p" in options:
                assert torch.equal(found[b, n].sort().values, expected.sort().values), (options, n)
            else:
                assert torch.equal(found[b, n], expected), (options, n)


def test_a_batch_gives_each_request_what_it_gets_alone() -> None:
    tree = trees([-1, 0, 1])
    logits_BNV = torch.randn(len(OPTIONS), 3, V, generator=torch.Generator().manual_seed(6))
    together = processed(sampling_of(), tree, logits_BNV)
    for b, options in enumerate(OPTIONS.values()):
        alone = BatchSampling.of([Sampling(**options)], [b], "cpu")
        seen_1V = seen_tokens([PREFIXES[b]], V, torch.device("cpu"))
        seen = seen_by_node(Tree(tree.token_BN[b, None], None, 2), seen_1V)
        assert torch.equal(alone.process(logits_BNV[b, None], seen)[0], together[b]), options


def test_ties_at_the_kth_score_are_kept() -> None:
    sampling = BatchSampling.of([Sampling(temperature=1.0, top_k=2)], [0], "cpu")
    scores = sampling.process(torch.tensor([[[1.0, 3.0, 1.0, 0.0, 1.0]]]))
    assert scores.isfinite().tolist() == [[[True, True, True, False, True]]]


def test_the_flags_say_what_is_needed() -> None:
    def flags(*options: dict[str, Any]) -> list[str]:
        sampling = BatchSampling.of([Sampling(**o) for o in options], range(len(options)), "cpu")
        return [name for name, value in vars(sampling).items() if value is True]

    assert flags({}) == flags(dict(top_k=3, top_p=0.5, draft="sample")) == ["greedy"]
    assert flags(dict(temperature=1.0)) == ["samples"]
    assert flags(dict(temperature=1.0, top_p=0.9), {}) == ["samples", "greedy", "filters"]
    assert flags(dict(repetition_penalty=2.0)) == ["greedy", "penalizes"]
    assert flags({}, dict(temperature=1.0, draft="sample")) == ["samples", "greedy", "samples_draft"]


def test_greedy_logits_are_left_as_they_are() -> None:
    logits_BNV = torch.randn(1, 3, V, dtype=torch.bfloat16)
    assert BatchSampling.of([Sampling()], [0], "cpu").process(logits_BNV) is logits_BNV


def test_tokens_seen_are_those_of_the_path() -> None:
    """Also where a node outside the path has a token of it, and where ids go beyond the target's head."""
    tree = Tree(torch.tensor([[4, 5, 6, 5, 9]]), torch.tensor([[-1, 0, 0, 2, 1]]), 4)
    seen = seen_by_node(tree, seen_tokens([[2, 7, 4]], 9, torch.device("cpu")))
    found = [row.nonzero()[:, 0].tolist() for row in seen[0]]
    assert found == [[2, 4, 7], [2, 4, 5, 7], [2, 4, 6, 7], [2, 4, 5, 6, 7], [2, 4, 5, 7]]


@given(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3, st.integers(0, 3)))
@settings(max_examples=200, deadline=None)
def test_streams_are_splitmix(key: tuple[int, int, int, int]) -> None:
    state = hash_keys(*(torch.tensor(part) for part in key[:3]), key[3])
    assert torch.equal(uniforms(state, 5), uniforms_of(key, 5))
    assert torch.equal(gumbel(state, 5), -(-uniforms_of(key, 5).log()).log())


def test_streams_stay_what_they_were() -> None:
    """Answers sampled with a seed are the same in every version."""
    found = uniforms(
        hash_keys(torch.tensor([0, 1, -1]), torch.tensor([0, 2, 10**12]), torch.tensor([0, 3, 4096]), 1), 2
    )
    assert found.tolist() == [
        [0.16806180823156136, 0.17667246852156093],
        [0.7403539443870636, 0.8464756398868317],
        [0.3084122699844024, 0.357463183747765],
    ]


SCORES: dict[str, dict[str, Any]] = {
    "like a model's": dict(scale=3.0), "flat": dict(scale=0.0), "nearly certain": dict(scale=40.0),
    "far apart": dict(scale=3000.0), "far from zero": dict(scale=2.0, shift=-1e6), "a few": dict(scale=2.0, kept=0.1),
}  # fmt: skip


def random_scores(rows: int, n: int, dtype: torch.dtype, *, scale: float, shift: float = 0.0, kept: float = 1.0):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(rows, n, generator=generator) * scale + shift
    x[torch.rand(rows, n, generator=generator) > kept] = -torch.inf
    x[:, n // 2] = shift  # one at least is possible
    return x.to(dtype)


def computing(impl: str) -> AbstractContextManager[Any]:
    return nullcontext() if impl == "compiled" else computed_by(impl)


compiled = pytest.param("compiled", marks=pytest.mark.skipif(library() is None, reason="needs a C compiler"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("impl", [compiled, "triton"])
def test_the_fast_draws_are_those_of_the_definition(impl: str, kind: str, dtype: torch.dtype) -> None:
    """Token for token, of rows of one number, of a block, and of several blocks; rows may be strided."""
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    for n, rows in ((1, 3), (40, 300), (2048, 40), (20_001, 8)):
        if device == "cpu" and impl == "triton":
            rows = min(rows, 2)  # the interpreter is slow
        scores = random_scores(rows, n, dtype, **SCORES[kind]).to(device)
        key = torch.tensor(n, device=device), torch.arange(rows, device=device), torch.tensor(1, device=device)
        state = hash_keys(*key, 2)
        with computed_by("definition"):
            expected = gumbel_argmax(scores, state)
        strided = torch.stack([scores, -scores], -1)[..., 0]
        with computing(impl):
            assert torch.equal(gumbel_argmax(scores, state), expected)
            assert torch.equal(gumbel_argmax(strided, state), expected)
            assert torch.equal(gumbel_argmax(scores[:, None], state[0])[0, 0], expected[0])


@pytest.mark.gpu
def test_draws_of_a_large_vocabulary_on_a_gpu() -> None:
    """Token for token those of the definition on that GPU."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        scores = random_scores(60, 128_256, dtype, scale=3.0).cuda()
        state = hash_keys(*(torch.tensor(x, device="cuda") for x in (1, 2)), torch.arange(60, device="cuda"), 0)
        assert torch.equal(*by_both(gumbel_argmax, scores, state))


@pytest.mark.parametrize("impl", ["definition", compiled, "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coupled_logits_have_the_noise_of_the_targets_draws(impl: str, dtype: torch.dtype) -> None:
    """Their argmax is the target's own draw from the same scores, among the tokens that the draft has. A greedy
    request's logits stay as they are."""
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    V, ids = 3000, torch.randperm(3000)[:2100].sort().values.to(device)
    logits = (3 * torch.randn(3, 4, V)).to(dtype).to(device)
    state = torch.randint(-(2**62), 2**62, (3, 4), device=device)
    temperature = torch.tensor([0.7, 0.0, 1.3], dtype=torch.float64, device=device)
    with computing(impl):
        whole = coupled(logits, state, temperature)
        part = coupled(logits[..., ids], state, temperature, ids)
        one = coupled(logits, state[:, :1], temperature)  # one state for all rows, as of a level of a tree
        assert torch.equal(one, coupled(logits, state[:, :1].expand(3, 4), temperature))
    assert whole.dtype == torch.float32 and torch.equal(whole[1], logits[1].float())
    scores = logits.double() / temperature.where(temperature > 0, 1.0)[:, None, None]
    with computed_by("definition"):
        draws = gumbel_argmax(scores, state)
    assert torch.equal(whole.argmax(-1)[[0, 2]], draws[[0, 2]])
    torch.testing.assert_close(part, whole[..., ids])
    torch.testing.assert_close(one[:, 0], whole[:, 0])


@pytest.mark.parametrize("impl", ["definition", compiled, "triton"])
def test_a_row_of_nan_draws_some_token(impl: str) -> None:
    """Which one means nothing, but it exists: an index outside of the vocabulary would break what reads it."""
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    scores = torch.full((2, 3000), torch.nan, dtype=torch.float64, device=device)
    scores[1, 5] = torch.inf
    with computing(impl):
        drawn = gumbel_argmax(scores, torch.tensor([1, 2], device=device))
    assert 0 <= int(drawn[0]) < 3000


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
def test_near_ties_are_left_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that differ by less than the error of a logarithm, and numbers that no threshold is computed for."""
    asked: list[int] = []
    definition = sampling_kernels.gumbel
    monkeypatch.setattr(sampling_kernels, "gumbel", lambda state, n: asked.append(n) or definition(state, n))
    state_M = torch.arange(1000)
    noise_MV = definition(state_M, 50)
    scores_MV = (-noise_MV - 9).float()
    scores_MV[:, [7, 30]] = -noise_MV[:, [7, 30]].float()
    value_MV = scores_MV.double() + noise_MV
    gap_M = (value_MV[:, 7] - value_MV[:, 30]).abs()
    assert gap_M.min() < 1e-9 < 1e-8 < gap_M.max()
    for row, by_definition in ((gap_M.argmin(), True), (gap_M.argmax(), False)):
        assert gumbel_argmax(scores_MV[row], state_M[row]) == value_MV[row].argmax()
        assert (len(asked) > 0) == by_definition
        asked.clear()
    assert gumbel_argmax(torch.tensor([0.0, 1e30]), state_M[1]) == 1 and asked == [2]


def test_the_fast_states_are_those_of_the_definition() -> None:
    seed, request = torch.tensor([[1], [-(2**63)], [7]]), torch.tensor([[0], [3], [2**63 - 1]])
    position = torch.arange(4) + torch.tensor([[0], [9], [10**12]])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for parts in (
        (seed, request, position), (seed[0, 0], request[0, 0], position[0, 0]), (seed[0], request[0], position[1]),
        (seed[:0], request[:0], position[:0]), (seed, request, position[:, :1]),
    ):  # fmt: skip
        with computed_by("definition"):
            expected = hash_keys(*parts, 3)
        for impl in ("compiled", "triton") if library() is not None else ("triton",):
            with computing(impl):
                found = hash_keys(*(x.to(device if impl == "triton" else "cpu") for x in parts), 3)
            assert torch.equal(found.cpu(), expected)


def filter_by_sorting(sampling: BatchSampling, scores_BNV: Tensor) -> Tensor:
    """Top-k and top-p by their definition: the tokens in ascending order of score, of equal ones by id."""
    out = scores_BNV.clone()
    for b, n in itertools.product(*map(range, out.shape[:2])):
        row, k, p = out[b, n], int(sampling.top_k_B[b]), float(sampling.top_p_B[b])
        if 0 < k < row.numel():
            row[row < row.topk(k).values[-1]] = -torch.inf
        ascending, token = row.sort(stable=True)
        gone = ascending.softmax(-1).cumsum(-1) <= torch.tensor(1 - p, dtype=torch.float64).to(row.dtype)
        row[token[:-1][gone[:-1] & (p < 1)]] = -torch.inf
    return out


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_filters_are_those_of_their_definition(dtype: torch.dtype, rounded: bool) -> None:
    """Also which of equal scores stay."""
    sampling = sampling_of()
    for seed in range(10):
        scores = 2 * torch.randn(len(OPTIONS), 3, V, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        scores = scores.round() if rounded else scores
        found = filter_top(scores.clone(), sampling.top_k_B, sampling.top_p_B)
        assert torch.equal(found, filter_by_sorting(sampling, scores))


def test_keys_broadcast() -> None:
    seed, request, position = torch.tensor([[1], [2]]), torch.tensor([[3], [4]]), torch.tensor([[5, 6, 7]])
    state = hash_keys(seed, request, position, 2)
    assert state.shape == (2, 3) and uniforms(state, 4).shape == (2, 3, 4)
    one = hash_keys(torch.tensor(2), torch.tensor(4), torch.tensor(6), 2)
    assert torch.equal(uniforms(state, 4)[1, 1], uniforms(one, 4))
    scores = torch.zeros(2, 3, 4)
    assert gumbel_argmax(scores, state)[1, 1] == gumbel_argmax(scores[0, 0], one)


def test_seeds_of_any_size_are_taken_modulo_64_bits() -> None:
    sampling = BatchSampling.of([Sampling(seed=s) for s in (2**64 + 5, -3, 2**63)], [0, 1, 2**64 - 1], "cpu")
    assert sampling.seed_B.tolist() == [5, -3, -(2**63)] and sampling.request_B.tolist() == [0, 1, -1]


def test_a_default_device_changes_nothing() -> None:
    """As `torch.set_default_device` sets it: no host tensor is made there, and none that was is pinned."""
    expected = BatchSampling.of([Sampling(temperature=0.5, top_k=3)], [7], "cpu")
    with torch.device("meta"):
        found = BatchSampling.of([Sampling(temperature=0.5, top_k=3)], [7], "cpu")
        made = torch.ones(2)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(found), tensors_of(expected), strict=True))
    assert to_device([made], torch.device("meta"))[0].is_meta


def test_nothing_is_compiled_for_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no C compiler, the warning would mean nothing there."""
    monkeypatch.setattr(sampling_kernels, "library", lambda: pytest.fail("it was compiled"))
    state = hash_keys(*torch.zeros(3, 2, dtype=torch.int64, device="meta"), 0)
    logits, temperature = torch.zeros(1, 2, 5, device="meta"), torch.ones(1, dtype=torch.float64, device="meta")
    assert gumbel_argmax(logits, state).is_meta and coupled(logits, state[None], temperature).is_meta


@pytest.mark.gpu
def test_a_default_device_on_a_gpu() -> None:
    with torch.device("cuda"):
        found = BatchSampling.of([Sampling(temperature=0.5, top_k=3)], [7], "cuda")
        (moved,) = to_device([torch.arange(3)], torch.device("cuda"))
    assert found.top_k_B.tolist() == [3] and found.temperature_B.is_cuda and moved.tolist() == [0, 1, 2]


FILTERS = [(0, 0.9), (0, 0.3), (5, 1.0), (50, 0.9), (1, 0.5), (300, 0.7), (0, 0.999), (5000, 1.0), (9999, 0.8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("V", [3, 64, 1500, 5001])
@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_filters_without_sorting(sharpness: float, V: int, rounded: bool, dtype: torch.dtype) -> None:
    """The tokens that are kept, equal scores included, and what is drawn from them are those of the definition. Where
    rounding could matter, the definition draws."""
    scores_MV = sharpness * torch.randn(len(FILTERS), V, generator=torch.Generator().manual_seed(V), dtype=dtype)
    if rounded:
        scores_MV = scores_MV.round()
    sampling = BatchSampling.of([Sampling(temperature=1.0, top_k=k, top_p=p) for k, p in FILTERS], range(9), "cpu")
    kept_MV = sampling.process(scores_MV[:, None])[:, 0].isfinite()
    for scores_V, kept_V, (k, p) in zip(scores_MV.numpy(), kept_MV, FILTERS, strict=True):
        k = k if k < V else 0
        if (k or p < 1) and (level := sampling_kernels._level(scores_V, k or 256)) is not None:
            assert (scores_V >= level).sum() >= (k or 256)
            if found := sampling_kernels._kept(scores_V, level, k, p):
                assert sorted(found[0]) == kept_V.nonzero()[:, 0].tolist()
    for seed in range(20):
        state_M = hash_keys(torch.tensor(seed), torch.arange(9), torch.tensor(3), TOKEN)
        with computed_by("definition"):
            expected = gumbel_argmax(sampling.process(scores_MV[:, None])[:, 0], state_M).tolist()
        assert sampling.draw(scores_MV, state_M) == expected


def test_what_is_found_without_sorting() -> None:
    """Peaked distributions of a large vocabulary, as language models have, need no sorting."""
    scores_MV = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0))
    scores_MV[:, :40] += 12
    state_M = torch.arange(3)
    assert None not in filtered_argmax(scores_MV, [0, 40, 20], [0.9, 1.0, 0.9], state_M)
    assert filtered_argmax(scores_MV, [0, 0, 40_000], [1.0, 0.99999, 1.0], state_M) == [None] * 3
    scores_MV[0, 5], scores_MV[1, 7], scores_MV[2] = torch.nan, torch.inf, -torch.inf
    assert filtered_argmax(scores_MV, [0, 40, 20], [0.9, 1.0, 0.9], state_M) == [None] * 3


def test_a_threshold_within_rounding() -> None:
    """Whether a token goes whose sum is the threshold of top-p is left to the definition."""
    scores_MV = torch.full((1, 4096), -80.0)
    scores_MV[0, 100:104] = 0
    assert filtered_argmax(scores_MV, [0], [0.5], torch.tensor([1])) == [None]
    assert filtered_argmax(scores_MV, [0], [0.6], torch.tensor([1])) != [None]
