"""Attention of training-time test (TTT, EAGLE-3, arXiv:2503.01840, section 3.2).

At step k, slot t attends to the keys K0 of all slots s <= t of the same document, which step 0 computes from target
features, and to the slot's own keys of steps 1 .. k, which are computed from the draft's own hidden states. The causal
part is the same at every step:

    out = softmax(d^-1/2 [q . K0_s for s <= t in doc(t) ; q . k_1 ; .. ; q . k_k]) [V0 ; v_1 ; .. ; v_k]

Scores and softmax are computed in at least float32. `ttt_attention` has three implementations with the values and
gradients of `ttt_attention_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.precision import at_least_float32
from fledge.ops.ttt_attention.inputs import BLOCK, OwnSteps, Queries, document_blocks

__all__ = [
    "BLOCK", "IMPLS", "OwnSteps", "Queries", "document_blocks", "ttt_attention", "ttt_attention_reference",
]  # fmt: skip

IMPLS = ("eager", "flex", "triton")


def ttt_attention(
    q_SHd: Tensor,
    k0_TGd: Tensor,
    v0_TGd: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    queries: Queries,
    impl: str = "eager",
) -> Tensor:
    """Attention of S queries over T keys and their own keys of J steps. Returns a tensor of the shape of `q_SHd`.

    `own` has the (keys, values) of each own step, of shape [P_j, G, d]; `queries.own_row_JS` selects the row of each
    query. `q_SHd` may have more rows than `queries` has queries; the result is zero in those padding rows.

    `impl` is "eager" (plain torch, in dense blocks of documents), "flex" (FlexAttention) or "triton" (fledge's Triton
    kernels). "flex" needs a GPU; "triton" needs a GPU or Triton's interpreter. Raises ValueError for any other value.
    """
    S, padding = queries.slot_S.numel(), q_SHd.shape[0] - queries.slot_S.numel()
    if impl == "eager":
        return F.pad(ttt_attention_eager(q_SHd[:S], k0_TGd, v0_TGd, own, queries), (0, 0, 0, 0, 0, padding))
    if impl == "flex":
        from fledge.ops.ttt_attention.flex import ttt_attention_flex

        out = ttt_attention_flex(q_SHd[:S], k0_TGd, v0_TGd, own, queries.own_row_JS, queries.slot_S, queries.first_S)
        return F.pad(out, (0, 0, 0, 0, 0, padding))
    if impl == "triton":
        from fledge.ops.ttt_attention.triton import ttt_attention_triton

        return ttt_attention_triton(q_SHd, k0_TGd, v0_TGd, own, queries.own_row_JS, queries.slot_S, queries.first_S)
    raise ValueError(f"attention {impl!r} must be one of {', '.join(IMPLS)}")


def visible(queries: Queries, rows: slice, keys: range) -> Tensor:
    """The attention mask of some queries and a range of N keys, bool [S, N]: same document, and causal."""
    key = torch.arange(keys.start, keys.stop, device=queries.slot_S.device)
    return (key >= queries.first_S[rows, None]) & (key <= queries.slot_S[rows, None])


def ttt_attention_reference(
    q_SHd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], queries: Queries
) -> Tensor:
    """The definition: dense attention over all keys of the row."""
    own_rows = [(k[at], v[at]) for (k, v), at in zip(own, queries.own_row_JS, strict=True)]
    return _attend(q_SHd, k0_TGd, v0_TGd, own_rows, visible(queries, slice(None), range(k0_TGd.shape[0])))


def ttt_attention_eager(
    q_SHd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], queries: Queries
) -> Tensor:
    """Attention in dense blocks of complete documents, whose cost depends on the documents' lengths, not the row's."""
    S = q_SHd.shape[0]  # a step with S own keys has one for each query, in order: no gather is needed
    own_rows = [
        (k, v) if k.shape[0] == S else (k[at], v[at]) for (k, v), at in zip(own, queries.own_row_JS, strict=True)
    ]
    out = []
    for q0, q1, n0, n1 in queries.blocks:
        mask = visible(queries, slice(q0, q1), range(n0, n1))
        block = [(k[q0:q1], v[q0:q1]) for k, v in own_rows]
        out.append(_attend(q_SHd[q0:q1], k0_TGd[n0:n1], v0_TGd[n0:n1], block, mask))
    return torch.cat(out) if out else torch.zeros_like(q_SHd)


def _attend(q_SHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    S, H, d = q_SHd.shape
    G = k_NGd.shape[1]
    q = q_SHd.view(S, G, H // G, d)
    scores = torch.einsum("sgrd,ngd->grsn", q, k_NGd)
    scores = at_least_float32(scores).masked_fill(~mask, float("-inf"))
    own_scores = [at_least_float32(torch.einsum("sgrd,sgd->grs", q, k))[..., None] for k, _ in own]
    weights = torch.cat([scores, *own_scores], dim=-1).mul(d**-0.5).softmax(-1).to(q.dtype)
    n = k_NGd.shape[0]
    out = torch.einsum("grsn,ngd->sgrd", weights[..., :n], v_NGd)
    for j, (_, v) in enumerate(own):
        out = out + weights[..., n + j].permute(2, 0, 1)[..., None] * v[:, :, None]
    return out.reshape(S, H, d)
