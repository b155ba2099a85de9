"""Drafting: a chain of tokens, or a tree of them, with the draft's own cache.

A stable cache is rebuilt from the target's features where tokens were accepted, which is what training saw. An
unstable one keeps what the draft itself made of them, which costs fewer rows and drifts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels.sampling import DRAFT, gumbel_argmax
from fledge.models.draft import Draft
from fledge.models.kv_cache import DraftCache
from fledge.types import Sampling, Tree, TreeShape


class Drafter:
    """A draft and its cache for one sequence; what the ways of drafting share.

    `drafted_N` says of the last tree's nodes which scratch slot of the cache each was drafted in, -1 for none.
    """

    def __init__(self, draft: Draft, stable: bool = True):
        self.draft, self.stable = draft, stable
        self.cache = DraftCache(draft.config, draft.device, draft.dtype)
        self.drafted_N = torch.empty(0, dtype=torch.int64)

    def take_in(self, token_R: Tensor, aux_RAD: Tensor, path: Sequence[int], room: int) -> tuple[Tensor, Tensor]:
        """Adds R new slots (the token after each, and its target features) to the cache, with room for some more to
        be drafted; or, unstable, what was drafted of the accepted `path`. Returns the last one's token, int64 [1],
        and output [1, E]."""
        draft, cache = self.draft, self.cache
        if not self.stable:
            slots = list(itertools.takewhile(lambda slot: slot >= 0, self.drafted_N[list(path[1:])].tolist()))
            cache.keep(slots)
            token_R, aux_RAD = token_R[len(slots) :], aux_RAD[len(slots) :]
        token_R, aux_RAD = token_R.to(draft.device), aux_RAD.to(draft.device, draft.dtype)
        R = token_R.numel()
        cache.reserve(cache.length + R + room)
        position = torch.arange(cache.length, cache.length + R, device=draft.device)
        out = draft.step(token_R, draft.fuse(aux_RAD), position, cache.attend, rows=position.new_tensor([R - 1]))
        cache.length += R
        return token_R[-1:], out


class ChainProposer(Drafter):
    """Drafts chains for one sequence: EAGLE-3's linear drafting with a stable draft cache.

    With `confidence` above 0 it drafts on only while the draft's own probability of the chain so far is at least
    that, up to `depth`. The token that brings it below is kept: whether a place is drafted depends on what stands
    before it alone, so that verification stays lossless. Each step then waits for the device.
    """

    def __init__(
        self, draft: Draft, depth: int, sampling: Sampling, request: int = 0, confidence: float = 0.0,
        *, stable: bool = True,
    ):  # fmt: skip
        super().__init__(draft, stable)
        self.depth, self.sampling, self.request = depth, sampling, request
        self.confidence = confidence
        self.draws = sampling.draft == "sample" and not sampling.greedy

    @torch.inference_mode()
    def propose(self, token_R: Tensor, aux_RAD: Tensor, path: Sequence[int] = ()) -> Tree:
        """Takes in R new slots (the token after each, and its target features) and drafts on from the last. `path` is
        what was accepted of the last tree: its nodes from the root on.

        The slots' keys stay in the cache; those of the drafted steps are forgotten.
        """
        draft, cache = self.draft, self.cache
        root, out = self.take_in(token_R, aux_RAD, path, self.depth)
        stable = cache.length
        position = torch.arange(stable, stable + self.depth, device=draft.device)
        tokens: list[Tensor] = [root]
        qs: list[Tensor] = []
        chance = 1.0
        for k in range(self.depth):
            fed_back, normed = draft.read(out)
            logits = draft.logits(normed)
            chosen = self._choose(logits, stable + 1 + k, qs)
            tokens.append(draft.to_target(chosen))
            if self.confidence:
                chance *= float(logits[0].softmax(-1)[chosen])
            if k + 1 == self.depth or chance < self.confidence:
                break
            out = draft.step(tokens[-1], fed_back, position[k : k + 1], cache.attend)
            cache.length += 1
        cache.length = stable
        self.drafted_N = torch.tensor([-1, *range(len(tokens) - 2), -1])
        return Tree(torch.cat(tokens), None, len(tokens) - 1, torch.stack(qs) if qs else None)

    def _choose(self, logits_1W: Tensor, position: int, qs: list[Tensor]) -> Tensor:
        """The next draft id, int64 [1]; where it is drawn, its distribution is added to `qs`."""
        if not self.draws:
            return logits_1W.argmax(-1)
        scores = logits_1W[0].double() / self.sampling.temperature
        qs.append(scores.softmax(-1))
        drawn = gumbel_argmax(scores, (self.sampling.seed, self.request, position, DRAFT))
        return torch.tensor([drawn], device=logits_1W.device)


class TreeProposer(Drafter):
    """Drafts EAGLE-2's dynamic tree (Li et al. 2024, arXiv:2406.16858, section 4) for one sequence.

    The first pass scores the root's `width` likeliest children; each further pass, up to `depth` in all, takes the
    `width` nodes of the last level that are likeliest by cumulative probability and scores as many children of each.
    Of all that were scored, the best `nodes` - 1 make the tree, the earlier level and place first among equals, so
    that parents stand before their children. Nothing waits for the device.
    """

    def __init__(self, draft: Draft, depth: int, nodes: int, width: int, *, stable: bool = True):
        super().__init__(draft, stable)
        self.depth, self.nodes, self.width = depth, nodes, min(width, draft.config.draft_vocab_size)

    @torch.inference_mode()
    def propose(self, token_R: Tensor, aux_RAD: Tensor, path: Sequence[int] = ()) -> Tree:
        """As `ChainProposer.propose`."""
        draft, cache, w = self.draft, self.cache, self.width
        root, out = self.take_in(token_R, aux_RAD, path, (self.depth - 1) * w)
        stable = cache.length
        fed_back, score, token = self._children(out, torch.zeros(1, device=draft.device))
        scores, tokens, parents = [score[0]], [token[0]], [token.new_full((w,), -1)]
        kept = torch.arange(w, device=draft.device)  # the front's places among all that were scored
        passed: list[Tensor] = []  # those that were drafted on from, in the order of their slots
        front, above = kept, kept.new_zeros(w)  # its places within the last level, and its parents among the last front
        seen = torch.zeros(w, 0, dtype=torch.bool, device=draft.device)  # which drafted slots a node sees
        own = torch.eye(w, dtype=torch.bool, device=draft.device)
        for level in range(1, self.depth):
            seen = torch.cat([seen[above], own], dim=1)
            cache.visible = torch.cat([seen.new_ones(w, stable), seen], dim=1)
            position = kept.new_full((w,), stable - 1 + level)
            out = draft.step(draft.to_target(tokens[-1][front]), fed_back[above], position, cache.attend)
            cache.length += w
            passed.append(kept)
            fed_back, score, token = self._children(out, scores[-1][front])
            scores.append(score.flatten())
            tokens.append(token.flatten())
            parents.append(kept.repeat_interleave(w))
            front = score.flatten().topk(w).indices
            kept, above = sum(s.numel() for s in scores[:-1]) + front, front // w
        cache.length, cache.visible = stable, None
        slot_P = torch.cat(parents).new_full((sum(map(torch.numel, scores)),), -1)
        if passed:
            slot_P[torch.cat(passed)] = torch.arange(len(passed) * w, device=draft.device)
        return self._best(root, torch.cat(scores), torch.cat(tokens), torch.cat(parents), slot_P)

    def _children(self, out_ME: Tensor, score_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What M nodes feed back, and the log-probabilities from the root on of their likeliest children, with those
        children's draft ids, both [M, width]."""
        fed_back, normed = self.draft.read(out_ME)
        logp, token = self.draft.logits(normed).float().log_softmax(-1).topk(self.width)
        return fed_back, score_M[:, None] + logp, token

    def _best(self, root_1: Tensor, score_P: Tensor, token_P: Tensor, parent_P: Tensor, slot_P: Tensor) -> Tree:
        order = score_P.sort(descending=True, stable=True).indices
        best = order[: self.nodes - 1].sort().values
        node_P = torch.zeros_like(order)
        node_P[best] = torch.arange(1, best.numel() + 1, device=best.device)
        none = parent_P.new_full((1,), -1)
        self.drafted_N = torch.cat([none, slot_P[best]])
        parent = parent_P[best]
        parent = torch.where(parent < 0, 0, node_P[parent])
        token_N = torch.cat([root_1, self.draft.to_target(token_P[best])])
        return Tree(token_N, torch.cat([none, parent]), self.depth)


