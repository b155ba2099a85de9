"""Resolves the options of `fledge train` into a recipe, and refuses contradictions before anything is loaded."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.address import refuse_credentials
from fledge.config import DraftConfig
from fledge.data.modes import modes_of
from fledge.jobs.options import flag_of, parse_template_kwargs
from fledge.methods import CHOICES, METHODS, Choice, Method

if TYPE_CHECKING:
    from fledge.features.cache import FeatureCache
    from fledge.jobs.features import FeaturesOptions
    from fledge.jobs.training.options import TrainOptions

MAX_LENGTH = 2048  # default of --max-length
DEPTH = 5  # default of --depth
COD_MIN_RATE = 0.2
LOGGERS = ("tensorboard", "wandb")
ACTIVATIONS = ("keep", "recompute", "auto")
SWITCHES = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm", "fc_bias")
# options that do not apply to an existing draft, whose vocabulary and shape are fixed
SHAPE_OPTIONS = ("draft_vocab", *SWITCHES, "aux_layers", "layers")
# options that are already decided by the features on disk
FEATURE_OPTIONS = (
    "data", "max_length", "template_kwargs", "columns", "skip_bad", "data_cache", "data_workers",
    "target_gpus", "shard_target",
)  # fmt: skip
# options that need the target to run in the training process
SERVED_OPTIONS = (
    "target_gpus", "shard_target", "eval_prompts", "eval_every", "eval_tokens",
)  # fmt: skip
# reasons why an option has no effect, in the form that `Options.refuse` takes
WITH_STEPS = "with --steps, which sets the length of the training;"
WITH_FEATURES = "with --features, whose documents are prepared and whose target does not run;"
WITH_SERVED = "with --features-from, as the target runs in vLLM alone; measure τ afterwards with fledge eval;"
WITH_INIT_FROM = "with --init-from, which keeps the draft's vocabulary and shape;"


@dataclass(frozen=True)
class TargetRecipe:
    """The target (a directory or hub id) and how to load it. With `dtype` None, it is float32 on a CPU and the target's
    own dtype elsewhere."""

    name: str
    trust_remote_code: bool
    dtype: str | None


@dataclass(frozen=True)
class DataRecipe:
    """The data sources and the maximum lengths of documents and rows, in tokens. A length that is None is chosen once
    the target and the data are loaded. `cache` is the directory of tokenized data and `workers` the number of processes
    that tokenize; None stands for the defaults. `modes` are all sets of template variables that sources are rendered
    with: `template_kwargs`, and a source's own, which take precedence."""

    sources: tuple[str, ...]
    template_kwargs: dict[str, Any] | None
    skip_bad: bool
    max_length: int | None
    row_length: int | None
    cache: str | None
    workers: int | None
    modes: tuple[dict[str, Any], ...]

    @property
    def longest(self) -> int:
        """Maximum document length in tokens; the target's context may lower it."""
        return self.max_length or min(MAX_LENGTH, self.row_length or MAX_LENGTH)


@dataclass(frozen=True)
class ServedRecipe:
    """Hidden states that vLLM computes. `address` is that of its server, or a directory of files that it wrote.
    `layers` are all that it captures, ascending (None: those that are needed). `mapped` is the path of its directory
    there and here, if they differ. `api_key_env` names the environment variable with the server's key, if it has one.
    """

    address: str
    layers: tuple[int, ...] | None
    mapped: tuple[Path, Path] | None
    api_key_env: str


@dataclass(frozen=True)
class NewDraft:
    """The shape of a new draft. `switches` are the boolean fields of its DraftConfig that are turned on. `aux_layers`
    None stands for the engines' default, `vocab_size` None for the target's vocabulary size, at most 32,000."""

    vocab_size: int | None
    layers: int
    aux_layers: tuple[int, ...] | None
    switches: tuple[str, ...]


@dataclass(frozen=True)
class ExistingDraft:
    """A draft to continue training: its directory or hub id, and its config, which is read only once."""

    name: str
    config: DraftConfig


@dataclass(frozen=True)
class ObjectiveRecipe:
    """The training objective. `depth` is the number of draft steps trained; the loss of step k is weighted by gamma^k.
    `drop` holds the rate and the minimum rate of conditional drop-token sampling; None: all slots."""

    depth: int
    gamma: float
    loss: str
    keep_out_of_vocab: bool
    feature_noise: float
    drop: tuple[float, float] | None


