"""The angles of rotary position embedding in Triton, for training and decoding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _cos_sin(position_ptr, frequency_ptr, cos_ptr, sin_ptr, scale, R: tl.constexpr, BR: tl.constexpr):
    s, r = tl.program_id(0).to(tl.int64), tl.arange(0, BR)
    half: tl.constexpr = R // 2
    angle = tl.load(position_ptr + s).to(tl.float32) * tl.load(frequency_ptr + r % half, mask=r < R, other=0.0)
    tl.store(cos_ptr + s * R + r, (tl.cos(angle) * scale).to(cos_ptr.dtype.element_ty), mask=r < R)
    tl.store(sin_ptr + s * R + r, (tl.sin(angle) * scale).to(sin_ptr.dtype.element_ty), mask=r < R)


def cos_sin_triton(
    position_S: Tensor, frequency_F: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`cos_sin` of `fledge.ops.rope`, one program per position."""
    position_S, S, R = position_S.contiguous(), position_S.numel(), 2 * frequency_F.numel()
    cos, sin = torch.empty(2, S, R, dtype=dtype, device=position_S.device)
    if S:
        _cos_sin[(S,)](position_S, frequency_F, cos, sin, scale, R=R, BR=triton.next_power_of_2(R))
    return cos, sin
