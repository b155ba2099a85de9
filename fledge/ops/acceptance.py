"""Which nodes of draft trees are the target's own tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.ops.implementations import best_impl
from fledge.types import Tree, Verdict

MOST_NODES = 4096  # held by one program


def accept_own(tree: Tree, own_BN: Tensor, *, impl: str | None = None) -> Verdict:
    """Commits the target's own tokens: those that each request's tree contains, and the first that it does not.

    `own_BN` (int64) is the target's own token after each node. A node is accepted if its parent is and its token is the
    parent's own; the root always is. `impl` is "definition" (plain torch), "triton" (one kernel, for trees of up to
    MOST_NODES nodes; a GPU or Triton's interpreter), or None: "triton" on a GPU.
    """
    kernel = (best_impl(own_BN.device, torch.float32) if impl is None else impl) == "triton"
    if kernel and own_BN.shape[1] <= MOST_NODES:
        from fledge.ops.acceptance_triton import accept_own_triton

        return accept_own_triton(tree, own_BN)
    return _accept_own(tree, own_BN)


def _accept_own(tree: Tree, own_BN: Tensor) -> Verdict:
    """The definition of `accept_own`."""
    if not tree.levels:  # nothing was drafted
        return Verdict(torch.zeros_like(own_BN), torch.ones_like(own_BN[:, 0]), own_BN)
    matched_BN = matches(tree, own_BN)
    node_N = torch.arange(own_BN.shape[1], device=own_BN.device)
    if tree.count_B is not None:
        matched_BN = matched_BN & (node_N < tree.count_B[:, None])
    if tree.parent_BN is None:
        return Verdict.of(node_N.expand_as(own_BN), matched_BN.cumprod(1).sum(1), own_BN)
    path_BNN, depth_BN = tree.ancestors(), tree.depths()
    accepted_BN = (matched_BN[:, None] | ~path_BNN).all(-1)
    # siblings differ, so that at most one node of a level is accepted
    level_R1 = torch.arange(tree.levels + 1, device=own_BN.device)[:, None]
    hit_BRN = accepted_BN[:, None] & (depth_BN[:, None] == level_R1)
    path_BR = torch.where(hit_BRN, node_N, 0).amax(-1)
    return Verdict.of(path_BR, hit_BRN.any(-1).sum(-1), own_BN.gather(1, path_BR))


def matches(tree: Tree, own_BN: Tensor) -> Tensor:
    """Whether each node's token is the target's own after its parent, bool [B, N]; True for the root."""
    parent_BN = tree.parent_BN
    if parent_BN is None:
        matched_BN = torch.ones_like(own_BN, dtype=torch.bool)
        matched_BN[:, 1:] = tree.token_BN[:, 1:] == own_BN[:, :-1]
        return matched_BN
    return (tree.token_BN == own_BN.gather(1, parent_BN.clamp_min(0))) | (parent_BN < 0)
