"""Draft trees between the passes of a round: growth, slots of nodes, and acceptance.

Each operation has a definition in plain torch, or in Python (`likeliest_prefixes`). All but `fresh_rows` also have one
Triton kernel, with the same results, bit by bit. On a GPU, nothing waits for the device.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.attention_tree import Visible, VisibleBits, VisibleChain
from fledge.ops.device import indices, use_triton
from fledge.types import Tree, Verdict

MOST_WIDTH = 32  # limit of the kernel of `add_level`, which compares the children of a level in pairs
MOST_CANDIDATES = 8192  # scored nodes of a tree; limit of the kernel of `best_nodes`, with one program per tree
MOST_NODES = 4096  # nodes of a tree; limit of the kernel of `accept_own`, with one program per tree


@dataclass(frozen=True)
class Candidates:
    """The P scored nodes below the roots of B dynamic trees (EAGLE-2, Li et al. 2024, arXiv:2406.16858, section 4), in
    the order of scoring.

    A tree grows by levels. Each node is scored by its cumulative log-probability, the best nodes of a level are
    expanded, and the best of all scored nodes make the tree. Of nodes with equal scores, the node scored first ranks
    higher, so that every parent ranks before its children; NaN ranks above every number.

    First come the w = `width` likeliest children of the root. At each level except the last of `levels`, the w best
    nodes are then expanded, X nodes in all, and w children of each expanded node are scored. The children of the e-th
    expanded node, counted from 0, have the places from w (e + 1) on.

    `score_BP` (float32) are cumulative log-probabilities, `token_BP` (int64) draft ids, and `place_BX` (int64) the
    places of the expanded nodes. `seen_BXJ` (int64) are the expanded nodes that each expanded node sees, its ancestors
    and itself, as J words of bits (`pack_bits`).
    """

    width: int
    levels: int
    score_BP: Tensor
    token_BP: Tensor
    place_BX: Tensor
    seen_BXJ: Tensor

    @classmethod
    def empty(cls, requests: int, levels: int, width: int, device: torch.device) -> Candidates:
        """Uninitialized tensors for the nodes of trees of `levels` levels."""
        X = (levels - 1) * width
        score_BP = torch.empty(requests, width + X * width, dtype=torch.float32, device=device)
        whole = dict(dtype=torch.int64, device=device)
        place_BX, seen_BXJ = torch.empty(requests, X, **whole), torch.empty(requests, X, -(-X // 64), **whole)
        return cls(width, levels, score_BP, torch.empty(score_BP.shape, **whole), place_BX, seen_BXJ)

    def seen(self, level: int) -> Tensor:
        """The words of the expanded nodes of a level, counted from 0 below the root, [B, w, J]."""
        return self.seen_BXJ[:, level * self.width : (level + 1) * self.width]

    def place(self, level: int) -> Tensor:
        """The places of the expanded nodes of a level, [B, w]."""
        return self.place_BX[:, level * self.width : (level + 1) * self.width]

    def begin(self, level: int) -> int:
        """The place of the first node of a level."""
        return self.width * (1 + (level - 1) * self.width) if level else 0


def add_level(
    found: Candidates, level: int, logp_BMw: Tensor, token_BMw: Tensor, ids_W: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Scores the nodes of a level, counted from 0 below the root, and chooses the w best nodes, in descending order, to
    be expanded next.

    `logp_BMw` (float32) and `token_BMw` (int64) are the log-probabilities and draft ids of the w likeliest children of
    each of the M nodes expanded last, in order: w nodes, or the root. `ids_W` (int64) are the target's ids of the
    draft's tokens.

    Fills in the level's scores and tokens, and the places and the visibility of the chosen nodes. Returns the target's
    ids of the chosen nodes, and the rows of their parents among the last pass's rows of all requests, int64 [B, w]
    each; None at the last level, where no node is chosen.
    """
    if use_triton(found.score_BP) and found.width <= MOST_WIDTH:
        from fledge.ops.trees_triton import add_level_triton

        return add_level_triton(found, level, logp_BMw, token_BMw, ids_W)
    (B, M, w), begin = logp_BMw.shape, found.begin(level)
    score_Bn, token_Bn = cumulative_scores(found, level, logp_BMw).flatten(1), token_BMw.flatten(1)
    found.score_BP[:, begin : begin + M * w] = score_Bn
    found.token_BP[:, begin : begin + M * w] = token_Bn
    if level + 1 == found.levels:
        return None
    best_Bw = _best_first(score_Bn)[:, :w]
    above_Bw = best_Bw // w
    found.place(level).copy_(begin + best_Bw)
    found.seen(level).copy_(_own_bits(found, level))
    if level:
        seen_BwJ = found.seen(level - 1)
        found.seen(level).bitwise_or_(seen_BwJ.gather(1, above_Bw[..., None].expand_as(seen_BwJ)))
    first_B1 = torch.arange(0, B * M, M, device=above_Bw.device)[:, None]
    return ids_W[token_Bn.gather(1, best_Bw)], first_B1 + above_Bw


