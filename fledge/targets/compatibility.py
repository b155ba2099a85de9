"""Checks that a draft belongs to a target, and connects the two."""

from __future__ import annotations

from collections.abc import Sequence

from fledge.config import DraftConfig, default_aux_layers, engine_layers
from fledge.drafts.draft import Draft
from fledge.io.fingerprints import tokenizer_sha256
from fledge.targets.interface import Target


def connect_draft(draft: Draft, target: Target) -> tuple[int, ...]:
    """Shares the target's embedding, and for EAGLE-1 its head, with a draft. Returns `layers_of` the draft.

    Raises ValueError like `check_fits`.
    """
    layers = check_fits(draft.config, target)
    draft.share_target_weights(target.embedding, target.head_weight)
    return layers


def check_fits(config: DraftConfig, target: Target) -> tuple[int, ...]:
    """`layers_of` a draft. Raises ValueError if it does not belong to the target (`mismatch`), whose weights may be on
    the meta device."""
    if problem := mismatch(config, target):
        raise ValueError(f"this draft does not fit {target.name or 'the target'}: {problem}")
    return layers_of(config, target)


def layers_of(config: DraftConfig, target: Target) -> tuple[int, ...]:
    """The ids of the target's hidden states that a draft reads, ascending, as in `TrainingTarget.features`; () for a
    method that reads the final hidden state only."""
    return resolve_layers(config.aux_layers if config.family.reads_layers else (), target)


def resolve_layers(requested: Sequence[int] | None, target: Target) -> tuple[int, ...]:
    """The requested layer ids in ascending order; None: the engines' default (`default_aux_layers`). Raises ValueError
    for ids that the target does not have, and if its layers cannot be identified."""
    layers = default_aux_layers(target.num_layers) if requested is None else tuple(sorted(requested))
    if layers and (min(layers) < 0 or max(layers) > target.num_layers):
        raise ValueError(f"layers {list(layers)} were requested, but the target has layers 0..{target.num_layers}")
    return layers


def mismatch(config: DraftConfig, target: Target) -> str | None:
    """The reason why a draft cannot be used with a target, as text for a message; None if it can."""
    known, method = config.provenance, config.family
    vocabulary, width = target.embedding.shape
    if config.target_hidden_size != width:
        return f"it reads hidden states of size {config.target_hidden_size}, and the target's have size {width}"
    if config.vocab_size != vocabulary:
        return f"it was made for a vocabulary of {config.vocab_size} tokens, and the target has {vocabulary}"
    if known.target_layers and known.target_layers != target.num_layers:
        return f"it was trained for a target of {known.target_layers} layers, and this one has {target.num_layers}"
    if method.reads_layers and config.aux_layers is None and engine_layers(target.num_layers) is None:
        return (
            f"its config does not list the layers it reads, and the target has {target.num_layers}, too few for the "
            "engines' default; list them as eagle_aux_hidden_state_layer_ids"
        )
    comparable = known.tokenizer_sha256 and target.tokenizer is not None
    if comparable and known.tokenizer_sha256 != tokenizer_sha256(target.tokenizer):
        return "it was trained with another tokenizer, so its token ids mean other text; use its own target"
    if method.borrows_head and not target.plain_head:
        return (
            "it uses the target's head weight, but the target also applies a bias, scaling or cap to its logits; train "
            "an EAGLE-3 draft instead"
        )
    if config.rope.rope_type == "longrope" and config.rope.for_length(target.max_length).long != config.rope.long:
        used = "long" if config.rope.long else "short"
        return f"it was trained with longrope's {used} factors; load the target with max_length={known.max_length}"
    return None