@dataclass(frozen=True)
class ScheduleRecipe:
    """The length and pace of the training. With `steps` None, `epochs` determines them; with `lr` None, the draft's
    hidden size determines it; with `rows_per_step` None, the number of ranks."""

    epochs: float
    steps: int | None
    rows_per_step: int | None
    lr: float | None
    warmup: float
    optimizer: str
    weight_decay: float
    clip: float
    save_every: int


@dataclass(frozen=True)
class EvaluationRecipe:
    """Measurements of τ during training. `prompts` is their source (None: held-out records), `every` the number of
    steps between two measurements (0: only at the end), and `tokens` the new tokens per prompt (None: depends on the
    target's context)."""

    prompts: str | None
    every: int
    tokens: int | None


@dataclass(frozen=True)
class ComputeRecipe:
    """How a training step is computed. `device` is the torch device, `impl` is "eager", "flex" or "triton". With
    `slots` None, as many slots are in flight as fit in memory."""

    device: str
    impl: str
    slots: int | None
    activations: str

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True)
class Recipe:
    """Everything about a run that is known before weights and data are loaded. `choice` is a key of
    `fledge.methods.CHOICES`. `depth` is the number of tokens that the trained draft drafts by default. `features` are
    those on disk to train from, and `served` those that vLLM computes (both None: the target computes them)."""

    choice: str
    depth: int
    target: TargetRecipe
    data: DataRecipe
    features: FeatureCache | None
    served: ServedRecipe | None
    draft: NewDraft | ExistingDraft
    train_embeddings: bool
    objective: ObjectiveRecipe
    schedule: ScheduleRecipe
    evaluation: EvaluationRecipe
    compute: ComputeRecipe
    log: str | None
    seed: int

    @property
    def method(self) -> Method:
        return CHOICES[self.choice].method


@dataclass(frozen=True)
class Settled:
    """The values of a run that depend on the target, the data and the device; `settled` in recipe.yaml. Lengths are in
    tokens. `slots` is the number of slots in flight, `mask_token` is None for methods without one, and `data_sha256` is
    the fingerprint of the training documents."""

    depth: int
    max_length: int
    row_length: int
    eval_tokens: int
    draft_vocab: int
    mask_token: int | None
    steps: int
    rows_per_step: int
    lr: float
    impl: str
    slots: int
    activations: str
    data_sha256: str


def resolve(options: TrainOptions, *, imagined: bool = False) -> Recipe:
    """The recipe for these options. Reads no file but the config of the --init-from draft and the manifest of the
    --features. With `imagined`, it is that of a machine with CUDA GPUs, which need not be there.

    Raises ValueError, naming the flags and a remedy, for options that contradict each other, that the method or the
    device does not support, or that name something that does not exist.
    """
    if not options.features and not (options.target and options.data):
        raise ValueError("give --target and --data, --features, a --config file that sets them, or --resume RUN")
    if options.features and options.features_from:
        raise ValueError("--features names hidden states on disk, and --features-from those of vLLM; give one of them")
    existing, features = _existing(options), _features(options)
    choice = _choice(options, existing)
    _check_method_options(options, choice.method)
    depth = _depth(options, existing, choice.method)
    return Recipe(
        choice=next(name for name, known in CHOICES.items() if known is choice),
        depth=depth,
        target=_target(options, features),
        data=_data(options, existing, features),
        features=features,
        served=served_recipe(options),
        draft=existing or _new_draft(options, choice),
        train_embeddings=options.train_embeddings,
        objective=_objective(options, choice.method, depth),
        schedule=_schedule(options),
        evaluation=_evaluation(options),
        compute=_compute(options, imagined),
        log=_logger(options.log),
        seed=options.seed,
    )


def ineffective_options(options: TrainOptions, method: Method) -> dict[str, str]:
    """Options that have no effect in combination with the others, with the reasons in the form of `Options.refuse`."""
    found = dict.fromkeys(["epochs"], WITH_STEPS) if options.steps else {}
    found |= dict.fromkeys(SHAPE_OPTIONS, WITH_INIT_FROM) if options.init_from else {}
    found |= dict.fromkeys(FEATURE_OPTIONS, WITH_FEATURES) if options.features else {}
    found |= dict.fromkeys(SERVED_OPTIONS, WITH_SERVED) if options.features_from else {}
    return found | unsupported_options(method)


