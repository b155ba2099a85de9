"""Attention of blocks of rows to a context and to each other, in training."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fledge.ops.device import at_least_float32

BLOCKS = 64  # blocks per iteration; bounds the memory of the attention scores


def block_attention(
    q_NQHd: Tensor, k_NQGd: Tensor, v_NQGd: Tensor, context_k_PGd: Tensor, context_v_PGd: Tensor, start_N: Tensor,
    end_N: Tensor, *, causal: bool, window: int | None = None,
) -> Tensor:  # fmt: skip
    """The attention of the Q rows of each of N blocks, [N, Q, H, d], with gradients.

    Block n sees the context tokens [`start_N[n]`, `end_N[n]`) (int64, ascending) of P, and its own rows: all, or with
    `causal` those up to the row itself. With a `window` of at least Q tokens, row q of a block, whose place is
    `end_N[n] + q`, sees only context tokens that are fewer than `window` places before it. H / G consecutive query
    heads share a key head. The scale is d^-1/2, and the softmax is in at least float32. The backward pass computes the
    attention scores again.
    """
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
        seen_nQP = seen_nQP.to(q.device)
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
