"""The draft of a training run: a new draft initialized from the target's weights, or an existing draft. The draft
vocabulary (the target tokens that a draft can propose), and the mask token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.config import DraftConfig
from fledge.data.documents import Document, grouped
from fledge.data.template import shared_variables
from fledge.drafts.draft import Draft
from fledge.drafts.registry import new_draft
from fledge.drafts.weights import load_draft
from fledge.io.fingerprints import template_sha256, tokenizer_sha256
from fledge.targets.compatibility import connect_draft
from fledge.train.setup.recipe import Recipe
from fledge.train.setup.target import PreparedTarget

DRAFT_VOCAB = 32_000  # maximum of the default draft vocabulary size
TOKENS_PER_CHUNK = 1 << 22  # tokens, at least, that one bincount counts

Say = Callable[[str], None]


def make_draft(recipe: Recipe, prepared: PreparedTarget, documents: Sequence[Document], say: Say) -> Draft:
    """The draft to train, on the target's device and in its dtype. `recipe.options.seed` seeds its random weights."""
    torch.manual_seed(recipe.options.seed)
    make = _existing_draft if recipe.draft else _new_draft
    draft = make(recipe, prepared, documents, say).to(device=prepared.target.device, dtype=prepared.target.dtype)
    connect_draft(draft, prepared.target)
    return draft


def check_shape(recipe: Recipe, prepared: PreparedTarget) -> None:
    """Validates the shape of a new draft before the data is read. Raises ValueError if it is not valid."""
    if not recipe.draft:
        _config(recipe, prepared, mask_token=0)


def draft_sizes(recipe: Recipe, planned: PreparedTarget) -> Draft:
    """The draft to train, without values, on the meta device. Raises ValueError if its shape is not valid."""
    with torch.device("meta"):
        draft = new_draft(recipe.draft or _config(recipe, planned, mask_token=0))
    if draft.embed_tokens is not None:
        draft.embed_tokens.requires_grad_(recipe.options.train_embeddings)
    return draft.to(planned.target.dtype)


def _existing_draft(recipe: Recipe, prepared: PreparedTarget, documents: Sequence[Document], say: Say) -> Draft:
    """The draft of --init-from. Raises ValueError if it does not fit the data or --train-embeddings."""
    target, draft = prepared.target, load_draft(recipe.options.init_from)
    coverage = _covered(draft.target_ids(), _counts(documents, target.embedding.shape[0]))
    say(f"the draft vocabulary covers {_coverage_text(coverage)}")
    draft.config = draft.config.with_provenance(coverage=coverage, **_provenance(recipe, prepared))
    mask = draft.config.mask_token_id
    if mask is not None and occurs(mask, documents):
        raise ValueError(
            f"the data contains token {mask} ({target.tokenizer.convert_ids_to_tokens(mask)!r}), which is this draft's "
            "mask token; train a new draft"
        )
    if recipe.options.train_embeddings and draft.embed_tokens is None:
        raise ValueError(
            "--train-embeddings cannot be used with a draft that has no embeddings of its own; train a new draft"
        )
    if draft.embed_tokens is not None:
        draft.embed_tokens.requires_grad_(recipe.options.train_embeddings)
    return draft.train()


def _new_draft(recipe: Recipe, prepared: PreparedTarget, documents: Sequence[Document], say: Say) -> Draft:
    target, mask = prepared.target, None
    vocab = target.embedding.shape[0]
    ids, coverage = choose_vocabulary(documents, vocab, _vocab_size(recipe, vocab), target.stop_ids)
    say(f"the draft vocabulary has {ids.numel():,} of {vocab:,} tokens and covers {_coverage_text(coverage)}")
    if recipe.method.masks:
        mask = choose_mask_token(documents, vocab, target.tokenizer, target.stop_ids)
        say(
            f"mask token: {mask} ({target.tokenizer.convert_ids_to_tokens(mask)!r}) stands for tokens that are not "
            "known yet"
        )
    if recipe.options.train_embeddings:
        say("the draft gets embeddings of its own: vLLM uses them, SGLang replaces them by the target's")
    config = _config(recipe, prepared, mask)
    draft = new_draft(config.with_provenance(coverage=coverage, **_provenance(recipe, prepared)))
    draft.set_vocabulary(ids)
    draft.initialize(target.last_layer_weights(), target.head_weight, target.embedding)
    return draft


def _config(recipe: Recipe, prepared: PreparedTarget, mask_token: int | None) -> DraftConfig:
    shape, options = prepared.target.shape, recipe.options
    layers = recipe.layers
    return DraftConfig.for_target(
        shape,
        max_length=prepared.max_length,
        method=recipe.method.name,
        draft_vocab_size=_vocab_size(recipe, shape["vocab_size"]),
        num_hidden_layers=layers,
        aux_layers=prepared.layers or None,
        num_aux_hidden_states=len(prepared.layers),
        own_embeddings=options.train_embeddings,
        mask_token_id=mask_token if recipe.method.masks else None,
        windows=(options.sliding_window,) * layers if options.sliding_window else (),
        **dict.fromkeys(recipe.switches, True),
    )


def _vocab_size(recipe: Recipe, vocab: int) -> int:
    """The vocabulary size of a new draft, for a target with `vocab` tokens."""
    return vocab if recipe.method.borrows_head else recipe.options.draft_vocab or min(vocab, DRAFT_VOCAB)


def _provenance(recipe: Recipe, prepared: PreparedTarget) -> dict[str, Any]:
    """The values that the draft's config records about the training."""
    target, modes = prepared.target, recipe.data.modes
    return dict(
        target=target.name,
        target_layers=target.num_layers,
        tokenizer_sha256=tokenizer_sha256(target.tokenizer),
        template_sha256=template_sha256(target.tokenizer),
        template_kwargs=shared_variables(modes),
        template_modes=modes if len(modes) > 1 else (),
        depth=recipe.depth,
        max_length=prepared.max_length,
    )


def _coverage_text(coverage: float) -> str:
    """The share of the assistant's tokens in the draft vocabulary, with a warning if it is small."""
    warning = "; the loss covers only these tokens, so a low loss means little: use a larger draft vocabulary"
    return f"{coverage:.2%} of the assistant's tokens" + (warning if coverage < 0.5 else "")


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


def missing_from(ids_W: Tensor, documents: Sequence[Document], vocab_size: int, most: int) -> list[tuple[int, int]]:
    """The `most` frequent supervised tokens that the target ids `ids_W` lack, as (token id, number of occurrences), the
    most frequent first; ties go to the lower id. Raises ValueError if a token is not below `vocab_size`."""
    counts = _counts(documents, vocab_size)
    counts[ids_W.numpy()] = 0
    return [(i, int(counts[i])) for i in np.argsort(-counts, kind="stable")[:most].tolist() if counts[i]]


def _covered(ids_W: Tensor, counts_V: np.ndarray) -> float:
    """The fraction of supervised tokens that the target ids `ids_W` cover."""
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
    """The token id that a draft reads at positions whose token is not yet known.

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
            "the method needs a mask token that does not occur in the data, but the data contains the whole vocabulary"
        )
    return max((i for i in free if i in special), default=free[-1])
