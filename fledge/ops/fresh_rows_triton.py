"""`fresh_rows` in Triton: one program per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.implementations import dependent_launch


@triton.jit(do_not_specialize=["B", "R", "n", "S", "L", "J", "mask_token", "st"])
def _fresh_rows(
    token_ptr, count_ptr, start_ptr, length_ptr, row_token_ptr, state_ptr, asked_ptr, root_ptr, slot_ptr, next_ptr,
    position_ptr, B, R, n, S, L, J, mask_token, st,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    count, start, length = tl.load(count_ptr + b), tl.load(start_ptr + b), tl.load(length_ptr + b)
    token = tl.load(token_ptr + b * st + i, mask=i < R, other=0)
    if MASKED:
        known = i < count
        tl.store(row_token_ptr + b * n + i, tl.where(known, token, mask_token), mask=i < n)
        tl.store(state_ptr + b * n + i, tl.where(known, b * R + i, B * R), mask=i < n)
    last = tl.maximum(count - 1, 0)
    tl.store(asked_ptr + b * S + i, last + i, mask=i < S)
    tl.store(root_ptr + b, tl.load(token_ptr + b * st + last))
    tl.store(slot_ptr + b * n + i, start + length + i, mask=i < n)
    tl.store(next_ptr + i * B + b, start + length + count + i, mask=i < J)
    tl.store(position_ptr + b * n + i, length + i, mask=i < n)
    tl.store(position_ptr + (n + i) * B + b, length + count + i, mask=i < L)


def fresh_rows_triton(
    token_BR: Tensor, count_B: Tensor, start_B: Tensor, length_B: Tensor, masked: int, mask_token: int, levels: int,
    expanded: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The fields of `FreshRows` in one kernel; rows may be strided, their entries are copied if they are."""
    token = token_BR if token_BR.stride(1) == 1 else token_BR.contiguous()
    (B, R), n, S, whole = token.shape, token.shape[1] + masked, masked + 1, dict(dtype=torch.int64, device=token.device)
    row_token, state = torch.empty(2, B, n, **whole) if masked else (token, None)
    slot, asked = torch.empty(B, n, **whole), torch.empty(B, S, **whole)
    # node by node, so that those of a level of chains, one of each request, are read without a copy
    following, root = torch.empty(expanded, B, **whole).T, torch.empty(B, **whole)
    position = torch.empty(B * (n + levels), **whole)
    if B:
        _fresh_rows[(B,)](
            token, count_B.contiguous(), start_B.contiguous(), length_B.contiguous(), row_token, state, asked, root,
            slot, following, position, B, R, n, S, levels, expanded, mask_token, token.stride(0),
            BLOCK=triton.next_power_of_2(max(n, levels, expanded)), MASKED=masked > 0, num_warps=1,
            **dependent_launch(token.device),
        )  # fmt: skip
    return row_token, state, asked, root, slot, following, position
