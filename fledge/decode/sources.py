"""Sources of candidates: the draft's logits at a root, then at the nodes that a shape (`decode/shapes.py`) expands.

`StepSource` drafts one level of a tree per pass, as EAGLE does. `OnePassSource` has the logits of all levels after one
pass, as P-EAGLE does. A source holds the draft's cache for the requests that are decoded together. A stable cache is
rebuilt from the target's hidden states where tokens were accepted, which is what training saw. An unstable one keeps
the keys and values of accepted tokens as drafting computed them, which costs fewer rows and drifts from training.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fledge.decode.sampling import BatchSampling
from fledge.kernels.transfer import to_device
from fledge.models.draft import Draft
from fledge.models.kv_cache import DraftCache


@dataclass(frozen=True)
class Front:
    """The nodes of one level, F of each request's tree, that are expanded together.

    `token_BF` are their target ids, int64. `above_BF` are the places of their parents among the nodes expanded before
    (int64; None: node f's parent is node f). `seen_BFJ` says which expanded nodes below the root each one sees, this
    level's included, in the order of expansion (bool; None: all of them, as in a chain).
    """

    token_BF: Tensor
    above_BF: Tensor | None = None
    seen_BFJ: Tensor | None = None


class Source:
    """A draft and its cache for the requests that are decoded together. `sampling` is how their drafted tokens are
    drawn, in the order of the cache's sequences and on the draft's device; None: greedily."""

    sequential: bool  # whether each level costs a pass, so that stopping early saves time

    def __init__(self, draft: Draft):
        self.draft = draft
        self.cache: DraftCache | None = None
        self.sampling: BatchSampling | None = None

    @torch.inference_mode()
    def admit(self, requests: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        """Adds requests: of each its first R slots, namely the token after each slot and the target's hidden states
        [R, A, D]; R may be 0."""
        if not requests:
            return
        tokens, aux = zip(*requests, strict=True)
        cache = DraftCache(self.draft.config, self.draft.device, self.draft.dtype, len(requests))
        if any(tokens):
            self._append(cache, tokens, aux, 0)
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.append([cache])

    @torch.inference_mode()
    def dismiss(self, staying: Sequence[int]) -> None:
        """Keeps the requests with these indices only."""
        if staying:
            self.cache.select(staying)
        else:
            self.cache = None

    def begin(
        self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], paths: Sequence[Sequence[int]], expanded: int
    ) -> tuple[Tensor, Tensor]:
        """Adds each request's R new slots (the token after each, and the target's hidden states [R, A, D]) to the
        cache, with room for `expanded` nodes. `paths` are the accepted nodes of the last trees, the root first.

        Returns the roots' tokens, int64 [B], and the logits after them, [B, 1, W]. Waits for nothing.
        """
        raise NotImplementedError

    def expand(self, front: Front) -> Tensor:
        """The logits after the nodes of the next level, [B, F, W], or [B, 1, W] where all nodes of a level share
        theirs."""
        raise NotImplementedError

    def end(self, slot_BN: Tensor) -> None:
        """Forgets what was drafted. `slot_BN` says of each node of the trees as which expanded node it was computed,
        counted from 0 below the root; -1 for nodes that were not expanded."""
        raise NotImplementedError

    def _append(
        self, cache: DraftCache, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], expanded: int
    ) -> tuple[Tensor, Tensor]:
        """Adds new slots to a cache. Returns the last slots' tokens, int64 [B], and the draft's outputs, [B, E]."""
        draft, counts = self.draft, [len(t) for t in tokens]
        B, most = len(counts), max(counts)
        rows = torch.tensor([[*t, *[0] * (most - len(t))] for t in tokens])
        last = torch.tensor(counts)[:, None].clamp_min(1) - 1  # the output of a request without slots is not read
        token_BR, last_B1 = to_device([rows, last], draft.device)
        aux = [a.to(draft.device, draft.dtype) for a in aux]
        aux_MAD = aux[0] if B == 1 else pad_sequence(aux, batch_first=True).flatten(0, 1)
        cache.reserve(most + expanded)
        slot_BR = cache.allocate(most, last_B1)
        asked = (last_B1 + torch.arange(0, B * most, most, device=draft.device)[:, None]).flatten()
        out = draft.step(token_BR.flatten(), draft.fuse(aux_MAD), slot_BR.flatten(), cache.attend, query_rows=asked)
        cache.set_lengths([n + r for n, r in zip(cache.lengths, counts, strict=True)])
        return token_BR.gather(1, last_B1)[:, 0], out


class StepSource(Source):
    """One pass per level: the draft reads each node's token and its own output at the node's parent (EAGLE)."""

    sequential = True

    def __init__(self, draft: Draft, stable: bool = True):
        super().__init__(draft)
        self.stable = stable
        self.slot_BN = torch.empty(0, 1, dtype=torch.int64)  # of the last trees, see `end`

    def admit(self, requests: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        super().admit(requests)
        nothing = self.slot_BN.new_full((len(requests), self.slot_BN.shape[1]), -1)
        self.slot_BN = torch.cat([self.slot_BN, nothing])

    def dismiss(self, staying: Sequence[int]) -> None:
        super().dismiss(staying)
        self.slot_BN = self.slot_BN[list(staying)]

    def begin(
        self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], paths: Sequence[Sequence[int]], expanded: int
    ) -> tuple[Tensor, Tensor]:
        if not self.stable:
            drafted = [slots[list(path[1:])].tolist() for slots, path in zip(self.slot_BN.cpu(), paths, strict=True)]
            kept = [list(itertools.takewhile(lambda slot: slot >= 0, slots)) for slots in drafted]
            self.cache.keep(kept)
            tokens = [t[len(k) :] for t, k in zip(tokens, kept, strict=True)]
            aux = [a[len(k) :] for a, k in zip(aux, kept, strict=True)]
        root_B, out_BE = self._append(self.cache, tokens, aux, expanded)
        self.level = 0
        return root_B, self._logits(out_BE, root_B.numel())

    def expand(self, front: Front) -> Tensor:
        (B, F), cache = front.token_BF.shape, self.cache
        self.level += 1
        cache.allocate(F, visible_BSJ=front.seen_BFJ)
        position_BF = (cache.length_B - 1 + self.level)[:, None].expand(B, F)
        hidden = self.fed_back
        if front.above_BF is not None:
            hidden = rows_of(hidden.unflatten(0, (B, -1)), front.above_BF).flatten(0, 1)
        out = self.draft.step(front.token_BF.flatten(), hidden, position_BF.flatten(), cache.attend)
        cache.scratch += F
        return self._logits(out, B)

    def end(self, slot_BN: Tensor) -> None:
        self.cache.scratch = 0
        self.slot_BN = slot_BN

    def _logits(self, out_ME: Tensor, requests: int) -> Tensor:
        self.fed_back, head_input = self.draft.split_output(out_ME)
        return self.draft.logits(head_input).unflatten(0, (requests, -1))


class OnePassSource(Source):
    """One pass for all `depth` levels: behind the new slots go depth - 1 more, which read a mask token and a learned
    state in place of what is not known yet (P-EAGLE, Hui et al. 2026, arXiv:2602.01469). So all nodes of a level share
    their logits."""

    sequential = False

    def __init__(self, draft: Draft, depth: int):
        super().__init__(draft)
        self.depth = depth

    def begin(
        self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor], paths: Sequence[Sequence[int]], expanded: int
    ) -> tuple[Tensor, Tensor]:
        root_B, self.logits_BKW = self.run_pass(tokens, aux)
        self.level = 0
        return root_B, self.logits_BKW[:, :1]

    def expand(self, front: Front) -> Tensor:
        self.level += 1
        return self.logits_BKW[:, self.level, None]

    def end(self, slot_BN: Tensor) -> None:
        """Nothing was added to the cache but the new slots."""

    @torch.inference_mode()
    def run_pass(self, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Adds each request's R new slots to the cache. Returns the last ones' tokens, int64 [B], and the logits of all
        levels, [B, K, W]."""
        draft, cache, K = self.draft, self.cache, self.depth
        counts = [len(t) for t in tokens]
        B, rows = len(counts), sum(counts)
        n = max(counts) + K - 1
        mask_token, mask_state = draft.mask_inputs()
        known = [torch.arange(rows)[a - r : a] for a, r in zip(itertools.accumulate(counts), counts, strict=True)]
        # the row that each slot reads: its own, or the mask's, which comes after all of them
        read_Bn = torch.stack([torch.cat([k, k.new_full((n - k.numel(),), rows)]) for k in known])
        asked_BK = torch.tensor(counts)[:, None] - 1 + torch.arange(K)
        flat = torch.tensor([t for mine in tokens for t in mine])
        read_Bn, asked_BK, flat = to_device([read_Bn, asked_BK, flat], draft.device)
        token_Bn = torch.cat([flat, mask_token])[read_Bn]
        fused = draft.fuse(torch.cat([a.to(draft.device, draft.dtype) for a in aux]))
        state = torch.cat([fused, mask_state])[read_Bn]
        cache.reserve(n)
        slot_Bn = cache.allocate(n, asked_BK)
        asked = (asked_BK + torch.arange(0, B * n, n, device=draft.device)[:, None]).flatten()
        out = draft.step(token_Bn.flatten(), state.flatten(0, 1), slot_Bn.flatten(), cache.attend, query_rows=asked)
        cache.set_lengths([length + r for length, r in zip(cache.lengths, counts, strict=True)])
        return token_Bn.gather(1, asked_BK[:, :1])[:, 0], draft.logits(draft.split_output(out)[1]).unflatten(0, (B, K))


def rows_of(x_BMJ: Tensor, at_BS: Tensor) -> Tensor:
    """The rows of each request at some places (int64), [B, S, J]."""
    return x_BMJ.gather(1, at_BS[..., None].expand(-1, -1, x_BMJ.shape[2]))
