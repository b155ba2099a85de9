"""The losses in plain torch: of a tile, with the gradients written out, and whole, as the oracle for both."""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.loss.tiles import SlotSums, Tile
from fledge.kernels.precision import at_least_float32

LEAST_ALPHA = 1e-6


def tile_loss(
    z_MW: Tensor, teacher_NV: Tensor, tile: Tile, weight_S: Tensor, ids_W: Tensor, draft_id_V: Tensor, kind: str,
    keep_out_of_vocab: bool, sums: SlotSums,
) -> None:  # fmt: skip
    """The loss of M slots of any steps, whose logits are `z_MW`, against N teacher rows. What it finds goes into
    `sums`; the weighted gradient for the logits replaces them."""
    teacher = _TeacherTile(teacher_NV, ids_W, draft_id_V)
    z = at_least_float32(z_MW)
    p, mass, top = teacher.p_NW[tile.row_M], teacher.mass_N[tile.row_M, None], teacher.top_N[tile.row_M]
    scored = (top >= 0) | keep_out_of_vocab
    loss, dz, alpha = _row_loss(z.log_softmax(-1), p, mass, kind)
    sums.hit_S[tile.place_M] = z.argmax(-1) == top
    sums.scored_S[tile.place_M] = scored
    sums.loss_S[tile.place_M] = torch.where(scored, loss, 0)
    sums.accept_S[tile.place_M] = alpha
    z_MW.copy_(dz * (scored * weight_S[tile.place_M])[:, None])


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
    argmax over the whole vocabulary as a draft id [n], -1 where it is outside the draft's vocabulary."""

    def __init__(self, logits_NV: Tensor, ids_W: Tensor, draft_id_V: Tensor):
        top = logits_NV.argmax(-1)
        self.top_N = draft_id_V[top]
        whole = at_least_float32(logits_NV)
        kept = whole if ids_W.numel() == whole.shape[-1] else whole[:, ids_W]
        lse = kept.logsumexp(-1)
        self.mass_N = (lse - whole.logsumexp(-1)).exp()
        self.p_NW = (kept - lse[:, None]).exp()


def soft_target_loss_reference(
    hidden: list[Tensor], head_WE: Tensor, rows: list[Tensor], teacher_PV: Tensor, ids_W: Tensor,
    weights: list[float], kind: str = "ce",
) -> Tensor:  # fmt: skip
    """The definition, all logits at once, its gradient left to autograd; slots whose teacher argmax is outside the
    draft's vocabulary are left out."""
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
