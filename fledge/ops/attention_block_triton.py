"""Attention of blocks in Triton: FlashAttention-2 (Dao 2023, arXiv:2307.08691) over the context and a block's own rows.

A block has Q rows, and r = H / G query heads share a key head. The Q r query rows of a block and a key head are M rows
here: row m is query m // r of head m % r. The M rows see nearly the same keys, so one program computes all M.

Forward, one program for M rows: the block's own keys first, then the context in tiles of BN keys, with a running
maximum m, sum l and weighted values. The tiles start at the block's first token, so without a window only the last tile
has a mask. The output and the log2-sum-exp2 of each row are saved; no tensor has queries x keys elements.

Backward, with delta = Σ_d out dout and p = exp2(score - lse):

    dp = dout . v,   ds = p (dp - delta),   dq = scale Σ ds k,   dk = scale Σ ds q,   dv = Σ p dout

One kernel computes delta and dq of each block, and dk and dv of the block's own keys, which no other block reads. One
computes dk and dv of each tile of the context, summed in float32 over the blocks that read the tile. Start and end of
the blocks' contexts are ascending, so these blocks are consecutive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.attention_ttt_triton import LOG2E, descriptors, needs_small_tiles
from fledge.ops.device import block_width, to_device

NO_WINDOW = 1 << 30  # a window that hides no token
MIN_TILE = 16  # rows and columns of the smallest product of tl.dot
# no recompilation for other lengths, nor for the alignment of pointers, which varies with the lengths
ANY_LENGTH = dict(
    do_not_specialize=["P", "window"], do_not_specialize_on_alignment=["start_ptr", "end_ptr", "range_ptr"]
)


@triton.jit
def _place_rows(n, g, first, Q: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr):
    """Of BM rows of a block and key head: the row, its query, and where it starts in a tensor [N, Q, H, d]."""
    row = first + tl.arange(0, BM)
    query, head = row // (H // G), g * (H // G) + row % (H // G)
    return row, query, (n.to(tl.int64) * Q + query) * (H * D) + head * D


@triton.jit
def _load_own(
    n, g, k_ptr, v_ptr, Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr
):
    """The own keys and values of a block, [BQ, BD], and where they are in tensors [N, Q, G, d]."""
    key, d = tl.arange(0, BQ), tl.arange(0, BD)
    place = (n.to(tl.int64) * Q + key[:, None]) * (G * D) + g * D + d[None, :]
    there = (key < Q)[:, None] & (d < D)[None, :]
    return tl.load(k_ptr + place, mask=there, other=0.0), tl.load(v_ptr + place, mask=there, other=0.0), place, there


@triton.jit
def _own_visible(query, Q: tl.constexpr, BQ: tl.constexpr, CAUSAL: tl.constexpr):
    """The own keys that each row sees, bool [BM, BQ]."""
    key = tl.arange(0, BQ)
    visible = (key < Q)[None, :] & (query >= 0)[:, None]
    if CAUSAL:
        visible = visible & (key[None, :] <= query[:, None])
    return visible


@triton.jit
def _key_ranges(n, start_ptr, end_ptr, window, Q: tl.constexpr, BN: tl.constexpr):
    """The context of a block, [start, end): tiles from `start` to a and from b to `end` need a mask; all rows read all
    of [a, b). The last row sees fewer tokens with a window than the first, down to `latest`."""
    start, end = tl.load(start_ptr + n), tl.load(end_ptr + n)
    latest = tl.maximum(start, end + Q - window)
    a = start + tl.cdiv(latest - start, BN) * BN
    b = a + tl.maximum(end - a, 0) // BN * BN
    return start, a, b, end


@triton.jit
def _add_keys(acc, m, total, s, v):
    """Online softmax update by scores s [BM, BN] and values v."""
    new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    shrink = tl.exp2(m - new)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new, total * shrink + tl.sum(p, 1)


@triton.jit
def _add_context(
    acc, m, total, q, k_PD, v_PD, column, first, last, earliest, end, scale2, BN: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Online softmax update by the context tokens [first, last), of which a row sees those from `earliest` to `end`."""
    for at in range(first, last, BN):
        s = tl.dot(q, tl.trans(k_PD.load([at, column])), input_precision="ieee") * scale2
        if MASKED:
            key = at + tl.arange(0, BN)
            s = tl.where((key[None, :] >= earliest[:, None]) & (key < end)[None, :], s, float("-inf"))
        acc, m, total = _add_keys(acc, m, total, s, v_PD.load([at, column]))
    return acc, m, total


