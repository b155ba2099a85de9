"""Shapes of a round's draft: a chain, EAGLE-2's dynamic tree, the tree of the likeliest prefixes, or a fixed tree.

Each shape grows trees from the logits of a proposer (`decode/propose.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fledge.decode.propose import Front, Proposer
from fledge.drafts.draft import Draft
from fledge.ops.attention_tree import VisibleBits, pack_bits
from fledge.ops.device import current_device
from fledge.ops.sampling import DRAFT, gumbel_argmax
from fledge.ops.topk import argmax_rows, largest, likeliest
from fledge.ops.trees import Candidates, add_level, best_nodes, likeliest_prefixes, most_prefixes
from fledge.types import Tree, TreeShape


class Shape(Protocol):
    """`levels` are the most tokens of a path below the root, `nodes` the most nodes of a tree, the root included, and
    `expanded` the most expanded nodes below the root. `ends_early`: whether drafting asks the device when to end."""

    levels: int
    nodes: int
    expanded: int
    ends_early: bool = False

    def grow(self, proposer: Proposer, root_B: Tensor, logits_BKW: Tensor) -> tuple[Tree, Tensor]:
        """Grows trees below the roots (target ids, int64 [B]) from the logits of `Proposer.begin`. Returns the
        trees and, for `Proposer.end`, each node's index among the expanded nodes, int64 [B, N]."""
        ...


