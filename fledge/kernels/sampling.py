"""Randomness that belongs to a place, not to a moment: draws keyed by (seed, request, position, purpose).

A draw at a position is the same whatever was drafted before it and in whatever order it is asked for, which makes
speculative sampling comparable with token-by-token sampling at the same seed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014) on a Python integer."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _mix_tensor(x: Tensor) -> Tensor:
    """The same on int64 tensors, whose products wrap and whose shifts are made logical by masks."""

    def shifted(x: Tensor, by: int) -> Tensor:
        return (x >> by) & ((1 << (64 - by)) - 1)

    x = (x ^ shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shifted(x, 31)


Key = tuple[int, int, int, int]  # seed, request, position, purpose


def _state(key: Key) -> int:
    """A key's 64 bits, as a signed integer."""
    return _signed(functools.reduce(lambda state, part: _mix((state + _GOLDEN + (part & _MASK)) & _MASK), key, 0))


def _uniforms(state: int | Tensor, n: int, device: torch.device | str) -> Tensor:
    counter = torch.arange(1, n + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN) + state
    bits = (_mix_tensor(counter) >> 12) & ((1 << 52) - 1)  # 52, so that the half is exact and 1 never comes out
    return (bits.double() + 0.5) * 2.0**-52


def uniforms(key: Key, n: int, device: torch.device | str = "cpu") -> Tensor:
    """n uniforms in (0, 1), float64, that depend only on `key`."""
    return _uniforms(_state(key), n, device)


def gumbel(keys: Sequence[Key], n: int, device: torch.device | str = "cpu") -> Tensor:
    """n standard Gumbel variates for each key, float64 [len(keys), n], keyed as `uniforms` are."""
    state = _state(keys[0]) if len(keys) == 1 else torch.tensor([[_state(key)] for key in keys], device=device)
    return -(-_uniforms(state, n, device).log()).log().view(len(keys), n)


def gumbel_argmax(scores_V: Tensor, key: Key) -> int:
    """A draw from softmax(scores) by the Gumbel-max trick; -inf scores are never drawn."""
    return int((scores_V.double() + gumbel([key], scores_V.numel(), scores_V.device)[0]).argmax())
