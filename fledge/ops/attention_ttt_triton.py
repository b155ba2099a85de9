"""TTT attention in Triton: FlashAttention-2 (Dao 2023, arXiv:2307.08691) with the own steps in the online softmax.

The forward kernel handles a block of queries. It loops over blocks of the row's keys that any of the queries may read,
updating the running maximum m, the sum l and the weighted values; then each own step j adds one score per query. The
output and the log2-sum-exp2 of each query and head are saved.

Backward, with delta = Σ_d out dout and p = exp2(score - lse):

    dp = dout . v,   ds = p (dp - delta),   dq = scale Σ ds k,   dk = scale Σ ds q,   dv = Σ p dout

One kernel computes dq and delta for each block of queries. One computes dk and dv for each block of the row's keys,
summed over the query heads that share a key head. One computes dk and dv of the own steps, where each key belongs to a
single query. No tensor has size queries x keys, and keys are not repeated for grouped query heads. Products are
accumulated in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fledge.ops.device import block_width, shared_memory

if TYPE_CHECKING:
    from fledge.ops.attention_ttt import OwnSteps, Queries

LOG2E = 1.4426950408889634
# no recompilation for other lengths, nor for the alignment of pointers, which varies with the lengths
ANY_LENGTH = dict(do_not_specialize=["S", "T"], do_not_specialize_on_alignment=["at_ptr", "slot_ptr", "first_ptr"])


@triton.jit
def _update_softmax(
    acc, m, total, q, k_TD, v_TD, column, start, end, slot, first, scale2, BN: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Online softmax update by the keys [start, end), a multiple of BN."""
    for at in range(start, end, BN):
        s = tl.dot(q, tl.trans(k_TD.load([at, column])), input_precision="ieee") * scale2
        if MASKED:
            key = at + tl.arange(0, BN)
            s = tl.where((key[None, :] <= slot[:, None]) & (key[None, :] >= first[:, None]), s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new) if MASKED else new  # -inf: all keys so far are masked
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(m - safe)
        v = v_TD.load([at, column])
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        m = new
    return acc, m, total