@triton.jit(**ANY_LENGTH)
def _forward(
    q_ptr, k_ptr, v_ptr, context_k_PD, context_v_PD, start_ptr, end_ptr, out_ptr, lse_ptr, window, scale2,
    Q: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n, g = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the longest contexts first
    M: tl.constexpr = Q * (H // G)
    row, query, place = _place_rows(n, g, tl.program_id(2) * BM, Q, H, G, D, BM)
    d = tl.arange(0, BD)
    tile = (row < M)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + place[:, None] + d[None, :], mask=tile, other=0.0)
    acc = tl.zeros([BM, BD], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    # the own keys first: each row sees some, so the maximum is finite from then on
    k, v, _, _ = _load_own(n, g, k_ptr, v_ptr, Q, G, D, BD, BQ)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
    s = tl.where(_own_visible(query, Q, BQ, CAUSAL), s, float("-inf"))
    acc, m, total = _add_keys(acc, m, total, s, v)
    start, a, b, end = _key_ranges(n, start_ptr, end_ptr, window, Q, BN)
    earliest = tl.maximum(start, end + query + 1 - window)
    acc, m, total = _add_context(
        acc, m, total, q, context_k_PD, context_v_PD, g * D, start, a, earliest, end, scale2, BN, True
    )
    acc, m, total = _add_context(
        acc, m, total, q, context_k_PD, context_v_PD, g * D, a, b, earliest, end, scale2, BN, False
    )
    acc, m, total = _add_context(
        acc, m, total, q, context_k_PD, context_v_PD, g * D, b, end, earliest, end, scale2, BN, True
    )
    out = acc / total[:, None]
    tl.store(out_ptr + place[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), tile)
    tl.store(lse_ptr + (n.to(tl.int64) * G + g) * M + row, m + tl.log2(total), row < M)


@triton.jit
def _add_to_dq(
    dq, q, dout, lse, delta, k_PD, v_PD, column, first, last, earliest, end, scale2,
    BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the context tokens [first, last) to dq, without the scale."""
    for at in range(first, last, BN):
        k, v = k_PD.load([at, column]), v_PD.load([at, column])
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse[:, None])
        if MASKED:
            key = at + tl.arange(0, BN)
            p = tl.where((key[None, :] >= earliest[:, None]) & (key < end)[None, :], p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(**ANY_LENGTH)
def _backward_blocks(
    q_ptr, k_ptr, v_ptr, context_k_PD, context_v_PD, start_ptr, end_ptr, out_ptr, lse_ptr, dout_ptr, dq_ptr, dk_ptr,
    dv_ptr, delta_ptr, window, scale, scale2,
    Q: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BQ: tl.constexpr,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    n, g = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the longest contexts first
    M: tl.constexpr = Q * (H // G)
    d = tl.arange(0, BD)
    start, a, b, end = _key_ranges(n, start_ptr, end_ptr, window, Q, BN)
    k, v, own_place, there = _load_own(n, g, k_ptr, v_ptr, Q, G, D, BD, BQ)
    dk = tl.zeros([BQ, BD], tl.float32)
    dv = tl.zeros([BQ, BD], tl.float32)
    for first in range(0, M, BM):  # a single time, unless many query heads share the key head
        row, query, place = _place_rows(n, g, first, Q, H, G, D, BM)
        tile = (row < M)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + place[:, None] + d[None, :], mask=tile, other=0.0)
        dout = tl.load(dout_ptr + place[:, None] + d[None, :], mask=tile, other=0.0)
        out = tl.load(out_ptr + place[:, None] + d[None, :], mask=tile, other=0.0)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        at = (n.to(tl.int64) * G + g) * M + row
        tl.store(delta_ptr + at, delta, row < M)
        lse = tl.load(lse_ptr + at, mask=row < M, other=float("inf"))
        earliest = tl.maximum(start, end + query + 1 - window)
        dq = tl.zeros([BM, BD], tl.float32)
        dq = _add_to_dq(
            dq, q, dout, lse, delta, context_k_PD, context_v_PD, g * D, start, a, earliest, end, scale2, BN, True
        )
        dq = _add_to_dq(
            dq, q, dout, lse, delta, context_k_PD, context_v_PD, g * D, a, b, earliest, end, scale2, BN, False
        )
        dq = _add_to_dq(
            dq, q, dout, lse, delta, context_k_PD, context_v_PD, g * D, b, end, earliest, end, scale2, BN, True
        )
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale2 - lse[:, None])
        p = tl.where(_own_visible(query, Q, BQ, CAUSAL), p, 0.0)
        ds = (p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])).to(q.dtype)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
        dv = tl.dot(tl.trans(p.to(dout.dtype)), dout, dv, input_precision="ieee")
        tl.store(dq_ptr + place[:, None] + d[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), tile)
    tl.store(dk_ptr + own_place, (dk * scale).to(dk_ptr.dtype.element_ty), there)
    tl.store(dv_ptr + own_place, dv.to(dv_ptr.dtype.element_ty), there)


@triton.jit
def _add_to_dkv(
    dk, dv, k, v, key, q_ptr, dout_ptr, g, start_ptr, end_ptr, lse_ptr, delta_ptr, begin, stop, window, scale2,
    Q: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the blocks [begin, stop) to dk, without the scale, and dv."""
    M: tl.constexpr = Q * (H // G)
    TILES: tl.constexpr = (M + BM - 1) // BM
    d = tl.arange(0, BD)
    for i in range(begin * TILES, stop * TILES):
        n = i // TILES
        row, query, place = _place_rows(n, g, i % TILES * BM, Q, H, G, D, BM)
        tile = (row < M)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + place[:, None] + d[None, :], mask=tile, other=0.0)
        dout = tl.load(dout_ptr + place[:, None] + d[None, :], mask=tile, other=0.0)
        at = (n.to(tl.int64) * G + g) * M + row
        lse = tl.load(lse_ptr + at, mask=row < M, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=row < M, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale2 - lse[None, :])
        if MASKED:
            end = tl.load(end_ptr + n)
            earliest = tl.maximum(tl.load(start_ptr + n), end + query + 1 - window)
            p = tl.where((key[:, None] >= earliest[None, :]) & (key < end)[:, None], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(**ANY_LENGTH)
def _backward_context(
    q_ptr, dout_ptr, k_ptr, v_ptr, start_ptr, end_ptr, lse_ptr, delta_ptr, range_ptr, dk_ptr, dv_ptr, P, window, scale,
    scale2,
    Q: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    g, at, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)  # more blocks read earlier tokens
    key, d = at * BN + tl.arange(0, BN), tl.arange(0, BD)
    tile = (key < P)[:, None] & (d < D)[None, :]
    place = key[:, None].to(tl.int64) * (G * D) + g * D + d[None, :]
    k = tl.load(k_ptr + place, mask=tile, other=0.0)
    v = tl.load(v_ptr + place, mask=tile, other=0.0)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    # [begin, stop): blocks that read any key of the tile; [a, b): blocks whose rows all read all keys, without a mask
    begin, stop = tl.load(range_ptr + at), tl.load(range_ptr + 3 * tiles + at)
    a = tl.minimum(tl.load(range_ptr + tiles + at), stop)
    b = tl.maximum(tl.load(range_ptr + 2 * tiles + at), a)
    dk, dv = _add_to_dkv(
        dk, dv, k, v, key, q_ptr, dout_ptr, g, start_ptr, end_ptr, lse_ptr, delta_ptr, begin, a, window, scale2,
        Q, H, G, D, BD, BM, True,
    )  # fmt: skip
    dk, dv = _add_to_dkv(
        dk, dv, k, v, key, q_ptr, dout_ptr, g, start_ptr, end_ptr, lse_ptr, delta_ptr, a, b, window, scale2,
        Q, H, G, D, BD, BM, False,
    )  # fmt: skip
    dk, dv = _add_to_dkv(
        dk, dv, k, v, key, q_ptr, dout_ptr, g, start_ptr, end_ptr, lse_ptr, delta_ptr, b, stop, window, scale2,
        Q, H, G, D, BD, BM, True,
    )  # fmt: skip
    tl.store(dk_ptr + place, (dk * scale).to(dk_ptr.dtype.element_ty), tile)
    tl.store(dv_ptr + place, dv.to(dv_ptr.dtype.element_ty), tile)


def block_attention_triton(
    q_NQHd: Tensor, k_NQGd: Tensor, v_NQGd: Tensor, context_k_PGd: Tensor, context_v_PGd: Tensor, start_N: Tensor,
    end_N: Tensor, *, causal: bool, window: int | None = None,
) -> Tensor:  # fmt: skip
    """`block_attention` on a GPU or in Triton's interpreter: [N, Q, H, d] in the dtype of `q_NQHd`.
    `start_N` and `end_N` are on the CPU.

    The kernels are compiled for each head shape and Q, but not for each N and P. Raises ValueError for float64, and if
    the key heads of one token, G d elements, are not a multiple of 16 bytes (required for descriptors).
    """
    if q_NQHd.dtype == torch.float64:
        raise ValueError("attention 'triton' computes in float32; use 'eager' for float64")
    Q, (P, G, d) = q_NQHd.shape[1], context_k_PGd.shape
    if G * d * q_NQHd.itemsize % 16:
        raise ValueError(
            f"attention 'triton' needs key heads of a multiple of 16 bytes, which {G} heads of size {d} are not; use "
            "'eager'"
        )
    seen = NO_WINDOW if window is None else window
    start_N = torch.maximum(start_N, end_N + 1 - seen)  # of the first row, which sees the most tokens
    ranges = _block_ranges(start_N, torch.maximum(start_N, end_N + Q - seen), end_N, P, _tiles(q_NQHd, "context")["BN"])
    places = to_device([x.int() for x in (start_N, end_N, ranges)], q_NQHd.device)
    return _BlockAttention.apply(q_NQHd, k_NQGd, v_NQGd, context_k_PGd, context_v_PGd, *places, causal, seen)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, context_k, context_v, start, end, ranges, causal, window):
        q, k, v, context_k, context_v = (x.contiguous() for x in (q, k, v, context_k, context_v))
        (N, Q, H, D), G = q.shape, k.shape[2]
        out, lse = torch.empty_like(q), q.new_empty((N, G, Q * H // G), dtype=torch.float32)
        if N:
            tiles = _tiles(q, "forward", G)
            _forward[(N, G, triton.cdiv(Q * H // G, tiles["BM"]))](
                q, k, v, *descriptors(tiles["BN"], context_k, context_v), start, end, out, lse, window,
                D**-0.5 * LOG2E, **_shape(q, G), BQ=_power_of_two(Q), CAUSAL=causal, **tiles,
            )  # fmt: skip
        ctx.causal, ctx.window = causal, window
        ctx.save_for_backward(q, k, v, context_k, context_v, start, end, ranges, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, context_k, context_v, start, end, ranges, out, lse = ctx.saved_tensors
        (N, Q, _, D), (P, G, _), dout = q.shape, context_k.shape, dout.contiguous()
        allocate = torch.empty_like if N else torch.zeros_like
        dq, dk, dv, delta = (torch.empty_like(x) for x in (q, k, v, lse))
        dcontext_k, dcontext_v = allocate(context_k), allocate(context_v)
        if N:
            scales, shape = dict(scale=D**-0.5, scale2=D**-0.5 * LOG2E), _shape(q, G)
            tiles = _tiles(q, "blocks", G)
            _backward_blocks[(N, G)](
                q, k, v, *descriptors(tiles["BN"], context_k, context_v), start, end, out, lse, dout, dq, dk, dv, delta,
                ctx.window, **scales, **shape, BQ=_power_of_two(Q), CAUSAL=ctx.causal, **tiles,
            )  # fmt: skip
            tiles = _tiles(q, "context", G)
            _backward_context[(G, triton.cdiv(P, tiles["BN"]))](
                q, dout, context_k, context_v, start, end, lse, delta, ranges, dcontext_k, dcontext_v, P, ctx.window,
                **scales, **shape, **tiles,
            )  # fmt: skip
        return dq, dk, dv, dcontext_k, dcontext_v, None, None, None, None, None


def _shape(q_NQHd: Tensor, G: int) -> dict[str, int]:
    _, Q, H, D = q_NQHd.shape
    return dict(Q=Q, H=H, G=G, D=D, BD=block_width(D))


def _power_of_two(n: int) -> int:
    return max(triton.next_power_of_2(n), MIN_TILE)


def _block_ranges(start: Tensor, latest: Tensor, end: Tensor, P: int, width: int) -> Tensor:
    """The blocks that read each tile of context tokens [n, n + width), int64 [4, tiles].

    Row 0: the first block that ends after the tile's first token. Row 1: the first block that ends at or after the end
    of the tile. Row 2: the end of the blocks of which all rows see the tile's first token, unless it is too late for
    them (`latest`). Row 3: the end of the blocks that start before the end of the tile.
    """
    at = torch.arange(0, P, width)
    return torch.stack(
        [
            torch.searchsorted(end, at, right=True),
            torch.searchsorted(end, at + width),
            torch.searchsorted(latest, at, right=True),
            torch.searchsorted(start, at + width),
        ]
    )


# the largest tile of query rows, the tile of context tokens, and the stages of each kernel: for 16-bit heads of at most
# 128 on a Hopper GPU, where two programs share the memory of a multiprocessor, and for all other cases
TILES = {
    "forward": (dict(BM=64, BN=64, num_stages=2), dict(BM=64, BN=32, num_stages=1)),
    "blocks": (dict(BM=64, BN=64, num_stages=2), dict(BM=32, BN=32, num_stages=1)),
    "context": (dict(BM=64, BN=64, num_stages=2), dict(BM=32, BN=32, num_stages=1)),
}


def _tiles(q_NQHd: Tensor, kernel: str, G: int = 1) -> dict[str, int]:
    """The tiles of a kernel, with no more rows than a block and key head have."""
    _, Q, H, _ = q_NQHd.shape
    tiles = TILES[kernel][needs_small_tiles(q_NQHd)]
    return tiles | dict(BM=min(tiles["BM"], _power_of_two(Q * H // G)), num_warps=4)
