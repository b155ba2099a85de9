"""Shapes of the draft tree of a round: a chain, EAGLE-2's dynamic tree, or a fixed tree.

A shape builds trees from the logits of any source (`decode/sources.py`). To expand a node is to compute the logits
after it. `expanded` is the largest number of nodes below the root that the shape expands in one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fledge.decode.sources import Front, Source, rows_of
from fledge.kernels.sampling import DRAFT, gumbel_argmax
from fledge.models.draft import Draft
from fledge.types import Sampling, Tree, TreeShape


class Shape(Protocol):
    expanded: int

    def grow(self, source: Source, root_B: Tensor, logits_B1W: Tensor) -> tuple[Tree, Tensor]:
        """Builds one tree below each root (target ids, int64 [B]); `logits_B1W` are the logits after the roots.

        Returns the trees and the argument of `Source.end`, int64 [B, N]: each node's index among the expanded nodes, or
        -1 if it was not expanded.
        """
        ...


class Chain:
    """Chains of up to `depth` tokens, chosen greedily or sampled, as `sampling` says.

    If `confidence` is above 0, a chain ends after the first token at which the draft's probability of the whole chain
    is below `confidence`. The chain keeps that token: whether a position is drafted then depends only on the tokens
    before it, so verification stays lossless. With a sequential source, this synchronises with the device at each step.
    """

    def __init__(self, depth: int, sampling: Sampling = Sampling(), confidence: float = 0.0):
        self.depth, self.sampling, self.confidence = depth, sampling, confidence
        self.expanded = depth

    def grow(self, source: Source, root_B: Tensor, logits_B1W: Tensor) -> tuple[Tree, Tensor]:
        draft, B = source.draft, root_B.numel()
        tokens, qs, chances = [root_B], [], []
        logits_BW = logits_B1W[:, 0]
        for k in range(self.depth):
            choice_B, q_BW = self._choose(logits_BW, source, k)
            tokens.append(draft.to_target(choice_B))
            qs.append(q_BW)
            if self.confidence:
                chance_B = logits_BW.softmax(-1).gather(1, choice_B[:, None])[:, 0]
                chances.append(chance_B * chances[-1] if chances else chance_B)
                if source.sequential and bool((chances[-1] < self.confidence).all()):
                    break
            if k + 1 < self.depth:
                logits_BW = source.expand(Front(tokens[-1][:, None]))[:, 0]
        token_BN = torch.stack(tokens, dim=1)
        N = token_BN.shape[1]
        count_B = [N] * B
        if self.confidence:
            likely_BK = torch.stack(chances[: N - 2], dim=1) >= self.confidence if N > 2 else token_BN.new_zeros(B, 0)
            count_B = [2 + n for n in likely_BK.sum(-1).tolist()]
        slot_BN = torch.tensor([[-1, *range(n - 2), *[-1] * (N - n + 1)] for n in count_B])
        drawn = None
        if self.sampling.samples_draft:
            drawn = [torch.stack([q_BW[b] for q_BW in qs[: n - 1]]) for b, n in enumerate(count_B)]
        return Tree(token_BN, None, N - 1, count_B, drawn), slot_BN

    def _choose(self, logits_BW: Tensor, source: Source, k: int) -> tuple[Tensor, Tensor | None]:
        """The draft ids chosen at step k, int64 [B], and the distributions they were sampled from, float64 [B, W]
        (None for greedy drafts)."""
        if not self.sampling.samples_draft:
            return logits_BW.argmax(-1), None
        scores = logits_BW.double() / self.sampling.temperature
        keys = [
            (self.sampling.seed, number, length + 1 + k, DRAFT)
            for number, length in zip(source.numbers, source.cache.lengths, strict=True)
        ]
        drawn = [gumbel_argmax(row, key) for row, key in zip(scores, keys, strict=True)]
        return torch.tensor(drawn, device=logits_BW.device), scores.softmax(-1)


class DynamicTree:
    """EAGLE-2's dynamic trees (Li et al. 2024, arXiv:2406.16858, section 4).

    A node's score is the sum of the draft's log-probabilities along its path. The first level holds the root's `width`
    likeliest children. Each further level, up to `depth` levels, expands the `width` nodes of the last level with the
    highest scores and adds the `width` likeliest children of each. The tree consists of the root and the `nodes` - 1
    nodes with the highest scores. Does not synchronise with the device.
    """

    def __init__(self, depth: int, nodes: int, width: int):
        self.depth, self.nodes, self.width = depth, nodes, width
        self.expanded = (depth - 1) * width

    def grow(self, source: Source, root_B: Tensor, logits_B1W: Tensor) -> tuple[Tree, Tensor]:
        draft, w = source.draft, min(self.width, logits_B1W.shape[-1])
        B, device = root_B.numel(), root_B.device
        score, token = self.children(logits_B1W, torch.zeros(B, 1, device=device))
        scored, drafted, parents = [score], [token], [token.new_full((B, w), -1)]
        # The front is the set of nodes expanded next. `places` are its indices among all scored nodes, `front` those
        # within the last level, and `above` the indices of its parents within the previous front.
        places = front = torch.arange(w, device=device).expand(B, w)
        above = torch.zeros_like(front)
        expanded: list[Tensor] = []  # indices of the expanded nodes among all scored nodes, in order of expansion
        seen = torch.zeros(B, w, 0, dtype=torch.bool, device=device)  # expanded nodes that each front node attends to
        own = torch.eye(w, dtype=torch.bool, device=device).expand(B, w, w)
        for _ in range(1, self.depth):
            seen = torch.cat([rows_of(seen, above), own], dim=2)
            logits = source.expand(Front(draft.to_target(drafted[-1].gather(1, front)), above, seen))
            expanded.append(places)
            score, token = self.children(logits, scored[-1].gather(1, front))
            parents.append(places.repeat_interleave(w, dim=1))
            before = sum(s.shape[1] for s in scored)
            scored.append(score)
            drafted.append(token)
            front = score.topk(w).indices
            places, above = before + front, front // w
        tree, place_BN = best_of(draft, root_B, scored, drafted, parents, self.nodes, self.depth)
        slot_BP = torch.full((B, sum(s.shape[1] for s in scored) + 1), -1, device=device)  # last column: the root
        if expanded:
            slots = torch.arange(len(expanded) * w, device=device).expand(B, -1)
            slot_BP.scatter_(1, torch.cat(expanded, dim=1), slots)
        return tree, slot_BP.gather(1, place_BN % slot_BP.shape[1])

    def children(self, logits_BMW: Tensor, score_BF: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (float32) and draft ids (int64) of the likeliest children of F nodes, grouped by parent, each
        [B, F width]. `logits_BMW` has one row per node (M = F) or one row that all nodes share (M = 1)."""
        logp, token = logits_BMW.float().log_softmax(-1).topk(min(self.width, logits_BMW.shape[-1]))
        score = score_BF[..., None] + logp
        return score.flatten(1), token.expand_as(score).flatten(1)


