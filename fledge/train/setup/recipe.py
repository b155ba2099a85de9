"""Resolves the options of `fledge train` into a recipe, and refuses contradictions before anything is loaded."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fledge.config import DraftConfig
from fledge.data.read import check_source, with_columns
from fledge.data.sources import modes_of
from fledge.drafts.registry import NETWORKS
from fledge.drafts.weights import read_draft_config
from fledge.io.fields import parse_dtype
from fledge.io.http import refuse_credentials
from fledge.io.machine import resolve_device
from fledge.methods import CHOICES, METHODS, Choice, Method
from fledge.options import names_of, parse_template_kwargs
from fledge.states.cache import FeatureCache
from fledge.train.plan import DrawAnchors, DropTokens
from fledge.train.ranks import local_rank, started_by_torchrun
from fledge.train.row_pass import Objective
from fledge.train.setup.options import (
    FEATURE_OPTIONS,
    SERVED_OPTIONS,
    SWITCHES,
    DataOptions,
    ObjectiveOptions,
    ServedOptions,
    ShapeOptions,
    TrainOptions,
)

MAX_LENGTH = 2048  # default of --max-length
COD_MIN_RATE = 0.2
WITH_INIT_FROM = "with --init-from, which keeps the draft's vocabulary and shape;"
# by option: the options without effect beside this option, and the reason, in the form that `Options.refuse` takes
INEFFECTIVE: dict[str, tuple[tuple[str, ...], str]] = {
    "steps": (("epochs",), "with --steps, which sets the length of the training;"),
    "init_from": (names_of(ShapeOptions), WITH_INIT_FROM),
    "features": (FEATURE_OPTIONS, "with --features, whose documents are prepared and whose target does not run;"),
    "features_from": (
        SERVED_OPTIONS, "with --features-from, as the target runs in vLLM alone; measure τ afterwards with fledge eval;"
    ),
    "dpace": (("gamma",), "with --dpace, which weights the tokens of a block by the draft's confidence;"),
}  # fmt: skip
# by value of --loss, as INEFFECTIVE
INEFFECTIVE_WITH_LOSS: dict[str, tuple[tuple[str, ...], str]] = {
    "hard": (
        ("loss_temperature", "keep_out_of_vocab"),
        "with --loss hard, whose targets are tokens of the text that are in the draft's vocabulary;",
    ),
    "accept": (("loss_temperature",), "with --loss accept, whose α is that of decoding; give --loss kl or ce, or"),
    "mixed": (("loss_temperature",), "with --loss mixed, whose α is that of decoding; give --loss kl or ce, or"),
}


@dataclass(frozen=True)
class DataRecipe:
    """The data that `options` name. `sources` have the mapping of --columns. `longest` is the maximum document length
    in tokens, by the options or by default; the target's context may lower `longest`. `modes` are all sets of template
    variables that sources are rendered with: `template_kwargs`, and a source's own variables, which take precedence."""

    options: DataOptions
    sources: tuple[str, ...]
    template_kwargs: dict[str, Any] | None
    longest: int
    modes: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Recipe:
    """Everything about a run that is known before weights and data are loaded. `options` have the target's name, the
    device and the implementation in place of None. `choice` is a key of `fledge.methods.CHOICES`. `depth` is the number
    of tokens that the trained draft drafts by default. `features`: the hidden states stored on disk; None if the hidden
    states are computed during training. `draft` is the config of the --init-from draft; None: a new draft, whose shape
    `options` say."""

    options: TrainOptions
    choice: str
    depth: int
    data: DataRecipe
    features: FeatureCache | None
    draft: DraftConfig | None
    objective: Objective

    @property
    def served(self) -> bool:
        """Whether vLLM computes the hidden states."""
        return self.options.features_from is not None

    @property
    def switches(self) -> tuple[str, ...]:
        """The boolean fields of a new draft's DraftConfig that are turned on."""
        return tuple(n for n in SWITCHES if getattr(self.options, n) or n in CHOICES[self.choice].switches)

    @property
    def method(self) -> Method:
        return CHOICES[self.choice].method

    @property
    def layers(self) -> int:
        """The number of decoder layers of a new draft."""
        return self.options.layers or self.method.layers


