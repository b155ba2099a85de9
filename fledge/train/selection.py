"""The loss of a selector among candidates (`CandidateSelector`), beside the loss of a draft's logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.drafts.block import CandidateSelector
from fledge.ops.device import at_least_float32
from fledge.ops.loss import Chosen, Tile


class SelectorLoss:
    """The cross-entropy between the target's distribution and the selector's, both over a slot's candidates, of the
    slots whose candidates have the target's likeliest token. A slot's weight is that of its step.

    `head_inputs` are K tensors, [S_k or more, E], and `before_S` the token that each of the K steps' slots follows
    (target ids, int64, on the draft's device, the steps concatenated). With hard labels `label_S`, of the same kind, a
    label takes the place of the target's distribution and of its likeliest token.

    An object is called for each tile of the loss (`ops.loss.Choose`): the gradients of the candidates' logits are part
    of the loss's. `backward` computes the rest.
    """

    def __init__(
        self, selector: CandidateSelector, head_inputs: Sequence[Tensor], before_S: Tensor, counts: Sequence[int],
        weights: Sequence[float], label_S: Tensor | None = None,
    ):  # fmt: skip
        self.selector, self.counts, self.before_S, self.label_S = selector, counts, before_S, label_S
        self.head_inputs = [h[:n].detach() for h, n in zip(head_inputs, counts, strict=True)]
        wide = torch.promote_types(head_inputs[0].dtype, torch.float32)
        parts = [before_S.new_full((n,), w, dtype=wide) for n, w in zip(counts, weights, strict=True)]
        self.weight_S = torch.cat(parts)
        self.loss = self.weight_S.new_zeros(())
        self.places: list[Tensor] = []
        self.chosen: list[Chosen] = []

    def __call__(self, tile: Tile, z_MW: Tensor, teacher_NV: Tensor) -> Chosen:
        h_ME = torch.cat([h[a:b] for h, (a, b) in zip(self.head_inputs, tile.spans, strict=True)])
        ids_MC, logit_MC = self.selector.candidates(z_MW)
        score_MC = logit_MC + self.selector.pairs(h_ME, self.before_S[tile.place_M], ids_MC)
        logq_MC = score_MC.log_softmax(-1)
        teacher_MC = at_least_float32(teacher_NV[tile.row_M[:, None], ids_MC])
        top_M1 = teacher_NV.argmax(-1)[tile.row_M, None]
        truth_MC, p_MC = ids_MC == top_M1, teacher_MC.softmax(-1)
        if self.label_S is not None:
            truth_MC = ids_MC == self.label_S[tile.place_M, None]
            p_MC = truth_MC.to(p_MC.dtype)
        weight_M = self.weight_S[tile.place_M] * truth_MC.any(-1)
        self.loss += (-(p_MC * logq_MC).sum(-1) * weight_M).sum()
        q_MC = logq_MC.exp()
        whole_MC = (teacher_MC - at_least_float32(teacher_NV).logsumexp(-1)[tile.row_M, None]).exp()
        hit_M = ids_MC.gather(1, score_MC.argmax(-1, keepdim=True))[:, 0] == top_M1[:, 0]
        chosen = Chosen(ids_MC, (q_MC - p_MC) * weight_M[:, None], hit_M, torch.minimum(whole_MC, q_MC).sum(-1))
        self.places.append(tile.place_M)
        self.chosen.append(chosen)
        return chosen

    @torch.enable_grad()
    def backward(self, dhead_inputs: Sequence[Tensor], by_slot: Sequence[Tensor] | None = None) -> None:
        """Adds the gradients of the selector's parameters to their `.grad`, and those of the head's inputs to
        `dhead_inputs`, after all tiles. `by_slot` are D-PACE's weights of the K steps' slots, with which `dhead_inputs`
        were multiplied."""
        if not self.places:
            return
        place_S, ids_SC = torch.cat(self.places), torch.cat([chosen.ids_MC for chosen in self.chosen])
        h_SE = torch.cat(self.head_inputs).requires_grad_()
        pair_SC = self.selector.pairs(h_SE[place_S], self.before_S[place_S], ids_SC)
        dpair_SC = torch.cat([chosen.dz_MC for chosen in self.chosen])
        if by_slot is not None:
            dpair_SC = dpair_SC * torch.cat(list(by_slot))[place_S, None]
        torch.autograd.backward(pair_SC, dpair_SC.to(pair_SC.dtype))
        assert h_SE.grad is not None
        for dh, part in zip(dhead_inputs, h_SE.grad.split(list(self.counts)), strict=True):
            dh[: len(part)] += part
