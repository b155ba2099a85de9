"""The scored nodes of dynamic trees while they grow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """The P scored nodes below the roots of B trees, in the order in which they were scored.

    First come the w = `width` likeliest children of the root. At each level but the last of `levels`, the w best nodes
    are then expanded, of which there are X in all, and w children of each are scored. So the children of the e-th
    expanded node, counted from 0, have the places from w (e + 1) on.

    `score_BP` (float32) are cumulative log-probabilities, `token_BP` (int64) draft ids, and `place_BX` (int64) the
    places of the expanded nodes. `seen_BXJ` (int64) says which expanded nodes each of these sees, its ancestors and
    itself, as J words of bits (`ops.tree_attention.pack_bits`).
    """

    width: int
    levels: int
    score_BP: Tensor
    token_BP: Tensor
    place_BX: Tensor
    seen_BXJ: Tensor

    @classmethod
    def empty(cls, requests: int, levels: int, width: int, device: torch.device) -> Candidates:
        """Room for the nodes of trees of so many levels, nothing of which is initialized."""
        X = (levels - 1) * width
        score_BP = torch.empty(requests, width + X * width, dtype=torch.float32, device=device)
        whole = dict(dtype=torch.int64, device=device)
        place_BX, seen_BXJ = torch.empty(requests, X, **whole), torch.empty(requests, X, -(-X // 64), **whole)
        return cls(width, levels, score_BP, torch.empty(score_BP.shape, **whole), place_BX, seen_BXJ)

    def seen(self, level: int) -> Tensor:
        """The words of the nodes of a level below the root, counted from 0, that are expanded, [B, w, J]."""
        return self.seen_BXJ[:, level * self.width : (level + 1) * self.width]

    def place(self, level: int) -> Tensor:
        """The places of these nodes, [B, w]."""
        return self.place_BX[:, level * self.width : (level + 1) * self.width]

    def begin(self, level: int) -> int:
        """The place of the first node of a level."""
        return self.width * (1 + (level - 1) * self.width) if level else 0
