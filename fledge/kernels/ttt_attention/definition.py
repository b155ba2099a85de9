"""TTT attention in plain torch: a dense reference, and the eager implementation in blocks of documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels.precision import at_least_float32
from fledge.kernels.ttt_attention.inputs import Queries


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
