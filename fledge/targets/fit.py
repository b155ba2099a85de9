"""Whether a draft belongs to a target, which layers of it the draft reads, and what joins the two."""

from __future__ import annotations

from collections.abc import Sequence

from fledge.config import DraftConfig, default_aux_layers, engine_layers
from fledge.models.draft import Draft
from fledge.models.weights import tokenizer_sha256
from fledge.targets.interface import Target


def fit(draft: Draft, target: Target) -> tuple[int, ...]:
    """Checks that a draft belongs to a target, shares the target's embedding (and for EAGLE-1 its head) with it, and
    returns the layers it reads, as `layers_of`. Raises ValueError naming the first thing that does not fit."""
    if problem := mismatch(draft.config, target):
        raise ValueError(f"this draft does not fit {target.name or 'the target'}: {problem}")
    layers = layers_of(draft.config, target)
    draft.share_target_weights(target.embedding, target.head_weight)
    return layers


def layers_of(config: DraftConfig, target: Target) -> tuple[int, ...]:
    """The target's layers that a draft reads, ascending; () for a method that reads the final state alone."""
    return resolve_layers(config.aux_layers if config.family.reads_layers else (), target)


def resolve_layers(asked: Sequence[int] | None, target: Target) -> tuple[int, ...]:
    """The layers asked for, ascending; None: the engines' default. Raises ValueError for ids that the target does not
    have, or where it does not show its layers."""
    layers = default_aux_layers(target.num_layers) if asked is None else tuple(sorted(asked))
    if layers and (min(layers) < 0 or max(layers) > target.num_layers):
        raise ValueError(f"layers {list(layers)} are to be read, but the target has layers 0..{target.num_layers}")
    return layers


def mismatch(config: DraftConfig, target: Target) -> str | None:
    """Why a draft cannot serve a target, in words, or None."""
    known, method = config.provenance, config.family
    vocabulary, width = target.embedding.shape
    if config.target_hidden_size != width:
        return f"it reads hidden states {config.target_hidden_size} wide and the target's are {width}"
    if config.vocab_size != vocabulary:
        return f"it was made for a vocabulary of {config.vocab_size} tokens and the target has {vocabulary}"
    if known.target_layers and known.target_layers != target.num_layers:
        return f"it was trained on a target of {known.target_layers} layers and this one has {target.num_layers}"
    if method.reads_layers and config.aux_layers is None and engine_layers(target.num_layers) is None:
        return (
            f"its config does not list the layers it reads, and the target has {target.num_layers}, too few for the "
            "engines' default; list them as eagle_aux_hidden_state_layer_ids"
        )
    other = known.tokenizer_sha256 and target.tokenizer is not None
    if other and known.tokenizer_sha256 != tokenizer_sha256(target.tokenizer):
        return "it was trained with another tokenizer, so its tokens mean other text; use the target it was made for"
    if method.borrows_head and not target.plain_head:
        return (
            "it uses the target's head, but the target's logits are more than the product with that head's weight (a "
            "bias, scaling or cap); train an EAGLE-3 draft instead"
        )
    if config.rope.rope_type == "longrope" and config.rope.for_length(target.max_length).long != config.rope.long:
        used = "long" if config.rope.long else "short"
        return f"it was trained with longrope's {used} factors; load the target with max_length={known.max_length}"
    return None
