"""How attention in decoding is divided among programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_SHARES = 64
COUNTERS = 1024  # integers that the kernels count programs in; see `tree_attention`
WORD = 64  # the most slots of a block whose rows see slots by a mask: one word has the block's bits
FEW_HEADS = 16  # key heads of all sequences that leave most processors to shares
LARGE = 200_000  # bytes of shared memory per block from which the deeper pipelines fit
LONG = 8192  # slots a sequence from which large trees have larger tiles; timed at 16,384 slots, where they are faster
MANY = 4096  # slots a sequence from which the shares of few rows are combined apart


@dataclass(frozen=True)
class AttentionTiles:
    """A program takes `rows` query rows of a key head, and its share of the slots in blocks of `slots`; both are powers
    of 2 and 16 or more. `stages` - 1 blocks are in flight at a time. There are as many shares as give each processor
    about `per_processor` programs.

    With `late`, a program lets the next kernel start when it has read its slots, otherwise at once. Programs of the
    next kernel that start early take shared memory from those of this one that are still to start.

    With `apart`, blocks that need no mask have a loop of their own, and only that one is pipelined; without, all blocks
    are masked, which costs nothing where reads limit the time. The program that adds the shares has `at_once` of them
    under way together. With `combine_apart`, another kernel adds them, with a program for each row: one more launch,
    but not one program that adds the many shares of a long sequence.
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
    with `shared` bytes of shared memory per block. `heads` counts the key heads of all sequences, and `chain` tells
    that the rows see slots as those of chains do. `bench/decode_kernels.py --sweep attention` times others."""
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
    """Into how many shares the slots of a sequence are divided, so that there are at most about `target` programs.

    `programs` is the number of programs without division. In a pool of `slots` slots, no sequence has more than slots /
    block blocks. The lengths are not known on the host, so the number does not depend on them. With `apart`, it is a
    power of two, as many as the kernel that combines them reads.
    """
    shares = max(1, min(target // programs, -(-slots // block), MOST_SHARES))
    return 1 << (shares.bit_length() - 1) if apart else shares
