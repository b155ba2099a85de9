"""The target of a training run: loaded, checked, and with the lengths that its context sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fledge.data.template import ChatTemplate
from fledge.jobs.options import dtype_named, new_tokens
from fledge.jobs.training.recipe import ComputeRecipe, ExistingDraft, Recipe
from fledge.targets.compatibility import resolve_layers
from fledge.targets.loading import load_target
from fledge.targets.source import FeatureSource, LiveFeatures
from fledge.targets.transformers import TransformersTarget
from fledge.train.heap import retain_freed_memory

EVAL_TOKENS = 64  # new tokens an answer while training, by default


@dataclass(frozen=True)
class Prepared:
    """A target to train for. `layers` are those whose outputs the draft reads, `source` gives features and the
    teacher's logits; `max_length` is the longest document and `eval_tokens` the new tokens of an answer while training;
    `decodes`: τ can be measured by decoding."""

    target: TransformersTarget
    layers: tuple[int, ...]
    source: FeatureSource
    template: ChatTemplate
    max_length: int
    eval_tokens: int
    decodes: bool


def prepare(recipe: Recipe, say: Callable[[str], None]) -> Prepared:
    """Loads the target and finds out what it can do. Raises ValueError for a length beyond its context, layers that it
    does not have, and τ asked of a target that cannot verify drafts."""
    set_up_process(recipe.compute)
    data, asked = recipe.data, recipe.target
    target = load_target(
        asked.name, device=recipe.compute.device, dtype=dtype_named(asked.dtype), max_length=data.longest,
        trust_remote_code=asked.trust_remote_code,
    )  # fmt: skip
    if data.max_length and data.max_length > target.context:
        raise ValueError(f"--max-length {data.max_length} is more than the target reads; give {target.context} or less")
    decodes = _decodes(recipe, target, say)
    layers = resolve_layers(_layers(recipe), target)
    if asked.compile:
        target.compile()
    source = LiveFeatures(target, layers)
    if not target.packs:
        say("this target does not keep packed documents apart, so it reads them one at a time")
    return Prepared(
        target=target,
        layers=layers,
        source=source,
        template=ChatTemplate(target.tokenizer, target.stop_ids, data.template_kwargs),
        max_length=min(data.longest, target.context),
        eval_tokens=recipe.evaluation.tokens or new_tokens(EVAL_TOKENS, target.context),
        decodes=decodes,
    )


def set_up_process(compute: ComputeRecipe) -> None:
    """Sets what torch keeps for the whole process: the current GPU and the number of threads, or the heap of a CPU."""
    if compute.gpu:
        torch.cuda.set_device(torch.device(compute.device).index or 0)  # Triton launches on the current device
        torch.set_num_threads(1)  # the host only plans; small tensors lose time to threads
    else:
        retain_freed_memory()


def _layers(recipe: Recipe) -> tuple[int, ...] | None:
    """The layers that the draft reads; None: the engines' default."""
    if not recipe.method.reads_layers:
        return ()
    draft = recipe.draft
    return draft.config.aux_layers if isinstance(draft, ExistingDraft) else draft.aux_layers


def _decodes(recipe: Recipe, target: TransformersTarget, say: Callable[[str], None]) -> bool:
    """Whether τ can be measured by decoding; says so where not. Raises ValueError where it was asked for."""
    if not target.rollback_problem:
        return True
    if recipe.evaluation.every or recipe.evaluation.prompts:
        flag = "--eval-every" if recipe.evaluation.every else "--eval-prompts"
        raise ValueError(
            f"{flag} measures τ by decoding, but {target.name} cannot verify drafts: {target.rollback_problem}; leave "
            "it out to train all the same"
        )
    say(
        f"{target.name} cannot verify drafts: {target.rollback_problem}. The draft is trained without decoded τ, and "
        "has to be served by an engine that can restore such states"
    )
    return False
