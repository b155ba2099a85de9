"""The draft vocabulary: the target tokens a draft can propose."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fledge.types import Document

TOKENS_AT_ONCE = 1 << 22


def choose_vocabulary(
    documents: Iterable[Document], vocab_size: int, size: int, keep: Collection[int] = ()
) -> tuple[Tensor, float]:
    """The `size` most frequent target ids among supervised tokens (ties to the lower id), those in `keep` first.

    Returns ascending ids, int64 [size], and the share of supervised tokens that they cover. Raises ValueError for a
    size above the target's, or a token outside of it.
    """
    if not 0 < size <= vocab_size:
        raise ValueError(f"--draft-vocab {size} is outside 1..{vocab_size}, the target's vocabulary")
    counts = _counts(documents, vocab_size)
    rank = counts.clone()
    rank[[i for i in keep if 0 <= i < vocab_size]] = counts.max() + 1
    ids = rank.sort(descending=True, stable=True).indices[:size].sort().values
    return ids, _share(ids, counts)


def coverage_of(ids_W: Tensor, documents: Iterable[Document], vocab_size: int) -> float:
    """The share of supervised tokens that these target ids cover. Raises ValueError as `choose_vocabulary`."""
    return _share(ids_W, _counts(documents, vocab_size))


def _share(ids_W: Tensor, counts_V: Tensor) -> float:
    return counts_V[ids_W].sum().item() / max(counts_V.sum().item(), 1)


def _counts(documents: Iterable[Document], vocab_size: int) -> Tensor:
    """How often each target id is supervised, int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for some in _chunks(documents):
        tokens, spans = torch.cat([d.tokens for d in some]), torch.cat([d.spans for d in some])
        if tokens.max() >= vocab_size:
            raise ValueError(
                f"the data has a token {tokens.max()} and the target's vocabulary ends at {vocab_size - 1}; its "
                "tokenizer belongs to another model"
            )
        counts += torch.bincount(tokens[spans >= 0], minlength=vocab_size)
    return counts


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents in groups that are counted at once: each count is as wide as the vocabulary."""
    some, tokens = [], 0
    for d in documents:
        some.append(d)
        tokens += d.tokens.numel()
        if tokens >= TOKENS_AT_ONCE:
            yield some
            some, tokens = [], 0
    if some:
        yield some


def choose_mask_token(
    documents: Iterable[Document], vocab_size: int, tokenizer: Any, stop_ids: Collection[int] = ()
) -> int:
    """The id that a P-EAGLE draft reads for a word not known yet: one that the data does not hold and no turn ends
    with. A special token of the tokenizer where there is such (the last), else the last id of all. Raises ValueError
    where the data holds every one."""
    seen = torch.zeros(vocab_size, dtype=torch.bool)
    for d in documents:
        seen[d.tokens] = True
    seen[[i for i in stop_ids if i < vocab_size]] = True
    free = (~seen).nonzero().squeeze(-1).tolist()
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    if not free:
        raise ValueError(
            "P-EAGLE needs a token that the data does not hold, and it holds the target's whole vocabulary"
        )
    return max((i for i in free if i in special), default=free[-1])
