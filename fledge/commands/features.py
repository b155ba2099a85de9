"""`fledge features`: writes the target's hidden states of the training data, for `fledge train --features`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.io.fields import parse_dtype
from fledge.io.files import check_output_path
from fledge.options import MAX_SEED, names_of, opt, parse_template_kwargs
from fledge.train.setup.options import DataOptions, ServedOptions, TargetOptions

if TYPE_CHECKING:
    from fledge.data.documents import Document
    from fledge.data.record import Record
    from fledge.states.cache import Manifest
    from fledge.states.vllm import VllmFeatures
    from fledge.targets.source import LiveFeatures
    from fledge.train.setup.recipe import DataRecipe


@dataclass(frozen=True, kw_only=True)
class FeaturesOptions(TargetOptions, DataOptions, ServedOptions):
    """Write the target's hidden states of the training data to a disk, to train drafts without running the target."""

    panel: ClassVar[str] = "Features"
    out: str | None = opt(
        "directory to write; the same command continues an unfinished one, and several processes may write one "
        "together", None,
    )  # fmt: skip
    verify: str | None = opt(
        "read all features in this directory, compare them with the hashes that were written, and stop", None
    )
    precision: str | None = opt(
        "float32, bfloat16, float16, or fp8 (8 bits for the captured layers, bfloat16 for the final states) (default: "
        "the dtype of computation, which loses nothing)", None, choices=("float32", "bfloat16", "float16", "fp8"),
    )  # fmt: skip
    aux_layers: str | None = opt(
        "target layers to store, e.g. 2,16,29, or none for EAGLE-1 alone (default: those that EAGLE-3 reads)", None
    )
    all_final_states: bool = opt(
        "store the final hidden states of all tokens, which EAGLE-1 reads (default: those that the loss reads)", False
    )
    disk_budget: str | None = opt(
        "most bytes on the disk, e.g. 500GB (default: the free space, less 5% of it or 10 GB)", None
    )
    seed: int = opt("random seed of held-out records and shares (@0.5) of the data", 0, minimum=0, maximum=MAX_SEED)
    device: str = opt("device: auto, cpu, cuda, cuda:1, ...", "auto")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify:
            others = [name for name in names_of(FeaturesOptions) if name != "verify"]
            self.refuse(others, f"with --verify, which only reads {self.verify};")
        elif missing := [flag for flag, value in (("--target", self.target), ("--out", self.out)) if not value]:
            raise ValueError(f"give {' and '.join(missing)}, or --verify DIRECTORY to check features that are there")


def run(options: FeaturesOptions, say: Callable[[str], None], progress: Any) -> None:
    """Writes all missing features; with `verify`, reads all features instead. Raises ValueError for damaged features,
    and before writing if the disk budget is too small, or if the directory holds features of other data or options."""
    from fledge.states.writer import parse_bytes, verify_features, write_features

    if options.verify:
        verify_features(options.verify, say, progress)
        return
    if not options.data:
        raise ValueError("give --data FILE")
    out = check_output_path(options.out, "--out", directory=True)
    budget = None if options.disk_budget is None else parse_bytes(options.disk_budget)
    source, data, documents, held_out = _prepare(options, say, progress)
    new = _manifest(options, source, data, documents)
    write_features(out, new, source, documents, held_out, budget, say, progress)


def _prepare(
    options: FeaturesOptions, say: Callable[[str], None], progress: Any
) -> tuple[LiveFeatures | VllmFeatures, DataRecipe, list[Document], list[Record]]:
    """Loads the target and the data. Records are held out as `fledge train` does."""
    from fledge.data.template import ChatTemplate
    from fledge.io.machine import resolve_device
    from fledge.targets.compatibility import resolve_layers
    from fledge.train.setup.data import read_data
    from fledge.train.setup.recipe import check_served, data_recipe, layer_ids
    from fledge.train.setup.target import (
        live_features,
        open_served_features,
        open_served_target,
        open_target,
        set_up_process,
    )

    device, kwargs = resolve_device(options.device), parse_template_kwargs(options.template_kwargs)
    parse_dtype(options.dtype)
    layers = () if options.aux_layers == "none" else layer_ids(options.aux_layers)
    if layers == () and not options.all_final_states:
        raise ValueError("--aux-layers none needs --all-final-states: EAGLE-1 reads the final states of all tokens")
    set_up_process(device)
    data = data_recipe(options, kwargs)
    check_served(options)
    served = options.features_from is not None
    target = open_served_target(options, data, device) if served else open_target(options, data, device)
    layers, length = resolve_layers(layers, target), min(data.longest, target.context)
    if served:
        source, hold_out = open_served_features(options, target, layers, length, say), True
    else:
        source, hold_out = live_features(target, layers, say), not target.rollback_problem
    template = ChatTemplate(target.tokenizer, target.stop_ids, kwargs)
    documents, held_out = read_data(data, options.seed, template, length, say, progress, hold_out=hold_out)
    if served:
        source.check(documents)
    return source, data, documents, held_out


def _manifest(
    options: FeaturesOptions, source: LiveFeatures | VllmFeatures, data: DataRecipe, documents: list[Document]
) -> Manifest:  # fmt: skip
    """The manifest of the features with the given options."""
    from fledge import __version__
    from fledge.data.documents import fingerprint
    from fledge.io.fingerprints import template_sha256, tokenizer_sha256
    from fledge.states.cache import FORMAT, Manifest
    from fledge.states.layout import Layout, Sizes, split_shards
    from fledge.states.writer import shard_bytes
    from fledge.train.setup.target import target_fingerprint

    target = source.target
    dtype = str(target.dtype).removeprefix("torch.")
    precision = options.precision or ("float32" if dtype == "float64" else dtype)
    if precision == "float16" and dtype != "float16":
        raise ValueError(f"--precision float16 has a smaller range than the target's {dtype}; use bfloat16")
    layout = Layout(source.layers, target.embedding.shape[1], precision, options.all_final_states)
    sizes = Sizes.of(documents, layout)
    tokens, last_states = sum(sizes.tokens), sum(sizes.last)
    size = shard_bytes(layout.bytes(tokens, last_states))
    return Manifest(
        format=FORMAT,
        fledge_version=__version__,
        target=str(Path(target.name).absolute()) if Path(target.name).exists() else target.name,
        target_sha256=target_fingerprint(target),
        target_layers=target.num_layers,
        tokenizer_sha256=tokenizer_sha256(target.tokenizer),
        template_sha256=template_sha256(target.tokenizer),
        template_kwargs=data.template_kwargs,
        template_modes=list(data.modes),
        data=list(data.sources),
        data_sha256=fingerprint(documents),
        max_length=min(data.longest, target.context),
        documents=len(documents),
        tokens=tokens,
        last_states=last_states,
        layers=list(layout.layers),
        width=layout.width,
        precision=precision,
        all_last=layout.all_last,
        dtype=dtype,
        shards=[list(shard) for shard in split_shards(sizes, layout, size)],
    )