def unsupported_options(method: Method) -> dict[str, str]:
    """Options that a method does not support, each with the reason."""
    found = {}
    for other in METHODS.values():
        foreign = [name for name in other.options if name not in method.options]
        found |= dict.fromkeys(foreign, f"with {method.title}; use --method {other.name}, or")
    return found | {name: f"with {method.title}: {why};" for name, why in method.without.items()}


def find_choice(name: str) -> Choice:
    """The method of this name. Raises ValueError for an unknown name."""
    if name not in CHOICES:
        raise ValueError(f"--method {name} is not one of {', '.join(CHOICES)}")
    return CHOICES[name]


def _existing(options: TrainOptions) -> ExistingDraft | None:
    if options.init_from is None:
        return None
    from fledge.models.weights import read_draft_config

    return ExistingDraft(options.init_from, read_draft_config(options.init_from))


def _features(options: TrainOptions) -> FeatureCache | None:
    if options.features is None:
        return None
    from fledge.features.cache import FeatureCache

    return FeatureCache.open(options.features)


def served_recipe(options: TrainOptions | FeaturesOptions) -> ServedRecipe | None:
    """The hidden states of vLLM that the options ask for; None if they do not. Raises ValueError for an address that is
    neither a directory nor that of a server."""
    address = options.features_from
    if address is None:
        needless = ("features_layers", "features_map", "api_key_env")
        options.refuse(needless, "without hidden states of vLLM; give --features-from, or")
        return None
    folder = Path(address).is_dir()
    if not folder:
        refuse_credentials(address)
    if not folder and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", address):
        raise ValueError(
            f"--features-from {address} is neither a directory nor the address of a server, such as "
            "http://localhost:8000"
        )
    if folder:
        options.refuse(["features_map", "api_key_env"], "with a directory of files;")
    mapped = None
    if options.features_map is not None:
        there, _, here = options.features_map.partition("=")
        if not there or not Path(here).is_dir() or not here:
            raise ValueError(
                f"--features-map {options.features_map} is not THERE=HERE, the paths of a directory on the server and "
                "of the same directory here, which has to exist"
            )
        mapped = Path(there), Path(here)
    layers = layer_ids(options.features_layers, "--features-layers")
    return ServedRecipe(address, layers, mapped, options.api_key_env)


def _target(options: TrainOptions, features: FeatureCache | None) -> TargetRecipe:
    name = options.target or features.manifest.target
    return TargetRecipe(name, options.trust_remote_code, options.dtype)


def _choice(options: TrainOptions, existing: ExistingDraft | None) -> Choice:
    """The method to train; that of the existing draft, if there is one."""
    name = options.method or (existing.config.method if existing else "eagle3")
    choice = find_choice(name)
    if existing and choice.method.name != existing.config.method:
        raise ValueError(
            f"--method {name}, but {existing.name} is a draft of {existing.config.method}; leave --method out"
        )
    if existing and not all(getattr(existing.config, switch) for switch in choice.switches):
        raise ValueError(
            f"--method {name}, but {existing.name} was trained without its norms "
            f"({', '.join(choice.switches)}); leave --method out"
        )
    return choice


def _check_method_options(options: TrainOptions, method: Method) -> None:
    reasons = ineffective_options(options, method)
    for why in dict.fromkeys(reasons.values()):
        options.refuse((name for name, reason in reasons.items() if reason == why), why)


def _depth(options: TrainOptions, existing: ExistingDraft | None, method: Method) -> int:
    known = existing.config.provenance.depth if existing else None
    depth = options.depth or known or DEPTH
    if depth < method.min_depth:
        raise ValueError(f"--depth {depth}: {method.title} needs a depth of at least {method.min_depth}")
    return depth


def _data(options: TrainOptions, existing: ExistingDraft | None, features: FeatureCache | None) -> DataRecipe:
    if features:
        known = features.manifest
        if options.row_length and options.row_length < known.max_length:
            raise ValueError(
                f"--row-length {options.row_length} is less than {known.max_length}, the maximum document length of "
                f"{features.path}; a row must have room for the longest document"
            )
        modes = tuple(known.template_modes) or (known.template_kwargs or {},)
        return DataRecipe((), known.template_kwargs, False, known.max_length, options.row_length, None, None, modes)
    if options.row_length and options.max_length and options.row_length < options.max_length:
        raise ValueError(
            f"--row-length {options.row_length} is less than --max-length {options.max_length}; a row must have room "
            "for the longest document"
        )
    from fledge.data.read import with_columns

    kwargs = parse_template_kwargs(options.template_kwargs)
    if kwargs is None and existing:
        kwargs = existing.config.provenance.template_kwargs
    sources = with_columns(options.data, options.columns)
    return DataRecipe(
        tuple(sources), kwargs, options.skip_bad, options.max_length, options.row_length, options.data_cache,
        options.data_workers, _modes(options.data, kwargs),
    )  # fmt: skip


