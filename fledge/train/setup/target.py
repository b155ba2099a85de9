"""Loads and checks the target of a training run, and limits lengths to the target's context."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fledge.data.template import ChatTemplate
from fledge.io.fields import parse_dtype
from fledge.io.fingerprints import target_sha256, tokenizer_sha256
from fledge.io.http import key_in
from fledge.options import default_new_tokens
from fledge.states.cache import FeatureCache
from fledge.states.source import DiskFeatures
from fledge.states.vllm import VllmFeatures, VllmServer
from fledge.states.vllm_files import UNCHECKED, StatesFolder, serve_command
from fledge.targets.compatibility import layers_of, mismatch, resolve_layers
from fledge.targets.distributed import (
    layout_of,
    load_head,
    load_sharded_target,
    parts_of,
    receive_parts,
    send_parts,
    target_of_parts,
)
from fledge.targets.interface import Target
from fledge.targets.loading import load_target
from fledge.targets.parts import TargetParts
from fledge.targets.source import FeatureSource, LiveFeatures
from fledge.targets.transformers import TransformersTarget
from fledge.train.feed import ReceivedFeatures
from fledge.train.setup.options import ServedOptions, TargetOptions
from fledge.train.setup.recipe import DataRecipe, Recipe, layer_ids

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fledge.train.ranks import Ranks

EVAL_TOKENS = 64  # default of --eval-tokens
# options of glibc's mallopt(3), with glibc's names, and the values to set, in bytes
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
NEVER_TRIM, TOP_PAD, MMAP_THRESHOLD = -1, 1 << 26, 1 << 30

Say = Callable[[str], None]


@dataclass(frozen=True)
class PreparedTarget:
    """A target, and the values and objects that training derives from the target.

    `layers` are the layers whose outputs the draft reads. `max_length` is the maximum document length and `eval_tokens`
    the number of new tokens per prompt when τ is measured. `decodes` tells whether τ can be measured by decoding.
    `source` computes the features and the teacher's logits.
    """

    target: TargetParts
    layers: tuple[int, ...]
    template: ChatTemplate
    max_length: int
    eval_tokens: int
    decodes: bool
    source: FeatureSource  # None in a planned run, whose target has no weights


def plan_target(recipe: Recipe) -> PreparedTarget:
    """The target of a planned run, without weights; assumes that the target can verify drafts and process packed
    documents together. Raises ValueError like `prepare_target`, for problems that show without the weights."""
    device = "cpu" if recipe.options.device == "cpu" else "meta"
    target = load_target(recipe.options.target, **_loading(recipe.options, recipe.data, device), weights=False)
    check_length(recipe.data, target)
    layers = _layers(recipe, target, lambda line: None)
    return _prepared(recipe, target, layers, not reads_features_only(recipe), None)


def reads_features_only(recipe: Recipe) -> bool:
    """Whether the target does not run: vLLM computes the features, or the features are on disk and τ is not measured by
    decoding."""
    return recipe.served or (recipe.features is not None and not _decoding_option(recipe))


def prepare_target(recipe: Recipe, mesh: DeviceMesh | None, say: Say) -> PreparedTarget:
    """Loads and checks the target; with a mesh, shards the target's layers over the ranks. Raises ValueError for a
    length beyond the target's context, for layers that the target does not have, for measuring τ with a target that
    cannot verify drafts, and for sharding a target that cannot process packed documents together."""
    set_up_process(recipe.options.device)
    head = _open_head(recipe, say) if reads_features_only(recipe) else None
    target = head or open_target(recipe.options, recipe.data, recipe.options.device, mesh)
    if cache := recipe.features:
        _check_origin(cache, target)  # first: another target may have other layers
    decodes = _decodes(recipe, target, say)
    layers = _layers(recipe, target, say)
    if cache:
        source = _stored_features(cache, target, layers)
    elif recipe.served:
        source = open_served_features(recipe.options, target, layers, min(recipe.data.longest, target.context), say)
    else:
        source = live_features(target, layers, say)
        if not target.packs and mesh is not None:
            raise ValueError(
                f"{target.name} cannot process packed documents together, which --shard-target needs; train without it"
            )
    return _prepared(recipe, target, layers, decodes, source)


def prepare_shared_target(recipe: Recipe, ranks: Ranks, shards: bool, say: Say) -> PreparedTarget:
    """`prepare_target` for several ranks; every rank calls this. `shards` tells whether the target's layers are sharded
    over the target ranks, or over all ranks if there are no target ranks.

    Target ranks load and check the target. The training ranks then receive embedding, head and last layer from the
    first target rank, and get `ReceivedFeatures` for the rows. Raises RankError if another rank fails."""
    mesh = ranks.mesh if shards else None
    if not ranks.target_ranks:
        return prepare_target(recipe, mesh, say)
    prepared, parts, failure, lines = None, {}, None, []
    try:
        if ranks.trains:
            set_up_process(recipe.options.device)
        else:
            prepared = prepare_target(recipe, mesh, lines.append)
            parts = parts_of(prepared.target)
    except Exception as e:  # `ranks.meet` reports the error to all ranks
        failure = e
    told = (lines, prepared and prepared.decodes, layout_of(parts))
    lines, decodes, layout = ranks.meet("while the target was loaded", told, failure)[ranks.size]
    if not ranks.trains:
        if ranks.rank == ranks.size:
            send_parts(parts, ranks.size, ranks.feeds[0])
        return prepared
    for line in lines:
        say(line)
    parts = receive_parts(layout, ranks.size, ranks.feeds[0], torch.device(recipe.options.device))
    target = target_of_parts(
        recipe.options.target, parts, max_length=recipe.data.longest, trust_remote_code=recipe.options.trust_remote_code
    )
    layers = _layers(recipe, target, say)
    return _prepared(recipe, target, layers, decodes, ReceivedFeatures(target, len(layers), ranks))


def _prepared(
    recipe: Recipe, target: TransformersTarget, layers: tuple[int, ...], decodes: bool, source: FeatureSource | None
) -> PreparedTarget:
    return PreparedTarget(
        target=target,
        layers=layers,
        template=ChatTemplate(target.tokenizer, target.stop_ids, recipe.data.template_kwargs),
        max_length=min(recipe.data.longest, target.context),
        eval_tokens=recipe.options.eval_tokens or default_new_tokens(EVAL_TOKENS, target.context),
        decodes=decodes,
        source=source,
    )


def open_target(
    requested: TargetOptions, data: DataRecipe, device: str, mesh: DeviceMesh | None = None
) -> TransformersTarget:
    """Loads a target, and with a mesh shards the target over the ranks. Raises ValueError if documents may be longer
    than the target's context."""
    loading = _loading(requested, data, device)
    if mesh is None:
        target = load_target(requested.target, **loading)
    else:
        target = load_sharded_target(requested.target, mesh, **loading)
    check_length(data, target)
    return target


