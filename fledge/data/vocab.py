"""The draft vocabulary (the target tokens that a draft can propose), and P-EAGLE's mask token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.data.documents import Document, grouped

TOKENS_PER_CHUNK = 1 << 22  # tokens, at least, that one bincount counts


def choose_vocabulary(
    documents: Sequence[Document], vocab_size: int, size: int, keep: Collection[int] = ()
) -> tuple[Tensor, float]:
    """The ids in `keep` and the most frequent target ids among supervised tokens, `size` ids in total.

    Ties go to the lower id. Returns the ids in ascending order, int64 [size], and the ids' fraction of supervised
    tokens. Raises ValueError if `size` is not in 1 .. `vocab_size`, or if a token is not below `vocab_size`.
    """
    if not 0 < size <= vocab_size:
        raise ValueError(f"--draft-vocab {size} is outside 1..{vocab_size}, the target's vocabulary")
    counts = _counts(documents, vocab_size)
    rank = counts.copy()
    rank[[i for i in keep if 0 <= i < vocab_size]] = counts.max() + 1
    ids_W = torch.from_numpy(np.sort(np.argsort(-rank, kind="stable")[:size]))
    return ids_W, _covered(ids_W, counts)


def coverage_of(ids_W: Tensor, documents: Sequence[Document], vocab_size: int) -> float:
    """The fraction of supervised tokens that the target ids `ids_W` cover.

    Raises ValueError if a token is not below `vocab_size`.
    """
    return _covered(ids_W, _counts(documents, vocab_size))


def missing_from(ids_W: Tensor, documents: Sequence[Document], vocab_size: int, most: int) -> list[tuple[int, int]]:
    """The `most` frequent supervised tokens that the target ids `ids_W` lack, as (token id, number of occurrences), the
    most frequent first; ties go to the lower id. Raises ValueError if a token is not below `vocab_size`."""
    counts = _counts(documents, vocab_size)
    counts[ids_W.numpy()] = 0
    return [(i, int(counts[i])) for i in np.argsort(-counts, kind="stable")[:most].tolist() if counts[i]]


def _covered(ids_W: Tensor, counts_V: np.ndarray) -> float:
    return int(counts_V[ids_W.numpy()].sum()) / max(int(counts_V.sum()), 1)


def _counts(documents: Sequence[Document], vocab_size: int) -> np.ndarray:
    """The number of supervised occurrences of each target id, int64 [V]."""
    found, _ = count_tokens(documents)
    if len(found) > vocab_size:
        raise ValueError(
            f"the data has token id {len(found) - 1}, but the target's vocabulary ends at {vocab_size - 1}; the "
            "tokenizer belongs to another model"
        )
    return np.pad(found, (0, vocab_size - len(found)))


def occurs(token: int, documents: Sequence[Document]) -> bool:
    """Whether a token id occurs in the documents, supervised or not."""
    _, seen = count_tokens(documents)
    return token < len(seen) and bool(seen[token])


def count_tokens(documents: Iterable[Document]) -> tuple[np.ndarray, np.ndarray]:
    """The number of supervised occurrences of each token id, int64, and whether each id occurs at all, bool. Both
    arrays end with the highest id that occurs."""
    supervised, seen = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
    # each bincount allocates an array of the vocabulary's size, so counting every document alone would be slow
    for chunk in grouped(documents, lambda d: len(d.tokens), TOKENS_PER_CHUNK):
        tokens, spans = np.concatenate([d.tokens for d in chunk]), np.concatenate([d.spans for d in chunk])
        seen = np.pad(seen, (0, max(int(tokens.max()) + 1 - len(seen), 0)))
        seen[tokens] = True
        counted = np.bincount(tokens[spans >= 0], minlength=len(seen))
        counted[: len(supervised)] += supervised
        supervised = counted
    return supervised, seen


def choose_mask_token(
    documents: Sequence[Document], vocab_size: int, tokenizer: Any, stop_ids: Collection[int] = ()
) -> int:
    """The token id that a P-EAGLE draft reads at positions whose token is not yet known.

    It is an id that occurs neither in the data nor in `stop_ids`: the highest such special token of the tokenizer, or
    else the highest such id. Raises ValueError if there is none.
    """
    found, seen = count_tokens(documents)[1], np.zeros(vocab_size, dtype=bool)
    seen[: len(found)] = found
    seen[[i for i in stop_ids if 0 <= i < vocab_size]] = True
    free = np.flatnonzero(~seen).tolist()
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    if not free:
        raise ValueError(
            "P-EAGLE needs a mask token that does not occur in the data, but the data contains the whole vocabulary"
        )
    return max((i for i in free if i in special), default=free[-1])
