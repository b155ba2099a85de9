"""`hash_keys` and `gumbel_argmax` on a CPU, with NumPy: noise is computed only for the tokens that can win.

A token v with score s_v and uniform u_v has the value s_v - log(E_v), with E_v = -log(u_v). If L is the value of the
token with the highest score, v wins only if E_v <= exp(s_v - L). Since 1 - u_v <= E_v, so must 1 - u_v be: a comparison
of the upper bits of v's random number with a threshold, without logarithms. The few tokens that remain are compared by
their values. Where these are nearly equal, so that another rounding of the logarithm could change the order, the row is
left to the definition.
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

BLOCK = 8192  # numbers of a row that are processed together, in temporary arrays that the cache holds
MOST = 4096.0  # scores beyond this are left to the definition, as `SLACK` covers the rounding of smaller ones only
SLACK = 1.001  # more than the relative error of exp(s - L) in float32
LAST = 512  # more than the error of a threshold in float32, in units of 2^-32
CLOSE = 1e-9  # values that differ by less are left to the definition
ALL = 2**64 - 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UPPER = 1 if sys.byteorder == "little" else 0  # of the two halves of a 64-bit number


def hash_keys_cpu(parts: Sequence[Tensor], purpose: int) -> Tensor:
    """`hash_keys` of seed, request and position."""
    state = np.zeros(1, dtype=np.uint64)  # not of no dimension, whose arithmetic warns of overflow
    for part in (*(x.numpy().view(np.uint64) for x in parts), np.uint64(purpose)):
        state = state + _GOLDEN + part
        _mix(state)
    return torch.from_numpy(state.view(np.int64)).view(torch.broadcast_shapes(*(x.shape for x in parts)))


def gumbel_argmax_cpu(scores_MV: Tensor, state_M: Tensor) -> list[int | None]:
    """The argmax of scores (float32 or float64) plus Gumbel noise in each row; None where the definition has to
    decide."""
    states = state_M.numpy().view(np.uint64)
    return [_winner(row, states[i : i + 1]) for i, row in enumerate(scores_MV.numpy())]


def _winner(score_V: NDArray, state: NDArray) -> int | None:
    top = int(score_V.argmax())
    best = float(score_V[top])
    if not abs(best) < MOST:  # also NaN
        return None
    place = _can_win(score_V, state, best + _noise_at(top, int(state[0])))
    if place.size == 1:
        return int(place[0])
    value = score_V[place].astype(np.float64) + _noise(place, state)
    order = value.argsort()
    return int(place[order[-1]]) if value[order[-1]] - value[order[-2]] > CLOSE else None


def _can_win(score_V: NDArray, state: NDArray, level: float) -> NDArray:
    """The places, ascending, of all tokens whose values may be at least `level`."""
    counter, found = _counters(score_V.size), []
    for first in range(0, score_V.size, BLOCK):
        x = counter[first : first + BLOCK] + state
        _mix(x, whole=False)
        threshold = score_V[first : first + BLOCK] - score_V.dtype.type(level)
        np.exp(threshold, out=threshold)
        threshold *= -SLACK * 2.0**32
        threshold += 2.0**32 - LAST
        np.maximum(threshold, 0, out=threshold)
        found.append(np.flatnonzero(x.view(np.uint32)[_UPPER::2] >= threshold.astype(np.uint32)) + first)
    return found[0] if len(found) == 1 else np.concatenate(found)


def _noise(place: NDArray, state: NDArray) -> NDArray:
    """The Gumbel variates at some places (from 0) of a stream, float64."""
    x = (place + 1).astype(np.uint64) * _GOLDEN + state
    _mix(x)
    uniform = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


def _noise_at(place: int, state: int) -> float:
    """One variate, about."""
    x = ((place + 1) * int(_GOLDEN) + state) & ALL
    x = ((x ^ (x >> 30)) * int(_FIRST)) & ALL
    x = ((x ^ (x >> 27)) * int(_SECOND)) & ALL
    return -math.log(-math.log((((x ^ (x >> 31)) >> 12) + 0.5) * 2.0**-52))


def _mix(x: NDArray, whole: bool = True) -> None:
    """SplitMix64's finaliser, in place. Without the `whole` of it, bit 32 and those below differ from the result."""
    x ^= x >> np.uint64(30)
    x *= _FIRST
    x ^= x >> np.uint64(27)
    x *= _SECOND
    if whole:
        x ^= x >> np.uint64(31)


@functools.lru_cache(maxsize=4)
def _counters(n: int) -> NDArray:
    return np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN
