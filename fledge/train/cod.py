"""Conditional drop-token sampling (PARD, An et al. 2025, arXiv:2504.18583) of P-EAGLE's deeper slots (Hui et al. 2026,
arXiv:2602.01469): of the anchors that are live at a depth fewer are kept the deeper it is, so that K depths cost little
more than a few."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.types import Packed


@dataclass(frozen=True)
class DropTokens:
    """Depth d keeps a share max(rate^d, least) of a document's live anchors, drawn by `key`."""

    rate: float = 0.8
    least: float = 0.2
    key: str = ""

    def __post_init__(self) -> None:
        if not (0 < self.rate <= 1 and 0 <= self.least <= 1):
            raise ValueError(
                f"a rate of {self.rate} and at least {self.least} are no shares: 1 is most, and the rate is above 0"
            )

    def keep(self, row: Packed, live: Sequence[Tensor]) -> list[Tensor]:
        """The slots of each depth that are trained, ascending int64 tensors: all live ones at depth 0; at depth d, of
        each document, min(pool, int(live · share)) drawn from the pool of those live at d and, from depth 2 on, kept at
        d - 1."""
        seed = int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        documents = int(row.doc_T.max()) + 1
        kept = list(live[:1])
        for d in range(1, len(live)):
            pool = live[d]
            if d > 1:
                before = torch.zeros_like(row.token_T, dtype=torch.bool)
                before[kept[-1]] = True
                pool = pool[before[pool]]
            share = max(self.rate**d, self.least)
            wanted = (torch.bincount(row.doc_T[live[d]], minlength=documents).double() * share).long()
            shuffled = pool[torch.randperm(pool.numel(), generator=generator)]
            by_document = shuffled[row.doc_T[shuffled].argsort(stable=True)]
            doc = row.doc_T[by_document]
            first = torch.searchsorted(doc, torch.arange(documents))
            rank = torch.arange(doc.numel()) - first[doc]
            kept.append(by_document[rank < wanted[doc]].sort().values)
        return kept
