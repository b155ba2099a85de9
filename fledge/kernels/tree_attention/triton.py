"""Attention in decoding in Triton: online softmax over shares of the keys ("split-KV", as in Flash-Decoding).

One program handles a sequence, a key head, a block of rows and a share of the slots. Its rows are the S x H / G query
rows that read the key head: row r is new row r // group and head r % group of the group. Each program reads the lengths
from the device, takes an equal share of the blocks of slots, and writes the softmax of its share with its log2-sum-exp2
to a workspace; a second kernel combines the shares. With one share, the first kernel writes the result itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.implementations import dependent_launch

LOG2E = 1.4426950408889634
WAVES = 2  # programs per processor that the shares are chosen for; one for large blocks of rows, which fill it
MOST_SPLITS = 64
LARGE = 200_000  # bytes of shared memory per block from which the deeper pipelines fit


@triton.jit
def _read_slots(
    acc, m, total, q, k_ptr, v_ptr, skp, svp, visible_ptr, svs, row_s, inside, position,
    first, length, J, begin, end, scale2,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax update by the slots [begin, end) of a sequence, a multiple of BN.

    Without MASKED, every row reads all of these slots, and all are in the prefix.
    """
    n, d = tl.arange(0, BN), tl.arange(0, BD)
    k_tile, v_tile = n[:, None] * skp + d[None, :], n[:, None] * svp + d[None, :]
    for at in tl.range(begin, end, BN, num_stages=MASKED_STAGES if MASKED else None):
        k_at, v_at = k_ptr + (first + at) * skp + k_tile, v_ptr + (first + at) * svp + v_tile
        if MASKED:
            slot = at + n
            held = (slot < length + J)[:, None] & (d < D)[None, :]
            k, v = tl.load(k_at, mask=held, other=0.0), tl.load(v_at, mask=held, other=0.0)
        elif D < BD:
            k, v = tl.load(k_at, mask=(d < D)[None, :], other=0.0), tl.load(v_at, mask=(d < D)[None, :], other=0.0)
        else:
            k, v = tl.load(k_at), tl.load(v_at)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
        if MASKED:
            j = slot - length
            new = inside[:, None] & ((j >= 0) & (j < J))[None, :]
            seen = tl.load(visible_ptr + row_s[:, None] * svs + j[None, :], mask=new, other=0) != 0
            if WINDOW > 0:
                seen = seen | ((slot < length)[None, :] & (slot[None, :] > position[:, None] - WINDOW))
            else:
                seen = seen | (slot < length)[None, :]
            s = tl.where(seen, s, float("-inf"))
        largest = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(largest == float("-inf"), 0.0, largest) if MASKED else largest  # -inf: no slot seen so far
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(m - safe)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        m = largest
    return acc, m, total


