"""Shapes of what is drafted in a round: a chain, EAGLE-2's dynamic tree, or a fixed tree.

Each grows its trees from the logits of any source (`decode/sources.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fledge.decode.sources import Front, Source, rows_of
from fledge.kernels.argmax import argmax_rows
from fledge.kernels.likeliest import largest, likeliest
from fledge.kernels.sampling import DRAFT, gumbel_argmax
from fledge.models.draft import Draft
from fledge.models.draft_decoder import DraftDecoder
from fledge.types import Tree, TreeShape


class Shape(Protocol):
    """`levels` are the most tokens of a path below the root, `nodes` the most nodes of a tree, the root included, and
    `expanded` the most nodes below the root that are expanded. `ends_early`: whether it asks the device when to end."""

    levels: int
    nodes: int
    expanded: int
    ends_early: bool = False

    def grow(self, source: Source, root_B: Tensor, logits_B1W: Tensor) -> tuple[Tree, Tensor]:
        """The trees below the roots (target ids, int64 [B]), whose logits are given. Returns them and, for
        `Source.end`, which expanded node each of their nodes was, int64 [B, N]."""
        ...


class Chain(Shape):
    """Chains of up to `depth` tokens, greedy or drawn as the source's sampling says.

    With `confidence` above 0, a chain ends after the first token that brings the draft's probability of the chain below
    it. That token is kept: whether a place is drafted then depends only on what stands before it, so verification
    stays lossless. A sequential source then waits for the device at each step; otherwise nothing waits.
    """

    def __init__(self, depth: int, confidence: float = 0.0, device: torch.device | str = "cpu"):
        self.depth, self.confidence = depth, confidence
        self.levels, self.nodes, self.expanded = depth, depth + 1, depth - 1
        self.ends_early = confidence > 0
        # node n was the n-th to be expanded, but for the last of each chain, which was not
        self.slot_N = torch.arange(-1, depth, device=device)
        self.whole_slot_N = self.slot_N.where(self.slot_N < depth - 1, -1)

    def grow(self, source: Source, root_B: Tensor, logits_B1W: Tensor) -> tuple[Tree, Tensor]:
        decoder, B = source.decoder, root_B.numel()
        tokens, qs, chances = [root_B], [], []
        logits_BW = logits_B1W[:, 0]
        for k in range(self.depth):
            choice_B, q_BW = self._choose(logits_BW, source, k)
            tokens.append(decoder.to_target(choice_B))
            qs.append(q_BW)
            if self.confidence:
                chance_B = logits_BW.softmax(-1).gather(1, choice_B[:, None])[:, 0]
                chances.append(chance_B * chances[-1] if chances else chance_B)
                if source.sequential and bool((chances[-1] < self.confidence).all()):
                    break
            if k + 1 < self.depth:
                logits_BW = source.expand(Front(tokens[-1][:, None]))[:, 0]
        token_BN = torch.stack(tokens, dim=1)
        N, count_B, slot_BN = len(tokens), None, self.whole_slot_N.expand(B, -1)
        if self.confidence:
            likely = [chance_B >= self.confidence for chance_B in chances[: N - 2]]
            count_B = 2 + sum(likely, torch.zeros_like(root_B))
            slot_BN = torch.where(self.slot_N[:N] < count_B[:, None] - 2, self.slot_N[:N], -1)
        q_BKW = None if qs[0] is None else torch.stack(qs, dim=1)
        return Tree(token_BN, None, N - 1, count_B, q_BKW), slot_BN

    def _choose(self, logits_BW: Tensor, source: Source, k: int) -> tuple[Tensor, Tensor | None]:
        """The draft ids of step k, int64 [B]; where they are drawn, with their distributions, float64 [B, W]."""
        sampling = source.sampling
        if sampling is None or not sampling.samples_draft:
            return argmax_rows(logits_BW), None
        scores_BW = sampling.settle(sampling.temper(logits_BW.double()))
        state_B1 = sampling.keys(source.cache.length_B[:, None] + 1 + k, DRAFT)
        return gumbel_argmax(scores_BW, state_B1[:, 0]), scores_BW.softmax(-1)


class NoTree(Shape):
    """Nothing is drafted: trees of a root only, which commit one token without a pass of the draft."""

    levels, nodes, expanded = 0, 1, 0


class DynamicTree(Shape):
    """EAGLE-2's dynamic trees (Li et al. 2024, arXiv:2406.16858, section 4).

    The root's `width` likeliest children are scored by the draft's log-probability. At each further level, up to
    `depth` in all, the `width` nodes of the last level with the highest cumulative score are expanded, and as many
    children of each are scored. The best `nodes` - 1 of all that were scored make the tree. `width` is at most the size
    of the draft's vocabulary, which is taken where it is larger. Waits for nothing.
    """

    def __init__(self, depth: int, nodes: int, width: int, draft: Draft):
        self.depth, self.nodes, self.width = depth, nodes, min(width, draft.config.draft_vocab_size)
        self.levels, self.expanded = depth, (depth - 1) * self.width
        self.slot_F = torch.arange(max(self.expanded, self.width), device=draft.device)
        self.own_ww = torch.eye(self.width, dtype=torch.bool, device=draft.device)

    def grow(self, source: Source, root_B: Tensor, logits_B1W: Tensor) -> tuple[Tree, Tensor]:
        decoder, w = source.decoder, self.width
        B, device = root_B.numel(), root_B.device
        score, token = self.children(logits_B1W, torch.zeros(B, 1, device=device))
        scored, drafted, parents = [score], [token], [token.new_full((B, w), -1)]
        # the front: its places among all scored nodes and within the last level, its parents' within the last front
        places = front = self.slot_F[:w].expand(B, w)
        above, front_score = torch.zeros_like(front), score
        expanded: list[Tensor] = []  # places of the expanded nodes, in order
        seen = torch.zeros(B, w, 0, dtype=torch.bool, device=device)  # which expanded nodes each node of the front sees
        own = self.own_ww.expand(B, w, w)
        for _ in range(1, self.depth):
            seen = torch.cat([rows_of(seen, above), own], dim=2)
            logits = source.expand(Front(decoder.to_target(drafted[-1].gather(1, front)), above, seen))
            expanded.append(places)
            score, token = self.children(logits, front_score)
            parents.append(places.repeat_interleave(w, dim=1))
            before = sum(s.shape[1] for s in scored)
            scored.append(score)
            drafted.append(token)
            front_score, front = largest(score, w)
            places, above = before + front, front // w
        tree, place_BN = best_of(decoder, root_B, scored, drafted, parents, self.nodes, self.depth)
        slot_BP = torch.full((B, sum(s.shape[1] for s in scored) + 1), -1, device=device)  # the last is the root's
        if expanded:
            slot_BP.scatter_(1, torch.cat(expanded, dim=1), self.slot_F.expand(B, -1))
        return tree, slot_BP.gather(1, place_BN % slot_BP.shape[1])

    def children(self, logits_BMW: Tensor, score_BF: Tensor) -> tuple[Tensor, Tensor]:
        """Cumulative scores (float32) and draft ids (int64) of the likeliest children of F nodes, one node's after the
        other's, each [B, F width]. `logits_BMW` are each node's (M = F) or shared by all (M = 1)."""
        logp, token = likeliest(logits_BMW, self.width)
        score = score_BF[..., None] + logp
        return score.flatten(1), token.expand_as(score).flatten(1)


def best_of(
    decoder: DraftDecoder, root_B: Tensor, scores: Sequence[Tensor], tokens: Sequence[Tensor],
    parents: Sequence[Tensor], nodes: int, levels: int,
) -> tuple[Tree, Tensor]:  # fmt: skip
    """The trees of the best `nodes` - 1 scored nodes, and the places of their nodes among all, int64 [B, N] (the root's
    is -1).

    Every level's scores, draft ids and parents (places among all, -1 for the root) come as [B, P]. Equal scores are
    taken in order, so that parents stand before their children. Waits for nothing.
    """
    score_BP, token_BP, parent_BP = (torch.cat(list(x), dim=1) for x in (scores, tokens, parents))
    order = score_BP.sort(dim=1, descending=True, stable=True).indices
    best = order[:, : nodes - 1].sort(dim=1).values
    node = torch.zeros_like(order)
    node.scatter_(1, best, torch.arange(1, best.shape[1] + 1, device=best.device).expand_as(best))
    none = best.new_full((best.shape[0], 1), -1)
    parent = parent_BP.gather(1, best)
    parent = torch.where(parent < 0, 0, node.gather(1, parent.clamp_min(0)))
    token_BN = torch.cat([root_B[:, None], decoder.to_target(token_BP.gather(1, best))], dim=1)
    return Tree(token_BN, torch.cat([none, parent], dim=1), levels), torch.cat([none, best], dim=1)


@dataclass(frozen=True)
class _Level:
    """One level of a fixed tree, as indices on the device.

    `parents`: the F nodes of the level above that have children; `above`: the places of their own parents among the
    nodes expanded before; `seen_FJ`: which expanded nodes each sees, bool. `nodes`: this level's; `parent` and `rank`:
    the place of each one's parent among `parents`, and its rank among its siblings, at most `ranks` - 1.
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
        expanded += front if made else []  # the root is not expanded: its logits are there
        of = [front, [before.index(parents[n]) for n in front], [[m in paths[n] for m in expanded] for n in front]]
        of += [level, [front.index(parents[n]) for n in level], [ranks[n] for n in level]]
        made.append(_Level(*(torch.tensor(x, device=device) for x in of), max(ranks[n] for n in level) + 1))
        before = front
    return made


