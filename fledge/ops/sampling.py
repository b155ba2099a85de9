"""Counter-based random numbers, keyed by (seed, request, position, purpose), draws with them, and top-k and top-p.

The random numbers for a position do not depend on what was drafted before, nor on the order of calls. Speculative
sampling can therefore be compared with token-by-token sampling at the same seed. A key is hashed to a 64-bit state,
which seeds a stream of SplitMix64 (Steele, Lea & Flood 2014). All functions run on the device of their tensors and wait
for no GPU.

Each function has a definition, and kernels in Triton for a GPU. On a CPU with a C compiler, compiled code (`layers.c`)
computes the states and the noise, with the same results. If top-k or top-p keeps few tokens, `filtered_argmax` selects
and samples the kept tokens on a CPU without sorting the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.ops.compiled import THREADS, library, pointer
from fledge.ops.device import chosen, current_device, use_triton

TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)  # purposes
MOST_TOKENS = 2**22  # of a row of `filter_top`'s kernels, whose sums of that many weights fit into 64 bits
SEVERAL = 1 << 15  # scores of all rows from which on several threads draw
CANDIDATES = (256, 2048)  # the likeliest tokens that top-p is applied to, or more; at first, and where these are few
MOST_CANDIDATES = 16384  # rows with more of them, by top-k or equal scores, are left to the definition
MARGIN = 2e-5  # more than the relative error of a sum of probabilities in float32
CLOSE = 1e-9  # of values that differ by less, the rounding of a logarithm could decide: left to the definition


def _signed(x: int) -> int:
    """The int64 with the bits of a 64-bit number."""
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors. Their products wrap modulo 2^64; a mask makes the right shifts
    logical."""

    def fold(x: Tensor, by: int) -> Tensor:
        return (x >> by).bitwise_and_((1 << (64 - by)) - 1).bitwise_xor_(x)

    x = fold(x, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    x = fold(x, 27).mul_(_signed(0x94D049BB133111EB))
    return fold(x, 31)


def hash_keys(seed: Tensor, request: Tensor, position: Tensor, purpose: int) -> Tensor:
    """The states of keys, int64 in the shape that `seed`, `request` and `position` (int64, of at most two dimensions)
    broadcast to."""
    if position.is_cpu and chosen() is None and library() is not None:
        parts = [x.contiguous() for x in torch.broadcast_tensors(seed, request, position)]
        state = torch.empty_like(parts[2])
        library().fledge_states(state.numel(), *map(pointer, parts), purpose, pointer(state))
        return state
    if use_triton(position):
        from fledge.ops.sampling_triton import hash_keys_triton

        with current_device(position.device):
            return hash_keys_triton(seed, request, position, purpose)
    state = _mix(seed + _GOLDEN)
    for part in (request, position, purpose):
        state = _mix(state + _GOLDEN + part)
    return state


def uniforms(state: Tensor, n: int) -> Tensor:
    """The first n uniform random numbers in (0, 1) of each state, float64 [.., n]."""
    return _uniforms_at(state, torch.arange(n, device=state.device))


def _uniforms_at(state: Tensor, place_V: Tensor) -> Tensor:
    """The uniform random numbers of each state at places (int64) that count from 0, float64 [.., V]."""
    counter = (place_V + 1) * _GOLDEN + state[..., None]
    # 52 bits, so that adding 0.5 is exact and the result is below 1
    bits = _mix(counter).bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    return bits.double().add_(0.5).mul_(2.0**-52)


def gumbel(state: Tensor, n: int) -> Tensor:
    """The first n standard Gumbel variates of each state, float64 [.., n]."""
    return uniforms(state, n).log_().neg_().log_().neg_()


def gumbel_argmax(scores: Tensor, state: Tensor) -> Tensor:
    """A sample from softmax(scores) by the Gumbel-max trick for scores [.., V] and states that broadcast to [..]: int64
    [..].

    Entries of -inf are never sampled. Rows must not contain NaN.
    """
    if scores.is_cpu and scores.dtype != torch.float64 and chosen() is None and library() is not None:
        return _gumbel_argmax_compiled(scores.float(), state)
    if use_triton(state):
        from fledge.ops.sampling_triton import gumbel_argmax_triton

        with current_device(scores.device):
            return gumbel_argmax_triton(scores, state)
    return _gumbel_argmax(scores, state)


def _gumbel_argmax(scores: Tensor, state: Tensor) -> Tensor:
    return (scores.double() + gumbel(state, scores.shape[-1])).argmax(-1)


def _gumbel_argmax_compiled(scores: Tensor, state: Tensor) -> Tensor:
    """`gumbel_argmax` of float32 scores. The definition computes rows with NaN or with scores beyond 4,096, and rows in
    which the rounding of a logarithm could decide."""
    shape, V = scores.shape[:-1], scores.shape[-1]
    scores_MV, state_M = scores.reshape(-1, V).contiguous(), state.expand(shape).reshape(-1).contiguous()
    token_M = torch.empty_like(state_M)
    given = len(token_M), V, pointer(scores_MV), pointer(state_M), pointer(token_M)
    if scores_MV.numel() < SEVERAL:
        library().fledge_draws(*given, 1)
    else:
        with THREADS.computing() as threads:
            library().fledge_draws(*given, threads)
    for i in (token_M < 0).nonzero().flatten().tolist():
        token_M[i] = _gumbel_argmax(scores_MV[i], state_M[i])
    return token_M.view(shape)


def coupled(logits_BSW: Tensor, state_BS: Tensor, temperature_B: Tensor, ids_W: Tensor | None = None) -> Tensor:
    """A draft's logits over temperature, plus the Gumbel noise with which the target draws at the same positions:
    float32 [B, S, W]. Logits of temperature 0 stay as they are.

    Their argmax is a draw from the draft's distribution, and the target's own draw is the same token with probability
    of at least (1 - d) / (1 + d), where d is the total variation distance of the two distributions (Gumbel sampling of
    Daliri, Musco & Suresh 2024, arXiv:2408.07978). The target's draws do not depend on the draft.

    `state_BS` are the states of the target's draws after each of the S rows of a request, or [B, 1] for all of them,
    `temperature_B` float64, and `ids_W` (int64) the target's ids of the draft's tokens; None if they are the same.
    """
    if logits_BSW.is_cpu and chosen() is None and library() is not None:
        return _coupled_compiled(logits_BSW, state_BS, temperature_B, ids_W)
    if use_triton(state_BS):
        from fledge.ops.sampling_triton import coupled_triton

        with current_device(logits_BSW.device):
            return coupled_triton(logits_BSW, state_BS, temperature_B, ids_W)
    ids_W = torch.arange(logits_BSW.shape[-1], device=logits_BSW.device) if ids_W is None else ids_W
    noise_BSW = _uniforms_at(state_BS, ids_W).log_().neg_().log_()
    temperature_B11 = temperature_B[:, None, None]
    noisy_BSW = logits_BSW.double() / temperature_B11 - noise_BSW
    return torch.where(temperature_B11 > 0, noisy_BSW, logits_BSW.double()).float()


def _coupled_compiled(logits_BSW: Tensor, state_BS: Tensor, temperature_B: Tensor, ids_W: Tensor | None) -> Tensor:
    logits_BSW = logits_BSW.float().contiguous()
    (B, S, W), noisy_BSW = logits_BSW.shape, torch.empty_like(logits_BSW)
    state_BS, temperature_BS = state_BS.expand(B, S).contiguous(), temperature_B[:, None].expand(B, S).contiguous()
    ids_W = None if ids_W is None else ids_W.contiguous()
    given = logits_BSW, ids_W, temperature_BS, state_BS, noisy_BSW
    library().fledge_coupled(B * S, W, *map(pointer, given))
    return noisy_BSW


def filter_top(scores_BNV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Top-k, then top-p, as TopKLogitsWarper and TopPLogitsWarper of transformers.

    Top-k keeps the k highest scores of each row and all scores equal to the k-th. Top-p then removes the least likely
    tokens whose probabilities add up to at most 1 - p, but never the likeliest token. Among equal scores, top-p removes
    lower ids first, so that the choice does not depend on the batch; transformers leaves the choice open. `top_k_B`
    (int64; 0 keeps all) and `top_p_B` (float64; 1 keeps all) have an entry per request. Scores are float32 or float64,
    and must not be NaN.

    The definition sorts. The kernels, for float32 rows of up to MOST_TOKENS on a GPU, search for the lowest kept score.
    Kernels and definition round sums of probabilities differently, and may differ in tokens at which the sum is 1 - p
    up to rounding. The kernels add integers: equal rows have equal results, in any batch. Nothing waits for the device.
    """
    if use_triton(scores_BNV) and scores_BNV.dtype == torch.float32 and scores_BNV.shape[-1] <= MOST_TOKENS:
        from fledge.ops.top_filter_triton import filter_top_triton

        with current_device(scores_BNV.device):
            return filter_top_triton(scores_BNV, top_k_B, top_p_B)
    # removed scores become -inf, and -inf sorts first; sums run from the least likely token up, as in transformers
    V = scores_BNV.shape[-1]
    ascending = _sorted(scores_BNV)
    # the k-th highest score; without a limit, the lowest score
    top_k_B = top_k_B.where(top_k_B > 0, V).clamp_max(V)
    lowest = ascending.gather(-1, (V - top_k_B)[:, None, None].expand(-1, ascending.shape[1], 1))
    scores_BNV = scores_BNV.masked_fill(scores_BNV < lowest, -torch.inf)
    ascending = ascending.masked_fill(ascending < lowest, -torch.inf)
    # no sum is below -1, the threshold of requests without top-p
    threshold = (1 - top_p_B).where(top_p_B < 1, -1.0).to(scores_BNV.dtype)[:, None, None]
    removed = ascending.softmax(-1).cumsum(-1) <= threshold
    count = removed[..., :-1].sum(-1, keepdim=True)  # the likeliest token stays
    lowest = ascending.gather(-1, count)
    below, equal = scores_BNV < lowest, scores_BNV == lowest
    gone = below | (equal & (equal.cumsum(-1) <= count - below.sum(-1, keepdim=True)))
    return scores_BNV.masked_fill(gone, -torch.inf)


def _sorted(x: Tensor) -> Tensor:
    """The numbers of each row of x [.., V], float32 or float64, in ascending order. NumPy sorts several times as fast
    as torch on a CPU."""
    if x.device.type != "cpu":
        return x.sort(dim=-1).values
    return torch.from_numpy(np.sort(x.numpy(), axis=-1))


def filtered_argmax(
    scores_MV: Tensor, top_k: Sequence[int], top_p: Sequence[float], state_M: Tensor
) -> list[int | None]:
    """`gumbel_argmax` of rows of scores (float32 or float64) among the tokens that top-k (0 keeps all), then top-p (1
    keeps all) leave, where these are few; None for other rows, and where rounding could decide which tokens stay."""
    return [_filtered_winner(*row) for row in zip(scores_MV.numpy(), top_k, top_p, state_M, strict=True)]


def _filtered_winner(score_V: NDArray, top_k: int, top_p: float, state: Tensor) -> int | None:
    limited, kept = 0 < top_k < score_V.size, None
    if (not limited and top_p == 1) or not math.isfinite(score_V.max()):  # without filters; or NaN
        return None
    for likeliest in (top_k,) if limited else CANDIDATES:
        if (level := _level(score_V, likeliest)) is None:
            break
        kept = _kept(score_V, level, top_k if limited else 0, top_p)
        if kept is not None:
            break
    if kept is None:
        return None
    ids, values = kept
    uniform = _uniforms_at(state, torch.from_numpy(ids))
    drawn = values + uniform.log_().neg_().log_().neg_().numpy()
    at = int(drawn.argmax())
    unsure = drawn.size > 1 and drawn[at] - np.partition(drawn, -2)[-2] <= CLOSE
    return None if unsure else int(ids[at])


def _kept(score_V: NDArray, level: float, top_k: int, top_p: float) -> tuple[NDArray, NDArray] | None:
    """The ids and scores (float64) of the tokens that the filters leave, if these have scores of at least `level`; None
    where they may not, or where rounding could decide. With `top_k`, as many scores reach the level."""
    ids = np.flatnonzero(score_V >= level)  # ascending
    if ids.size > MOST_CANDIDATES:
        return None
    values = score_V[ids].astype(np.float64)
    order = np.argsort(values, kind="stable")  # of equal scores, those with lower ids go first
    if top_k:
        order = order[values[order] >= values[order[-top_k]]]
    if top_p < 1:
        best = values[order[-1]]
        weights, others = np.exp(values[order] - best), 0.0
        if not top_k:
            every = np.exp(score_V - score_V.dtype.type(best))
            every[ids] = 0
            others = float(every.sum(dtype=np.float64))
        sums = others + weights.cumsum()
        removed = (1 - top_p) * sums[-1]
        unsure = MARGIN * removed
        if others > removed - unsure or (abs(sums[:-1] - removed) <= unsure).any():
            return None
        order = order[(sums[:-1] <= removed).sum() :]  # the likeliest stays
    return ids[order], values[order]


def _level(score_V: NDArray, k: int) -> float | None:
    """A score that at least k of the scores reach, and not many more; None if k is too large to look for one.

    The scores are dealt to several times k groups. At least k scores reach the k-th highest of the groups' maxima.
    """
    groups = min(4 * k, score_V.size)
    rows = score_V.size // groups
    if 4 * k > MOST_CANDIDATES or k >= groups:
        return None
    tops = score_V[: rows * groups].reshape(rows, groups).max(0)
    rest = score_V[rows * groups :]
    np.maximum(tops[: rest.size], rest, out=tops[: rest.size])
    return np.partition(tops, -k)[-k]
