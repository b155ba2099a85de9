"""Counter-based random numbers, keyed by (seed, request, position, purpose).

The random numbers for a position do not depend on what was drafted before, nor on the order of calls. Speculative
sampling can therefore be compared with token-by-token sampling at the same seed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

TOKEN, DRAFT, ACCEPT, RESIDUAL = range(4)  # purposes

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
    """`_mix` on int64 tensors. Their products wrap modulo 2^64; a mask makes the right shifts logical."""

    def shifted(x: Tensor, by: int) -> Tensor:
        return (x >> by) & ((1 << (64 - by)) - 1)

    x = (x ^ shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shifted(x, 31)


Key = tuple[int, int, int, int]  # seed, request, position, purpose


def _state(key: Key) -> int:
    """A 64-bit hash of the key, as a signed integer."""
    return _signed(functools.reduce(lambda state, part: _mix((state + _GOLDEN + (part & _MASK)) & _MASK), key, 0))


def _uniforms(state: int | Tensor, n: int, device: torch.device | str) -> Tensor:
    counter = torch.arange(1, n + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN) + state
    # 52 bits, so that adding 0.5 is exact and the result is below 1
    bits = (_mix_tensor(counter) >> 12) & ((1 << 52) - 1)
    return (bits.double() + 0.5) * 2.0**-52


def uniforms(key: Key, n: int, device: torch.device | str = "cpu") -> Tensor:
    """n uniform random numbers in (0, 1), float64, that depend only on `key`."""
    return _uniforms(_state(key), n, device)


def gumbel(keys: Sequence[Key], n: int, device: torch.device | str = "cpu") -> Tensor:
    """n standard Gumbel variates for each key, float64 [len(keys), n], that depend only on the key."""
    state = _state(keys[0]) if len(keys) == 1 else torch.tensor([[_state(key)] for key in keys], device=device)
    return -(-_uniforms(state, n, device).log()).log().view(len(keys), n)


def gumbel_argmax(scores_V: Tensor, key: Key) -> int:
    """A sample from softmax(scores) by the Gumbel-max trick; entries of -inf are never sampled."""
    return int((scores_V.double() + gumbel([key], scores_V.numel(), scores_V.device)[0]).argmax())
