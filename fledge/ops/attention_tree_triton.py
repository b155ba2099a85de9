"""Attention in decoding in Triton: online softmax over shares of the keys ("split-KV", as in Flash-Decoding).

One program handles a sequence, a key head, a block of rows and a share of the slots. The rows are the S x H / G query
rows that read the key head: row r is new row r // group and head r % group of the group. Each program reads the lengths
from the device, takes an equal share of the blocks of slots, and writes the softmax of the share with the log2-sum-exp2
to a workspace. The last program to finish combines the shares, or a second kernel with a program for each row does. A
single share is the result, and programs without blocks end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.device import block_width, dependent_launch, shared_memory, with_unit_stride
from fledge.ops.topk_triton import wait_for_previous

if TYPE_CHECKING:
    from fledge.ops.attention_tree import Visible, VisibleChain

MOST_SHARES = 64
WORD = 64  # the most slots of a block whose rows see slots by a mask: one word has the block's bits
FEW_HEADS = 16  # key heads of all sequences that leave most processors to shares
LARGE = 200_000  # bytes of shared memory per block from which the deeper pipelines fit
LONG = 8192  # slots a sequence from which large trees have larger tiles; timed at 16,384 slots, where they are faster
MANY = 4096  # slots a sequence from which the shares of few rows are combined apart
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionTiles:
    """A program takes `rows` query rows of a key head, and its share of the slots in blocks of `slots`; both are powers
    of 2 and 16 or more. `stages` - 1 blocks are in flight at a time. There are as many shares as give each processor
    about `per_processor` programs.

    With `late`, a program lets the next kernel start after reading the slots, otherwise at once. Early programs of the
    next kernel take shared memory from programs of this kernel that have not started.

    With `apart`, blocks that need no mask have a separate loop, the only pipelined loop. Without `apart`, all blocks
    are masked, which costs nothing where reads limit the time. The program that adds the shares loads `at_once` shares
    together. With `combine_apart`, a second kernel adds the shares, with a program for each row: a launch more, but the
    many shares of a long sequence are not added by a single program.
    """

    rows: int
    slots: int
    warps: int
    stages: int
    per_processor: int = 1
    apart: bool = False
    at_once: int = 4
    combine_apart: bool = False
    late: bool = False


def tiles_for(
    rows: int, d: int, dtype: torch.dtype, shared: int, slots: int, heads: int, chain: bool
) -> AttentionTiles:
    """The tiles for `rows` query rows per key head of `d` dimensions and pools with `slots` slots a sequence, on a GPU
    with `shared` bytes of shared memory per block. `heads` counts the key heads of all sequences. `chain`: whether the
    rows are chains (`VisibleChain`). `bench/decode_kernels.py --sweep attention` times other tiles."""
    if dtype.itemsize > 2:  # products of float32 run without tensor cores and keep their operands in registers
        return AttentionTiles(rows=16, slots=32, warps=8, stages=1)
    wide, stages = d > 128, 3 if shared >= LARGE else 2
    block = min(max(1 << (rows - 1).bit_length(), 16), 64)
    if block < 64 and slots >= MANY and heads <= FEW_HEADS and shared >= LARGE and not wide:
        return AttentionTiles(
            rows=block, slots=64, warps=4, stages=stages, per_processor=2, combine_apart=True, late=True
        )
    if block == 32 and chain and heads <= FEW_HEADS and shared >= LARGE and not wide:  # fewer shares are added sooner
        return AttentionTiles(rows=block, slots=128, warps=8, stages=stages)
    if block < 64:
        return AttentionTiles(rows=block, slots=32 if wide else 64, warps=4, stages=stages)
    if rows > 64 and slots >= LONG and shared >= LARGE and not wide:
        return AttentionTiles(rows=128, slots=64, warps=8, stages=4, apart=True, at_once=2)
    # the products limit the time. Of 64 rows and 64 slots, four warps would spill registers
    return AttentionTiles(rows=64, slots=32, warps=8 if wide else 4, stages=stages, apart=True, at_once=2)


def share_count(programs: int, slots: int, block: int, target: int, apart: bool = False) -> int:
    """The number of shares that the slots of a sequence are divided into, for at most about `target` programs.

    `programs` is the number of programs without division. In a pool of `slots` slots, no sequence has more than slots /
    block blocks. The number does not depend on the lengths, which the host does not know. With `apart`, the number is a
    power of two, as the kernel that combines shares needs.
    """
    shares = max(1, min(target // programs, -(-slots // block), MOST_SHARES))
    return 1 << (shares.bit_length() - 1) if apart else shares


@triton.jit
def _word(words_ptr, row_s, svs, S, k, W):
    """Word k, of 64 bits, of each row's mask: all ones for k < 0 (the prefix is visible), zeros for k >= W."""
    limit = tl.where((k >= 0) & (k < W), S, 0)  # no row is loaded for k outside [0, W)
    word = tl.load(words_ptr + row_s.to(tl.int64) * svs + k, mask=row_s < limit, other=0)
    return tl.where(k < 0, -1, word).to(tl.uint64, bitcast=True)