def best_of(
    draft: Draft, root_B: Tensor, scores: Sequence[Tensor], tokens: Sequence[Tensor], parents: Sequence[Tensor],
    nodes: int, levels: int,
) -> tuple[Tree, Tensor]:  # fmt: skip
    """Builds the trees of the `nodes` - 1 nodes with the highest scores. Also returns the indices of the trees' nodes
    among all scored nodes, int64 [B, N] (-1 for the root).

    `scores`, `tokens` (draft ids) and `parents` hold one [B, P] tensor per level; a parent is an index among all scored
    nodes, or -1 for the root. Among equal scores the earlier node wins, so that parents precede their children. Does
    not synchronise with the device.
    """
    score_BP, token_BP, parent_BP = (torch.cat(list(x), dim=1) for x in (scores, tokens, parents))
    order = score_BP.sort(dim=1, descending=True, stable=True).indices
    best = order[:, : nodes - 1].sort(dim=1).values
    node = torch.zeros_like(order)
    node.scatter_(1, best, torch.arange(1, best.shape[1] + 1, device=best.device).expand_as(best))
    none = best.new_full((best.shape[0], 1), -1)
    parent = parent_BP.gather(1, best)
    parent = torch.where(parent < 0, 0, node.gather(1, parent.clamp_min(0)))
    token_BN = torch.cat([root_B[:, None], draft.to_target(token_BP.gather(1, best))], dim=1)
    return Tree(token_BN, torch.cat([none, parent], dim=1), levels), torch.cat([none, best], dim=1)