def resolve(options: TrainOptions, *, imagined: bool = False) -> Recipe:
    """The recipe for these options. Reads no file but the config of the --init-from draft and the manifest of the
    --features. `imagined` makes the recipe for an absent machine with CUDA GPUs.

    Raises ValueError, naming the flags and a remedy, for options that contradict each other, that the method or the
    device does not support, or that name something that does not exist.
    """
    if not options.features and not (options.target and options.data):
        raise ValueError("give --target and --data, --features, a --config file that sets them, or --resume RUN")
    if options.features and options.features_from:
        raise ValueError("--features names hidden states on disk, and --features-from those of vLLM; give one of them")
    existing = read_draft_config(options.init_from) if options.init_from else None
    features = FeatureCache.open(options.features) if options.features else None
    name = options.method or (existing.method if existing else "eagle3")
    choice = _choice(name, options.init_from, existing)
    reasons = ineffective_options(options.as_dict()) | unsupported_options(choice.method)
    for why in dict.fromkeys(reasons.values()):
        options.refuse((option for option, reason in reasons.items() if reason == why), why)
    depth = _depth(options, existing, choice.method)
    if options.sliding_window is not None and options.sliding_window <= depth:
        raise ValueError(
            f"--sliding-window {options.sliding_window} is narrower than a block, which has a row more than --depth "
            f"{depth}; give {depth + 1} or more"
        )
    data, objective = _data(options, existing, features), _objective(options, choice.method, depth)
    check_served(options)
    layer_ids(options.aux_layers)
    if options.eval_prompts:
        check_source(options.eval_prompts, "--eval-prompts")
    if options.log and importlib.util.find_spec(options.log) is None:
        raise ValueError(f"--log {options.log} needs a package that is not installed: pip install {options.log}")
    device, impl = _device_and_impl(options, choice.method, imagined)
    target = options.target or features.manifest.target
    return Recipe(
        options=replace(options, target=target, device=device, impl=impl),
        choice=name,
        depth=depth,
        data=data,
        features=features,
        draft=existing,
        objective=objective,
    )


def ineffective_options(values: Mapping[str, Any]) -> dict[str, str]:
    """Options that have no effect beside the options with these values, each with the reason."""
    found: dict[str, str] = {}
    for option, (names, why) in INEFFECTIVE.items():
        found |= dict.fromkeys(names, why) if values.get(option) else {}
    names, why = INEFFECTIVE_WITH_LOSS.get(values.get("loss", ""), ((), ""))
    return found | dict.fromkeys(names, why)


def unsupported_options(method: Method) -> dict[str, str]:
    """Options that a method does not support, each with the reason."""
    found = {}
    for other in METHODS.values():
        foreign = [name for name in other.options if name not in method.options and name not in found]
        found |= dict.fromkeys(foreign, f"with {method.title}; use --method {other.name}, or")
    return found | {name: f"with {method.title}: {why};" for name, why in method.without.items()}


def check_served(options: ServedOptions) -> None:
    """Raises ValueError for an address of vLLM that is neither a directory nor a server's address, for invalid layers
    and paths, and for options without effect."""
    address = options.features_from
    if address is None:
        needless = ("features_layers", "features_map", "api_key_env")
        options.refuse(needless, "without hidden states of vLLM; give --features-from, or")
        return
    if Path(address).is_dir():
        options.refuse(["features_map", "api_key_env"], "with a directory of files;")
    else:
        refuse_credentials(address)
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
            raise ValueError(
                f"--features-from {address} is neither a directory nor the address of a server, such as "
                "http://localhost:8000"
            )
    if options.features_map is not None:
        there, _, here = options.features_map.partition("=")
        if not there or not Path(here).is_dir() or not here:
            raise ValueError(
                f"--features-map {options.features_map} is not THERE=HERE, the paths of a directory on the server and "
                "of the same directory here, which has to exist"
            )
    layer_ids(options.features_layers, "--features-layers")


def _choice(name: str, draft: str | None, existing: DraftConfig | None) -> Choice:
    """The choice of this name. Raises ValueError if the --init-from draft (`draft`, with the config `existing`) has
    another method, or lacks the choice's norms."""
    choice = CHOICES[name]
    if existing and choice.method.name != existing.method:
        raise ValueError(f"--method {name}, but {draft} is a draft of {existing.method}; leave --method out")
    if existing and not all(getattr(existing, switch) for switch in choice.switches):
        raise ValueError(
            f"--method {name}, but {draft} was trained without its norms "
            f"({', '.join(choice.switches)}); leave --method out"
        )
    return choice


