"""The options of `fledge train`."""

from __future__ import annotations

from dataclasses import dataclass

from fledge.jobs.options import (
    MAX_SEED,
    Options,
    api_key_env_option,
    columns_option,
    data_cache_option,
    data_workers_option,
    dtype_option,
    features_from_option,
    features_layers_option,
    features_map_option,
    opt,
    option_fields,
    trust_remote_code_option,
)
from fledge.methods import CHOICES

OUT = "draft-run"
# the options that say where a run computes, or that it is only planned, not what it computes
MACHINE = ("gpus", "target_gpus", "shard_target", "rank_timeout", "dry_run", "gpu_memory")
# the options that may have another value when a run is continued
MOVABLE = ("features_from", "features_map", "api_key_env")
WITH_RESUME = (  # the options that may be given together with --resume
    "resume", "trust_remote_code", *MOVABLE, *MACHINE,
)  # fmt: skip
NOT_FROM_FILE = ("out", "trust_remote_code")  # the options that a --config file does not set


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """Train a draft for a target on chats or plain text."""

    config: str | None = opt(
        "NAME|FILE: take options from a recipe that comes with fledge (eagle3, peagle, llama-3.1-8b, qwen3-8b, "
        "gpt-oss-20b, gemma-3 or laptop) or from a YAML file, e.g. the recipe.yaml of a run; flags override it, and "
        "negated flags such as --no-qk-norm turn off its switches", None
    )  # fmt: skip
    target: str | None = opt("target model: a directory or hub id (owner/name or owner/name@revision)", None)
    trust_remote_code: bool = trust_remote_code_option()
    data: list[str] = opt(
        "training data: a file, directory, quoted glob or hub id (owner/name@revision:split), or one of sharegpt, "
        "ultrachat, perfectblend, magpie, openhermes, nemotron; @0.5 at the end takes half of it, "
        "@2 all of it twice; or a JSON object with options of its own, e.g. '{\"source\": \"a.jsonl\", "
        "\"template_kwargs\": {\"enable_thinking\": true}}' (docs/recipes.md); repeatable", repeatable=True
    )  # fmt: skip
    features: str | None = opt(
        "train from the hidden states in this directory, which `fledge features` has written; it has the documents and "
        "names the target, so --data is not needed", None
    )  # fmt: skip
    features_from: str | None = features_from_option()
    features_layers: str | None = features_layers_option()
    features_map: str | None = features_map_option()
    api_key_env: str = api_key_env_option()
    out: str = opt("directory of the new run; the draft to serve is written to OUT/draft", OUT)
    resume: str | None = opt("continue the run in this directory with its own options", None)
    init_from: str | None = opt(
        "continue training this draft, a directory or hub id; its vocabulary and shape are kept", None
    )
    method: str | None = opt(
        f"draft method: {', '.join(CHOICES)} (default: eagle3, or the method of the --init-from draft)", None
    )
    epochs: float = opt("number of passes over the data", 1.0, greater_than=0)
    steps: int | None = opt("number of optimizer steps (default: as many as --epochs takes)", None, minimum=1)
    depth: int | None = opt(
        "number of tokens drafted per round by default, and of draft steps trained (training-time test; EAGLE-1 trains "
        "one) (default: 5, or that of the --init-from draft)", None, minimum=1, maximum=64,
    )  # fmt: skip
    draft_vocab: int | None = opt(
        "size of the draft vocabulary (default: the target's, at most 32,000)", None, minimum=2
    )
    max_length: int | None = opt(
        "maximum document length in tokens; longer documents are cut into windows (default: 2,048, or the target's "
        "context if that is shorter)", None, minimum=3,
    )  # fmt: skip
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
        "muon",
    )  # fmt: skip
    weight_decay: float = opt("weight decay, applied to matrices only", 0.01, minimum=0)
    clip: float = opt("maximum gradient norm", 1.0, greater_than=0)
    gamma: float = opt(
        "the loss of draft step k is weighted by gamma^k (P-EAGLE: always 1)", 0.8, greater_than=0, maximum=1
    )
    loss: str = opt(
        "loss function: ce, kl, accept (-log of the acceptance rate α), or mixed (kl while α is low, then 1 - α)", "ce"
    )
    keep_out_of_vocab: bool = opt("also train on slots whose target token is outside the draft vocabulary", False)
    fc_norm: bool = opt("EAGLE-3.1: apply an RMSNorm to each hidden state that the draft reads", False)
    norm_output: bool = opt("EAGLE-3.1: feed the normalized hidden state back to the next draft step", False)
    norm_before_fc: bool = opt("apply one RMSNorm to all hidden states that the draft reads (speculators)", False)
    norm_before_residual: bool = opt(
        "use the normalized hidden state as the residual (only vLLM and speculators support this)", False
    )
    qk_norm: bool = opt("normalize queries and keys as Qwen3 does (only vLLM supports this)", False)
    aux_layers: str | None = opt(
        "target layers that the draft reads, e.g. 2,16,29 (default: 2, n/2, n-3 of n layers; others if n < 7)", None
    )
    layers: int = opt("number of decoder layers of the draft", 1, minimum=1, maximum=512)
    train_embeddings: bool = opt(
        "train token embeddings of the draft's own (SGLang replaces them by the target's)", False
    )
    fc_bias: bool = opt("EAGLE-1: add a bias to fc, which joins embedding and hidden state (vLLM ignores it)", False)
    cod_rate: float | None = opt(
        "EAGLE-3 and P-EAGLE: step k, counted from 0, trains on the fraction rate^k of its live slots (conditional "
        "drop-token sampling) (default: 1; P-EAGLE: 0.8)", None, greater_than=0, maximum=1,
    )  # fmt: skip
    cod_min_rate: float | None = opt(
        "minimum of the fraction of slots that each step trains on with --cod-rate (default: 0.2)", None, minimum=0,
        maximum=1,
    )  # fmt: skip
    feature_noise: float = opt(
        "EAGLE-1: add uniform noise to the hidden states that the draft reads; its amplitude is this value times 512 / "
        "document length", 0.0, minimum=0,
    )  # fmt: skip
    template_kwargs: str | None = opt(
        "JSON object of chat template variables, e.g. '{\"enable_thinking\": false}'; those of a source in --data take "
        "precedence",
        None,
    )
    columns: str | None = columns_option()
    skip_bad: bool = opt("skip and count records that are not text or that the chat template refuses", False)
    data_cache: str | None = data_cache_option()
    data_workers: int | None = data_workers_option()
    eval_prompts: str | None = opt(
        "file or hub id of prompts on which τ is measured during training; the first turns of 32 prompts are used "
        "(default: 16 held-out records of the data)", None
    )  # fmt: skip
    eval_every: int = opt("number of steps between measurements of τ; 0 measures it only at the end", 0, minimum=0)
    eval_tokens: int | None = opt(
        "maximum new tokens per prompt in these measurements (default: 64, at most half of the target's context)", None,
        minimum=1,
    )  # fmt: skip
    save_every: int = opt("number of steps between checkpoints", 200, minimum=1)
    log: str | None = opt("also log metrics to tensorboard or wandb", None)
    seed: int = opt(
        "random seed of initial weights, packing, held-out records and shares (@0.5) of the data", 0, minimum=0,
        maximum=MAX_SEED,
    )  # fmt: skip
    impl: str | None = opt(
        "implementation of the training step: eager, flex or triton (default: triton on a GPU, otherwise eager)", None
    )
    slots: int | None = opt(
        "number of slots in flight; fewer take less memory (default: as many as fit in GPU memory, up to 8,192; 256 on "
        "a CPU)", None, minimum=1
    )  # fmt: skip
    activations: str = opt("activations of the MLP: keep, recompute, or auto (recompute if necessary to fit)", "auto")
    device: str = opt("device: auto, cpu, cuda, cuda:1, ...", "auto")
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
    dtype: str | None = dtype_option()
    dry_run: bool = opt(
        "train nothing: print what would run where, its memory and disk, the number of steps, and on the machine's own "
        "GPUs the hours (a few steps are timed and thrown away); exit code 1 if it does not fit", False
    )  # fmt: skip
    gpu_memory: float | None = opt(
        "--dry-run: GB of memory of each of --gpus GPUs that are not there, for placement, memory and disk alone",
        None,
        greater_than=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume:
            others = [f.name for f in option_fields(self) if f.name not in WITH_RESUME]
            self.refuse(others, f"with --resume, which continues with the options of the run in {self.resume};")
        elif self.was_given("steps"):
            self.refuse(["epochs"], "with --steps, which sets the length of the training;")
        if self.gpu_memory is not None and not self.dry_run:
            raise ValueError("--gpu-memory describes GPUs to plan a run for; give it together with --dry-run")
