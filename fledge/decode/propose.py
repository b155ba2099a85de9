"""Drafting a chain of tokens with the draft's own cache, kept stable: accepted positions are rebuilt from features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.sampling import DRAFT, gumbel_argmax
from fledge.models.draft import Draft
from fledge.models.kv_cache import DraftCache
from fledge.types import Sampling


@dataclass(frozen=True)
class Chain:
    """K drafted target ids, int64 [K], and where they were drawn their distributions, float64 [K, W]."""

    token_K: Tensor
    q_KW: Tensor | None = None


class ChainProposer:
    """Drafts chains for one sequence: EAGLE-3's linear drafting with a stable draft cache.

    With `confidence` above 0 it drafts on only while the draft's own probability of the chain so far is at least
    that, up to `depth`. The token that brings it below is kept: whether a place is drafted depends on what stands
    before it alone, so that verification stays lossless. Each step then waits for the device.
    """

    def __init__(self, draft: Draft, depth: int, sampling: Sampling, request: int = 0, confidence: float = 0.0):
        self.draft, self.depth, self.sampling, self.request = draft, depth, sampling, request
        self.confidence = confidence
        self.cache = DraftCache(draft.config, draft.device, draft.dtype)
        self.draws = sampling.draft == "sample" and not sampling.greedy

    @torch.inference_mode()
    def propose(self, token_R: Tensor, aux_RAD: Tensor) -> Chain:
        """Takes in R new slots (the token after each, and its target features) and drafts on from the last.

        The slots' keys stay in the cache; those of the drafted steps are forgotten.
        """
        draft, cache = self.draft, self.cache
        token_R, aux_RAD = token_R.to(draft.device), aux_RAD.to(draft.device, draft.dtype)
        R = token_R.numel()
        cache.reserve(cache.length + R + self.depth)
        position = torch.arange(cache.length, cache.length + R + self.depth, device=draft.device)
        last = position.new_tensor([R - 1])
        out = draft.step(token_R, draft.fuse(aux_RAD), position[:R], cache.attend, rows=last)
        cache.length += R
        stable = cache.length
        tokens: list[Tensor] = []
        qs: list[Tensor] = []
        chance = 1.0
        for k in range(self.depth):
            fed_back, normed = draft.read(out)
            logits = draft.lm_head(normed)
            chosen = self._choose(logits, stable + 1 + k, qs)
            tokens.append(draft.to_target(chosen))
            if self.confidence:
                chance *= float(logits[0].softmax(-1)[chosen])
            if k + 1 == self.depth or chance < self.confidence:
                break
            out = draft.step(tokens[-1], fed_back, position[R + k : R + k + 1], cache.attend)
            cache.length += 1
        cache.length = stable
        return Chain(torch.cat(tokens), torch.stack(qs) if qs else None)

    def _choose(self, logits_1W: Tensor, position: int, qs: list[Tensor]) -> Tensor:
        """The next draft id, int64 [1]; where it is drawn, its distribution is added to `qs`."""
        if not self.draws:
            return logits_1W.argmax(-1)
        scores = logits_1W[0].double() / self.sampling.temperature
        qs.append(scores.softmax(-1))
        drawn = gumbel_argmax(scores, (self.sampling.seed, self.request, position, DRAFT))
        return torch.tensor([drawn], device=logits_1W.device)
