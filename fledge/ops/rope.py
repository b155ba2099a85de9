"""Rotary position embedding (RoPE, Su et al. 2021, arXiv:2104.09864) and its published context extensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fledge.config import RopeConfig
from fledge.ops.device import use_triton


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [rotated // 2], and the attention factor that multiplies cos and sin.

    `linear` divides all frequencies by the factor (Chen et al. 2023). `llama3` divides the frequencies of long
    wavelengths, keeps short wavelengths, and interpolates between. `yarn` does the same with a linear ramp over the
    dimensions (Peng et al. 2023). `longrope` divides by a factor per frequency (Ding et al. 2024). Raises ValueError if
    the number of rotated dimensions is odd or 0, if longrope's list has the wrong length, and if contradictory fields
    give a frequency that is not finite.
    """
    dim = int(head_dim * rope.partial_rotary_factor)
    if dim < 2 or dim % 2:
        raise ValueError(
            f"a head of {head_dim} dimensions, {dim} of them rotated: rotary embedding needs an even number"
        )
    frequencies, scale = _frequencies(rope, head_dim, dim)
    if not bool(frequencies.isfinite().all()) or not math.isfinite(scale):
        raise ValueError(f"the RoPE fields of the config ({rope.to_hf()}) give frequencies that are not finite")
    return frequencies, scale


def _frequencies(rope: RopeConfig, head_dim: int, dim: int) -> tuple[Tensor, float]:
    base = rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.rope_type == "default":
        return 1.0 / base, 1.0
    if rope.rope_type == "linear":
        return 1.0 / base / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, 1.0 / base), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, base, dim), _yarn_attention_factor(rope)
    factors = rope.long_factor if rope.long else rope.short_factor
    if factors is None or len(factors) != dim // 2:
        raise ValueError(
            f"longrope's {'long' if rope.long else 'short'}_factor has {len(factors or ())} entries; a head of "
            f"{head_dim} with {dim} rotated dimensions needs {dim // 2}"
        )
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * base), _longrope_attention_factor(rope)


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    rotations = rope.original_max_position_embeddings / wavelength
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn(rope: RopeConfig, base: Tensor, dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return ramp / (rope.factor * base) + (1 - ramp) / base


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale()


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


def cos_sin(position_S: Tensor, frequency_F: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, times `scale`: each [S, 2F] with equal halves.

    Computed in float32 and returned in `dtype`. The kernel returns no float64.
    """
    if use_triton(position_S) and dtype != torch.float64:
        from fledge.ops.rope_triton import cos_sin_triton

        return cos_sin_triton(position_S, frequency_F, scale, dtype)
    angle = position_S[:, None].float() * torch.cat((frequency_F, frequency_F))
    cos, sin = angle.cos(), angle.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype), sin.to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first `cos.shape[-1]` dimensions of every head and leaves the others unchanged.

    x is [S, heads, d]. cos and sin are [S, 1, rotated], with equal halves; dimension i is paired with i + rotated / 2,
    as in Llama.
    """
    n = cos.shape[-1]
    rotated, rest = x[..., :n], x[..., n:]
    swapped = torch.cat((-rotated[..., n // 2 :], rotated[..., : n // 2]), dim=-1)
    rotated = rotated * cos + swapped * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
