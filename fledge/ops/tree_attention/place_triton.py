"""`place_trees` and `pack_bits` in Triton. Each node of a tree follows its ancestors to the root."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.implementations import dependent_launch
from fledge.types import Tree

BLOCK = 16  # nodes of a program
PACKED_ROWS = 16  # rows of a program that packs a mask


@triton.jit(do_not_specialize=["N", "levels", "sp"])
def _place(
    parent_ptr, start_ptr, length_ptr, position_ptr, slot_ptr, seen_ptr, N, levels, sp,
    WORDS: tl.constexpr, BW: tl.constexpr, CHAIN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Of a chain, `seen_ptr` gets the last node that each one sees."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n, b, word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64), tl.arange(0, BW)
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    depth = n
    if CHAIN:
        tl.store(seen_ptr + b * N + n, n.to(tl.int64), mask=n < N)
    else:
        depth, at = tl.zeros([BLOCK], tl.int32), n
        seen = tl.zeros([BLOCK, BW], tl.int64)
        for _ in range(levels + 1):
            bit = tl.full([BLOCK], 1, tl.int64) << (at % 64).to(tl.int64)
            seen |= tl.where((at // 64)[:, None] == word[None, :], bit[:, None], 0)
            below = (at > 0) & (n < N)
            depth += below.to(tl.int32)
            at = tl.load(parent_ptr + b * sp + at, mask=below, other=0).to(tl.int32)
        tile = (n < N)[:, None] & (word < WORDS)[None, :]
        tl.store(seen_ptr + (b * N + n)[:, None] * WORDS + word[None, :], seen, mask=tile)
    tl.store(position_ptr + b * N + n, length + depth, mask=n < N)
    tl.store(slot_ptr + b * N + n, start + length + n, mask=n < N)


def place_trees_triton(tree: Tree, start_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`place_trees`. What a node sees are words of bits; of a chain, the last node that it sees."""
    (B, N), parent, chain = tree.token_BN.shape, tree.parent_BN, tree.parent_BN is None
    if not chain and parent.stride(1) != 1:
        parent = parent.contiguous()
    words = triton.cdiv(N, 64)
    position, slot = torch.empty(2, B, N, dtype=torch.int64, device=length_B.device)
    seen = position.new_empty((B, N) if chain else (B, N, words))
    if position.numel():
        _place[(triton.cdiv(N, BLOCK), B)](
            length_B if chain else parent, start_B.contiguous(), length_B.contiguous(), position, slot, seen, N,
            tree.levels, 0 if chain else parent.stride(0), WORDS=words, BW=triton.next_power_of_2(words), CHAIN=chain,
            BLOCK=BLOCK, num_warps=1, **dependent_launch(length_B.device),
        )  # fmt: skip
    return position, slot, seen


@triton.jit(do_not_specialize=["S", "J", "smb", "sms"], do_not_specialize_on_alignment=["mask_ptr"])
def _pack_bits(mask_ptr, words_ptr, S, J, smb, sms, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """One word of BLOCK rows of a sequence."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    k, b, W = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.num_programs(0)
    s, bit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 64)
    j = k * 64 + bit
    inside = (s < S)[:, None] & (j < J)[None, :]
    mask = tl.load(mask_ptr + b * smb + s.to(tl.int64)[:, None] * sms + j[None, :], mask=inside, other=0)
    words = tl.sum(mask.to(tl.int64) << bit.to(tl.int64)[None, :], 1)
    tl.store(words_ptr + (b * S + s) * W + k, words, mask=s < S)


def pack_bits_triton(mask_BSJ: Tensor) -> Tensor:
    """`pack_bits` in one kernel. Rows may be strided; their entries are copied if they are."""
    (B, S, J), W = mask_BSJ.shape, triton.cdiv(mask_BSJ.shape[2], 64)
    mask = (mask_BSJ if mask_BSJ.stride(2) == 1 else mask_BSJ.contiguous()).view(torch.uint8)  # bytes 0 and 1
    words = torch.empty(B, S, W, dtype=torch.int64, device=mask.device)
    if words.numel():
        _pack_bits[(W, triton.cdiv(S, PACKED_ROWS), B)](
            mask, words, S, J, *mask.stride()[:2], BLOCK=PACKED_ROWS, num_warps=4, **dependent_launch(mask.device)
        )
    return words