@triton.jit(
    do_not_specialize=["S", "J", "splits", "svb", "svs", "spb"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr", "visible_ptr", "position_ptr"],
)
def _attend(
    q_ptr, k_ptr, v_ptr, start_ptr, length_ptr, visible_ptr, position_ptr, out_ptr, partial_ptr, lse_ptr,
    S, J, splits, scale2, sqb, sqs, sqh, skg, skp, svg, svp, svb, svs, spb,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split, g, b = tl.program_id(0), tl.program_id(1) % G, tl.program_id(2).to(tl.int64)
    group: tl.constexpr = H // G
    # with a pipeline in the masked loops, ptxas serializes the warp group's products of all loops (C7515)
    masked_stages: tl.constexpr = 1 if BM >= 64 else 2
    row = tl.program_id(1) // G * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    row_s, row_h = row // group, g * group + row % group
    inside = row_s < S
    tile = inside[:, None] & (d < D)[None, :]
    q_at = q_ptr + b * sqb + row_s[:, None].to(tl.int64) * sqs + row_h[:, None] * sqh + d[None, :]
    q = tl.load(q_at, mask=tile, other=0.0)
    first, length = tl.load(start_ptr + b).to(tl.int64), tl.load(length_ptr + b).to(tl.int32)
    k_ptr += g.to(tl.int64) * skg
    v_ptr += g.to(tl.int64) * svg
    visible_ptr += b * svb
    acc = tl.zeros([BM, BD], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    # the blocks of slots that the rows read start at lo; from `seen_by_all` on, all rows read all of the prefix
    prefix_end = length // BN * BN  # end of the blocks that are wholly in the prefix
    position, lo = row, 0
    if WINDOW > 0:
        position = tl.load(position_ptr + b * spb + row_s, mask=inside, other=0).to(tl.int32)
        lowest = tl.min(tl.where(inside, position, 2147483647))
        lo = tl.minimum(tl.maximum(lowest - WINDOW + 1, 0) // BN * BN, prefix_end)
    share = tl.cdiv(tl.cdiv(length + J - lo, BN), splits) * BN
    begin = lo + split * share
    end = tl.minimum(begin + share, tl.cdiv(length + J, BN) * BN)
    clear = begin
    if WINDOW > 0:
        highest = tl.max(tl.where(inside, position, 0))
        seen_by_all = tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), BN) * BN
        clear = tl.maximum(begin, tl.minimum(seen_by_all, end))
        acc, m, total = _read_slots(
            acc, m, total, q, k_ptr, v_ptr, skp, svp, visible_ptr, svs, row_s, inside, position, first, length, J,
            begin, clear, scale2, D, BD, BN, WINDOW, True, masked_stages,
        )  # fmt: skip
    mixed = tl.maximum(clear, tl.minimum(prefix_end, end))
    acc, m, total = _read_slots(
        acc, m, total, q, k_ptr, v_ptr, skp, svp, visible_ptr, svs, row_s, inside, position, first, length, J,
        clear, mixed, scale2, D, BD, BN, WINDOW, False, masked_stages,
    )  # fmt: skip
    acc, m, total = _read_slots(
        acc, m, total, q, k_ptr, v_ptr, skp, svp, visible_ptr, svs, row_s, inside, position, first, length, J,
        mixed, end, scale2, D, BD, BN, WINDOW, True, masked_stages,
    )  # fmt: skip
    found = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_row = (b * S + row_s) * H + row_h
    if SHARED:
        part = out_row * splits + split
        lse = tl.where(total > 0.0, m + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(partial_ptr + part[:, None] * D + d[None, :], found, mask=tile)
        tl.store(lse_ptr + part, lse, mask=inside)
    else:
        tl.store(out_ptr + out_row[:, None] * D + d[None, :], found.to(out_ptr.dtype.element_ty), mask=tile)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    partial_ptr, lse_ptr, out_ptr, splits,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The weighted mean of the shares of one row and head; the weights are the shares' sums of exponentials."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, split, d = tl.program_id(0).to(tl.int64), tl.arange(0, BS), tl.arange(0, BD)
    lse = tl.load(lse_ptr + row * splits + split, mask=split < splits, other=float("-inf"))
    held = (lse > float("-inf"))[:, None] & (d < D)[None, :]  # a share without slots costs no reading
    part = tl.load(partial_ptr + (row * splits + split)[:, None] * D + d[None, :], mask=held, other=0.0)
    weight = tl.exp2(lse - tl.max(lse, 0))
    found = tl.sum(weight[:, None] * part, 0) / tl.sum(weight, 0)
    tl.store(out_ptr + row * D + d, found.to(out_ptr.dtype.element_ty), mask=d < D)


def tree_attention_triton(
    q_BSHd: Tensor, keys_GPd: Tensor, values_GPd: Tensor, start_B: Tensor, length_B: Tensor, visible_BSJ: Tensor,
    scale: float, window: int | None = None, position_BS: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`tree_attention_reference` on a GPU or in Triton's interpreter, without any synchronization with the host.

    The kernels are compiled for each head shape, dtype, window and block of rows, not for each length. Raises
    ValueError for heads of more than 256, for tensors whose heads are not contiguous, and for pools whose slots are
    2^24 or more elements apart (offsets within a block are int32).
    """
    (B, S, H, d), (G, P, _), J = q_BSHd.shape, keys_GPd.shape, visible_BSJ.shape[-1]
    if d > 256 or not q_BSHd.stride(3) == keys_GPd.stride(2) == values_GPd.stride(2) == 1:
        raise ValueError(f"attention 'triton' needs heads of at most 256 that are contiguous, not heads of {d}")
    if max(keys_GPd.stride(1), values_GPd.stride(1)) >= 2**24:
        raise ValueError("attention 'triton' needs pools whose slots are fewer than 2^24 elements apart")
    out = q_BSHd.new_empty((B, S, H, d))
    if not out.numel():
        return out
    # a bool's bytes are 0 and 1; rows may be strided, their J entries may not
    visible = (visible_BSJ if visible_BSJ.stride(2) == 1 else visible_BSJ.contiguous()).view(torch.uint8)
    position = length_B if window is None else position_BS  # unused without a window
    if window is not None and position.stride(1) != 1:
        position = position.contiguous()
    rows = S * (H // G)
    tiles = _tiles(q_BSHd, rows)
    blocks = triton.cdiv(rows, tiles["BM"])
    waves = 1 if tiles["BM"] >= 64 else WAVES
    splits = split_count(B * G * blocks, P, tiles["BN"], waves * _processors(q_BSHd.device))
    partial, lse = out, out  # unused with one share
    if splits > 1:
        partial, lse = (out.new_empty(n, dtype=torch.float32) for n in (B * S * H * splits * d, B * S * H * splits))
    BD, dependent = _block_width(d), dependent_launch(q_BSHd.device)
    _attend[(splits, blocks * G, B)](
        q_BSHd, keys_GPd, values_GPd, start_B.contiguous(), length_B.contiguous(), visible, position, out, partial, lse,
        S, J, splits, scale * LOG2E, *q_BSHd.stride()[:3], *keys_GPd.stride()[:2], *values_GPd.stride()[:2],
        *visible.stride()[:2], 0 if window is None else position.stride(0),
        H=H, G=G, D=d, BD=BD, WINDOW=window or 0, SHARED=splits > 1, **tiles, **dependent,
    )  # fmt: skip
    if splits > 1:
        _combine[(B * S * H,)](
            partial, lse, out, splits, D=d, BD=BD, BS=triton.next_power_of_2(splits),
            num_warps=4 if BD <= 128 else 8, **dependent,
        )  # fmt: skip
    return out


def split_count(programs: int, slots: int, block: int, target: int) -> int:
    """Into how many shares the slots of a sequence are divided, so that there are at most about `target` programs.

    `programs` is the number of programs without division. In a pool of `slots` slots, no sequence has more than slots /
    block blocks. The lengths are not known on the host, so the number does not depend on them.
    """
    return max(1, min(target // programs, triton.cdiv(slots, block), MOST_SPLITS))


def _processors(device: torch.device) -> int:
    """The GPU's streaming multiprocessors; 8 in the interpreter, where a program is slow."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _block_width(d: int) -> int:
    """The width of a head's block: a power of two, and at least 16, the minimum of tl.dot."""
    return max(triton.next_power_of_2(d), 16)


def _tiles(q: Tensor, rows: int) -> dict[str, int]:
    """Block sizes, warps and stages for `rows` query rows per key head."""
    if q.dtype.itemsize > 2:  # products of float32 run without tensor cores and keep their operands in registers
        return dict(BM=16, BN=32, num_warps=8, num_stages=1)
    wide = q.shape[-1] > 128
    BM = min(max(triton.next_power_of_2(rows), 16), 64 if wide else 128)
    deep = q.is_cuda and torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin >= LARGE
    warps = 8 if BM >= 64 else 4  # of 64 rows, four warps would spill registers
    return dict(BM=BM, BN=32 if wide else 64, num_warps=warps, num_stages=3 if deep else 2)