def _loading(requested: TargetOptions, data: DataRecipe, device: str) -> dict[str, Any]:
    """The options of the functions that load a target."""
    return dict(
        device=device, dtype=parse_dtype(requested.dtype), max_length=data.longest,
        trust_remote_code=requested.trust_remote_code,
    )  # fmt: skip


def check_length(data: DataRecipe, target: TargetParts) -> None:
    """Raises ValueError if documents may be longer than the target's context."""
    asked = data.options.max_length
    if asked and asked > target.context:
        raise ValueError(f"--max-length {asked} is more than the target's context; give {target.context} or less")


def open_served_target(requested: TargetOptions, data: DataRecipe, device: str) -> TargetParts:
    """The parts of a target that training from vLLM's states needs: embedding, head and final norm, and the last
    layer's weights that are not quantized. Raises ValueError if embedding, head or final norm are quantized, or missing
    in the checkpoint's safetensors files, and if documents may be longer than the target's context."""
    target = load_head(requested.target, **_loading(requested, data, device))
    if target is None:
        raise ValueError(
            f"{requested.target} has no safetensors files with its embedding, head and final norm, or has quantized "
            "them; training from vLLM's hidden states needs them here, in 16 or 32 bits"
        )
    check_length(data, target)
    return target


def _open_head(recipe: Recipe, say: Say) -> TargetParts | None:
    """The parts of the target that training from features on disk needs; None if only the whole target can be
    loaded."""
    asked = recipe.options, recipe.data, recipe.options.device
    if recipe.served:
        return open_served_target(*asked)
    head = load_head(recipe.options.target, **_loading(*asked))
    # the fingerprint also covers the last layer, whose weights may not be readable alone
    if head is not None and (
        head.last_layer_complete or target_fingerprint(head) == recipe.features.manifest.target_sha256
    ):
        return head
    say("the whole target is loaded, since its files do not allow loading the embedding and head alone")
    return None


