"""The target of a training run: loads and checks it, and limits lengths to its context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fledge.data.template import ChatTemplate
from fledge.jobs.options import default_new_tokens, parse_dtype
from fledge.jobs.training.recipe import ComputeRecipe, ExistingDraft, Recipe
from fledge.targets.compatibility import resolve_layers
from fledge.targets.loading import load_target
from fledge.targets.source import FeatureSource, LiveFeatures
from fledge.targets.transformers import TransformersTarget
from fledge.train.heap import retain_freed_memory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EVAL_TOKENS = 64  # default of --eval-tokens


@dataclass(frozen=True)
class PlannedTarget:
    """A target, whose weights need not be loaded, and what is known of it before it computes.

    `layers` are the layers whose outputs the draft reads. `max_length` is the maximum document length and `eval_tokens`
    the number of new tokens per prompt when τ is measured. `decodes` tells whether τ can be measured by decoding.
    """

    target: TransformersTarget
    layers: tuple[int, ...]
    template: ChatTemplate
    max_length: int
    eval_tokens: int
    decodes: bool


@dataclass(frozen=True)
class PreparedTarget(PlannedTarget):
    """A loaded target and what training needs of it. `source` computes the features and the teacher's logits."""

    source: FeatureSource


def plan_target(recipe: Recipe) -> PlannedTarget:
    """The target without its weights, which is assumed to verify drafts and to process packed documents together.
    Raises ValueError as `prepare_target` does for what needs no weights."""
    requested = recipe.target
    target = load_target(
        requested.name, device="cpu" if recipe.compute.device == "cpu" else "meta", dtype=parse_dtype(requested.dtype),
        max_length=recipe.data.longest, trust_remote_code=requested.trust_remote_code, weights=False,
    )  # fmt: skip
    _check_length(recipe, target)
    return PlannedTarget(**_known(recipe, target, resolve_layers(_layers(recipe), target), decodes=True))


def prepare_target(recipe: Recipe, mesh: DeviceMesh | None, say: Callable[[str], None]) -> PreparedTarget:
    """Loads and checks the target; with a mesh, its layers are sharded over the ranks. Raises ValueError for a length
    beyond its context, for layers that it does not have, if τ is to be measured with a target that cannot verify
    drafts, and if one that cannot process packed documents together is to be sharded."""
    set_up_process(recipe.compute)
    data, requested = recipe.data, recipe.target
    target = load_target(
        requested.name, device=recipe.compute.device, dtype=parse_dtype(requested.dtype), max_length=data.longest,
        trust_remote_code=requested.trust_remote_code, mesh=mesh,
        implementation="transformers" if requested.compile else "auto",  # the native target has fused kernels
    )  # fmt: skip
    _check_length(recipe, target)
    decodes = _decodes(recipe, target, say)
    layers = resolve_layers(_layers(recipe), target)
    if requested.compile:
        target.compile()
    source = LiveFeatures(target, layers)
    if not target.packs and mesh is not None:
        raise ValueError(
            f"{target.name} cannot process packed documents together, which --shard-target needs; train without it"
        )
    if not target.packs:
        say("this target cannot process packed documents together, so it processes them one at a time")
    return PreparedTarget(**_known(recipe, target, layers, decodes), source=source)


def _check_length(recipe: Recipe, target: TransformersTarget) -> None:
    asked = recipe.data.max_length
    if asked and asked > target.context:
        raise ValueError(f"--max-length {asked} is more than the target's context; give {target.context} or less")


def _known(recipe: Recipe, target: TransformersTarget, layers: tuple[int, ...], decodes: bool) -> dict[str, Any]:
    """The fields of `PlannedTarget`."""
    return dict(
        target=target,
        layers=layers,
        template=ChatTemplate(target.tokenizer, target.stop_ids, recipe.data.template_kwargs),
        max_length=min(recipe.data.longest, target.context),
        eval_tokens=recipe.evaluation.tokens or default_new_tokens(EVAL_TOKENS, target.context),
        decodes=decodes,
    )


def set_up_process(compute: ComputeRecipe) -> None:
    """Makes torch's process-wide settings: the current GPU and the number of threads, or the heap settings on a CPU."""
    if compute.gpu:
        torch.cuda.set_device(torch.device(compute.device).index or 0)  # Triton launches on the current device
        torch.set_num_threads(1)  # the CPU handles only small tensors, which are slower with several threads
    else:
        retain_freed_memory()


def _layers(recipe: Recipe) -> tuple[int, ...] | None:
    """The target layers that the draft reads, or None for the engines' default."""
    if not recipe.method.reads_layers:
        return ()
    draft = recipe.draft
    return draft.config.aux_layers if isinstance(draft, ExistingDraft) else draft.aux_layers


def _decodes(recipe: Recipe, target: TransformersTarget, say: Callable[[str], None]) -> bool:
    """Whether τ can be measured by decoding. If not, prints a message; raises ValueError if the options request it."""
    if not target.rollback_problem:
        return True
    if recipe.evaluation.every or recipe.evaluation.prompts:
        flag = "--eval-every" if recipe.evaluation.every else "--eval-prompts"
        raise ValueError(
            f"{flag} measures τ by decoding, but {target.name} cannot verify drafts: {target.rollback_problem}; leave "
            f"{flag} out to train without measuring τ"
        )
    say(
        f"{target.name} cannot verify drafts: {target.rollback_problem}. The draft is trained without measuring τ; "
        "serve it with an engine that can restore such states"
    )
    return False
