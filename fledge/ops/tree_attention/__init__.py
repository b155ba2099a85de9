"""Attention in decoding: a few new rows per sequence attend to a key-value cache and to a tree of new rows.

The keys and values of one layer are in a pool of P slots. Sequence b owns the slots from start_b on. Its first length_b
slots are the prefix, in the order of positions; the J slots after them hold the new rows, of which row s reads those
that `visible` names (in a draft tree: itself and its ancestors):

    out_s = softmax(scale [q_s . k_i for the prefix slots i ; q_s . k_j for the new slots j that s sees]) [v_i ; v_j]

With a window, row s at position p_s reads the prefix slots i > p_s - window only. Scores and softmax are computed in at
least float32. The kernels read lengths, starts, positions and visibility on the device: their grids depend on shapes
alone, so that a CUDA graph of a call may be replayed with other values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.ops.implementations import IMPLS, best_impl, use_triton
from fledge.ops.tree_attention.definition import tree_attention_reference, tree_attention_torch
from fledge.ops.tree_attention.tiles import COUNTERS
from fledge.ops.tree_attention.visible import Visible, VisibleBits, VisibleChain, pack_bits
from fledge.types import Tree

__all__ = [
    "COUNTERS",
    "IMPLS",
    "Visible",
    "VisibleBits",
    "VisibleChain",
    "best_impl",
    "pack_bits",
    "place_trees",
    "tree_attention",
    "tree_attention_reference",
]


def tree_attention(
    q_BSHd: Tensor,
    keys_GPd: Tensor,
    values_GPd: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    visible: Visible | VisibleChain,
    *,
    scale: float | None = None,
    window: int | None = None,
    position_BS: Tensor | None = None,
    counters: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of S new rows of each of B sequences; returns [B, S, H, d] in the dtype of q.

    `keys_GPd` and `values_GPd` are the pool of one layer in the dtype of q, possibly strided views, and already hold
    the new rows. `start_B`, `length_B` and `position_BS` are int32 or int64. H / G consecutive query heads share a key
    head. `scale` is d^-1/2 unless given. Slots that a row does not see may hold any finite number. Every row must see
    at least one slot. There are no gradients.

    `counters` are COUNTERS zeros, int32, which are zeros again after the call; None: new ones, which a kernel has to
    fill. Calls one after the other on a stream may share them, but not calls that may run at the same time.

    `impl` is "definition" (plain torch; reads the lengths on the host), "triton" (a GPU or Triton's interpreter;
    bfloat16, float16 and float32; heads of at most 256), or None for `best_impl`. Raises ValueError for another name,
    for shapes or dtypes that do not belong together, and for a window without positions.
    """
    (B, S, H, d), (G, P, _), J = q_BSHd.shape, keys_GPd.shape, visible.shape[2]
    if H % G or keys_GPd.shape != (G, P, d) or values_GPd.shape != (G, P, d) or visible.shape != (B, S, J):
        raise ValueError(
            f"attention of queries {tuple(q_BSHd.shape)} to keys {tuple(keys_GPd.shape)} and values "
            f"{tuple(values_GPd.shape)} with visibility {visible.shape}: the shapes must be [B, S, H, d], "
            "[G, P, d] twice and [B, S, J], where G divides H"
        )
    if not q_BSHd.dtype == keys_GPd.dtype == values_GPd.dtype:
        raise ValueError(
            f"queries, keys and values must have one dtype, not {q_BSHd.dtype}, {keys_GPd.dtype}, {values_GPd.dtype}"
        )
    if window is not None and (window < 1 or position_BS is None):
        raise ValueError(f"a window ({window}) must be at least 1, and needs the positions of the rows")
    if counters is not None and (counters.shape != (COUNTERS,) or counters.dtype != torch.int32):
        raise ValueError(f"the counters must be {COUNTERS} int32, not {tuple(counters.shape)} {counters.dtype}")
    scale = d**-0.5 if scale is None else scale
    arguments = (q_BSHd, keys_GPd, values_GPd, start_B, length_B)
    if use_triton(impl, q_BSHd):
        from fledge.ops.tree_attention.triton import tree_attention_triton

        return tree_attention_triton(*arguments, visible, scale, window, position_BS, counters)
    return tree_attention_torch(*arguments, visible, scale, window, position_BS)


def place_trees(
    tree: Tree, start_B: Tensor, length_B: Tensor, *, impl: str | None = None
) -> tuple[Tensor, Tensor, Visible | VisibleChain]:
    """The positions and slots of the nodes of trees behind the prefixes of their sequences, int64 [B, N] each, and
    which nodes each one sees: its ancestors and itself.

    `start_B` and `length_B` (int64) are as in `tree_attention`. Nodes stand in the slots in their order. `impl` is
    "definition" (plain torch), "triton" (one kernel; a GPU or Triton's interpreter), or None: "triton" on a GPU.
    """
    if (best_impl(length_B.device, torch.float32) if impl is None else impl) == "triton":
        from fledge.ops.tree_attention.place_triton import place_trees_triton

        position_BN, slot_BN, words_BNW = place_trees_triton(tree, start_B, length_B)
        if tree.parent_BN is not None:
            return position_BN, slot_BN, VisibleBits(words_BNW, tree.token_BN.shape[1])
        return position_BN, slot_BN, VisibleChain(words_BNW, tree.token_BN.shape[1])
    depth_BN, N = tree.depths(), tree.token_BN.shape[1]
    slot_BN = (start_B + length_B)[:, None] + torch.arange(N, device=length_B.device)
    visible = VisibleChain(depth_BN, N) if tree.parent_BN is None else Visible(tree.ancestors())
    return length_B[:, None] + depth_BN, slot_BN, visible
