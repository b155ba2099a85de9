"""Where the nodes of trees go, and what they see."""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.implementations import best_impl
from fledge.kernels.tree_attention.visible import Visible, VisibleBits, VisibleChain
from fledge.types import Tree


def place_trees(
    tree: Tree, start_B: Tensor, length_B: Tensor, *, impl: str | None = None
) -> tuple[Tensor, Tensor, Visible | VisibleChain]:
    """The positions and slots of the nodes of trees behind the prefixes of their sequences, int64 [B, N] each, and
    which nodes each one sees: its ancestors and itself.

    `start_B` and `length_B` (int64) are as in `tree_attention`. Nodes stand in the slots in their order. `impl` is
    "definition" (plain torch), "triton" (one kernel; a GPU or Triton's interpreter), or None: "triton" on a GPU.
    """
    if (best_impl(length_B.device, torch.float32) if impl is None else impl) == "triton":
        from fledge.kernels.tree_attention.place_triton import place_trees_triton

        position_BN, slot_BN, words_BNW = place_trees_triton(tree, start_B, length_B)
        if tree.parent_BN is not None:
            return position_BN, slot_BN, VisibleBits(words_BNW, tree.token_BN.shape[1])
        return position_BN, slot_BN, VisibleChain(words_BNW, tree.token_BN.shape[1])
    depth_BN, N = tree.depths(), tree.token_BN.shape[1]
    slot_BN = (start_B + length_B)[:, None] + torch.arange(N, device=length_B.device)
    visible = VisibleChain(depth_BN, N) if tree.parent_BN is None else Visible(tree.ancestors())
    return length_B[:, None] + depth_BN, slot_BN, visible
