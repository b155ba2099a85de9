"""The options of `fledge train`, in groups. Functions take the groups whose options they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fledge.methods import CHOICES
from fledge.options import (
    MAX_SEED,
    Options,
    aliases_of,
    api_key_env_option,
    columns_option,
    dtype_option,
    names_of,
    opt,
    option_fields,
    same_option,
    trust_remote_code_option,
)

OUT = "draft-run"


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Options):
    """The target, whose hidden states a draft learns from. `dtype` None: float32 on a CPU, the target's own dtype
    elsewhere."""

    panel: ClassVar[str] = "Target"
    target: str | None = opt("target model: a directory or hub id (owner/name or owner/name@revision)", None)
    trust_remote_code: bool = trust_remote_code_option()
    dtype: str | None = dtype_option()


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """The documents to train on."""

    panel: ClassVar[str] = "Data"
    data: list[str] = opt(
        "training data: a file, directory, quoted glob or hub id (owner/name@revision:split), or one of sharegpt, "
        "ultrachat, perfectblend, magpie, openhermes, nemotron; @0.5 at the end takes half of it, "
        "@2 all of it twice; or a JSON object with options of its own, e.g. '{\"source\": \"a.jsonl\", "
        "\"template_kwargs\": {\"enable_thinking\": true}}' (docs/recipes.md); repeatable", repeatable=True
    )  # fmt: skip
    columns: str | None = columns_option()
    template_kwargs: str | None = opt(
        "JSON object of chat template variables, e.g. '{\"enable_thinking\": false}'; those of a source in --data take "
        "precedence",
        None,
    )
    skip_bad: bool = opt("skip and count records that are not text or that the chat template refuses", False)
    max_length: int | None = opt(
        "maximum document length in tokens; longer documents are cut into windows (default: 2,048, or the target's "
        "context if that is shorter)", None, minimum=3,
    )  # fmt: skip
    data_cache: str | None = opt(
        "directory that keeps the tokenized data for later runs (default: $FLEDGE_CACHE, or fledge in the user's cache "
        "directory)", None
    )  # fmt: skip
    data_workers: int | None = opt(
        "number of processes that tokenize the data; 1 starts no other process (default: as many as cores, at most 32; "
        "1 for small data)", None, minimum=1, maximum=1024,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServedOptions(Options):
    """Hidden states that vLLM computes, in place of a target in this process."""

    panel: ClassVar[str] = "Hidden states from vLLM"
    features_from: str | None = opt(
        "take the target's hidden states from vLLM, which computes them instead of this command: the address of a "
        "server, e.g. http://localhost:8000, or a directory of files that it wrote (docs/hidden-states.md)", None
    )  # fmt: skip
    features_layers: str | None = opt(
        "all layers that this vLLM captures, e.g. 2,16,29,32 (default: those that are read, and n of n layers)", None
    )
    features_map: str | None = opt(
        "THERE=HERE, the paths of this vLLM's directory on its machine and here (default: the same path)", None
    )
    api_key_env: str = api_key_env_option()


@dataclass(frozen=True, kw_only=True)
class ShapeOptions(Options):
    """The vocabulary and shape of a new draft; an existing draft (`--init-from`) keeps vocabulary and shape."""

    panel: ClassVar[str] = "Shape of a new draft"
    draft_vocab: int | None = opt(
        "size of the draft vocabulary (default: the target's, at most 32,000)", None, minimum=2
    )
    layers: int | None = opt(
        "number of decoder layers of the draft (default: 1; DFlash: 5)", None, minimum=1, maximum=512
    )
    aux_layers: str | None = opt(
        "target layers that the draft reads, e.g. 2,16,29 (default: 2, n/2, n-3 of n layers; others if n < 7; DFlash: "
        "as many as the draft has layers, from 2 to n-2)", None
    )  # fmt: skip
    fc_norm: bool = opt("EAGLE-3.1: apply an RMSNorm to each hidden state that the draft reads", False)
    norm_output: bool = opt("EAGLE-3.1: feed the normalized hidden state back to the next draft step", False)
    norm_before_fc: bool = opt("apply one RMSNorm to all hidden states that the draft reads (speculators)", False)
    norm_before_residual: bool = opt(
        "use the normalized hidden state as the residual (only vLLM and speculators support this)", False
    )
    qk_norm: bool = opt("normalize queries and keys as Qwen3 does (only vLLM supports this)", False)
    fc_bias: bool = opt("EAGLE-1: add a bias to fc, which joins embedding and hidden state (vLLM ignores it)", False)
    block_causal: bool = opt(
        "DFlash: let a drafted token see only the tokens of the block before it, as JetSpec does (default: the whole "
        "block)", False
    )  # fmt: skip
    block_conv: bool = opt(
        "DFlash 2: convolve each token's row with the row before it in the block, around every attention and MLP", False
    )
    candidate_selector: bool = opt(
        "DFlash 2: choose each token among the 16 likeliest of its place, given the token before it (drafts chains, no "
        "trees)", False
    )  # fmt: skip
    sliding_window: int | None = opt(
        "DFlash: let a drafted token see only this many tokens before it (default: the whole text)", None, minimum=2
    )


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(Options):
    """What a draft is trained to do."""

    panel: ClassVar[str] = "Objective"
    depth: int | None = opt(
        "number of tokens drafted per round by default, and of draft steps trained (training-time test; EAGLE-1 trains "
        "one) (default: 5; DFlash: 15; or that of the --init-from draft)", None, minimum=1, maximum=64,
    )  # fmt: skip
    loss: str = opt(
        "loss function: ce, kl, accept (-log of the acceptance rate α), mixed (kl while α is low, then 1 - α), or hard "
        "(cross-entropy with the text's own tokens instead of the target's distribution)", "ce",
        choices=("ce", "kl", "accept", "mixed", "hard"),
    )  # fmt: skip
    loss_temperature: float = opt(
        "DFlash: compare the distributions of --loss ce or kl at this temperature, as JetSpec does", 1.0, minimum=0.01,
        maximum=100,
    )  # fmt: skip
    gamma: float | None = opt(
        "the loss of draft step k is weighted by gamma^k (default: 0.8; P-EAGLE: always 1; DFlash: 0.87 from a depth "
        "of 15 on, 0.82 from 9 on, else 0.78)", None, greater_than=0, maximum=1
    )  # fmt: skip
    dpace: bool = opt(
        "DFlash: weight the tokens of a block by the draft's own confidence in the block up to them (D-PACE), instead "
        "of --gamma", False
    )  # fmt: skip
    keep_out_of_vocab: bool = opt("also train on slots whose target token is outside the draft vocabulary", False)
    cod_rate: float | None = opt(
        "EAGLE-3 and P-EAGLE: step k, counted from 0, trains on the fraction rate^k of its live slots (conditional "
        "drop-token sampling) (default: 1; P-EAGLE: 0.8)", None, greater_than=0, maximum=1,
    )  # fmt: skip
    cod_min_rate: float | None = opt(
        "minimum of the fraction of slots that each step trains on with --cod-rate (default: 0.2)", None, minimum=0,
        maximum=1,
    )  # fmt: skip
    anchors: int | None = opt(
        "DFlash: number of tokens of a row after which a block is trained, drawn anew in each epoch (default: 512)",
        None, minimum=1,
    )  # fmt: skip
    feature_noise: float = opt(
        "EAGLE-1: add uniform noise to the hidden states that the draft reads; its amplitude is this value times 512 / "
        "document length", 0.0, minimum=0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """The length and pace of the training."""

    panel: ClassVar[str] = "Schedule"
    epochs: float = opt("number of passes over the data", 1.0, greater_than=0)
    steps: int | None = opt("number of optimizer steps (default: as many as --epochs takes)", None, minimum=1)
    row_length: int | None = opt(
        "tokens per packed row (default: twice --max-length, at most the tokens of the data)", None, minimum=3
    )
    rows_per_step: int | None = opt(
        "number of rows per optimizer step, those of all GPUs together; with more rows than GPUs, gradients are "
        "accumulated (default: one row for each GPU)", None, minimum=1, maximum=65_536,
    )  # fmt: skip
    lr: float | None = opt("peak learning rate (default: 0.5 / hidden size of the draft)", None, greater_than=0)
    warmup: float = opt("fraction of the steps over which the learning rate warms up", 0.05, minimum=0, maximum=1)
    optimizer: str = opt(
        "muon (Muon for the matrices of the draft's layers, AdamW for the rest), or adamw; learning rates are the same",
        "muon", choices=("adamw", "muon"),
    )  # fmt: skip
    weight_decay: float = opt("weight decay, applied to matrices only", 0.01, minimum=0)
    clip: float = opt("maximum gradient norm", 1.0, greater_than=0)
    save_every: int = opt("number of steps between checkpoints", 200, minimum=1)
    seed: int = opt(
        "random seed of initial weights, packing, held-out records and shares (@0.5) of the data", 0, minimum=0,
        maximum=MAX_SEED,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Options):
    """Measurements of τ during training."""

    panel: ClassVar[str] = "Measuring τ"
    eval_prompts: str | None = opt(
        "file or hub id of prompts on which τ is measured during training; the first turns of 32 prompts are used "
        "(default: 16 held-out records of the data)", None
    )  # fmt: skip
    eval_every: int = opt("number of steps between measurements of τ; 0 measures it only at the end", 0, minimum=0)
    eval_tokens: int | None = opt(
        "maximum new tokens per prompt in these measurements (default: 64, at most half of the target's context)", None,
        minimum=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(Options):
    """How a training step is computed."""

    panel: ClassVar[str] = "Computing"
    device: str = opt("device: auto, cpu, cuda, cuda:1, ...", "auto")
    impl: str | None = opt(
        "implementation of the training step: eager, flex or triton (default: triton on a GPU, otherwise eager)", None,
        choices=("eager", "flex", "triton"),
    )  # fmt: skip
    slots: int | None = opt(
        "number of slots in flight; fewer take less memory (default: as many as fit in GPU memory, up to 8,192; 256 on "
        "a CPU; DFlash: blocks in flight, by default as many as have that many rows)", None, minimum=1
    )  # fmt: skip
    activations: str = opt(
        "activations of the MLP: keep, recompute, or auto (recompute if necessary to fit)", "auto",
        choices=("keep", "recompute", "auto"),
    )  # fmt: skip

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Options):
    """Where a run computes, or that the run is only planned; nothing here changes what is computed."""

    panel: ClassVar[str] = "Several GPUs and planning"
    gpus: int | None = opt(
        "train on this many GPUs of this machine, with one process for each; on several machines, start fledge train "
        "with torchrun instead (default: 1)", None, minimum=1, maximum=1024,
    )  # fmt: skip
    target_gpus: int | None = opt(
        "several GPUs: this many of them, the last ones, hold only the target, and send its hidden states to the "
        "others, which train the draft (default: each GPU does both)", None, minimum=1, maximum=1024,
    )  # fmt: skip
    shard_target: bool = opt(
        "several GPUs: split the target's layers over those that hold it (FSDP), for a target that does not fit on one",
        False,
    )  # fmt: skip
    rank_timeout: float = opt(
        "several GPUs: minutes that one process waits for another before all fail", 30.0, greater_than=0
    )
    dry_run: bool = opt(
        "train nothing: print what would run where, its memory and disk, the number of steps, and on the machine's own "
        "GPUs the hours (a few steps are timed and thrown away); exit code 1 if it does not fit", False
    )  # fmt: skip
    gpu_memory: float | None = opt(
        "--dry-run: GB of memory of each of --gpus GPUs that are not there, for placement, memory and disk alone",
        None,
        greater_than=0,
    )


TARGET_RANKS = ("target_gpus", "shard_target")  # options of ranks that hold the target
FEATURE_OPTIONS = (*names_of(DataOptions), *TARGET_RANKS)  # without effect where the target does not run
SERVED_OPTIONS = (*names_of(EvaluationOptions), *TARGET_RANKS)  # need the target to run in the training process
SWITCHES = tuple(f.name for f in option_fields(ShapeOptions) if f.type == "bool")  # boolean fields of a DraftConfig
MACHINE = names_of(MachineOptions)
MOVABLE = ("features_from", "features_map", "api_key_env")  # may have another value when a run is continued
WITH_RESUME = ("resume", "trust_remote_code", *MOVABLE, *MACHINE)  # may be given together with --resume


@dataclass(frozen=True, kw_only=True)
class TrainOptions(
    TargetOptions, DataOptions, ServedOptions, ShapeOptions, ObjectiveOptions, ScheduleOptions, EvaluationOptions,
    ComputeOptions, MachineOptions,
):  # fmt: skip
    """Train a draft for a target on chats or plain text."""

    panel: ClassVar[str] = "Run"
    config: str | None = opt(
        "NAME|FILE: take options from a recipe that comes with fledge (eagle3, peagle, dflash, dflash2, jetspec, "
        "llama-3.1-8b, qwen3-8b, gpt-oss-20b, gemma-3 or laptop) or from a YAML file, e.g. the recipe.yaml of a run; "
        "flags override it, and negated flags such as --no-qk-norm turn off its switches", None
    )  # fmt: skip
    features: str | None = opt(
        "train from the hidden states in this directory, which `fledge features` has written; it has the documents and "
        "names the target, so --data is not needed", None
    )  # fmt: skip
    out: str = opt("directory of the new run; the draft to serve is written to OUT/draft", OUT)
    resume: str | None = opt("continue the run in this directory with its own options", None)
    init_from: str | None = opt(
        "continue training this draft, a directory or hub id; its vocabulary and shape are kept", None
    )
    method: str | None = opt(
        f"draft method: {', '.join(CHOICES)} (default: eagle3, or the method of the --init-from draft)", None,
        choices=CHOICES,
    )  # fmt: skip
    train_embeddings: bool = opt(
        "train token embeddings of the draft's own (SGLang replaces them by the target's)", False
    )
    log: str | None = opt("also log metrics to tensorboard or wandb", None, choices=("tensorboard", "wandb"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume:
            others = [name for name in names_of(TrainOptions) if name not in WITH_RESUME]
            self.refuse(others, f"with --resume, which continues with the options of the run in {self.resume};")
        elif self.was_given("steps"):
            self.refuse(["epochs"], "with --steps, which sets the length of the training;")
        if self.gpu_memory is not None and not self.dry_run:
            raise ValueError("--gpu-memory describes GPUs to plan a run for; give it together with --dry-run")


def replace_aliases(values: Mapping[str, Any], as_written: Callable[[str], str]) -> dict[str, Any]:
    """Given options (name: value) by their own names. `as_written` turns a name into the form that the user wrote, for
    messages. Raises ValueError if an option is given by two names."""
    own = {alias: f.name for f in option_fields(TrainOptions) for alias in aliases_of(TrainOptions, f.name)}
    replaced: dict[str, Any] = {}
    for name, value in values.items():
        if (new := own.get(name, name)) in replaced:
            first, second = sorted((name, next(n for n in values if own.get(n, n) == new)))
            raise ValueError(same_option(as_written(first), as_written(second)))
        replaced[new] = value
    return replaced
