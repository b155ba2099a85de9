"""Loss of a draft head against a target's distribution, without ever holding slots x vocabulary logits.

For slot i of step k with hidden state h (after the draft's norm), head W, the target's distribution p over its
vocabulary V, and p' that distribution restricted to the draft's W ids and renormalised:

    z = W h,   q = softmax(z),   α = Σ_w min(p_w, q_w)

    ce        -Σ_w p'_w log q_w                     dz = q - p'
    kl        Σ_w p'_w log(p'_w / q_w)              dz = q - p'
    accept    -log α                                dz = -q ([q < p] - c) / α,   c = Σ_w q_w [q_w < p_w]
    mixed     λ kl + (1 - λ)(1 - α)                 dz = λ (q - p') - (1 - λ) q ([q < p] - c)

with λ = exp(-3 α) taken as a constant, and α no smaller than 1e-6. Gradients are made in the forward pass, chunk by
chunk (Liger's idea, with a soft target): the teacher's tile of a chunk is computed once and read by all K steps, dW
is accumulated in float32, dh is written. What is saved for backward is dh and dW alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.precision import at_least_float32

KINDS = ("ce", "kl", "accept", "mixed")
IMPLS = ("eager", "triton")
LEAST_ALPHA = 1e-6


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
    kind: str = "ce",
    keep_unseen: bool = False,
    chunk: int | None = None,
    impl: str = "eager",
) -> tuple[Tensor, Scores]:
    """Σ_k weights[k] Σ_scored loss, differentiable in `hidden` and `head_WE`.

    hidden: K tensors [S_k, E]. rows: K ascending int64 CPU tensors [S_k], the teacher row of each slot; they index
    the P rows that `teacher(slice)` gives logits [n, V] of. ids_W: target id of every draft id. A slot is scored
    where the teacher's argmax is among them, or always with `keep_unseen`; elsewhere it counts as a miss. α has p
    over all of V. Memory: `chunk` teacher rows at a time (None: about 64M logits). `impl` "triton" needs a GPU, or
    Triton's interpreter. Raises ValueError for a kind or impl that there is not.
    """
    if kind not in KINDS:
        raise ValueError(f"loss {kind!r} is none of {', '.join(KINDS)}")
    if impl not in IMPLS:
        raise ValueError(f"loss implementation {impl!r} is none of {', '.join(IMPLS)}")
    if chunk is None:
        chunk = max(64, (1 << 26) // max(teacher(slice(0, 1)).shape[-1], 1))
    loss, *found = _SoftTargetLoss.apply(
        head_WE, ids_W, teacher, rows, weights, kind, keep_unseen, chunk, impl, *hidden
    )
    loss_K, accept_K, scored_K, *hits = found
    return loss, Scores(loss_K, accept_K, scored_K, hits)


@dataclass
class _Sums:
    """Where the chunks leave what they find; the slots of all steps stand one after the other."""

    loss_S: Tensor
    accept_S: Tensor
    scored_S: Tensor
    hit_S: Tensor
    dhidden_SE: Tensor | None
    dhead_WE: Tensor | None


class _SoftTargetLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head_WE, ids_W, teacher, rows, weights, kind, keep_unseen, chunk, impl, *hidden):
        device, counts = head_WE.device, [h.shape[0] for h in hidden]
        wide = torch.promote_types(head_WE.dtype, torch.float32)
        grads = ctx.needs_input_grad[0] or any(ctx.needs_input_grad[9:])
        total = sum(counts)
        sums = _Sums(
            *torch.zeros(2, total, dtype=wide, device=device),
            *torch.zeros(2, total, dtype=torch.bool, device=device),
            head_WE.new_zeros(total, head_WE.shape[1]) if grads else None,
            torch.zeros_like(head_WE, dtype=wide) if grads else None,
        )
        weight_S = torch.repeat_interleave(torch.tensor(weights, dtype=wide), torch.tensor(counts)).to(device)
        draft_id = torch.full((int(ids_W.max()) + 1,), -1, dtype=torch.int64, device=device)
        draft_id[ids_W] = torch.arange(ids_W.numel(), device=device)
        if impl == "triton":
            from fledge.kernels.loss_triton import chunk_loss
        else:
            chunk_loss = _chunk_loss
        for start, spans, place, row in _by_chunk(rows, chunk, device):
            if not place.numel():
                continue
            h = torch.cat([x[a:b] for x, (a, b) in zip(hidden, spans, strict=True)])
            logits = teacher(slice(start, start + chunk)).to(device)
            chunk_loss(h, head_WE, logits, row, place, weight_S[place], ids_W, draft_id, kind, keep_unseen, sums)
        if grads:
            ctx.counts = counts
            ctx.save_for_backward(sums.dhead_WE.to(head_WE.dtype), sums.dhidden_SE)
        loss_K, accept_K = (torch.stack([p.sum() for p in x.split(counts)]) for x in (sums.loss_S, sums.accept_S))
        scored_K = torch.stack([p.sum() for p in sums.scored_S.split(counts)])
        loss = (loss_K * torch.tensor(weights, dtype=wide, device=device)).sum()
        outputs = (loss, loss_K, accept_K, scored_K, *sums.hit_S.split(counts))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, dloss, *_):
        dhead, dhidden = ctx.saved_tensors
        dhidden = (dhidden * dloss.to(dhidden.dtype)).split(ctx.counts)
        return (dhead * dloss.to(dhead.dtype), *(None,) * 8, *dhidden)


def _by_chunk(rows: list[Tensor], chunk: int, device: torch.device):
    """Yields, for each run of `chunk` teacher rows: its start, the span of every step's slots in it, those slots'
    places among all steps' slots, and their teacher rows within it (the last two on the device)."""
    last = max((int(r[-1]) for r in rows if r.numel()), default=-1)
    edges = torch.arange(0, last + 1 + chunk, chunk)
    cuts = torch.stack([torch.searchsorted(r, edges) for r in rows])  # [K, chunks + 1]
    base = [0, *torch.tensor([r.numel() for r in rows]).cumsum(0).tolist()]
    spans = [[(int(c[i]), int(c[i + 1])) for c in cuts] for i in range(len(edges) - 1)]
    places = [torch.cat([base[k] + torch.arange(a, b) for k, (a, b) in enumerate(s)]) for s in spans]
    within = [torch.cat([rows[k][a:b] - i * chunk for k, (a, b) in enumerate(s)]) for i, s in enumerate(spans)]
    sizes = [p.numel() for p in places]
    if sizes:
        place, row = torch.stack([torch.cat(places), torch.cat(within)]).to(device)
        yield from zip(edges.tolist(), spans, place.split(sizes), row.split(sizes), strict=False)