@triton.jit
def _key_ranges(slot, first, inside, T, BN: tl.constexpr):
    """The keys that the queries need: [lo, a) and [b, hi) need a mask; all queries read all of [a, b)."""
    lo = tl.min(tl.where(inside, first, T)) // BN * BN
    hi = tl.cdiv(tl.max(tl.where(inside, slot, -1)) + 1, BN) * BN
    a = tl.minimum(tl.cdiv(tl.max(tl.where(inside, first, 0)), BN) * BN, hi)
    b = tl.maximum((tl.min(tl.where(inside, slot, T - 1)) + 1) // BN * BN, a)
    return lo, a, b, hi


@triton.jit(**ANY_LENGTH)
def _forward(
    q_ptr, k_TD, v_TD, own_k, own_v, at_ptr, slot_ptr, first_ptr, out_ptr, lse_ptr, S, T, scale2,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, J: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    g = h // (H // G)
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM + tl.arange(0, BM)  # the longest pasts first
    d = tl.arange(0, BD)
    inside = row < S
    tile = inside[:, None] & (d < D)[None, :]
    slot = tl.load(slot_ptr + row, mask=inside, other=T - 1)
    first = tl.load(first_ptr + row, mask=inside, other=0)
    q = tl.load(q_ptr + row[:, None].to(tl.int64) * (H * D) + h * D + d[None, :], mask=tile, other=0.0)
    acc = tl.zeros([BM, BD], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    lo, a, b, hi = _key_ranges(slot, first, inside, T, BN)
    acc, m, total = _update_softmax(acc, m, total, q, k_TD, v_TD, g * D, lo, a, slot, first, scale2, BN, True)
    acc, m, total = _update_softmax(acc, m, total, q, k_TD, v_TD, g * D, a, b, slot, first, scale2, BN, False)
    acc, m, total = _update_softmax(acc, m, total, q, k_TD, v_TD, g * D, b, hi, slot, first, scale2, BN, True)
    for j in tl.static_range(J):
        at = tl.load(at_ptr + j * S + row, mask=inside, other=0).to(tl.int64)
        place = at[:, None] * (G * D) + g * D + d[None, :]
        k_own = tl.load(own_k[j] + place, mask=tile, other=0.0).to(tl.float32)
        s = tl.sum(q.to(tl.float32) * k_own, 1) * scale2
        new = tl.maximum(m, s)
        p, shrink = tl.exp2(s - new), tl.exp2(m - new)
        v_own = tl.load(own_v[j] + place, mask=tile, other=0.0).to(tl.float32)
        acc = acc * shrink[:, None] + p[:, None] * v_own
        total = total * shrink + p
        m = new
    out = acc / total[:, None]
    tl.store(out_ptr + row[:, None].to(tl.int64) * (H * D) + h * D + d[None, :], out.to(out_ptr.dtype.element_ty), tile)
    tl.store(lse_ptr + h * S + row, m + tl.log2(total), inside)


@triton.jit
def _add_to_dq(
    dq, q, dout, lse, delta, k_TD, v_TD, column, start, end, slot, first, scale2,
    BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of keys [start, end) to dq, without the scale."""
    for at in range(start, end, BN):
        k, v = k_TD.load([at, column]), v_TD.load([at, column])
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse[:, None])
        if MASKED:
            key = at + tl.arange(0, BN)
            p = tl.where((key[None, :] <= slot[:, None]) & (key[None, :] >= first[:, None]), p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(**ANY_LENGTH)
def _backward_queries(
    q_ptr, k_TD, v_TD, own_k, own_v, at_ptr, slot_ptr, first_ptr, out_ptr, lse_ptr, dout_ptr, dq_ptr, delta_ptr,
    S, T, scale, scale2,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, J: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    g = h // (H // G)
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM + tl.arange(0, BM)  # the longest pasts first
    d = tl.arange(0, BD)
    inside = row < S
    tile = inside[:, None] & (d < D)[None, :]
    slot = tl.load(slot_ptr + row, mask=inside, other=T - 1)
    first = tl.load(first_ptr + row, mask=inside, other=0)
    place = row[:, None].to(tl.int64) * (H * D) + h * D + d[None, :]
    q = tl.load(q_ptr + place, mask=tile, other=0.0)
    dout = tl.load(dout_ptr + place, mask=tile, other=0.0)
    out = tl.load(out_ptr + place, mask=tile, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + h * S + row, delta, inside)
    lse = tl.load(lse_ptr + h * S + row, mask=inside, other=float("inf"))
    dq = tl.zeros([BM, BD], tl.float32)
    lo, a, b, hi = _key_ranges(slot, first, inside, T, BN)
    dq = _add_to_dq(dq, q, dout, lse, delta, k_TD, v_TD, g * D, lo, a, slot, first, scale2, BN, True)
    dq = _add_to_dq(dq, q, dout, lse, delta, k_TD, v_TD, g * D, a, b, slot, first, scale2, BN, False)
    dq = _add_to_dq(dq, q, dout, lse, delta, k_TD, v_TD, g * D, b, hi, slot, first, scale2, BN, True)
    for j in tl.static_range(J):
        at = tl.load(at_ptr + j * S + row, mask=inside, other=0).to(tl.int64)
        there = at[:, None] * (G * D) + g * D + d[None, :]
        k_own = tl.load(own_k[j] + there, mask=tile, other=0.0).to(tl.float32)
        v_own = tl.load(own_v[j] + there, mask=tile, other=0.0).to(tl.float32)
        p = tl.exp2(tl.sum(q.to(tl.float32) * k_own, 1) * scale2 - lse)
        dq += (p * (tl.sum(dout.to(tl.float32) * v_own, 1) - delta))[:, None] * k_own
    tl.store(dq_ptr + place, (dq * scale).to(dq_ptr.dtype.element_ty), tile)


@triton.jit
def _add_to_dkv(
    dk, dv, k, v, key, q_SD, dout_SD, column, slot_ptr, first_ptr, lse_ptr, delta_ptr, start, end, scale2,
    BM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of a head's queries [start, end) to dk, without the scale, and dv."""
    for at in range(start, end, BM):
        row = at + tl.arange(0, BM)
        q, dout = q_SD.load([at, column]), dout_SD.load([at, column])
        if MASKED:
            lse = tl.load(lse_ptr + row, mask=row < end, other=float("inf"))
            delta = tl.load(delta_ptr + row, mask=row < end, other=0.0)
        else:
            lse = tl.load(lse_ptr + row)
            delta = tl.load(delta_ptr + row)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale2 - lse[None, :])
        if MASKED:
            slot = tl.load(slot_ptr + row, mask=row < end, other=-1)
            first = tl.load(first_ptr + row, mask=row < end, other=0)
            p = tl.where((key[:, None] <= slot[None, :]) & (key[:, None] >= first[None, :]), p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["S", "T"], do_not_specialize_on_alignment=["slot_ptr", "first_ptr"])
def _backward_keys(
    q_SD, dout_SD, k_ptr, v_ptr, slot_ptr, first_ptr, lse_ptr, delta_ptr, range_ptr, dk_ptr, dv_ptr,
    S, T, scale, scale2,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block, g, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    key = block * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    tile = (key < T)[:, None] & (d < D)[None, :]
    place = key[:, None].to(tl.int64) * (G * D) + g * D + d[None, :]
    k = tl.load(k_ptr + place, mask=tile, other=0.0)
    v = tl.load(v_ptr + place, mask=tile, other=0.0)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    # [begin, end): queries that read any key of the block; [a, b): queries that read all keys of it, without a mask
    begin, end = tl.load(range_ptr + block), tl.load(range_ptr + 3 * blocks + block)
    a = tl.minimum(tl.load(range_ptr + blocks + block), end)
    b = a + tl.maximum(tl.load(range_ptr + 2 * blocks + block) - a, 0) // BM * BM
    for head in range(H // G):
        h = g * (H // G) + head
        lse, delta = lse_ptr + h * S, delta_ptr + h * S
        dk, dv = _add_to_dkv(
            dk, dv, k, v, key, q_SD, dout_SD, h * D, slot_ptr, first_ptr, lse, delta, begin, a, scale2, BM, True
        )
        dk, dv = _add_to_dkv(
            dk, dv, k, v, key, q_SD, dout_SD, h * D, slot_ptr, first_ptr, lse, delta, a, b, scale2, BM, False
        )
        dk, dv = _add_to_dkv(
            dk, dv, k, v, key, q_SD, dout_SD, h * D, slot_ptr, first_ptr, lse, delta, b, end, scale2, BM, True
        )
    tl.store(dk_ptr + place, (dk * scale).to(dk_ptr.dtype.element_ty), tile)
    tl.store(dv_ptr + place, dv.to(dv_ptr.dtype.element_ty), tile)


@triton.jit(do_not_specialize=["S"], do_not_specialize_on_alignment=["at_ptr"])
def _backward_own(
    q_ptr, own_k, own_v, at_ptr, lse_ptr, dout_ptr, delta_ptr, own_dk, own_dv, S, scale, scale2,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, J: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(1)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    inside = row < S
    tile = inside[:, None] & (d < D)[None, :]
    for j in tl.static_range(J):
        at = tl.load(at_ptr + j * S + row, mask=inside, other=0).to(tl.int64)
        there = at[:, None] * (G * D) + g * D + d[None, :]
        k = tl.load(own_k[j] + there, mask=tile, other=0.0).to(tl.float32)
        v = tl.load(own_v[j] + there, mask=tile, other=0.0).to(tl.float32)
        dk = tl.zeros([BM, BD], tl.float32)
        dv = tl.zeros([BM, BD], tl.float32)
        for head in range(H // G):
            h = g * (H // G) + head
            place = row[:, None].to(tl.int64) * (H * D) + h * D + d[None, :]
            q = tl.load(q_ptr + place, mask=tile, other=0.0).to(tl.float32)
            dout = tl.load(dout_ptr + place, mask=tile, other=0.0).to(tl.float32)
            lse = tl.load(lse_ptr + h * S + row, mask=inside, other=float("inf"))
            delta = tl.load(delta_ptr + h * S + row, mask=inside, other=0.0)
            p = tl.exp2(tl.sum(q * k, 1) * scale2 - lse)
            dv += p[:, None] * dout
            dk += (p * (tl.sum(dout * v, 1) - delta))[:, None] * q
        # each own key belongs to a single query, so only this program writes here
        dk = dk * scale + tl.load(own_dk[j] + there, mask=tile, other=0.0).to(tl.float32)
        dv += tl.load(own_dv[j] + there, mask=tile, other=0.0).to(tl.float32)
        tl.store(own_dk[j] + there, dk.to(own_dk[j].dtype.element_ty), tile)
        tl.store(own_dv[j] + there, dv.to(own_dv[j].dtype.element_ty), tile)


def ttt_attention_triton(
    q_SHd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own: OwnSteps, queries: Queries
) -> Tensor:  # fmt: skip
    """`ttt_attention_reference` on a GPU or in Triton's interpreter. Returns a tensor of the shape of `q_SHd`.

    The result is zero in the rows of q beyond the number of queries. The kernels are compiled for each head shape and
    number of own steps, but not for each S and T. Raises ValueError if the key heads of one slot, G d elements, are not
    a multiple of 16 bytes (required for descriptors).
    """
    if k0_TGd.shape[1:].numel() * k0_TGd.itemsize % 16:
        raise ValueError(
            f"attention 'triton' needs key heads of a multiple of 16 bytes, which {k0_TGd.shape[1]} heads of size "
            f"{k0_TGd.shape[2]} are not; use 'eager'"
        )
    keys, values = [k for k, _ in own], [v for _, v in own]
    own_row_JS, slot_S, first_S = (x.contiguous() for x in (queries.own_row_JS, queries.slot_S, queries.first_S))
    return _Attention.apply(q_SHd, k0_TGd, v0_TGd, own_row_JS, slot_S, first_S, own.gradients, *keys, *values)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k0, v0, at, slot, first, gradients, *own):
        q, k0, v0, *own = (x.contiguous() for x in (q, k0, v0, *own))
        (_, H, D), (T, G, _), S, J = q.shape, k0.shape, slot.numel(), len(own) // 2
        out, lse = torch.empty_like(q), q.new_empty((H, S), dtype=torch.float32)
        out[S:].zero_()
        if S:
            tiles = _tiles(q, "forward")
            _forward[(triton.cdiv(S, tiles["BM"]), H)](
                q, *descriptors(tiles["BN"], k0, v0), tuple(own[:J]), tuple(own[J:]), at, slot, first, out, lse, S, T,
                D**-0.5 * LOG2E, H=H, G=G, D=D, BD=block_width(D), J=J, **tiles,
            )  # fmt: skip
        ctx.gradients = gradients
        if any(ctx.needs_input_grad):
            gradients.add_reader(J)
        ctx.save_for_backward(q, k0, v0, at, slot, first, out, lse, *own)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k0, v0, at, slot, first, out, lse, *own = ctx.saved_tensors
        J, dout = len(own) // 2, dout.contiguous()
        (_, H, D), (T, G, _), S = q.shape, k0.shape, slot.numel()
        allocate = torch.empty_like if S else torch.zeros_like
        dq, dk, dv, delta = torch.empty_like(q), allocate(k0), allocate(v0), torch.empty_like(lse)
        dq[S:].zero_()
        own_k, own_v = tuple(own[:J]), tuple(own[J:])
        own_sums = [ctx.gradients.buffers(j, *pair) for j, pair in enumerate(zip(own_k, own_v, strict=True))]
        if S:
            scales = dict(scale=D**-0.5, scale2=D**-0.5 * LOG2E)
            shape = dict(H=H, G=G, D=D, BD=block_width(D))
            tiles = _tiles(q, "queries")
            _backward_queries[(triton.cdiv(S, tiles["BM"]), H)](
                q, *descriptors(tiles["BN"], k0, v0), own_k, own_v, at, slot, first, out, lse, dout, dq, delta, S, T,
                **scales, **shape, J=J, **tiles,
            )  # fmt: skip
            tiles = _tiles(q, "keys")
            ranges = _query_ranges(slot, first, T, tiles["BN"])
            _backward_keys[(triton.cdiv(T, tiles["BN"]), G)](
                *descriptors(tiles["BM"], q, dout), k0, v0, slot, first, lse, delta, ranges, dk, dv, S, T,
                **scales, **shape, **tiles,
            )  # fmt: skip
            if J:
                own_dk, own_dv = zip(*own_sums, strict=True)
                _backward_own[(triton.cdiv(S, 32), G)](
                    q, own_k, own_v, at, lse, dout, delta, own_dk, own_dv, S,
                    **scales, **shape, J=J, BM=32, num_warps=4,
                )  # fmt: skip
        own_grads = [ctx.gradients.finish_reader(j) for j in range(J)]
        return dq, dk, dv, None, None, None, None, *(k for k, _ in own_grads), *(v for _, v in own_grads)


def descriptors(rows: int, *tensors: Tensor) -> list[TensorDescriptor]:
    """Tensor descriptors of [N, heads, d] tensors for blocks of `rows` rows of one head (TMA copies on Hopper).

    Rows beyond the last are read as zeros. If d is smaller than the block's width, the remaining columns contain the
    next head; they are multiplied by zeros or never stored.
    """
    BD = block_width(tensors[0].shape[-1])
    flat = [x.flatten(1) for x in tensors]
    return [TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [rows, BD]) for x in flat]


def _query_ranges(slot: Tensor, first: Tensor, T: int, width: int) -> Tensor:
    """The queries that read each block of keys [n, n + width), int32 [4, blocks].

    Row 0: the first query at or after the block's first key. Row 1: the first query at or after its last key. Row 2:
    the end of the queries whose document starts at or before its first key. Row 3: the same for its last key.
    """
    at = torch.arange(0, T, width, device=slot.device, dtype=slot.dtype)
    return torch.stack(
        [
            torch.searchsorted(slot, at),
            torch.searchsorted(slot, at + width - 1),
            torch.searchsorted(first, at, right=True),
            torch.searchsorted(first, at + width),
        ]
    ).int()


# block sizes, warps and stages of each kernel: for 16-bit heads of at most 128 on a Hopper GPU, and for all other cases
TILES = {
    "forward": (dict(BM=64, BN=64, num_warps=4, num_stages=3), dict(BM=64, BN=32, num_warps=4, num_stages=1)),
    "queries": (dict(BM=128, BN=64, num_warps=8, num_stages=3), dict(BM=32, BN=32, num_warps=4, num_stages=1)),
    "keys": (dict(BM=64, BN=64, num_warps=4, num_stages=2), dict(BM=32, BN=32, num_warps=4, num_stages=1)),
}
LARGE = 200_000  # bytes of shared memory per block that the first configuration needs


def needs_small_tiles(q: Tensor) -> bool:
    """Whether the tiles of a kernel must be small: for heads of more than 128, of more than 16 bits, or on a GPU with
    little shared memory."""
    small = q.dtype.itemsize > 2 or q.shape[-1] > 128
    return small or (q.is_cuda and shared_memory(q.device) < LARGE)


def _tiles(q: Tensor, kernel: str) -> dict[str, int]:
    return TILES[kernel][needs_small_tiles(q)]