class FixedTreeProposer(Drafter):
    """Drafts a tree of a given shape, as EAGLE-1 does (Li et al. 2024, arXiv:2401.15077, section 3.1): a child of rank
    r is its parent's r-th likeliest token. Nothing waits for the device."""

    def __init__(self, draft: Draft, shape: TreeShape, *, stable: bool = True):
        super().__init__(draft, stable)
        self.shape = shape
        if max(shape.ranks) >= draft.config.draft_vocab_size:
            raise ValueError(f"the tree has a child of rank {max(shape.ranks)}, beyond the draft's vocabulary")

    @torch.inference_mode()
    def propose(self, token_R: Tensor, aux_RAD: Tensor, path: Sequence[int] = ()) -> Tree:
        """As `ChainProposer.propose`."""
        draft, cache, levels = self.draft, self.cache, self.shape.levels()
        parents, ranks = (0, *self.shape.parents), (0, *self.shape.ranks)
        expanded = [sorted({parents[n] for n in level}) for level in levels[1:]]  # nodes that a pass is made of
        root, out = self.take_in(token_R, aux_RAD, path, sum(map(len, expanded[1:])))
        stable = cache.length
        token_N = root.repeat(len(parents))
        parent_N = torch.tensor([-1, *self.shape.parents], device=draft.device)
        ancestors = Tree(token_N, parent_N, len(levels) - 1).ancestors()
        fed_back, normed = draft.read(out)
        drafted: list[int] = []  # nodes that have slots in the cache
        for depth, (passed, level) in enumerate(zip(expanded, levels[1:], strict=True)):
            if depth:
                drafted += passed
                seen = ancestors[passed][:, drafted]
                cache.visible = torch.cat([seen.new_ones(len(passed), stable), seen], dim=1)
                position = token_N.new_full((len(passed),), stable - 1 + depth)
                above = [expanded[depth - 1].index(parents[n]) for n in passed]
                out = draft.step(token_N[passed], fed_back[above], position, cache.attend)
                fed_back, normed = draft.read(out)
                cache.length += len(passed)
            likeliest = draft.logits(normed).topk(max(ranks[n] for n in level) + 1).indices
            chosen = likeliest[[passed.index(parents[n]) for n in level], [ranks[n] for n in level]]
            token_N[level] = draft.to_target(chosen)
        cache.length, cache.visible = stable, None
        self.drafted_N = torch.tensor([drafted.index(n) if n in drafted else -1 for n in range(len(parents))])
        return Tree(token_N, parent_N, len(levels) - 1)
