"""Conditional drop-token sampling (PARD, An et al. 2025, arXiv:2504.18583), which P-EAGLE uses (Hui et al. 2026,
arXiv:2602.01469): the share of live slots that is trained decreases with the depth, which bounds the cost of K depths.

A depth is a TTT step of EAGLE-3, whose slots read only keys and states of the same slot and of the first pass, so that
slots can be dropped there too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.types import Packed


@dataclass(frozen=True)
class DropTokens:
    """At depth d, a share of max(rate^d, min_rate) of each document's live slots is trained.

    Raises ValueError unless 0 < `rate` <= 1 and 0 <= `min_rate` <= 1.
    """

    rate: float = 0.8
    min_rate: float = 0.2

    def __post_init__(self) -> None:
        if not (0 < self.rate <= 1 and 0 <= self.min_rate <= 1):
            raise ValueError(
                f"a rate of {self.rate} with a minimum of {self.min_rate}: the rate must be above 0 and at most 1, the "
                "minimum between 0 and 1"
            )

    def keep(self, row: Packed, live: Sequence[Tensor], key: str = "") -> list[Tensor]:
        """The slots trained at each depth: ascending int64 tensors, drawn with `key` as the seed.

        At depth 0, all live slots. At depth d, a random sample of each document's pool, of size
        min(pool, int(live · share)). The pool is the slots live at depth d, and from depth 2 on only those of them that
        were kept at depth d - 1.
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
