"""The losses in plain torch: for one tile with explicit gradients, and a reference that uses autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.ops.loss.tiles import SlotSums, Tile
from fledge.ops.precision import at_least_float32

MIN_ALPHA = 1e-6  # lower bound of α in -log α


def tile_loss(
    z_MW: Tensor, teacher_NV: Tensor, tile: Tile, weight_S: Tensor, ids_W: Tensor, draft_id_V: Tensor, kind: str,
    keep_out_of_vocab: bool, sums: SlotSums,
) -> None:  # fmt: skip
    """The loss of M slots with draft logits `z_MW` against N rows of teacher logits.

    Overwrites `z_MW` by its gradient, multiplied by the slots' weights, and writes the results to `sums` at the slots'
    places. `weight_S` are the weights of all slots; `draft_id_V` is the draft id of each target id, or -1.
    """
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
    """The loss [M], its gradient with respect to the logits [M, W], and α [M].

    `p` [M, W] is p', the teacher's renormalised distribution. `mass` [M, 1] is the probability of the draft's
    vocabulary under p, so that p = p' mass.
    """
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
        clamped = alpha.clamp_min(MIN_ALPHA)
        return -clamped.log(), -dalpha * ((alpha >= MIN_ALPHA) / clamped)[:, None], alpha
    lam = torch.exp(-3 * alpha)
    return lam * kl + (1 - lam) * (1 - alpha), lam[:, None] * (q - p) - (1 - lam)[:, None] * dalpha, alpha


class _TeacherTile:
    """The teacher's distributions for N rows of logits.

    `p_NW` is p', renormalised over the draft's vocabulary. `mass_N` is the probability of the draft's vocabulary.
    `top_N` is the argmax over the target's vocabulary as a draft id, or -1 if it is not in the draft's vocabulary.
    """

    def __init__(self, logits_NV: Tensor, ids_W: Tensor, draft_id_V: Tensor):
        top = logits_NV.argmax(-1)
        self.top_N = draft_id_V[top]
        logits_NV = at_least_float32(logits_NV)
        logits_NW = logits_NV if ids_W.numel() == logits_NV.shape[-1] else logits_NV[:, ids_W]
        lse = logits_NW.logsumexp(-1)
        self.mass_N = (lse - logits_NV.logsumexp(-1)).exp()
        self.p_NW = (logits_NW - lse[:, None]).exp()


def soft_target_loss_reference(
    hidden: list[Tensor], head_WE: Tensor, rows: list[Tensor], teacher_PV: Tensor, ids_W: Tensor,
    weights: list[float], kind: str = "ce",
) -> Tensor:  # fmt: skip
    """The definition of the loss: materializes all logits and leaves the gradient to autograd.

    `teacher_PV` are the teacher's logits; the other arguments are as in `loss_and_gradients`. Slots whose teacher
    argmax is not in the draft's vocabulary are not scored.
    """
    total = head_WE.new_zeros(())
    out_of_vocab = ~torch.isin(teacher_PV.argmax(-1), ids_W)
    for h, r, weight in zip(hidden, rows, weights, strict=True):
        logq = (h @ head_WE.T).log_softmax(-1)
        p = teacher_PV[r][:, ids_W].softmax(-1)
        alpha = torch.minimum(teacher_PV[r].softmax(-1)[:, ids_W], logq.exp()).sum(-1)
        kl = (p * (p.log() - logq)).sum(-1)
        lam = torch.exp(-3 * alpha.detach())
        loss = {
            "ce": -(p * logq).sum(-1),
            "kl": kl,
            "accept": -alpha.clamp_min(MIN_ALPHA).log(),
            "mixed": lam * kl + (1 - lam) * (1 - alpha),
        }[kind]
        total = total + weight * loss[~out_of_vocab[r]].sum()
    return total
