"""Attention of training-time test: each slot reads its document's past and its own drafted steps.

For slot t at step k the keys are K0 of the slots s <= t of the same document, made from target features, and the
slot's own keys of steps 1 .. k (EAGLE-3, section 3.2; the causal part never shrinks with k):

    out = softmax(d^-1/2 [q . K0_s for s <= t in doc(t) ; q . k_1 ; .. ; q . k_k]) [V0 ; v_1 ; .. ; v_k]

Scores and softmax are at least float32, whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels.precision import at_least_float32
from fledge.types import group_documents


def visible(slot_S: Tensor, doc_S: Tensor, key_N: Tensor, doc_N: Tensor) -> Tensor:
    """Which of the row's keys each query slot may read, bool [S, N]: the same document, not later than itself."""
    return (doc_S[:, None] == doc_N) & (key_N <= slot_S[:, None])


def ttt_attention_reference(
    q_SHd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], slot_S: Tensor, doc_T: Tensor
) -> Tensor:
    """The definition, dense over the whole row. `own` holds (k_SGd, v_SGd) of steps 1 .. k. Returns [S, H, d]."""
    rows = torch.arange(doc_T.numel(), device=doc_T.device)
    mask = visible(slot_S, doc_T[slot_S], rows, doc_T)
    return _attend(q_SHd, k0_TGd, v0_TGd, own, mask)


def ttt_attention_eager(
    q_SHd: Tensor,
    k0_TGd: Tensor,
    v0_TGd: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    slot_S: Tensor,
    doc_T: Tensor,
    blocks: Sequence[tuple[int, int, int, int]],
) -> Tensor:
    """The same, a block of whole documents at a time, so that the cost follows their lengths and not the row's.

    `blocks` holds (first query, end query, first key, end key) of each block, as `document_blocks` makes them on the
    host; between them they hold every query.
    """
    out = []
    for q0, q1, n0, n1 in blocks:
        slots = slot_S[q0:q1]
        mask = visible(slots, doc_T[slots], torch.arange(n0, n1, device=doc_T.device), doc_T[n0:n1])
        near = [(k[q0:q1], v[q0:q1]) for k, v in own]
        out.append(_attend(q_SHd[q0:q1], k0_TGd[n0:n1], v0_TGd[n0:n1], near, mask))
    return torch.cat(out) if out else torch.zeros_like(q_SHd)


def document_blocks(
    slots: Tensor, documents: Sequence[tuple[int, int]], width: int = 512
) -> list[tuple[int, int, int, int]]:
    """Cuts a row into blocks of whole documents of at most `width` tokens, a longer one into stretches of `width`
    queries that read its keys so far. Each block names its queries and keys; one without queries is left out.

    `slots` is ascending and on the CPU.
    """
    groups = group_documents(documents, width)
    cuts = torch.searchsorted(slots, torch.tensor([e for _, e in groups], dtype=slots.dtype)).tolist()
    blocks = []
    for q0, q1, (n0, n1) in zip([0, *cuts[:-1]], cuts, groups, strict=True):
        if n1 - n0 <= width:
            blocks += [(q0, q1, n0, n1)] if q1 > q0 else []
        else:
            ends = [min(q + width, q1) for q in range(q0, q1, width)]
            blocks += [(q, e, n0, int(slots[e - 1]) + 1) for q, e in zip(range(q0, q1, width), ends, strict=True)]
    return blocks


def _attend(q_SHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    S, H, d = q_SHd.shape
    G = k_NGd.shape[1]
    q = q_SHd.view(S, G, H // G, d)
    past = torch.einsum("sgrd,ngd->grsn", q, k_NGd)
    past = at_least_float32(past).masked_fill(~mask, float("-inf"))
    near = [at_least_float32(torch.einsum("sgrd,sgd->grs", q, k))[..., None] for k, _ in own]
    weights = torch.cat([past, *near], dim=-1).mul(d**-0.5).softmax(-1).to(q.dtype)
    n = k_NGd.shape[0]
    out = torch.einsum("grsn,ngd->sgrd", weights[..., :n], v_NGd)
    for j, (_, v) in enumerate(own):
        out = out + weights[..., n + j].permute(2, 0, 1)[..., None] * v[:, :, None]
    return out.reshape(S, H, d)
