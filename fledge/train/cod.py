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
    """Depth d keeps a share max(rate^d, min_rate) of a document's live anchors. Raises ValueError for rates outside
    (0, 1] and [0, 1]."""

    rate: float = 0.8
    min_rate: float = 0.2

    def __post_init__(self) -> None:
        if not (0 < self.rate <= 1 and 0 <= self.min_rate <= 1):
            raise ValueError(
                f"a rate of {self.rate} with a minimum of {self.min_rate}: the rate is above 0 and at most 1, the "
                "minimum between 0 and 1"
            )

    def keep(self, row: Packed, live: Sequence[Tensor], key: str = "") -> list[Tensor]:
        """The slots of each depth that are trained, ascending int64 tensors, drawn by the seed `key`.

        All live ones at depth 0; at depth d, of each document, min(pool, int(live · share)) from the pool of those
        live at d and, from depth 2 on, kept at d - 1.
        """
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        documents = int(row.doc_T.max()) + 1
        kept = list(live[:1])
        for d in range(1, len(live)):
            pool = live[d]
            if d > 1:
                before = torch.zeros_like(row.token_T, dtype=torch.bool)
                before[kept[-1]] = True
                pool = pool[before[pool]]
            share = max(self.rate**d, self.min_rate)
            wanted = (torch.bincount(row.doc_T[live[d]], minlength=documents).double() * share).long()
            shuffled = pool[torch.randperm(pool.numel(), generator=generator)]
            by_document = shuffled[row.doc_T[shuffled].argsort(stable=True)]
            doc = row.doc_T[by_document]
            first = torch.searchsorted(doc, torch.arange(documents, dtype=doc.dtype))
            rank = torch.arange(doc.numel()) - first[doc]
            kept.append(by_document[rank < wanted[doc]].sort().values)
        return kept