def live_features(target: TransformersTarget, layers: tuple[int, ...], say: Say) -> LiveFeatures:
    """Features computed by the target. Raises ValueError if the target's logits cannot be computed from the final
    states."""
    source = LiveFeatures(target, layers)
    if target.quantization:
        say(quantization_note(target))
    if not target.packs:
        say("this target cannot process packed documents together, so it processes them one at a time")
    return source


def quantization_note(target: TargetParts) -> str:
    """A message about the hidden states of a quantized target."""
    return (
        f"{target.name} is quantized by {target.quantization}: its hidden states differ from those of the "
        "full-precision model, so serve the draft with this checkpoint, not with another precision"
    )


def check_connector(target: TargetParts) -> None:
    """Raises ValueError for a target with multi-head latent attention, which vLLM's connector refuses."""
    config = target.config
    # vLLM computes MiniCPM3 with ordinary attention
    if getattr(config, "kv_lora_rank", None) is not None and config.model_type != "minicpm3":
        raise ValueError(
            f"{target.name} has multi-head latent attention (kv_lora_rank {config.kv_lora_rank}), of which vLLM's "
            "connector gives no hidden states; leave --features-from out, and let transformers compute them"
        )


def open_served_features(
    options: ServedOptions, target: TransformersTarget, layers: tuple[int, ...], max_length: int, say: Say
) -> VllmFeatures:
    """vLLM's features of the given layers, for documents of at most `max_length` tokens. `options` must have passed
    `check_served`. Raises ValueError if the features are not available; if no server answers, the message has the
    command that starts a server."""
    captured = layer_ids(options.features_layers) or tuple(sorted({*layers, target.num_layers}))
    if Path(options.features_from).is_dir():
        states = StatesFolder(Path(options.features_from))
        say(f"{states.path} has hidden states of {len(states):,} texts")
        if states.layers is None:
            say(f"{states.path} {UNCHECKED}")
    else:
        check_connector(target)
        length = min(max_length + 1, target.context)  # vLLM refuses a length beyond the context
        start = serve_command(target.name, captured, length, trust=target.trust_remote_code)
        there, _, here = (options.features_map or "").partition("=")
        mapped = (Path(there), Path(here)) if there else None
        key = key_in(options.api_key_env)
        states = VllmServer(options.features_from, start, say, mapped=mapped, api_key=key)
        say(f"{states.root} computes {states.model}")
    return VllmFeatures(states, target, layers, captured)


def _check_origin(cache: FeatureCache, target: TransformersTarget) -> None:
    """Raises ValueError if features on disk were computed by another target, or with another tokenizer."""
    known = cache.manifest
    for what, ours, theirs in (
        ("target", known.target_sha256, target_fingerprint(target)),
        ("tokenizer", known.tokenizer_sha256, tokenizer_sha256(target.tokenizer)),
    ):
        if ours != theirs:
            raise ValueError(
                f"the features in {cache.path} are of another {what} than that of {target.name}; they were computed by "
                f"{known.target}"
            )