class Chain(Shape):
    """Chains of up to `depth` tokens, the likeliest by the proposer's logits or drawn as its sampling says. The
    draft's probabilities are the softmax of the proposer's logits, with the noise of coupled drafting.

    With `confidence` above 0, a chain ends after the first token that brings the draft's probability of the chain below
    `confidence`. This last token is kept: verification stays lossless, because whether a position is drafted depends
    only on earlier tokens. A sequential proposer then waits for the device at each step; otherwise nothing waits.
    """

    def __init__(self, depth: int, confidence: float = 0.0, device: torch.device | str = "cpu"):
        self.depth, self.confidence = depth, confidence
        self.levels, self.nodes, self.expanded = depth, depth + 1, depth - 1
        self.ends_early = confidence > 0
        self.level_K = torch.arange(depth, device=device)
        # node n is the n-th expanded node; the last node of each chain is not expanded
        self.slot_N = torch.arange(-1, depth, device=device)
        self.whole_slot_N = self.slot_N.where(self.slot_N < depth - 1, -1)

    def grow(self, proposer: Proposer, root_B: Tensor, logits_BKW: Tensor) -> tuple[Tree, Tensor]:
        tokens, qs, chances = [root_B[:, None]], [], []
        logits_BSW, k = logits_BKW[:, : self.depth], 0
        while True:
            token_BS, q_BSW, chance_BS = self._choose(logits_BSW, proposer, k)
            tokens.append(token_BS)
            qs.append(q_BSW)
            if self.confidence:
                chance_BS = chance_BS.cumprod(1) if chance_BS.shape[1] > 1 else chance_BS
                chances.append(chance_BS * chances[-1][:, -1:] if chances else chance_BS)
                if proposer.sequential and float(chances[-1].amax()) < self.confidence:
                    break
            k += token_BS.shape[1]
            rest_BS = None
            if k == 1 < self.depth and q_BSW is None and not self.confidence:
                rest_BS = proposer.rest_of_chain(token_BS, self.depth - 1)
            if rest_BS is not None:
                tokens.append(rest_BS)
                break
            if k == self.depth:
                break
            logits_BSW = proposer.expand(Front(token_BS))
        token_BN = torch.cat(tokens, dim=1)
        (B, N), count_B = token_BN.shape, None
        slot_BN = self.whole_slot_N.expand(B, -1)
        if self.confidence:
            count_B = 2 + (torch.cat(chances, dim=1)[:, : N - 2] >= self.confidence).sum(1)
            slot_BN = torch.where(self.slot_N[:N] < count_B[:, None] - 2, self.slot_N[:N], -1)
        q_BKW = None if qs[0] is None else torch.cat(qs, dim=1)
        return Tree(token_BN, None, N - 1, count_B, q_BKW), slot_BN

    def _choose(self, logits_BSW: Tensor, proposer: Proposer, k: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The target ids of the tokens of S levels from level k on, int64 [B, S]; the distributions of drawn tokens,
        float64 [B, S, W], else None; and where chains end early, the tokens' draft probabilities [B, S], else None."""
        sampling, q_BSW = proposer.sampling, None
        if sampling is not None and sampling.samples_draft:
            scores_BSW = sampling.settle(sampling.temper(logits_BSW.double()))
            position_BS = proposer.cache.length_B[:, None] + 1 + k + self.level_K[: logits_BSW.shape[1]]
            choice_BS = gumbel_argmax(scores_BSW, sampling.keys(position_BS, DRAFT))
            q_BSW = scores_BSW.softmax(-1)
        elif self.confidence:
            choice_BS = argmax_rows(logits_BSW)
        else:
            return argmax_rows(logits_BSW, proposer.target_id_W), None, None
        chance_BS = None
        if self.confidence:
            p_BSW = logits_BSW.softmax(-1)
            chance_BS = p_BSW.amax(-1) if q_BSW is None else p_BSW.gather(2, choice_BS[..., None])[..., 0]
        return proposer.to_target(choice_BS), q_BSW, chance_BS


class DynamicTree(Shape):
    """EAGLE-2's dynamic trees (Li et al. 2024, arXiv:2406.16858, section 4).

    The root's `width` likeliest children are scored by the draft's log-probability. At each further level, up to
    `depth` levels in all, the `width` nodes of the last level with the highest cumulative score are expanded, and
    `width` children of each expanded node are scored. The best `nodes` - 1 of all scored nodes make the tree. A `width`
    above the size of the draft's vocabulary is reduced to that size. Waits for nothing.
    """

    def __init__(self, depth: int, nodes: int, width: int, draft: Draft):
        self.depth, self.nodes, self.width = depth, nodes, min(width, draft.config.draft_vocab_size)
        self.levels, self.expanded = depth, (depth - 1) * self.width

    def grow(self, proposer: Proposer, root_B: Tensor, logits_BKW: Tensor) -> tuple[Tree, Tensor]:
        ids_W, w = proposer.target_id_W, self.width
        found = Candidates.empty(root_B.numel(), self.depth, w, root_B.device)
        front = add_level(found, 0, *likeliest(logits_BKW[:, :1], w), ids_W)
        for level in range(1, self.depth):
            visible = VisibleBits(found.seen(level - 1), level * w)
            logits_BMW = proposer.expand(Front(*front, visible))
            front = add_level(found, level, *likeliest(logits_BMW, w), ids_W)
        token_BN, parent_BN, slot_BN = best_nodes(found, self.nodes, root_B, ids_W)
        return Tree(token_BN, parent_BN, self.depth), slot_BN


class LikeliestTree(Shape):
    """Trees of a proposer that has the logits of all levels after one pass: the root and the `nodes` - 1 likeliest
    prefixes of up to `depth` tokens, under the product of the levels' distributions (DDTree, Ringel & Romano 2026,
    arXiv:2604.12989). No other tree of as many nodes is accepted further on average, if the tokens are distributed so.
    Waits for nothing.
    """

    def __init__(self, depth: int, nodes: int, draft: Draft):
        vocabulary = draft.config.draft_vocab_size
        self.levels, self.nodes, self.expanded = depth, most_prefixes(nodes, depth, vocabulary), 0
        self.ranks = min(nodes - 1, vocabulary)  # of a level's tokens that may be in a tree
        self.slot_N = torch.full((self.nodes,), -1, device=draft.device)

    def grow(self, proposer: Proposer, root_B: Tensor, logits_BKW: Tensor) -> tuple[Tree, Tensor]:
        logp_BKw, token_BKw = likeliest(logits_BKW[:, : self.levels], self.ranks)
        token_BN, parent_BN = likeliest_prefixes(logp_BKw, token_BKw, self.nodes, root_B, proposer.target_id_W)
        return Tree(token_BN, parent_BN, self.levels), self.slot_N.expand(root_B.numel(), -1)


@dataclass(frozen=True)
class _Level:
    """One level of a fixed tree, as indices on the device.

    `parents`: the F nodes of the level above that have children. `above`: for each of `parents`, the place of its own
    parent among the `before` nodes expanded in the last pass. `seen_1FW`: the nodes that each of `parents` sees, among
    the `expanded` nodes so far, as words of bits. `nodes`: the nodes of this level. `parent`: for each of `nodes`, the
    place of its parent among `parents`. `rank`: the rank of each of `nodes` among siblings, at most `ranks` - 1.
    """

    parents: Tensor
    above: Tensor
    nodes: Tensor
    parent: Tensor
    rank: Tensor
    before: int
    seen_1FW: Tensor
    expanded: int
    ranks: int

    def front(self, token_BN: Tensor) -> Front:
        """The expanded nodes of trees with the tokens `token_BN`."""
        B, F = token_BN.shape[0], self.parents.numel()
        first_B1 = torch.arange(0, B * self.before, self.before, device=token_BN.device)[:, None]
        visible = VisibleBits(self.seen_1FW.expand(B, -1, -1), self.expanded)
        return Front(token_BN[:, self.parents], first_B1 + self.above.expand(B, F), visible)


def _levels(shape: TreeShape, device: torch.device) -> list[_Level]:
    parents, ranks, levels = shape.parents, shape.ranks, shape.levels()
    paths: list[set[int]] = []
    for n, parent in enumerate(parents):
        paths.append({n} | (paths[parent] if n else set()))
    made, before, expanded = [], [-1], []
    for level in levels[1:]:
        front = sorted({parents[n] for n in level})
        expanded += front if made else []  # the root is not expanded: the proposer has the root's logits already
        above, seen = [before.index(parents[n]) for n in front], [[m in paths[n] for m in expanded] for n in front]
        of = [front, above, level, [front.index(parents[n]) for n in level], [ranks[n] for n in level]]
        indices = (torch.tensor(x, device=device) for x in of)
        seen_1FW = pack_bits(torch.tensor([seen], dtype=torch.bool, device=device))
        made.append(_Level(*indices, len(before), seen_1FW, len(expanded), max(ranks[n] for n in level) + 1))
        before = front
    return made


class FixedTree(Shape):
    """Trees of a given shape, as EAGLE-1's (Li et al. 2024, arXiv:2401.15077, section 3.1): a child of rank r is its
    parent's r-th likeliest token. Waits for nothing. Raises ValueError for a rank beyond the draft's vocabulary."""

    def __init__(self, shape: TreeShape, draft: Draft):
        if max(shape.ranks) >= draft.config.draft_vocab_size:
            raise ValueError(f"the tree has a child of rank {max(shape.ranks)}, beyond the draft's vocabulary")
        with current_device(draft.device):
            self.places = _levels(shape, draft.device)
        self.levels = len(self.places)
        self.parent_N = torch.tensor(shape.parents, device=draft.device)
        nodes = [n for level in self.places[1:] for n in level.parents.tolist()]
        self.expanded = len(nodes)
        self.nodes = len(shape.parents)
        self.slot_N = torch.full((self.nodes,), -1, device=draft.device)
        self.slot_N[nodes] = torch.arange(self.expanded, device=draft.device)

    def grow(self, proposer: Proposer, root_B: Tensor, logits_BKW: Tensor) -> tuple[Tree, Tensor]:
        B, logits = root_B.numel(), logits_BKW[:, :1]
        token_BN = root_B[:, None].repeat(1, self.parent_N.numel())
        for i, level in enumerate(self.places):
            F = level.parents.numel()
            if i:
                logits = proposer.expand(level.front(token_BN))
            ranked = largest(logits, level.ranks)[1].expand(B, F, -1)
            token_BN[:, level.nodes] = proposer.to_target(ranked[:, level.parent, level.rank])
        return Tree(token_BN, self.parent_N.expand(B, -1), len(self.places)), self.slot_N.expand(B, -1)
