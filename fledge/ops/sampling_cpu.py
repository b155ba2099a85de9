"""The functions of `ops.sampling` on a CPU, with NumPy and by the C code of `layers.c`.

With NumPy, noise is computed only for the tokens that can win.

If top-k or top-p keeps few tokens, `filtered_argmax` selects and samples the kept tokens without sorting the
vocabulary.

A token v with score s_v and uniform u_v has the value s_v - log(E_v), with E_v = -log(u_v). Let L be the value of the
token with the highest score. A token v can win only if E_v <= exp(s_v - L), and since 1 - u_v <= E_v, only if 1 - u_v
<= exp(s_v - L): a comparison of the upper bits of v's random number with a threshold, without logarithms. The few
remaining tokens are compared by value. If two values are so close that another rounding of the logarithm could change
the order, the row is left to the definition.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.ops.compiled import THREADS, library, pointer

BLOCK = 2**15  # numbers that are processed together, in temporary arrays that the cache holds
MOST = 4096.0  # scores beyond this are left to the definition, as `SLACK` covers the rounding of smaller ones only
SLACK = 1.001  # more than the relative error of exp(s - L) in float32
LAST = 512  # more than the error of a threshold in float32, in units of 2^-32
CLOSE = 1e-9  # values that differ by less are left to the definition
CANDIDATES = (256, 2048)  # the likeliest tokens that top-p is applied to, or more; at first, and where these are few
MOST_CANDIDATES = 16384  # rows with more of them, by top-k or equal scores, are left to the definition
MARGIN = 2e-5  # more than the relative error of a sum of probabilities in float32
ALL = 2**64 - 1
SEVERAL = 1 << 15  # scores of all rows from which on several threads draw

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FIRST, _SECOND, _30, _27 = np.uint64(FIRST), np.uint64(SECOND), np.uint64(30), np.uint64(27)
_UPPER = 1 if sys.byteorder == "little" else 0  # of the two halves of a 64-bit number


def hash_keys_cpu(seed: Tensor, request: Tensor, position: Tensor, purpose: int) -> Tensor:
    """`hash_keys`, by the compiled code where there is a C compiler."""
    seed, request, position = torch.broadcast_tensors(seed, request, position)
    if library() is not None:
        parts = [x.contiguous() for x in (seed, request, position)]
        state = torch.empty_like(parts[2])
        library().fledge_states(state.numel(), *map(pointer, parts), purpose, pointer(state))
        return state
    states = []
    for *of_request, place in zip(*(x.flatten().tolist() for x in (seed, request, position)), strict=True):
        state = _mix_one(_mix_one(_request_state(*of_request) + GOLDEN + place) + GOLDEN + purpose)
        states.append(state - (state >> 63 << 64))
    return torch.tensor(states, dtype=torch.int64).view(position.shape)


@functools.lru_cache(maxsize=1024)
def _request_state(seed: int, request: int) -> int:
    """The state after the parts of a key that all of a request's positions have in common."""
    return _mix_one(_mix_one(GOLDEN + seed) + GOLDEN + request)


