"""Mixtures of experts in Triton: one program routes all rows, and one program reads each tile of an expert's weights.

The products are those of `ops.products_triton`, with the pairs of one expert as rows. If an expert has more pairs than
a block, the program computes the pairs block by block, and reads the weights again from the L2 cache.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.device import dependent_launch, shared_memory, with_unit_stride
from fledge.ops.products_triton import MOST_ROWS, ProductTiles, _epilogue, _sums, _sums_of_parts, fit
from fledge.ops.topk_triton import NOTHING, keys_of, wait_for_previous

if TYPE_CHECKING:
    from fledge.ops.experts import Routing

WIDE = 1024  # outputs of a program that adds the experts of a row
TILES = ProductTiles(outputs=32, inputs=256, part=64, warps=4, stages=4)  # of both products
# of float32, whose products run outside the tensor cores, and need registers
EXACT = ProductTiles(outputs=32, inputs=64, part=16, warps=4, stages=3)


@triton.jit(do_not_specialize=["M"])
def _route(
    logits_ptr, weight_ptr, order_ptr, end_ptr, slot_ptr, M, sx,
    X: tl.constexpr, C: tl.constexpr, S: tl.constexpr, NORMALIZED: tl.constexpr,
    BM: tl.constexpr, BX: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_previous(DEPENDENT)
    m, x = tl.arange(0, BM), tl.arange(0, BX)
    inside = (m < M)[:, None] & (x < X)[None, :]
    logit = tl.load(logits_ptr + m[:, None] * sx + x[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    key = tl.where((x < X)[None, :], keys_of(logit, x[None, :]), NOTHING)
    choice = tl.full([BM, BX], -1, tl.int32)  # the rank of each expert among its row's chosen experts; -1: not chosen
    for c in range(C):
        best = key == tl.max(key, 1)[:, None]  # keys of a row are distinct
        choice = tl.where(best, c, choice)
        key = tl.where(best, NOTHING, key)
    chosen = (choice >= 0) & inside
    # rows past the end hold -inf only, and are not stored
    p = tl.exp(logit - tl.where(m < M, tl.max(logit, 1), 0.0)[:, None])
    total = tl.sum(tl.where(chosen, p, 0.0) if NORMALIZED else p, 1)
    pair = m[:, None] * C + choice
    tl.store(weight_ptr + pair, p / tl.where(m < M, total, 1.0)[:, None], mask=chosen)
    count = tl.sum(chosen.to(tl.int32), 0)
    end = tl.cumsum(count, 0)
    place = (end - count)[None, :] + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(order_ptr + place, pair, mask=chosen)
    tl.store(end_ptr + x, end, mask=x < X)
    present = count > 0
    slot = tl.cumsum(present.to(tl.int32), 0) - 1
    tl.store(slot_ptr + slot, x, mask=present)
    used = tl.sum(present.to(tl.int32), 0)
    tl.store(slot_ptr + x, -1, mask=(x >= used) & (x < S))


def route_triton(logits_MX: Tensor, chosen: int, normalized: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Routing`, in one program."""
    (M, X), device = logits_MX.shape, logits_MX.device
    logits = with_unit_stride(logits_MX)
    weight = torch.empty(M, chosen, dtype=torch.float32, device=device)
    S = min(X, M * chosen)
    order, end, slot = (torch.empty(n, dtype=torch.int32, device=device) for n in (M * chosen, X, S))
    if M:
        BX = triton.next_power_of_2(X)
        # the layout of the block, and so the order of sums, must not depend on the number of rows
        BM = max(triton.next_power_of_2(M), triton.cdiv(256, BX))
        _route[(1,)](
            logits, weight, order, end, slot, M, logits.stride(0), X=X, C=chosen, S=S, NORMALIZED=normalized,
            BM=BM, BX=BX, num_warps=min(max(BM * BX // 512, 1), 16), **dependent_launch(device),
        )  # fmt: skip
    else:
        end.zero_()
    return weight, order, end, slot


@triton.jit(do_not_specialize=["M", "P"])
def _expert_product(
    x_ptr, gain_ptr, w_ptr, order_ptr, end_ptr, slot_ptr, out_ptr, M, P, sx, sw, eps,
    C: tl.constexpr, I: tl.constexpr, O: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
    PARTS: tl.constexpr, GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BO rows of an expert's weight times the rows of its pairs, BM at a time.

    Stores the products at the pairs' places. If GATED, pair p reads row p // C of x, normalised, and the weight has the
    O rows of the gate first, then the O rows of up; else pair p reads row p.
    """
    wait_for_previous(DEPENDENT)
    expert = tl.load(slot_ptr + tl.program_id(1))
    if expert < 0:
        return
    begin, end = tl.load(end_ptr + expert - 1, mask=expert > 0, other=0), tl.load(end_ptr + expert)
    r = tl.arange(0, BO)
    BF: tl.constexpr = BO // 2 if GATED else BO
    o = tl.program_id(0) * BF + tl.arange(0, BF)
    if GATED:
        row = (r // BF) * O + tl.minimum(tl.program_id(0) * BF + r % BF, O - 1)
    else:
        row = tl.minimum(tl.program_id(0) * BO + r, O - 1)  # outputs past the end are computed and not stored
    w_ptr += expert.to(tl.int64) * sx
    STEPS: tl.constexpr = (I + BI - 1) // BI
    EVEN: tl.constexpr = STEPS * BI == I
    for at in range(begin, end, BM):
        i = at + tl.arange(0, BM)
        pair = tl.load(order_ptr + i, mask=i < end, other=0)
        m = tl.where(i < end, pair // C if GATED else pair, M)
        if PARTS == 1:
            acc, square = _sums(
                x_ptr, gain_ptr, w_ptr, m, row, 0, M, sw, I, BI, STEPS, EVEN, GATED, False, False, 0, 1
            )  # fmt: skip
        else:
            acc, square = _sums_of_parts(
                x_ptr, gain_ptr, w_ptr, m, row, 0, M, sw, I, BI, PARTS, STEPS, EVEN, GATED, False, False, 0, 1, 0
            )  # fmt: skip
        to = tl.where(i < end, pair, P)
        _epilogue(acc, square, to, o, None, None, out_ptr, P, O, 0, eps, I, GATED, GATED, False, False)


@triton.jit
def _add_experts(
    found_ptr, weight_ptr, residual_ptr, out_ptr, sr,
    E: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The weighted sum of the experts of a row, in their order, plus the residual."""
    wait_for_previous(DEPENDENT)
    m, e = tl.program_id(0).to(tl.int64), tl.program_id(1) * BE + tl.arange(0, BE)
    total = tl.load(residual_ptr + m * sr + e, mask=e < E, other=0.0).to(tl.float32)
    for c in tl.static_range(C):
        total += tl.load(weight_ptr + m * C + c) * tl.load(found_ptr + (m * C + c) * E + e, mask=e < E, other=0.0)
    tl.store(out_ptr + m * E + e, total.to(out_ptr.dtype.element_ty), mask=e < E)


def experts_triton(
    x_ME: Tensor, gain_E: Tensor, eps: float, routing: Routing, gate_up_XOE: Tensor, down_XEF: Tensor,
    residual_ME: Tensor,
) -> Tensor:  # fmt: skip
    """`experts` in three kernels. Raises ValueError if a row of a weight is not contiguous."""
    if gate_up_XOE.stride(2) != 1 or down_XEF.stride(2) != 1:
        raise ValueError("the kernels of experts need weights whose rows are contiguous")
    (M, E), (X, _, F), (_, C) = x_ME.shape, down_XEF.shape, routing.weight_MC.shape
    residual, x = with_unit_stride(residual_ME), x_ME.contiguous()
    x = x.clone() if x.data_ptr() % 16 else x  # the alignment must not select a kernel with another order of sums
    P, out = M * C, torch.empty(M, E, dtype=x.dtype, device=x.device)
    if not M:
        return out
    tiles = _tiles(M, P, X, x.dtype, x.device)
    activated = torch.empty(P, F, dtype=x.dtype, device=x.device)
    found = torch.empty(P, E, dtype=torch.float32, device=x.device)
    slots, launch = routing.slot_S.numel(), dependent_launch(x.device)
    routed = routing.order_P, routing.end_X, routing.slot_S

    def product(x: Tensor, weight: Tensor, to: Tensor, O: int, gated: bool) -> None:
        outputs = tiles.outputs // 2 if gated else tiles.outputs
        _expert_product[(triton.cdiv(O, outputs), slots)](
            x, gain_E.contiguous() if gated else None, weight, *routed, to, x.shape[0], P, *weight.stride()[:2], eps,
            C=C, I=x.shape[1], O=O, BM=tiles.rows, BO=tiles.outputs, BI=tiles.inputs, PARTS=tiles.inputs // tiles.part,
            GATED=gated, num_warps=tiles.warps, num_stages=tiles.stages, **launch,
        )  # fmt: skip

    product(x, gate_up_XOE, activated, F, True)
    product(activated, down_XEF, found, E, False)
    block = min(triton.next_power_of_2(E), WIDE)
    _add_experts[(M, triton.cdiv(E, block))](
        found, routing.weight_MC, residual, out, residual.stride(0), E=E, C=C, BE=block, num_warps=4, **launch
    )
    return out


@functools.cache
def _tiles(M: int, P: int, X: int, dtype: torch.dtype, device: torch.device) -> ProductTiles:
    """The tiles of P pairs of M rows. Up to MOST_ROWS rows, a tile has as few rows as in a product of few rows; beyond,
    a tile has about the mean number of pairs per expert."""
    rows = 8 if M <= 8 else 16
    if M > MOST_ROWS:
        rows = min(max(triton.next_power_of_2(triton.cdiv(P, X)), 16), 64)
    tiles = replace(EXACT if dtype == torch.float32 else TILES, rows=rows)
    return fit(tiles, dtype.itemsize, shared_memory(device)) if device.type == "cuda" else tiles