def _depth(options: TrainOptions, existing: DraftConfig | None, method: Method) -> int:
    known = existing.provenance.depth if existing else None
    depth = options.depth or known or method.depth
    if depth < method.min_depth:
        raise ValueError(f"--depth {depth}: {method.title} needs a depth of at least {method.min_depth}")
    return depth


def _data(options: TrainOptions, existing: DraftConfig | None, features: FeatureCache | None) -> DataRecipe:
    if features:
        known = features.manifest
        if options.row_length and options.row_length < known.max_length:
            raise ValueError(
                f"--row-length {options.row_length} is less than {known.max_length}, the maximum document length of "
                f"{features.path}; a row must have room for the longest document"
            )
        modes = tuple(known.template_modes) or (known.template_kwargs or {},)
        return DataRecipe(options, (), known.template_kwargs, known.max_length, modes)
    if options.row_length and options.max_length and options.row_length < options.max_length:
        raise ValueError(
            f"--row-length {options.row_length} is less than --max-length {options.max_length}; a row must have room "
            "for the longest document"
        )
    kwargs = parse_template_kwargs(options.template_kwargs)
    if kwargs is None and existing:
        kwargs = existing.provenance.template_kwargs
    return data_recipe(options, kwargs, options.row_length)


def data_recipe(options: DataOptions, kwargs: dict[str, Any] | None, row_length: int | None = None) -> DataRecipe:
    """The data that the options name, rendered with these variables of the chat template, for rows of `row_length`
    tokens. Raises ValueError for a source that cannot be read."""
    sources = tuple(with_columns(options.data, options.columns))
    try:
        modes = modes_of(options.data, kwargs)
    except ValueError as e:
        raise ValueError(f"--data {e}") from e
    longest = options.max_length or min(MAX_LENGTH, row_length or MAX_LENGTH)
    return DataRecipe(options, sources, kwargs, longest, modes)


def layer_ids(text: str | None, flag: str = "--aux-layers") -> tuple[int, ...] | None:
    """The value of an option for layers as ascending layer ids; None if it was not given."""
    try:
        layers = tuple(sorted(int(i) for i in text.split(","))) if text else None
    except ValueError as e:
        raise ValueError(f"{flag} {text} is not a list of layer numbers such as 2,16,29") from e
    if layers and len(set(layers)) < len(layers):
        raise ValueError(f"{flag} {text} contains a layer twice")
    return layers


def _objective(options: ObjectiveOptions, method: Method, depth: int) -> Objective:
    rate = method.cod_rate if options.cod_rate is None else options.cod_rate
    min_rate = COD_MIN_RATE if options.cod_min_rate is None else options.cod_min_rate
    gamma, anchors = method.gamma or options.gamma or method.gamma_of(depth), options.anchors or method.anchors
    return Objective(
        depth=method.trained_depth or depth,
        gamma=gamma,
        loss=options.loss,
        temperature=options.loss_temperature,
        dpace=options.dpace,
        keep_out_of_vocab=options.keep_out_of_vocab,
        feature_noise=options.feature_noise,
        drop=DrawAnchors(anchors) if anchors else DropTokens(rate, min_rate) if rate < 1 else None,
    )


def _device_and_impl(options: TrainOptions, method: Method, imagined: bool) -> tuple[str, str]:
    """The device and the implementation of the training step."""
    dtype = parse_dtype(options.dtype)
    device = "cuda" if imagined else resolve_device(options.device)
    if device == "cuda" and started_by_torchrun():
        device = f"cuda:{local_rank()}"
    gpu, triton = device.startswith("cuda"), imagined or importlib.util.find_spec("triton") is not None
    able = NETWORKS[method.name].implementations
    impl = options.impl or ("triton" if gpu and triton and "triton" in able else "eager")
    if impl not in able:
        raise ValueError(f"--impl {impl}: {method.title} has {' and '.join(able)} only; leave --impl out")
    if gpu and impl != "eager" and not triton:
        raise ValueError(
            f"--impl {impl} needs the package triton, which is not installed; install it, or use --impl eager"
        )
    if not gpu and impl != "eager":
        raise ValueError(f"--impl {impl} needs a CUDA GPU")
    if impl == "eager" and options.activations == "recompute":
        raise ValueError("--activations recompute needs a CUDA GPU and --impl triton or flex")
    if impl != "eager" and str(dtype) == "torch.float64":
        raise ValueError(f"--impl {impl} does not support --dtype float64; use --impl eager")
    return device, impl