def best_nodes(found: Candidates, nodes: int, root_B: Tensor, ids_W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The trees of the roots (target ids, int64) and the best `nodes` - 1 scored nodes, or all scored nodes if fewer.

    The N nodes of each tree are in the order of places, the root first. Returns the nodes' target ids, the nodes'
    parents (-1 for the root's), and each node's index among the expanded nodes (-1: not expanded), int64 [B, N] each.
    """
    if use_triton(found.score_BP) and found.score_BP.shape[1] <= MOST_CANDIDATES:
        from fledge.ops.trees_triton import best_nodes_triton

        return best_nodes_triton(found, nodes, root_B, ids_W)
    order_BP = _best_first(found.score_BP)
    best_Bn = order_BP[:, : nodes - 1].sort(dim=1).values
    (B, n), (_, X), device = best_Bn.shape, found.place_BX.shape, best_Bn.device
    node_Bn = torch.arange(1, n + 1, device=device).expand(B, n)
    node_BP = torch.zeros_like(order_BP).scatter_(1, best_Bn, node_Bn)
    slot_BP = torch.full_like(order_BP, -1).scatter_(1, found.place_BX, torch.arange(X, device=device).expand(B, X))
    # the tree index of each expanded node as a parent, with the root's index 0 in front
    parent_B1X = torch.cat([torch.zeros_like(root_B)[:, None], node_BP.gather(1, found.place_BX)], dim=1)
    token_BN = torch.cat([root_B[:, None], ids_W[found.token_BP.gather(1, best_Bn)]], dim=1)
    parent_BN = F.pad(parent_B1X.gather(1, best_Bn // found.width), (1, 0), value=-1)
    return token_BN, parent_BN, F.pad(slot_BP.gather(1, best_Bn), (1, 0), value=-1)


def _best_first(score_Bn: Tensor) -> Tensor:
    """The places of each row's scores in descending order of scores, then ascending order of places; NaN is largest.

    On a GPU, sorts of long rows order NaN values by their bits, and sums produce other NaN bits than the terms. All
    NaN values are therefore replaced by the same NaN.
    """
    one_nan_Bn = score_Bn.masked_fill(score_Bn.isnan(), torch.nan)
    return one_nan_Bn.sort(dim=1, descending=True, stable=True).indices


def cumulative_scores(found: Candidates, level: int, logp_BMw: Tensor) -> Tensor:
    """The scores of the children of M nodes, [B, M, w]: a parent's score plus the child's log-probability."""
    if not level:
        return logp_BMw
    return found.score_BP.gather(1, found.place(level - 1))[..., None] + logp_BMw


def _own_bits(found: Candidates, level: int) -> Tensor:
    """The words of the expanded nodes of a level if each node sees only itself, int64 [w, J]."""
    node_w = torch.arange(level * found.width, (level + 1) * found.width, device=found.place_BX.device)
    word_J = torch.arange(found.seen_BXJ.shape[2], device=node_w.device)
    return (node_w[:, None] // 64 == word_J).long() << node_w[:, None] % 64


def likeliest_prefixes(
    logp_BKw: Tensor, token_BKw: Tensor, nodes: int, root_B: Tensor, ids_W: Tensor
) -> tuple[Tensor, Tensor]:
    """The trees of the roots (target ids, int64) and the `nodes` - 1 likeliest prefixes of drafts whose K tokens are
    drawn independently (DDTree, Ringel & Romano 2026, arXiv:2604.12989), or of all prefixes if these are fewer.

    `logp_BKw` (float32) and `token_BKw` (int64) are the log-probabilities, in descending order, and the draft ids of
    the w likeliest tokens of each level: w = `nodes` - 1, or all W tokens of the draft's vocabulary if fewer. `ids_W`
    (int64) are the target's ids of the draft's tokens.

    The score of a prefix is the sum of its tokens' log-probabilities, in float64; NaN counts as -inf. No prefix has a
    higher score than its parent or than its sibling of the rank before. The likeliest prefix that is not in the tree is
    therefore the next child of a node of the tree, and a heap of the nodes' next children gives all prefixes in
    descending order of scores. Of children with equal scores, the child of the node found first is the first.

    Returns the N nodes' target ids and parents (-1 for the root's), int64 [B, N] each, in the order in which the nodes
    are found. The definition copies the log-probabilities to the host.
    """
    N = most_prefixes(nodes, *logp_BKw.shape[1:])
    if use_triton(logp_BKw):
        from fledge.ops.trees_triton import likeliest_prefixes_triton

        return likeliest_prefixes_triton(logp_BKw, token_BKw, N, root_B, ids_W)
    known = logp_BKw.masked_fill(logp_BKw.isnan(), -math.inf).tolist()
    searched = [_best_first_search(logp_Kw, N) for logp_Kw in known]
    found_B2n = torch.tensor(searched, dtype=torch.int64, device=root_B.device).view(len(known), 2, N - 1)
    parent_Bn, place_Bn = found_B2n.unbind(1)
    token_BN = torch.cat([root_B[:, None], ids_W[token_BKw.flatten(1).gather(1, place_Bn)]], dim=1)
    return token_BN, F.pad(parent_Bn, (1, 0), value=-1)


def most_prefixes(nodes: int, levels: int, width: int) -> int:
    """The nodes of a tree of all prefixes of `levels` tokens out of `width`, the root included, but at most `nodes`."""
    return min(nodes, sum(width**k for k in range(levels + 1)))


def _best_first_search(logp_Kw: list[list[float]], N: int) -> tuple[list[int], list[int]]:
    """The parents of the nodes of `likeliest_prefixes` below the root, and their tokens' places in the flat table of K
    levels of w tokens."""
    K, w = len(logp_Kw), len(logp_Kw[0])
    scores, levels, children = [0.0], [0], [0]  # by node; children are the numbers of children in the tree
    heap = [(-logp_Kw[0][0], 0)]  # by node: the negative score of the node's next child, and the node
    parents, places = [], []
    for node in range(1, N):
        negative, parent = heapq.heappop(heap)
        level, rank = levels[parent], children[parent]
        parents.append(parent)
        places.append(level * w + rank)
        scores.append(-negative)
        levels.append(level + 1)
        children.append(0)
        children[parent] += 1
        if rank + 1 < w:
            heapq.heappush(heap, (-(scores[parent] + logp_Kw[level][rank + 1]), parent))
        if level + 1 < K:
            heapq.heappush(heap, (-(scores[node] + logp_Kw[level + 1][0]), node))
    return parents, places


@dataclass(frozen=True)
class FreshRows:
    """The n rows of a draft's first pass of each of B requests, and where the nodes drafted after them go; all int64.

    `token_Bn` are the rows' tokens, and `slot_Bn` the rows' slots. `state_Bn` is the index of each row's input state
    among the states of all requests' tokens, with one more state at the end for masked rows; None without masked rows:
    row i reads the state of token i. `asked_BS` are the S rows whose outputs are needed: the row of the last token, the
    root `root_B` (without tokens, the first row), and the masked rows after it. `position_M` are the positions of all
    rows, [B n], then of the nodes of each level below the root except the last, [levels, B]. `slot_BJ` are the slots of
    the nodes that will be expanded.
    """

    token_Bn: Tensor
    state_Bn: Tensor | None
    asked_BS: Tensor
    root_B: Tensor
    slot_Bn: Tensor
    slot_BJ: Tensor
    position_M: Tensor


def fresh_rows(
    token_BR: Tensor, count_B: Tensor, start_B: Tensor, length_B: Tensor, *, masked: int = 0, mask_token: int = 0,
    levels: int = 0, expanded: int = 0,
) -> FreshRows:  # fmt: skip
    """The rows of the first `count_B[b]` of R tokens (int64) after the committed tokens of each sequence.

    `masked` more rows follow, and rows without a token have `mask_token`. `start_B` and `length_B` are as in `KVCache`.
    `levels` and `expanded` are the numbers of levels and nodes to be drafted after the rows.
    """
    (B, R), count_B1, length_B1 = token_BR.shape, count_B[:, None], length_B[:, None]
    most = indices(max(R + masked, levels, expanded), token_BR.device)
    row_n, token_Bn, state_Bn = most[: R + masked], token_BR, None
    if masked:
        unknown_Bn = row_n >= count_B1
        token_Bn = F.pad(token_BR, (0, masked)).masked_fill(unknown_Bn, mask_token)
        first_B1 = torch.arange(0, B * R, R, device=token_BR.device)[:, None]
        state_Bn = (first_B1 + row_n).masked_fill(unknown_Bn, B * R)
    asked_BS = (count_B1 - 1).clamp_min(0) + most[: masked + 1]
    position_Bn, after_B = length_B1 + row_n, length_B + count_B
    root_B = token_BR.gather(1, asked_BS[:, :1])[:, 0]
    position_M = torch.cat([position_Bn.flatten(), (after_B + most[:levels, None]).flatten()])
    slot_JB = after_B + start_B + most[:expanded, None]  # so that the slots of a level of chains are contiguous
    return FreshRows(token_Bn, state_Bn, asked_BS, root_B, position_Bn + start_B[:, None], slot_JB.T, position_M)


def place_trees(tree: Tree, start_B: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor, Visible | VisibleChain]:
    """The positions and slots of tree nodes after the prefixes of their sequences, int64 [B, N] each, and the visible
    nodes of each node: its ancestors and itself.

    `start_B` and `length_B` (int64) are as in `tree_attention`. Node n has the n-th slot after the prefix, from 0.
    """
    N, chain = tree.token_BN.shape[1], tree.parent_BN is None
    if use_triton(length_B):
        from fledge.ops.trees_triton import place_trees_triton

        position_BN, slot_BN, seen_BN = place_trees_triton(tree, start_B, length_B)
        return position_BN, slot_BN, VisibleChain(seen_BN, N) if chain else VisibleBits(seen_BN, N)
    node_N = indices(N, length_B.device)
    slot_BN = (start_B + length_B)[:, None] + node_N
    depth_BN = node_N.expand_as(slot_BN) if chain else tree.depths()
    visible = VisibleChain(depth_BN, N) if chain else Visible(tree.ancestors())
    return length_B[:, None] + depth_BN, slot_BN, visible


def accept_own(tree: Tree, own_BN: Tensor) -> Verdict:
    """Commits the target's own tokens, up to and including the first token that the request's tree does not contain.

    `own_BN` (int64) is the target's own token after each node. The root is accepted. Any other node is accepted if its
    parent is accepted and the node's token is the target's own token after the parent.
    """
    if use_triton(own_BN) and own_BN.shape[1] <= MOST_NODES:
        from fledge.ops.trees_triton import accept_own_triton

        return accept_own_triton(tree, own_BN)
    if not tree.levels:  # nothing was drafted
        return Verdict(torch.zeros_like(own_BN), torch.ones_like(own_BN[:, 0]), own_BN)
    node_N = indices(own_BN.shape[1], own_BN.device)
    if tree.parent_BN is None:
        matched_BK = tree.token_BN[:, 1:] == own_BN[:, :-1]
        if tree.count_B is not None:
            matched_BK = matched_BK & (node_N[1:] < tree.count_B[:, None])
        count_B = 1 + matched_BK.cumprod(1).sum(1)
        last_B1 = count_B[:, None] - 1
        return Verdict(node_N.minimum(last_B1), count_B, own_BN.where(node_N <= last_B1, 0))
    matched_BN = matches(tree.token_BN, tree.parent_BN, own_BN)
    if tree.count_B is not None:
        matched_BN = matched_BN & (node_N < tree.count_B[:, None])
    path_BNN, depth_BN = tree.ancestors(), tree.depths()
    accepted_BN = (matched_BN[:, None] | ~path_BNN).all(-1)
    # siblings have different tokens: at most one node of a level is accepted
    level_R1 = torch.arange(tree.levels + 1, device=own_BN.device)[:, None]
    hit_BRN = accepted_BN[:, None] & (depth_BN[:, None] == level_R1)
    path_BR = torch.where(hit_BRN, node_N, 0).amax(-1)
    return Verdict.of(path_BR, hit_BRN.any(-1).sum(-1), own_BN.gather(1, path_BR))


def matches(token_BN: Tensor, parent_BN: Tensor, own_BN: Tensor) -> Tensor:
    """Whether each node's token is the target's own after its parent, bool [B, N]; True for the root."""
    return (token_BN == own_BN.gather(1, parent_BN.clamp_min(0))) | (parent_BN < 0)
