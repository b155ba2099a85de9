"""`fledge train`: from a target and chats to a draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fledge.jobs.options import LARGEST_SEED, Options, flags, opt, place_of, trust_option
from fledge.methods import CHOICES

if TYPE_CHECKING:
    from fledge.jobs.training.recipe import Recipe
    from fledge.train.checkpoint import RunDirectory

OUT = "draft-run"
WITH_RESUME = ("resume", "trust_remote_code")  # options that go together with --resume
NOT_FROM_FILE = ("out", "trust_remote_code")  # options that a --config file does not set


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """Train a draft for a target on chats or plain text."""

    config: str | None = opt(
        "take options from this YAML file, such as the recipe.yaml of a run; flags override it, and a switch that it "
        "turns on is turned off by its negation, such as --no-qk-norm", None
    )  # fmt: skip
    target: str | None = opt("the model to speed up: a directory or hub id (owner/name or owner/name@revision)", None)
    trust_remote_code: bool = trust_option()
    data: list[str] = opt(
        "files, quoted globs or hub ids (owner/name@revision:split); @0.5 takes half, @2 twice; repeatable", many=True
    )
    out: str = opt("directory of a new run; the draft to serve ends in OUT/draft", OUT)
    resume: str | None = opt("continue the run in this directory, with its own options", None)
    init_from: str | None = opt(
        "train this draft further, a directory or hub id (it keeps its vocabulary and shape)", None
    )
    method: str | None = opt(f"{', '.join(CHOICES)} (default: eagle3, or that of the --init-from draft)", None)
    epochs: float = opt("passes over the data", 1.0, above=0)
    steps: int | None = opt("optimizer steps, instead of --epochs", None, least=1)
    depth: int | None = opt(
        "draft steps trained (TTT; EAGLE-1 trains one) and drafted by default (default: 5, or the --init-from draft's)",
        None, least=1, most=64,
    )  # fmt: skip
    draft_vocab: int | None = opt(
        "size of the draft vocabulary (default: at most 32,000 of the target's tokens)", None, least=2
    )
    max_length: int | None = opt(
        "longest document, in tokens; longer ones are cut into windows (default: 2,048, or the target's context)",
        None, least=3,
    )  # fmt: skip
    row_length: int | None = opt(
        "tokens of a packed row (default: twice --max-length; at most the data)", None, least=3
    )
    rows_per_step: int = opt("rows accumulated for each optimizer step", 1, least=1, most=65_536)
    lr: float | None = opt("peak learning rate (default: 0.5 / draft width)", None, above=0)
    warmup: float = opt("share of the steps that the learning rate rises for", 0.05, least=0, most=1)
    weight_decay: float = opt("AdamW's weight decay, on matrices", 0.01, least=0)
    clip: float = opt("largest gradient norm", 1.0, above=0)
    gamma: float = opt("weight of step k is gamma^k (P-EAGLE: 1)", 0.8, above=0, most=1)
    loss: str = opt("ce, kl, accept (-log α) or mixed (kl while α is low, then 1 - α)", "ce")
    keep_out_of_vocab: bool = opt(
        "also train on slots whose target token is outside the draft vocabulary", False, formerly="keep_unseen"
    )
    fc_norm: bool = opt("EAGLE-3.1: an RMSNorm on each captured layer", False)
    norm_output: bool = opt("EAGLE-3.1: feed back the normed state", False)
    norm_before_fc: bool = opt("speculators: one RMSNorm over all captured layers", False)
    norm_before_residual: bool = opt("the residual is the normed state (vLLM and speculators only)", False)
    qk_norm: bool = opt("q and k norms as Qwen3 has them (vLLM only)", False)
    aux_layers: str | None = opt("layers to read, e.g. 2,16,29 (default: 2, n/2, n-3, or others under 7 layers)", None)
    layers: int = opt("decoder layers of the draft", 1, least=1, most=512)
    train_embeddings: bool = opt("train embeddings of the draft's own (SGLang replaces them by the target's)", False)
    fc_bias: bool = opt("EAGLE-1: a bias where embedding and state are joined (vLLM drops it)", False)
    cod_rate: float | None = opt(
        "P-EAGLE: depth d trains this share, to the power d, of the slots that are live there (default: 0.8)", None,
        above=0, most=1,
    )  # fmt: skip
    cod_min_rate: float | None = opt(
        "P-EAGLE: but no smaller share than this (default: 0.2)", None, least=0, most=1, formerly="cod_least"
    )
    feature_noise: float = opt(
        "EAGLE-1: uniform noise on the states that the draft reads, up to this times 512 / a document's length",
        0.0, least=0,
    )  # fmt: skip
    template_kwargs: str | None = opt("JSON passed to the chat template, e.g. '{\"enable_thinking\": false}'", None)
    skip_bad: bool = opt("count and leave out records that are not text or that the template refuses", False)
    eval_prompts: str | None = opt(
        "file or hub id of prompts for τ while training, the first turns of 32 (default: 16 records of the data)", None
    )
    eval_every: int = opt("steps between τ by the real decoder (0: only at the end)", 0, least=0)
    eval_tokens: int | None = opt(
        "new tokens for each of those prompts (default: 64, at most half the target's context)", None, least=1
    )
    save_every: int = opt("steps between checkpoints", 200, least=1)
    log: str | None = opt("also log to 'tensorboard' or 'wandb'", None)
    seed: int = opt(
        "of initial weights, packing, held-out records and shares (@0.5) of the data", 0, least=0, most=LARGEST_SEED
    )
    impl: str | None = opt("implementation of a step: eager, flex or triton (default: triton on a GPU)", None)
    slots: int | None = opt(
        "slots in flight: fewer hold less memory (default: as many as fit, up to 8,192; on a CPU 256)", None, least=1
    )
    activations: str = opt("the MLP's activations: keep, recompute, or auto, which recomputes only to fit", "auto")
    longest_row: bool = opt("find the longest row that fits this GPU, print it and stop", False)
    compile_target: bool = opt("compile the target's norms and MLPs: a slower start, quicker steps on a GPU", False)
    device: str = opt("auto, cpu, cuda, cuda:1, ...", "auto")
    dtype: str | None = opt("compute dtype (default: float32 on the CPU, else the target's)", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume:
            others = [f.name for f in flags(self) if f.name not in WITH_RESUME]
            self.refuse(others, f"with --resume, which continues with the options that {self.resume} was started with;")
        elif self.was_given("steps"):
            self.refuse(["epochs"], "with --steps, which sets the length of the training;")


def run(options: TrainOptions, say: Callable[[str], None], progress: Any) -> dict[str, Any]:
    """Trains (or continues) and returns the metrics of the last step. `say` prints a line, `progress` shows steps.

    Raises KeyboardInterrupt where it was interrupted, after it said how to continue, and ValueError for options that
    contradict each other or a directory that another process writes.
    """
    from fledge.jobs.training.recipe_file import naming, resumed, with_config
    from fledge.train.checkpoint import RunDirectory

    options = with_config(options, say)
    directory = RunDirectory(options.resume or options.out)
    recorded = None
    if options.resume:
        options, recorded = resumed(directory, options)
    else:
        place_of(options.out, "--out", directory=True)
        directory.check_free()
    with directory.locked(say):
        with naming(options):
            recipe = _resolve(options, directory)
        return _train(options, recipe, recorded, directory, say, progress)


def _resolve(options: TrainOptions, directory: RunDirectory) -> Recipe:
    from fledge.jobs.training.recipe import resolve

    if options.resume and options.init_from and directory.checkpoint.exists():
        options = replace(options, init_from=str(directory.checkpoint))  # the draft it names may be another by now
    return resolve(options)


def _train(
    options: TrainOptions, recipe: Recipe, recorded: dict[str, Any] | None, directory: RunDirectory,
    say: Callable[[str], None], progress: Any,
) -> dict[str, Any]:  # fmt: skip
    """`run` with a recipe, in a directory that this process holds. `recorded` is what the run settled when it was
    started; None: it is new."""
    from fledge.jobs.training.data import make_rows, read_data
    from fledge.jobs.training.draft import check_shape, make_draft
    from fledge.jobs.training.evaluator import make_evaluator
    from fledge.jobs.training.follow import Run, follow
    from fledge.jobs.training.implementation import choose_implementation
    from fledge.jobs.training.recipe_file import check_settled, recipe_text
    from fledge.jobs.training.schedule import make_schedule
    from fledge.jobs.training.settle import settle
    from fledge.jobs.training.target import prepare

    target = prepare(recipe, say)
    check_shape(recipe, target)
    documents, held_out = read_data(recipe, target, say, progress)
    draft = make_draft(recipe, target, documents, say)
    rows = make_rows(recipe, target, documents, say)
    schedule = make_schedule(recipe, rows, draft.config.hidden_size)
    implementation = choose_implementation(recipe.compute, draft, rows, target.source, schedule, say)
    if recipe.compute.longest_row:
        return {}
    schedule = replace(schedule, implementation=implementation)
    evaluate = make_evaluator(recipe, target, held_out, say)
    settled = settle(recipe, target, draft, rows, schedule)
    if recorded is None:
        directory.start(recipe_text(replace(options, method=recipe.choice), settled))
    else:
        check_settled(recorded, settled, directory)
    made = Run(recipe, draft, rows, target.source, schedule, evaluate, directory, resumed=recorded is not None)
    return follow(made, say, progress)
