"""The draft of a training run: a new draft initialized from the target's weights, or an existing draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fledge.config import DraftConfig
from fledge.data.documents import Document
from fledge.data.template import shared_variables
from fledge.data.vocab import choose_mask_token, choose_vocabulary, coverage_of, occurs
from fledge.drafts.draft import Draft
from fledge.drafts.registry import new_draft
from fledge.drafts.weights import load_draft
from fledge.io.fingerprints import template_sha256, tokenizer_sha256
from fledge.targets.compatibility import connect_draft
from fledge.train.setup.recipe import Recipe
from fledge.train.setup.target import PreparedTarget

DRAFT_VOCAB = 32_000  # maximum of the default draft vocabulary size

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
        draft = new_draft(recipe.draft.config if recipe.draft else _config(recipe, planned, mask_token=0))
    if draft.embed_tokens is not None:
        draft.embed_tokens.requires_grad_(recipe.options.train_embeddings)
    return draft.to(planned.target.dtype)


def _existing_draft(recipe: Recipe, prepared: PreparedTarget, documents: Sequence[Document], say: Say) -> Draft:
    """The draft of --init-from. Raises ValueError if it does not fit the data or --train-embeddings."""
    name, target = recipe.draft.name, prepared.target
    draft = load_draft(name)
    coverage = coverage_of(draft.target_ids(), documents, target.embedding.shape[0])
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
    shape = prepared.target.shape
    return DraftConfig.for_target(
        shape,
        max_length=prepared.max_length,
        method=recipe.method.name,
        draft_vocab_size=_vocab_size(recipe, shape["vocab_size"]),
        num_hidden_layers=recipe.options.layers,
        aux_layers=prepared.layers or None,
        num_aux_hidden_states=len(prepared.layers),
        own_embeddings=recipe.options.train_embeddings,
        mask_token_id=mask_token if recipe.method.masks else None,
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