def _chunk_loss(
    h_ME: Tensor, head_WE: Tensor, teacher_NV: Tensor, row_M: Tensor, place_M: Tensor, weight_M: Tensor,
    ids_W: Tensor, draft_id: Tensor, kind: str, keep_unseen: bool, sums: _Sums,
) -> None:  # fmt: skip
    """One chunk in plain torch: M slots of any steps against N teacher rows."""
    tile = _TeacherTile(teacher_NV, ids_W, draft_id)
    z = at_least_float32(h_ME @ head_WE.T)
    logq = z.log_softmax(-1)
    p, mass, top = tile.p_NW[row_M], tile.mass_N[row_M, None], tile.top_N[row_M]
    scored = (top >= 0) | keep_unseen
    loss, dz, alpha = _row_loss(logq, p, mass, kind)
    sums.hit_S[place_M] = z.argmax(-1) == top
    sums.scored_S[place_M] = scored
    sums.loss_S[place_M] = torch.where(scored, loss, 0)
    sums.accept_S[place_M] = alpha
    if sums.dhead_WE is not None:
        dz = (dz * (scored * weight_M)[:, None]).to(h_ME.dtype)
        sums.dhidden_SE[place_M] = dz @ head_WE
        sums.dhead_WE += dz.T @ h_ME


def _row_loss(logq: Tensor, p: Tensor, mass: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [M], its gradient for the logits [M, W], and α [M]; `p` renormalised, `mass` [M, 1] what it holds of V."""
    q = logq.exp()
    alpha = torch.minimum(q, p * mass).sum(-1)
    if kind == "ce":
        return -(p * logq).sum(-1), q - p, alpha
    kl = (torch.special.xlogy(p, p) - p * logq).sum(-1)
    if kind == "kl":
        return kl, q - p, alpha
    below = q * (q < p * mass)
    dalpha = below - q * below.sum(-1, keepdim=True)
    if kind == "accept":
        inside = alpha.clamp_min(LEAST_ALPHA)
        return -inside.log(), -dalpha * ((alpha >= LEAST_ALPHA) / inside)[:, None], alpha
    share = torch.exp(-3 * alpha)
    return share * kl + (1 - share) * (1 - alpha), share[:, None] * (q - p) - (1 - share)[:, None] * dalpha, alpha


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


def soft_target_loss_reference(
    hidden: list[Tensor], head_WE: Tensor, rows: list[Tensor], teacher_PV: Tensor, ids_W: Tensor,
    weights: list[float], kind: str = "ce",
) -> Tensor:  # fmt: skip
    """The definition, all logits at once, its gradient left to autograd; slots whose teacher argmax the draft cannot
    say are left out."""
    total = head_WE.new_zeros(())
    unseen = ~torch.isin(teacher_PV.argmax(-1), ids_W)
    for h, r, weight in zip(hidden, rows, weights, strict=True):
        logq = (h @ head_WE.T).log_softmax(-1)
        p = teacher_PV[r][:, ids_W].softmax(-1)
        alpha = torch.minimum(teacher_PV[r].softmax(-1)[:, ids_W], logq.exp()).sum(-1)
        kl = (p * (p.log() - logq)).sum(-1)
        share = torch.exp(-3 * alpha.detach())
        loss = {
            "ce": -(p * logq).sum(-1),
            "kl": kl,
            "accept": -alpha.clamp_min(LEAST_ALPHA).log(),
            "mixed": share * kl + (1 - share) * (1 - alpha),
        }[kind]
        total = total + weight * loss[~unseen[r]].sum()
    return total