class FixedTree(Shape):
    """Trees of a given shape, as EAGLE-1's (Li et al. 2024, arXiv:2401.15077, section 3.1): a child of rank r is its
    parent's r-th likeliest token. Waits for nothing. Raises ValueError for a rank beyond the draft's vocabulary."""

    def __init__(self, shape: TreeShape, draft: Draft):
        if max(shape.ranks) >= draft.config.draft_vocab_size:
            raise ValueError(f"the tree has a child of rank {max(shape.ranks)}, beyond the draft's vocabulary")
        self.places = _levels(shape, draft.device)
        self.levels = len(self.places)
        self.parent_N = torch.tensor(shape.parents, device=draft.device)
        nodes = [n for level in self.places[1:] for n in level.parents.tolist()]
        self.expanded = len(nodes)
        self.nodes = len(shape.parents)
        self.slot_N = torch.full((self.nodes,), -1, device=draft.device)
        self.slot_N[nodes] = torch.arange(self.expanded, device=draft.device)

    def grow(self, source: Source, root_B: Tensor, logits_B1W: Tensor) -> tuple[Tree, Tensor]:
        B, logits = root_B.numel(), logits_B1W
        token_BN = root_B[:, None].repeat(1, self.parent_N.numel())
        for i, level in enumerate(self.places):
            F = level.parents.numel()
            if i:
                seen_BFJ = level.seen_FJ.expand(B, -1, -1)
                logits = source.expand(Front(token_BN[:, level.parents], level.above.expand(B, F), seen_BFJ))
            ranked = largest(logits, level.ranks)[1].expand(B, F, -1)
            token_BN[:, level.nodes] = source.decoder.to_target(ranked[:, level.parent, level.rank])
        return Tree(token_BN, self.parent_N.expand(B, -1), len(self.places)), self.slot_N.expand(B, -1)