def _stored_features(cache: FeatureCache, target: TargetParts, layers: tuple[int, ...]) -> DiskFeatures:
    """Features on disk, computed by the target, for a draft that reads `layers`. Raises ValueError if the features lack
    states that the draft reads, or lack a shard."""
    known = cache.manifest
    if not layers and not known.all_last:
        raise ValueError(
            f"{cache.path} has the final hidden states of supervised tokens only, and EAGLE-1 reads those of all "
            "tokens; write them with fledge features --all-final-states"
        )
    for shard in cache.shards:
        cache.offsets(shard)
    return DiskFeatures(cache, layers, target.logits, target.device, target.dtype)


def target_fingerprint(target: Target) -> str:
    """`target_sha256` of a loaded target."""
    return target_sha256(target.embedding, target.head_weight, target.last_layer_weights())


def set_up_process(device: str) -> None:
    """Makes torch's process-wide settings: the current GPU and the number of threads, or the heap settings on a CPU."""
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device).index or 0)  # Triton launches on the current device
        torch.set_num_threads(1)  # the CPU handles only small tensors, which are slower with several threads
    else:
        retain_freed_memory()


def retain_freed_memory() -> bool:
    """Configures malloc to keep freed memory in this process. Returns whether all options were accepted.

    By default glibc returns large freed blocks to the operating system, and every training step then pays a page fault
    for each page of its tensors: on two cores of an AMD CPU, steps of the demo took about a tenth longer. Does nothing
    and returns False without glibc on Linux.
    """
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return False
    options = {M_MMAP_THRESHOLD: MMAP_THRESHOLD, M_TRIM_THRESHOLD: NEVER_TRIM, M_TOP_PAD: TOP_PAD}
    return all([libc.mallopt(option, value) for option, value in options.items()])


def _layers(recipe: Recipe, target: TransformersTarget, say: Say) -> tuple[int, ...]:
    """The target layers that the draft reads. Says it if these are the features' and not the method's own. Raises
    ValueError for layers that the target does not have, and for an existing draft that does not fit the target."""
    if draft := recipe.draft:
        if problem := mismatch(draft, target):
            raise ValueError(f"--init-from {recipe.options.init_from} does not fit {target.name}: {problem}")
        return layers_of(draft, target)
    if not recipe.method.reads_layers:
        return ()
    asked = layer_ids(recipe.options.aux_layers)
    own = recipe.method.taps(target.num_layers, recipe.layers) if recipe.method.taps else None
    if not asked and recipe.features and (asked := recipe.features.layout.layers) and own not in (None, asked):
        default, stored = (",".join(map(str, ids)) for ids in (own or (), asked))
        say(
            f"the draft reads the target's layers {stored}, which the features hold; {recipe.method.title} reads "
            f"{default} by default, with features that were written with --aux-layers {default}"
        )
    return resolve_layers(asked or own, target)


def _decoding_option(recipe: Recipe) -> str | None:
    """The given flag that asks to measure τ by decoding, --eval-every or --eval-prompts; None without both."""
    return "--eval-every" if recipe.options.eval_every else "--eval-prompts" if recipe.options.eval_prompts else None


def _decodes(recipe: Recipe, target: TargetParts, say: Say) -> bool:
    """Whether τ can be measured by decoding. If not, says why. Raises ValueError if the options ask a target that
    cannot verify drafts for τ."""
    if reads_features_only(recipe):
        remedy = "fledge eval measures it afterwards" if recipe.served else "--eval-every measures it"
        say(f"τ is not measured by decoding, for which the target would have to run; {remedy}")
        return False
    if not target.rollback_problem:
        return True
    if flag := _decoding_option(recipe):
        raise ValueError(
            f"{flag} measures τ by decoding, but {target.name} cannot verify drafts: {target.rollback_problem}; leave "
            f"{flag} out to train without measuring τ"
        )
    say(
        f"{target.name} cannot verify drafts: {target.rollback_problem}. The draft is trained without measuring τ; "
        "serve it with an engine that can restore such states"
    )
    return False