@dataclass(frozen=True)
class _Level:
    """One level of a fixed tree, as index tensors on the device.

    `nodes` are the nodes of this level. `parents` are the F nodes of the previous level that have children. `above`
    gives, for each of `parents`, the index of its own parent within the `parents` of the previous level. `seen_FJ`
    (bool) says which expanded nodes each of `parents` attends to. `parent` and `rank` give, for each of `nodes`, the
    index of its parent within `parents` and its rank among its siblings, at most `ranks` - 1.
    """

    parents: Tensor
    above: Tensor
    seen_FJ: Tensor
    nodes: Tensor
    parent: Tensor
    rank: Tensor
    ranks: int


def _levels(shape: TreeShape, device: torch.device) -> list[_Level]:
    parents, ranks, levels = shape.parents, shape.ranks, shape.levels()
    paths: list[set[int]] = []
    for n, parent in enumerate(parents):
        paths.append({n} | (paths[parent] if n else set()))
    made, before, expanded = [], [-1], []
    for level in levels[1:]:
        front = sorted({parents[n] for n in level})
        expanded += front if made else []  # the root is not expanded: its logits are already computed
        of = [front, [before.index(parents[n]) for n in front], [[m in paths[n] for m in expanded] for n in front]]
        of += [level, [front.index(parents[n]) for n in level], [ranks[n] for n in level]]
        made.append(_Level(*(torch.tensor(x, device=device) for x in of), max(ranks[n] for n in level) + 1))
        before = front
    return made


class FixedTree:
    """Trees of a given shape, as in EAGLE-1 (Li et al. 2024, arXiv:2401.15077, section 3.1): a child of rank r is the
    r-th likeliest token after its parent, counted from 0. Building them does not synchronise with the device.

    Raises ValueError for a rank beyond the draft's vocabulary.
    """

    def __init__(self, shape: TreeShape, draft: Draft):
        if max(shape.ranks) >= draft.config.draft_vocab_size:
            raise ValueError(f"the tree has a child of rank {max(shape.ranks)}, beyond the draft's vocabulary")
        self.levels = _levels(shape, draft.device)
        self.parent_N = torch.tensor(shape.parents, device=draft.device)
        nodes = [n for level in self.levels[1:] for n in level.parents.tolist()]
        self.expanded = len(nodes)
        self.slot_N = torch.full((self.parent_N.numel(),), -1)
        self.slot_N[nodes] = torch.arange(self.expanded)

    def grow(self, source: Source, root_B: Tensor, logits_B1W: Tensor) -> tuple[Tree, Tensor]:
        B, logits = root_B.numel(), logits_B1W
        token_BN = root_B[:, None].repeat(1, self.parent_N.numel())
        for i, level in enumerate(self.levels):
            F = level.parents.numel()
            if i:
                seen_BFJ = level.seen_FJ.expand(B, -1, -1)
                logits = source.expand(Front(token_BN[:, level.parents], level.above.expand(B, F), seen_BFJ))
            likeliest = logits.topk(level.ranks).indices.expand(B, F, -1)
            token_BN[:, level.nodes] = source.draft.to_target(likeliest[:, level.parent, level.rank])
        return Tree(token_BN, self.parent_N.expand(B, -1), len(self.levels)), self.slot_N.expand(B, -1)
