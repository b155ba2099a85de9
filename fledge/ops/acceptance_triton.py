"""`accept_own` in Triton: one program per request walks from the root to the last accepted node."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.implementations import dependent_launch
from fledge.types import Tree, Verdict


@triton.jit(do_not_specialize=["N", "R", "st", "sp", "so"])
def _walk(
    token_ptr, parent_ptr, own_ptr, size_ptr, path_ptr, count_ptr, out_ptr, N, R, st, sp, so,
    BN: tl.constexpr, BR: tl.constexpr, CHAIN: tl.constexpr, SIZES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b, n = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    end = tl.minimum(tl.load(size_ptr + b), N) if SIZES else N
    real = (n > 0) & (n < end)
    token = tl.load(token_ptr + b * st + n, mask=real, other=0)
    parent = n - 1
    if not CHAIN:
        parent = tl.load(parent_ptr + b * sp + n, mask=real, other=-1).to(tl.int32)
    own_ptr += b * so
    real = real & (parent >= 0)
    matched = real & (token == tl.load(own_ptr + parent, mask=real, other=0))
    # the walk is in registers: a load at each step would wait for the one before it
    r, node, count = tl.arange(0, BR), 0, 1
    path = tl.zeros([BR], tl.int32)
    for step in range(1, R):
        child = tl.max(tl.where(matched & (parent == node), n, 0), 0)
        node = tl.where(child > 0, child, -1)  # where a path ends, it ends at each further step too
        path = tl.where((r >= step) & (child > 0), child, path)
        count += (child > 0).to(tl.int32)
    own = tl.load(own_ptr + path, mask=r < R, other=0)
    tl.store(path_ptr + b * R + r, path, mask=r < R)
    tl.store(out_ptr + b * R + r, tl.where(r < count, own, 0), mask=r < R)
    tl.store(count_ptr + b, count)


def accept_own_triton(tree: Tree, own_BN: Tensor) -> Verdict:
    """`accept_own` in one kernel; rows may be strided, their entries are copied if they are."""
    (B, N), R = own_BN.shape, tree.levels + 1
    token, own = _rows(tree.token_BN), _rows(own_BN)
    parent = token if tree.parent_BN is None else _rows(tree.parent_BN)
    path, out = torch.empty(2, B, R, dtype=torch.int64, device=own.device)
    count = path.new_empty(B)
    if B:
        _walk[(B,)](
            token, parent, own, None if tree.count_B is None else tree.count_B.contiguous(), path, count, out, N, R,
            token.stride(0), parent.stride(0), own.stride(0), BN=max(triton.next_power_of_2(N), 2),
            BR=triton.next_power_of_2(R), CHAIN=tree.parent_BN is None, SIZES=tree.count_B is not None,
            num_warps=1 if N <= 128 else 4, **dependent_launch(own.device),
        )  # fmt: skip
    return Verdict(path, count, out)


def _rows(x_BN: Tensor) -> Tensor:
    """x, copied if its rows are not contiguous."""
    return x_BN if x_BN.stride(1) == 1 else x_BN.contiguous()
