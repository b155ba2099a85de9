"""EAGLE-2's dynamic trees (Li et al. 2024, arXiv:2406.16858, section 4): the steps between the passes of a draft.

A tree grows by levels. Each node is scored by its cumulative log-probability, the best nodes of a level are expanded,
and the best of all scored nodes make the tree. Of equal scores, the one that was scored first is better, so that every
parent stands before its children; NaN is better than every number.

`impl` is "definition" (plain torch), "triton" (one kernel each; a GPU or Triton's interpreter) or None: "triton" on a
GPU. Trees that are wider than MOST_WIDTH or have more than MOST_CANDIDATES scored nodes take the definition in any
case. Other names raise ValueError. Both have the same results, bit by bit. Nothing waits for the device.
"""

from __future__ import annotations

from torch import Tensor

from fledge.kernels.dynamic_tree import definition
from fledge.kernels.dynamic_tree.candidates import Candidates
from fledge.kernels.implementations import use_triton

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
        from fledge.kernels.dynamic_tree.triton import add_level_triton

        return add_level_triton(found, level, logp_BMw, token_BMw, ids_W)
    return definition.add_level(found, level, logp_BMw, token_BMw, ids_W)


def best_nodes(
    found: Candidates, nodes: int, root_B: Tensor, ids_W: Tensor, *, impl: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The trees of the roots (target ids, int64) and the best `nodes` - 1 scored nodes, or all if there are fewer.

    Returns, of the N nodes of each tree in the order of their places, the root first, the target's ids, the nodes'
    parents (-1 for the root's), and as which expanded node each was expanded (-1: it was not), int64 [B, N] each.
    """
    if use_triton(impl, found.score_BP) and found.score_BP.shape[1] <= MOST_CANDIDATES:
        from fledge.kernels.dynamic_tree.triton import best_nodes_triton

        return best_nodes_triton(found, nodes, root_B, ids_W)
    return definition.best_nodes(found, nodes, root_B, ids_W)