def gumbel_argmax_cpu(scores_MV: Tensor, state_M: Tensor) -> list[int | None]:
    """The argmax of scores (float32 or float64) plus Gumbel noise in each row, by the compiled code for float32 where
    there is a C compiler; None where the definition has to decide."""
    if scores_MV.dtype == torch.float32 and library() is not None:
        return _gumbel_argmax_compiled(scores_MV, state_M)
    scores, states, drawn = scores_MV.numpy(), state_M.tolist(), []
    rows = max(1, BLOCK // scores.shape[1])
    for i in range(0, len(states), rows):
        drawn += _winners(scores[i : i + rows], states[i : i + rows])
    return drawn


def _winners(score_MV: NDArray, states: Sequence[int]) -> list[int | None]:
    tops, bests = score_MV.argmax(1).tolist(), score_MV.max(1).tolist()
    usual = [abs(best) < MOST for best in bests]  # False for NaN too
    levels = [
        best + _noise(top, state) if fine else math.inf
        for top, best, state, fine in zip(tops, bests, states, usual, strict=True)
    ]
    found: list[list[int]] = [[] for _ in states]
    for at in _can_win(score_MV, states, levels):
        row, place = divmod(at, score_MV.shape[1])
        found[row].append(place)
    return [_winner(score_MV[row], found[row], state) if usual[row] else None for row, state in enumerate(states)]


def _winner(score_V: NDArray, found: Sequence[int], state: int) -> int | None:
    if len(found) == 1:
        return found[0]
    values = sorted((float(score_V[place]) + _noise(place, state), place) for place in found)
    return values[-1][1] if values[-1][0] - values[-2][0] > CLOSE else None


def _can_win(score_MV: NDArray, states: Sequence[int], levels: Sequence[float]) -> list[int]:
    """All m * V + v of which token v of row m may have a value of at least the row's level."""
    V, found = score_MV.shape[1], []
    counter, start = _counters(V), np.array([state & ALL for state in states], dtype=np.uint64)[:, None]
    level = np.array(levels, dtype=score_MV.dtype)[:, None]
    for first in range(0, V, BLOCK):
        # SplitMix64's finaliser without the last step, as the last step changes only bits 0 to 32
        x = counter[first : first + BLOCK] + start
        x ^= x >> _30
        x *= _FIRST
        x ^= x >> _27
        x *= _SECOND
        threshold = score_MV[:, first : first + BLOCK] - level
        np.exp(threshold, out=threshold)
        threshold *= -SLACK * 2.0**32
        threshold += 2.0**32 - LAST
        np.fmax(threshold, 0, out=threshold)  # 0 for NaN
        found += (np.flatnonzero(x.view(np.uint32)[:, _UPPER::2] >= threshold.astype(np.uint32)) + first).tolist()
    return found


def filtered_argmax(
    scores_MV: Tensor, top_k: Sequence[int], top_p: Sequence[float], state_M: Tensor
) -> list[int | None]:
    """`gumbel_argmax` of rows of scores (float32 or float64) among the tokens that top-k (0 keeps all), then top-p (1
    keeps all) leave, where these are few; None for other rows, and where rounding could decide which tokens stay."""
    rows = zip(scores_MV.numpy(), top_k, top_p, state_M.tolist(), strict=True)
    return [_filtered_winner(*row) for row in rows]


def _filtered_winner(score_V: NDArray, top_k: int, top_p: float, state: int) -> int | None:
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
    drawn = values + _noises(ids, state)
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


def _noises(places: NDArray, state: int) -> NDArray:
    """`_noise` at several places."""
    x = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN) + np.uint64(state & ALL)
    x ^= x >> _30
    x *= _FIRST
    x ^= x >> _27
    x *= _SECOND
    x ^= x >> np.uint64(31)
    return -np.log(-np.log(((x >> np.uint64(12)) + 0.5) * 2.0**-52))


def _noise(place: int, state: int) -> float:
    """The Gumbel variate at a place (from 0) of a stream, but for the rounding of the logarithms."""
    bits = _mix_one((place + 1) * GOLDEN + state) >> 12
    return -math.log(-math.log((bits + 0.5) * 2.0**-52))


def _mix_one(x: int) -> int:
    """SplitMix64's finaliser on an integer modulo 2^64."""
    x &= ALL
    x = ((x ^ (x >> 30)) * FIRST) & ALL
    x = ((x ^ (x >> 27)) * SECOND) & ALL
    return x ^ (x >> 31)


@functools.lru_cache(maxsize=4)
def _counters(n: int) -> NDArray:
    return np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def _gumbel_argmax_compiled(scores_MV: Tensor, state_M: Tensor) -> list[int | None]:
    (M, V), scores_MV, state_M = scores_MV.shape, scores_MV.contiguous(), state_M.contiguous()
    token_M = torch.empty(M, dtype=torch.int64)
    given = M, V, pointer(scores_MV), pointer(state_M), pointer(token_M)
    if M * V < SEVERAL:
        library().fledge_draws(*given, 1)
    else:
        with THREADS.computing() as threads:
            library().fledge_draws(*given, threads)
    return [None if token < 0 else token for token in token_M.tolist()]


def coupled_compiled(logits_BSW: Tensor, state_BS: Tensor, temperature_B: Tensor, ids_W: Tensor | None) -> Tensor:
    """`coupled`, by the compiled code."""
    logits_BSW = logits_BSW.float().contiguous()
    (B, S, W), noisy_BSW = logits_BSW.shape, torch.empty_like(logits_BSW)
    state_BS, temperature_BS = state_BS.expand(B, S).contiguous(), temperature_B[:, None].expand(B, S).contiguous()
    ids_W = None if ids_W is None else ids_W.contiguous()
    given = logits_BSW, ids_W, temperature_BS, state_BS, noisy_BSW
    library().fledge_coupled(B * S, W, *map(pointer, given))
    return noisy_BSW
