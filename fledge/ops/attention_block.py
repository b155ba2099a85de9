"""Attention of blocks of rows to a context and to each other, in training.

Row q of block n has queries of its own, and its keys are those of context tokens and of rows of the block:

    out = softmax(d^-1/2 [q . K_s for s in context(n, q) ; q . k_j for rows j that q sees]) [V ; v]

`block_attention` has three implementations with the same values and gradients: plain torch, which is the definition,
FlexAttention, and fledge's Triton kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fledge.ops.attention_ttt import FLEX_BLOCK, IMPLS, MIN_HEAD_DIM, OPTIONS, compiled_flex_attention
from fledge.ops.device import at_least_float32, to_device

BLOCKS = 64  # blocks per iteration of plain torch; bounds the memory of the attention scores


def block_attention(
    q_NQHd: Tensor, k_NQGd: Tensor, v_NQGd: Tensor, context_k_PGd: Tensor, context_v_PGd: Tensor, start_N: Tensor,
    end_N: Tensor, *, causal: bool, window: int | None = None, impl: str = "eager",
) -> Tensor:  # fmt: skip
    """The attention of the Q rows of each of N blocks, [N, Q, H, d], with gradients.

    Block n sees the context tokens [`start_N[n]`, `end_N[n]`) (int64 on the CPU, each ascending) of P, and its own
    rows: all, or with `causal` those up to the row itself. With a `window` of at least Q tokens, row q of a block,
    whose place is `end_N[n] + q`, sees only context tokens that are fewer than `window` places before it. H / G
    consecutive query heads share a key head. The scale is d^-1/2, and the softmax is in at least float32.

    `impl` is "eager" (plain torch), "flex" (FlexAttention) or "triton" (fledge's Triton kernels), each of which
    computes the attention scores again in the backward pass. "flex" needs a GPU; "triton" needs a GPU or Triton's
    interpreter. Raises ValueError for any other value.
    """
    given = q_NQHd, k_NQGd, v_NQGd, context_k_PGd, context_v_PGd, start_N, end_N
    if impl == "eager":
        return block_attention_eager(*given, causal=causal, window=window)
    if impl == "flex":
        return block_attention_flex(*given, causal=causal, window=window)
    if impl == "triton":
        from fledge.ops.attention_block_triton import block_attention_triton

        return block_attention_triton(*given, causal=causal, window=window)
    raise ValueError(f"attention {impl!r} must be one of {', '.join(IMPLS)}")


def block_attention_eager(
    q_NQHd: Tensor, k_NQGd: Tensor, v_NQGd: Tensor, context_k_PGd: Tensor, context_v_PGd: Tensor, start_N: Tensor,
    end_N: Tensor, *, causal: bool, window: int | None = None,
) -> Tensor:  # fmt: skip
    """The definition of `block_attention`: dense attention of BLOCKS blocks at a time."""
    (N, Q, H, _), G = q_NQHd.shape, k_NQGd.shape[2]
    visible_QQ = torch.ones(Q, Q, dtype=torch.bool, device=q_NQHd.device)
    visible_QQ = visible_QQ.tril() if causal else visible_QQ
    out = [q_NQHd[:0]]
    for n in range(0, N, BLOCKS):
        part = slice(n, n + BLOCKS)
        first, last = int(start_N[part][0]), int(end_N[part][-1])
        q = at_least_float32(q_NQHd[part]).unflatten(2, (G, H // G))
        own_k, own_v = at_least_float32(k_NQGd[part]), at_least_float32(v_NQGd[part])
        k, v = at_least_float32(context_k_PGd[first:last]), at_least_float32(context_v_PGd[first:last])
        token = torch.arange(first, last)
        seen_nQP = ((start_N[part, None] <= token) & (token < end_N[part, None]))[:, None]
        if window is not None:
            place_nQ1 = (end_N[part, None] + torch.arange(Q))[..., None]
            seen_nQP = seen_nQP & (place_nQ1 - token < window)
        (seen_nQP,) = to_device([seen_nQP], q.device)
        given = q, k, v, own_k, own_v, seen_nQP, visible_QQ
        found: Tensor = checkpoint(_attend, *given, use_reentrant=False, preserve_rng_state=False)
        out.append(found.flatten(2, 3).to(q_NQHd.dtype))
    return torch.cat(out)


def _attend(
    q_nQGrd: Tensor, k_PGd: Tensor, v_PGd: Tensor, own_k_nQGd: Tensor, own_v_nQGd: Tensor, seen_nQP: Tensor,
    visible_QQ: Tensor,
) -> Tensor:  # fmt: skip
    """The attention of n blocks, [n, Q, G, r, d], to the context tokens that `seen_nQP` says, and to their own rows."""
    of_context = torch.einsum("nqgrd,pgd->nqgrp", q_nQGrd, k_PGd).masked_fill(~seen_nQP[:, :, None, None], -math.inf)
    of_own = torch.einsum("nqgrd,nkgd->nqgrk", q_nQGrd, own_k_nQGd).masked_fill(~visible_QQ[:, None, None], -math.inf)
    weights = (torch.cat([of_context, of_own], dim=-1) * q_nQGrd.shape[-1] ** -0.5).softmax(-1)
    of_context, of_own = weights.split([of_context.shape[-1], of_own.shape[-1]], dim=-1)
    found = torch.einsum("nqgrp,pgd->nqgrd", of_context, v_PGd)
    return found + torch.einsum("nqgrk,nkgd->nqgrd", of_own, own_v_nQGd)


def block_attention_flex(
    q_NQHd: Tensor, k_NQGd: Tensor, v_NQGd: Tensor, context_k_PGd: Tensor, context_v_PGd: Tensor, start_N: Tensor,
    end_N: Tensor, *, causal: bool, window: int | None = None,
) -> Tensor:  # fmt: skip
    """`block_attention` by FlexAttention on a GPU, over one row of keys: the context's, then those of all blocks.

    Raises ValueError on a CPU, where FlexAttention has no backward pass.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if q_NQHd.device.type == "cpu":
        raise ValueError("attention 'flex' has no backward pass on a CPU; use 'eager'")
    (N, Q, H, d), (P, G, _) = q_NQHd.shape, context_k_PGd.shape
    if not N:
        return q_NQHd
    row, end_NQ = torch.arange(Q), end_N[:, None].expand(N, Q)
    start_NQ = start_N[:, None] if window is None else torch.maximum(start_N[:, None], end_NQ + row + 1 - window)
    own_start_NQ = (P + Q * torch.arange(N))[:, None].expand(N, Q)
    own_end_NQ = own_start_NQ + (row + 1 if causal else Q)
    # tensors, since the compiled mask would be compiled again for each other number
    ranges = [x.expand(N, Q).flatten().int() for x in (start_NQ, end_NQ, own_start_NQ, own_end_NQ)]
    start, end, own_start, own_end = to_device(ranges, q_NQHd.device)
    mask = create_block_mask(
        lambda b, h, q, k: ((k >= start[q]) & (k < end[q])) | ((k >= own_start[q]) & (k < own_end[q])), None, None,
        N * Q, P + N * Q, device=q_NQHd.device, BLOCK_SIZE=FLEX_BLOCK,
    )  # fmt: skip
    keys, values = torch.cat([context_k_PGd, k_NQGd.flatten(0, 1)]), torch.cat([context_v_PGd, v_NQGd.flatten(0, 1)])
    q, k, v = (
        F.pad(x.transpose(0, 1)[None], (0, max(MIN_HEAD_DIM - d, 0))) for x in (q_NQHd.flatten(0, 1), keys, values)
    )
    how = dict(block_mask=mask, enable_gqa=H != G, scale=d**-0.5, kernel_options=OPTIONS)
    out: Tensor = compiled_flex_attention()(q, k, v, **how)
    return out[0, ..., :d].transpose(0, 1).unflatten(0, (N, Q))
