"""Soft-target cross-entropy of a draft head against a target, without ever holding slots x vocabulary logits.

For slot i of step k with hidden state h (after the draft's norm), head W, and the target's distribution p over its
vocabulary V, restricted to the draft's W ids and renormalised:

    z = W h,   loss = logsumexp(z) - Σ_w p_w z_w,   dloss/dz = softmax(z) - p

Gradients are made in the forward pass, chunk by chunk (Liger's idea, with a soft target): the teacher's tile of a
chunk is computed once and read by all K steps, dW is accumulated in float32, dh is written. What is saved for
backward is dh and dW alone; the largest tensor held is one chunk by the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.precision import at_least_float32


@dataclass(frozen=True)
class Scores:
    """What the loss found: per step k a float32 loss sum and Σ α [K], int64 scored counts [K], and bool hits [S_k]."""

    loss_K: Tensor
    accept_K: Tensor
    scored_K: Tensor
    hits: list[Tensor]


def soft_target_loss(
    hidden: list[Tensor],
    head_WE: Tensor,
    rows: list[Tensor],
    teacher: Callable[[slice], Tensor],
    ids_W: Tensor,
    weights: list[float],
    *,
    keep_unseen: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Scores]:
    """Σ_k weights[k] Σ_scored soft cross-entropy, differentiable in `hidden` and `head_WE`.

    hidden: K tensors [S_k, E]. rows: K ascending int64 CPU tensors [S_k], the teacher row of each slot; they index
    the P rows that `teacher(slice)` gives logits [n, V] of. ids_W: target id of every draft id. A slot is scored
    where the teacher's argmax is among them, or always with `keep_unseen`; elsewhere it counts as a miss. α is
    Σ_w min(p, q) with p over all of V. Memory: `chunk` teacher rows at a time (None: about 64M logits).
    """
    if chunk is None:
        chunk = max(64, (1 << 26) // max(teacher(slice(0, 1)).shape[-1], 1))
    loss, *found = _SoftTargetLoss.apply(head_WE, ids_W, teacher, rows, weights, keep_unseen, chunk, *hidden)
    loss_K, accept_K, scored_K, *hits = found
    return loss, Scores(loss_K, accept_K, scored_K, hits)


class _SoftTargetLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head_WE, ids_W, teacher, rows, weights, keep_unseen, chunk, *hidden):
        K, device = len(hidden), head_WE.device
        wide = torch.promote_types(head_WE.dtype, torch.float32)
        grads = ctx.needs_input_grad[0] or any(ctx.needs_input_grad[7:])
        loss_K = torch.zeros(K, dtype=wide, device=device)
        accept_K = torch.zeros(K, dtype=wide, device=device)
        scored_K = torch.zeros(K, dtype=torch.int64, device=device)
        hits = [torch.zeros(h.shape[0], dtype=torch.bool, device=device) for h in hidden]
        dhidden = [torch.zeros_like(h) if grads else None for h in hidden]
        dhead = torch.zeros_like(head_WE, dtype=wide) if grads else None
        draft_id = torch.full((int(ids_W.max()) + 1,), -1, dtype=torch.int64, device=device)
        draft_id[ids_W] = torch.arange(ids_W.numel(), device=device)

        last = max((int(r[-1]) for r in rows if r.numel()), default=-1)
        for start in range(0, last + 1, chunk):
            spans = [_span(r, start, start + chunk) for r in rows]
            if not any(b > a for a, b in spans):
                continue
            tile = _TeacherTile(teacher(slice(start, start + chunk)).to(device), ids_W, draft_id)
            for k, (a, b) in enumerate(spans):
                if b == a:
                    continue
                at = (rows[k][a:b] - start).to(device)
                h = hidden[k][a:b]
                z = at_least_float32(h @ head_WE.T)
                lse = z.logsumexp(-1)
                p, scored = tile.p_NW[at], (tile.top_N[at] >= 0) | keep_unseen
                ce = lse - (p * z).sum(-1)
                hits[k][a:b] = z.argmax(-1) == tile.top_N[at]
                scored_K[k] += scored.sum()
                loss_K[k] += ce[scored].sum()
                q = z.sub_(lse[:, None]).exp_()
                accept_K[k] += torch.minimum(q, p * tile.mass_N[at, None]).sum()
                if grads:
                    dz = q.sub_(p).mul_((scored.to(wide) * weights[k])[:, None]).to(h.dtype)
                    dhidden[k][a:b] = dz @ head_WE
                    dhead += dz.T @ h
        if grads:
            ctx.save_for_backward(dhead.to(head_WE.dtype), *dhidden)
        outputs = ((loss_K * torch.tensor(weights, dtype=wide, device=device)).sum(), loss_K, accept_K, scored_K, *hits)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, dloss, *_):
        dhead, *dhidden = ctx.saved_tensors
        return (dhead * dloss.to(dhead.dtype), *(None,) * 6, *(d * dloss.to(d.dtype) for d in dhidden))


class _TeacherTile:
    """A chunk of the teacher: p over the draft's ids renormalised [n, W], the mass those ids hold [n], and the
    argmax over the whole vocabulary as a draft id [n], -1 where the draft cannot say it."""

    def __init__(self, logits_NV: Tensor, ids_W: Tensor, draft_id: Tensor):
        top = logits_NV.argmax(-1)
        self.top_N = torch.where(top < draft_id.numel(), draft_id[top.clamp_max(draft_id.numel() - 1)], -1)
        whole = at_least_float32(logits_NV)
        kept = whole if ids_W.numel() == whole.shape[-1] else whole[:, ids_W]
        lse = kept.logsumexp(-1)
        self.mass_N = (lse - whole.logsumexp(-1)).exp()
        self.p_NW = (kept - lse[:, None]).exp()


def _span(rows: Tensor, start: int, end: int) -> tuple[int, int]:
    """Where the ascending `rows` enter and leave [start, end)."""
    return tuple(torch.searchsorted(rows, torch.tensor([start, end], dtype=rows.dtype)).tolist())


def soft_target_loss_reference(
    hidden: list[Tensor], head_WE: Tensor, rows: list[Tensor], teacher_PV: Tensor, ids_W: Tensor, weights: list[float]
) -> Tensor:
    """The definition, all logits at once; slots whose teacher argmax the draft cannot say are left out."""
    total = head_WE.new_zeros(())
    unseen = ~torch.isin(teacher_PV.argmax(-1), ids_W)
    for h, r, weight in zip(hidden, rows, weights, strict=True):
        logq = (h @ head_WE.T).log_softmax(-1)
        p = teacher_PV[r][:, ids_W].softmax(-1)
        total = total + weight * (-(p * logq).sum(-1))[~unseen[r]].sum()
    return total