@triton.jit
def _read_slots(
    acc, m, total, q, k_ptr, v_ptr, skp, svp, visible_ptr, svs, row_s, last, position,
    first, length, S, J, begin, end, scale2,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, CHAIN: tl.constexpr,
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
            if CHAIN:
                seen = slot[None, :] <= last[:, None]
            else:
                new = at - length  # the first slot as a new slot; negative in the prefix
                word, W, shift = new >> 6, (J + 63) // 64, (new & 63).to(tl.uint64)
                low = _word(visible_ptr, row_s, svs, S, word, W)
                high = _word(visible_ptr, row_s, svs, S, word + 1, W)
                bits = (low >> shift) | ((high << 1) << (63 - shift))
                seen = ((bits[:, None] >> n.to(tl.uint64)[None, :]) & 1) != 0
            if WINDOW > 0:
                seen &= (slot >= length)[None, :] | (slot[None, :] > position[:, None] - WINDOW)
        elif D < BD:
            k, v = tl.load(k_at, mask=(d < D)[None, :], other=0.0), tl.load(v_at, mask=(d < D)[None, :], other=0.0)
        else:
            k, v = tl.load(k_at), tl.load(v_at)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
        if MASKED:
            s = tl.where(seen, s, float("-inf"))
        largest = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(largest == float("-inf"), 0.0, largest) if MASKED else largest  # -inf: no slot seen so far
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(m - safe)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        m = largest
    return acc, m, total


@triton.jit
def _combine(
    partial_ptr, lse_ptr, first_row, used, inside,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The weighted mean of `used` shares of BM rows each; the weights are the shares' sums of exponentials.

    Shares are added by index, not in the order of completion: equal calls have equal results.
    """
    r, d = tl.arange(0, BM), tl.arange(0, BD)
    acc = tl.zeros([BM, BD], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for at in tl.range(0, used, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # independent loads, in flight together
            row = first_row + (at + i) * BM + r
            held = inside & (row < first_row + used * BM)
            lse = tl.load(lse_ptr + row, mask=held, other=float("-inf"))
            tile = held[:, None] & (d < D)[None, :]
            part = tl.load(partial_ptr + row[:, None] * D + d[None, :], mask=tile, other=0.0)
            largest = tl.maximum(m, lse)
            safe = tl.where(largest == float("-inf"), 0.0, largest)
            shrink, weight = tl.exp2(m - safe), tl.exp2(lse - safe)
            acc = acc * shrink[:, None] + weight[:, None] * part
            total = total * shrink + weight
            m = largest
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(
    do_not_specialize=["S", "J", "svb", "svs", "spb"],
    do_not_specialize_on_alignment=["start_ptr", "length_ptr", "visible_ptr", "position_ptr", "counter_ptr"],
)
def _attend(
    q_ptr, k_ptr, v_ptr, start_ptr, length_ptr, visible_ptr, position_ptr, out_ptr, partial_ptr, lse_ptr, counter_ptr,
    S, J, scale2, sqb, sqs, sqh, skg, skp, svg, svp, svb, svs, spb,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr, CHAIN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, APART: tl.constexpr, AT_ONCE: tl.constexpr, COMBINED: tl.constexpr,
    DEPENDENT: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Without COMBINED, `_combine_rows` combines the shares, also a single share."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
    split, g, b = tl.program_id(0), tl.program_id(1) % G, tl.program_id(2).to(tl.int64)
    group: tl.constexpr = H // G
    r = tl.arange(0, BM)
    row = tl.program_id(1) // G * BM + r
    d = tl.arange(0, BD)
    row_s, row_h = row // group, g * group + row % group
    inside = row_s < S
    tile = inside[:, None] & (d < D)[None, :]
    first, length = tl.load(start_ptr + b).to(tl.int64), tl.load(length_ptr + b).to(tl.int32)
    q_at = q_ptr + b * sqb + row_s[:, None].to(tl.int64) * sqs + row_h[:, None] * sqh + d[None, :]
    q = tl.load(q_at, mask=tile, other=0.0)
    visible_ptr += b * svb
    last = row
    if CHAIN:
        last = length + tl.load(visible_ptr + row_s.to(tl.int64) * svs, mask=inside, other=0).to(tl.int32)
    # the blocks of slots that the rows read start at lo; from `seen_by_all` on, all rows read all of the prefix
    prefix_end = length // BN * BN  # end of the blocks that are wholly in the prefix
    position, lo = row, 0
    if WINDOW > 0:
        position = tl.load(position_ptr + b * spb + row_s, mask=inside, other=0).to(tl.int32)
        lowest = tl.min(tl.where(inside, position, 2147483647))
        lo = tl.minimum(tl.maximum(lowest - WINDOW + 1, 0) // BN * BN, prefix_end)
    blocks = tl.cdiv(length + J - lo, BN)
    share = tl.cdiv(blocks, tl.num_programs(0))
    used = tl.cdiv(blocks, share)
    shared = b * tl.num_programs(1) + tl.program_id(1)  # the shares of the same rows have one counter
    first_row = shared * tl.num_programs(0) * BM
    part = first_row + split * BM + r
    if split >= used:
        if not COMBINED:
            tl.store(lse_ptr + part, float("-inf"), mask=inside)
        return
    begin = lo + split * share * BN
    end = lo + tl.minimum((split + 1) * share, blocks) * BN
    k_ptr += g.to(tl.int64) * skg
    v_ptr += g.to(tl.int64) * svg
    acc = tl.zeros([BM, BD], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if not APART:
        acc, m, total = _read_slots(
            acc, m, total, q, k_ptr, v_ptr, skp, svp, visible_ptr, svs, row_s, last, position, first, length, S, J,
            begin, end, scale2, D, BD, BN, WINDOW, CHAIN, True, None,
        )  # fmt: skip
    else:  # with a pipeline in the masked loops, ptxas serializes the warp group's products of all loops (C7515)
        clear = begin
        if WINDOW > 0:
            highest = tl.max(tl.where(inside, position, 0))
            seen_by_all = tl.cdiv(tl.maximum(highest - WINDOW + 1, 0), BN) * BN
            clear = tl.maximum(begin, tl.minimum(seen_by_all, end))
            acc, m, total = _read_slots(
                acc, m, total, q, k_ptr, v_ptr, skp, svp, visible_ptr, svs, row_s, last, position, first, length, S,
                J, begin, clear, scale2, D, BD, BN, WINDOW, CHAIN, True, 1,
            )  # fmt: skip
        mixed = tl.maximum(clear, tl.minimum(prefix_end, end))
        acc, m, total = _read_slots(
            acc, m, total, q, k_ptr, v_ptr, skp, svp, visible_ptr, svs, row_s, last, position, first, length, S, J,
            clear, mixed, scale2, D, BD, BN, WINDOW, CHAIN, False, 1,
        )  # fmt: skip
        acc, m, total = _read_slots(
            acc, m, total, q, k_ptr, v_ptr, skp, svp, visible_ptr, svs, row_s, last, position, first, length, S, J,
            mixed, end, scale2, D, BD, BN, WINDOW, CHAIN, True, 1,
        )  # fmt: skip
    if DEPENDENT and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    found = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = out_ptr + ((b * S + row_s) * H + row_h)[:, None] * D + d[None, :]
    lse = tl.where(total > 0.0, m + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    if not COMBINED:
        tl.store(partial_ptr + part[:, None] * D + d[None, :], found, mask=tile)
        tl.store(lse_ptr + part, lse, mask=inside)
    elif used == 1:
        tl.store(out_at, found.to(out_ptr.dtype.element_ty), mask=tile)
    else:
        tl.store(partial_ptr + part[:, None] * D + d[None, :], found, mask=tile)
        tl.store(lse_ptr + part, lse, mask=inside)
        # One thread adds to the counter. The barrier orders the stores of all threads before the addition, and the
        # release makes the stores visible to programs that acquire the counter later. The last program therefore sees
        # all shares, and so do all threads of that program, because a barrier broadcasts the counter's value.
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + shared, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(counter_ptr + shared, 0)
            found = _combine(partial_ptr, lse_ptr, first_row, used, inside, D, BD, BM, AT_ONCE)
            tl.store(out_at, found.to(out_ptr.dtype.element_ty), mask=tile)


@triton.jit(do_not_specialize=["S"])
def _combine_rows(
    partial_ptr, lse_ptr, out_ptr, S,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Combines the shares of one row as `_combine` does: their mean, weighted by the shares' sums of exponentials."""
    wait_for_previous(DEPENDENT)
    group: tl.constexpr = H // G
    row, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, d = tl.arange(0, SPLITS), tl.arange(0, BD)
    shared = (b * tl.cdiv(S * group, BM) + row // BM) * G + g
    part = (shared * SPLITS + i) * BM + row % BM
    lse = tl.load(lse_ptr + part)
    seen = lse > float("-inf")
    tile = partial_ptr + part[:, None] * D + d[None, :]
    parts = tl.load(tile, mask=seen[:, None] & (d < D)[None, :], other=0.0)
    largest = tl.max(lse, 0)
    weight = tl.where(seen, tl.exp2(lse - largest), 0.0)
    total = tl.sum(weight, 0)
    found = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    out = out_ptr + ((b * S + row // group) * H + g * group + row % group) * D + d
    tl.store(out, found.to(out_ptr.dtype.element_ty), mask=d < D)


def tree_attention_triton(
    q_BSHd: Tensor, keys_GPd: Tensor, values_GPd: Tensor, start_B: Tensor, length_B: Tensor,
    visible: Visible | VisibleChain, scale: float, window: int | None, position_BS: Tensor | None, counters: Tensor,
    tiles: AttentionTiles | None = None,
) -> Tensor:  # fmt: skip
    """`tree_attention` on a GPU or in Triton's interpreter, without any synchronization with the host, with the tiles
    of `tiles_for` unless given.

    The kernel is compiled for each head shape, dtype, window, kind of visibility and block of rows, not for each
    length. Raises ValueError for heads of more than 256, for tensors whose heads are not contiguous, and for pools
    whose slots are 2^24 or more elements apart (offsets within a block are int32).
    """
    (B, S, H, d), (G, P, _), J = q_BSHd.shape, keys_GPd.shape, visible.shape[2]
    if d > 256 or not q_BSHd.stride(3) == keys_GPd.stride(2) == values_GPd.stride(2) == 1:
        raise ValueError(f"attention 'triton' needs heads of at most 256 that are contiguous, not heads of {d}")
    if max(keys_GPd.stride(1), values_GPd.stride(1)) >= 2**24:
        raise ValueError("attention 'triton' needs pools whose slots are fewer than 2^24 elements apart")
    out = q_BSHd.new_empty((B, S, H, d))
    if not out.numel():
        return out
    chain = visible.chain
    seen = visible.last_BS if chain else visible.words_BSW
    position = length_B if window is None else position_BS  # unused without a window
    if window is not None:
        position = with_unit_stride(position)
    rows = S * (H // G)
    if (t := tiles) is None:
        t = tiles_for(rows, d, q_BSHd.dtype, shared_memory(q_BSHd.device), P // B, B * G, chain)
    if t.slots > WORD and not chain:
        raise ValueError(f"blocks of {t.slots} slots need a chain: a mask has words for {WORD}")
    programs = B * G * triton.cdiv(rows, t.rows)
    # at most as many as there are counters, which programs with shares need
    target = min(t.per_processor * _processors(q_BSHd.device), counters.numel())
    splits = share_count(programs, P, t.slots, target, t.combine_apart)
    combined = splits == 1 or not t.combine_apart
    at_once = 2 if splits == 2 else t.at_once  # a program would wait for loads of missing shares
    stored = programs * splits * t.rows if splits > 1 else 0  # rows of shares
    partial, lse = (out.new_empty(stored * n, dtype=torch.float32) for n in (d, 1))
    _attend[(splits, programs // B, B)](
        q_BSHd, keys_GPd, values_GPd, start_B.contiguous(), length_B.contiguous(), seen, position, out, partial, lse,
        counters, S, J, scale * LOG2E, *q_BSHd.stride()[:3], *keys_GPd.stride()[:2], *values_GPd.stride()[:2],
        *seen.stride()[:2], 0 if window is None else position.stride(0),
        H=H, G=G, D=d, BD=block_width(d), WINDOW=window or 0, CHAIN=chain, BM=t.rows, BN=t.slots,
        APART=t.apart, AT_ONCE=at_once, COMBINED=combined, LATE=t.late, num_warps=t.warps,
        num_stages=t.stages, **dependent_launch(out.device),
    )  # fmt: skip
    if not combined:
        _combine_rows[(rows, G, B)](
            partial, lse, out, S, H=H, G=G, D=d, BD=block_width(d), BM=t.rows,
            SPLITS=splits, num_warps=2, **dependent_launch(out.device),
        )  # fmt: skip
    return out


def _processors(device: torch.device) -> int:
    """The GPU's streaming multiprocessors; 8 in the interpreter, where a program is slow."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
