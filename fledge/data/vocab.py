"""The draft vocabulary: the target tokens a draft can propose."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from fledge.types import Document


def choose_vocabulary(
    documents: Iterable[Document], vocab_size: int, size: int, keep: Collection[int] = ()
) -> tuple[Tensor, float]:
    """The `size` most frequent target ids among supervised tokens (ties to the lower id), those in `keep` first.

    Returns ascending ids, int64 [size], and the share of supervised tokens that they cover. Raises ValueError for a
    size above the target's, or a token outside of it.
    """
    if not 0 < size <= vocab_size:
        raise ValueError(f"--draft-vocab {size} is outside 1..{vocab_size}, the target's vocabulary")
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for d in documents:
        if d.tokens.max() >= vocab_size:
            raise ValueError(
                f"the data has a token {d.tokens.max()} and the target's vocabulary ends at {vocab_size - 1}; its "
                "tokenizer belongs to another model"
            )
        counts += torch.bincount(d.tokens[d.spans >= 0], minlength=vocab_size)
    rank = counts.clone()
    rank[[i for i in keep if 0 <= i < vocab_size]] = counts.max() + 1
    ids = rank.sort(descending=True, stable=True).indices[:size].sort().values
    return ids, counts[ids].sum().item() / max(counts.sum().item(), 1)