def _modes(data: Sequence[str], kwargs: dict[str, Any] | None) -> tuple[dict[str, Any], ...]:
    """`modes_of` for --data. Raises ValueError for a source that cannot be read."""
    try:
        return modes_of(data, kwargs)
    except ValueError as e:
        raise ValueError(f"--data {e}") from e


def _new_draft(options: TrainOptions, choice: Choice) -> NewDraft:
    switches = tuple(name for name in SWITCHES if getattr(options, name) or name in choice.switches)
    layers = layer_ids(options.aux_layers) if choice.method.reads_layers else ()
    return NewDraft(options.draft_vocab, options.layers, layers, switches)


def layer_ids(text: str | None, flag: str = "--aux-layers") -> tuple[int, ...] | None:
    """The value of an option for layers as ascending layer ids; None if it was not given."""
    try:
        layers = tuple(sorted(int(i) for i in text.split(","))) if text else None
    except ValueError as e:
        raise ValueError(f"{flag} {text} is not a list of layer numbers such as 2,16,29") from e
    if layers and len(set(layers)) < len(layers):
        raise ValueError(f"{flag} {text} contains a layer twice")
    return layers


def _objective(options: TrainOptions, method: Method, depth: int) -> ObjectiveRecipe:
    from fledge.kernels.loss import KINDS

    _check_known("loss", options.loss, KINDS)
    rate = method.cod_rate if options.cod_rate is None else options.cod_rate
    min_rate = COD_MIN_RATE if options.cod_min_rate is None else options.cod_min_rate
    return ObjectiveRecipe(
        depth=method.trained_depth or depth,
        gamma=options.gamma if method.gamma is None else method.gamma,
        loss=options.loss,
        keep_out_of_vocab=options.keep_out_of_vocab,
        feature_noise=options.feature_noise,
        drop=(rate, min_rate) if rate < 1 else None,
    )


def _schedule(options: TrainOptions) -> ScheduleRecipe:
    from fledge.train.optim import OPTIMIZERS

    _check_known("optimizer", options.optimizer, OPTIMIZERS)
    return ScheduleRecipe(
        epochs=options.epochs, steps=options.steps, rows_per_step=options.rows_per_step, lr=options.lr,
        warmup=options.warmup, optimizer=options.optimizer, weight_decay=options.weight_decay, clip=options.clip,
        save_every=options.save_every,
    )  # fmt: skip


def _evaluation(options: TrainOptions) -> EvaluationRecipe:
    from fledge.data.read import check_source

    if options.eval_prompts:
        check_source(options.eval_prompts, "--eval-prompts")
    return EvaluationRecipe(options.eval_prompts, options.eval_every, options.eval_tokens)


def _compute(options: TrainOptions, imagined: bool) -> ComputeRecipe:
    from fledge.decode.engine import resolve_device
    from fledge.jobs.options import parse_dtype
    from fledge.kernels.ttt_attention import IMPLS
    from fledge.train.ranks import local_rank, started_by_torchrun

    if options.impl is not None:
        _check_known("impl", options.impl, IMPLS)
    _check_known("activations", options.activations, ACTIVATIONS)
    dtype = parse_dtype(options.dtype)
    device = "cuda" if imagined else resolve_device(options.device)
    if device == "cuda" and started_by_torchrun():
        device = f"cuda:{local_rank()}"
    gpu, triton = device.startswith("cuda"), imagined or importlib.util.find_spec("triton") is not None
    impl = options.impl or ("triton" if gpu and triton else "eager")
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
    return ComputeRecipe(device, impl, options.slots, options.activations)


def _logger(name: str | None) -> str | None:
    if name is None:
        return None
    _check_known("log", name, LOGGERS)
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"--log {name} needs a package that is not installed: pip install {name}")
    return name


def _check_known(name: str, value: str, known: Iterable[str]) -> None:
    known = tuple(known)
    if value not in known:
        raise ValueError(f"{flag_of(name)} {value} is not one of {', '.join(known)}")
