"""EAGLE-2's dynamic trees (Li et al. 2024, arXiv:2406.16858, section 4): the steps between the passes of a draft.

A tree grows by levels. Each node is scored by its cumulative log-probability, the best nodes of a level are expanded,
and the best of all scored nodes make the tree. Of equal scores, the one that was scored first is better, so that every
parent stands before its children; NaN is better than every number.

`impl` is "definition" (plain torch), "triton" (one kernel each; a GPU or Triton's interpreter) or None: "triton" on a
GPU. Trees that are wider than MOST_WIDTH or have more than MOST_CANDIDATES scored nodes take the definition in any
case. Other names raise ValueError. Both have the same results, bit by bit. Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.dynamic_tree.candidates import Candidates
from fledge.ops.implementations import use_triton

__all__ = ["MOST_CANDIDATES", "MOST_WIDTH", "Candidates", "add_level", "best_nodes"]

MOST_WIDTH = 32  # the children of a level are compared in pairs
MOST_CANDIDATES = 8192  # held by one program


def add_level(
    found: Candidates, level: int, logp_BMw: Tensor, token_BMw: Tensor, ids_W: Tensor, *, impl: str | None = None
) -> tuple[Tensor, Tensor] | None:
    """Scores the nodes of a level, counted from 0 below the root, and chooses the w best of them, in descending order,
    to be expanded next.

    `logp_BMw` (float32) and `token_BMw` (int64) are the log-probabilities and draft ids of the w likeliest children of
    the nodes that were expanded last, in their order (M = w, or 1 for the root), or of all of them alike (M = 1).
    `ids_W` (int64) are the target's ids of the draft's tokens.

    Fills in the level's scores and tokens, and the places and the visibility of the chosen nodes. Returns, of these,
    the target's ids, and as which row their parents were expanded among the rows of all requests, int64 [B, w] each;
    None at the last level, from which no node is expanded.
    """
    if use_triton(impl, found.score_BP) and found.width <= MOST_WIDTH:
        from fledge.ops.dynamic_tree.triton import add_level_triton

        return add_level_triton(found, level, logp_BMw, token_BMw, ids_W)
    return _add_level(found, level, logp_BMw, token_BMw, ids_W)


def best_nodes(
    found: Candidates, nodes: int, root_B: Tensor, ids_W: Tensor, *, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The trees of the roots (target ids, int64) and the best `nodes` - 1 scored nodes, or all if there are fewer.

    Returns, of the N nodes of each tree in the order of their places, the root first, the target's ids, the nodes'
    parents (-1 for the root's), and as which expanded node each was expanded (-1: it was not), int64 [B, N] each.
    """
    if use_triton(impl, found.score_BP) and found.score_BP.shape[1] <= MOST_CANDIDATES:
        from fledge.ops.dynamic_tree.triton import best_nodes_triton

        return best_nodes_triton(found, nodes, root_B, ids_W)
    return _best_nodes(found, nodes, root_B, ids_W)


def _add_level(
    found: Candidates, level: int, logp_BMw: Tensor, token_BMw: Tensor, ids_W: Tensor
) -> tuple[Tensor, Tensor] | None:
    """`add_level` in plain torch."""
    score_BFw = cumulative_scores(found, level, logp_BMw)
    (B, front, w), begin = score_BFw.shape, found.begin(level)
    score_Bn, token_Bn = score_BFw.flatten(1), token_BMw.expand_as(score_BFw).flatten(1)
    found.score_BP[:, begin : begin + front * w] = score_Bn
    found.token_BP[:, begin : begin + front * w] = token_Bn
    if level + 1 == found.levels:
        return None
    best_Bw = _best_first(score_Bn)[:, :w]
    above_Bw = best_Bw // w
    found.place(level).copy_(begin + best_Bw)
    found.seen(level).copy_(_own_bits(found, level))
    if level:
        seen_BwJ = found.seen(level - 1)
        found.seen(level).bitwise_or_(seen_BwJ.gather(1, above_Bw[..., None].expand_as(seen_BwJ)))
    first_B1 = torch.arange(0, B * front, front, device=above_Bw.device)[:, None]
    return ids_W[token_Bn.gather(1, best_Bw)], first_B1 + above_Bw


def _best_first(score_Bn: Tensor) -> Tensor:
    """The places of the scores of each row in descending order, of equal ones in ascending order; NaN is largest.

    Sorts of long rows on a GPU order NaN by their bits, and a sum has other NaN there than its terms. So all are
    replaced by one.
    """
    one_nan_Bn = score_Bn.masked_fill(score_Bn.isnan(), torch.nan)
    return one_nan_Bn.sort(dim=1, descending=True, stable=True).indices


def cumulative_scores(found: Candidates, level: int, logp_BMw: Tensor) -> Tensor:
    """The scores of the children of F nodes, [B, F, w]: a parent's score plus the child's log-probability."""
    if not level:
        return logp_BMw
    return found.score_BP.gather(1, found.place(level - 1))[..., None] + logp_BMw


def _own_bits(found: Candidates, level: int) -> Tensor:
    """The words of expanded nodes of a level that see nothing but themselves, int64 [w, J]."""
    node_w = torch.arange(level * found.width, (level + 1) * found.width, device=found.place_BX.device)
    word_J = torch.arange(found.seen_BXJ.shape[2], device=node_w.device)
    return (node_w[:, None] // 64 == word_J).long() << node_w[:, None] % 64


def _best_nodes(found: Candidates, nodes: int, root_B: Tensor, ids_W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`best_nodes` in plain torch."""
    order_BP = _best_first(found.score_BP)
    best_Bn = order_BP[:, : nodes - 1].sort(dim=1).values
    (B, n), (_, X), device = best_Bn.shape, found.place_BX.shape, best_Bn.device
    node_Bn = torch.arange(1, n + 1, device=device).expand(B, n)
    node_BP = torch.zeros_like(order_BP).scatter_(1, best_Bn, node_Bn)
    slot_BP = torch.full_like(order_BP, -1).scatter_(1, found.place_BX, torch.arange(X, device=device).expand(B, X))
    # behind each expanded node, that of its parent; what is in front of the first one stands for the root
    parent_B1X = torch.cat([torch.zeros_like(root_B)[:, None], node_BP.gather(1, found.place_BX)], dim=1)
    token_BN = torch.cat([root_B[:, None], ids_W[found.token_BP.gather(1, best_Bn)]], dim=1)
    parent_BN = F.pad(parent_B1X.gather(1, best_Bn // found.width), (1, 0), value=-1)
    return token_BN, parent_BN, F.pad(slot_BP.gather(1, best_Bn), (1, 0), value=-1)
