"""`fledge train`: from a target and chats to a draft."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.jobs.options import (
    LARGEST_SEED,
    Options,
    dtype_named,
    flags,
    new_tokens,
    opt,
    place_of,
    template_kwargs,
    trust_option,
)

if TYPE_CHECKING:
    from fledge.config import DraftConfig
    from fledge.data.record import Record
    from fledge.data.template import ChatTemplate
    from fledge.models.draft import Draft
    from fledge.models.target import Target
    from fledge.train.checkpoint import RunDirectory
    from fledge.train.objective import Implementation
    from fledge.train.trainer import Progress, Schedule
    from fledge.types import Document


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """Train a draft for a target on chats or plain text."""

    target: str | None = opt("the model to speed up: a directory or hub id (owner/name or owner/name@revision)", None)
    trust_remote_code: bool = trust_option()
    data: list[str] = opt(
        "files, quoted globs or hub ids (owner/name@revision:split); @0.5 takes half, @2 twice; repeatable", many=True
    )
    out: str = opt("directory of a new run; the draft to serve ends in OUT/draft", "draft-run")
    resume: str | None = opt("go on with the run in this directory, with its own options", None)
    init_from: str | None = opt(
        "go on training this draft, a directory or hub id (its vocabulary and shape are kept)", None
    )
    method: str | None = opt("eagle3 (the default), eagle3.1, peagle or eagle1", None)
    epochs: float = opt("passes over the data", 1.0, above=0)
    steps: int | None = opt("optimizer steps, instead of --epochs", None, least=1)
    depth: int | None = opt(
        "draft steps trained (TTT; EAGLE-1 trains one), and drafted by default (default: 5, or as --init-from was)",
        None, least=1, most=64,
    )  # fmt: skip
    draft_vocab: int | None = opt(
        "tokens the draft can propose (default: at most 32,000 of the target's)", None, least=2
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
    weight_decay: float = opt("AdamW's, on matrices", 0.01, least=0)
    clip: float = opt("largest gradient norm", 1.0, above=0)
    gamma: float = opt("weight of step k is gamma^k (P-EAGLE: 1)", 0.8, above=0, most=1)
    loss: str = opt("ce, kl, accept (-log α) or mixed (kl while α is low, then 1 - α)", "ce")
    keep_unseen: bool = opt("also learn from slots whose target token the draft cannot say", False)
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
        "P-EAGLE: depth d trains this share, to the power d, of the slots that are live there (default: 0.8)", None
    )
    cod_least: float | None = opt("P-EAGLE: but no smaller share than this (default: 0.2)", None)
    feature_noise: float = opt(
        "EAGLE-1: moves what the draft reads by up to this, times 512 / a document's length", 0.0, least=0
    )
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
    impl: str | None = opt("how a step is computed: eager, flex or triton (default: triton on a GPU)", None)
    slots: int | None = opt(
        "slots in flight: fewer hold less memory (default: as many as fit, up to 8,192; on a CPU 256)", None, least=1
    )
    activations: str = opt("the MLP's activations: keep, recompute, or auto, which recomputes only to fit", "auto")
    longest_row: bool = opt("find the longest row that fits this GPU, say it and stop", False)
    compile_target: bool = opt("compile the target's norms and MLPs: a slower start, quicker steps on a GPU", False)
    device: str = opt("auto, cpu, cuda, cuda:1, ...", "auto")
    dtype: str | None = opt("compute dtype (default: float32 on the CPU, else the target's)", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume:
            others = [f.name for f in flags(self) if f.name not in WITH_RESUME]
            self.refuse(others, f"with --resume, which goes on with the options that {self.resume} was started with;")
        elif self.was_given("steps"):
            self.refuse(["epochs"], "with --steps, which says how long to train;")


EVAL_RECORDS = 16
MAX_LENGTH = 2048  # tokens of the longest document where nobody says
WITH_RESUME = ("resume", "trust_remote_code")  # options that go together with --resume
ROW_BYTES = 4 * 8  # of a packed row's token: its id, span, position and document
# options that a draft to go on with has settled
SHAPE = (
    "draft_vocab", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "qk_norm", "aux_layers",
    "layers", "fc_bias",
)  # fmt: skip


def run(options: TrainOptions, say: Callable[[str], None], progress: Any) -> dict[str, Any]:
    """Trains (or goes on) and returns the last metrics. `say` prints a line, `progress` shows steps.

    Raises KeyboardInterrupt where it was interrupted, after it said how to go on, and ValueError for options that
    cannot be or a directory that another process writes.
    """
    from fledge.train.checkpoint import RunDirectory

    directory = RunDirectory(options.resume or options.out)
    if options.resume:
        options = _saved_options(directory, options)
    else:
        place_of(options.out, "--out", directory=True)
        directory.check_free()
    with directory.held(say):
        return _train(options, directory, say, progress)


def _train(options: TrainOptions, directory: RunDirectory, say: Callable[[str], None], progress: Any) -> dict[str, Any]:
    """`run` in a directory that this process holds."""
    import torch

    from fledge.data.dataset import Rows
    from fledge.decode.engine import resolve_device
    from fledge.models.target import load_target
    from fledge.models.weights import fit
    from fledge.train.heap import keep_freed
    from fledge.train.trainer import Source, train

    if options.resume and options.init_from and directory.checkpoint.exists():
        options = replace(options, init_from=str(directory.checkpoint))  # the draft it names may be another by now
    _check(options)
    options = replace(options, depth=options.depth or _depth_begun(options) or 5)
    device = resolve_device(options.device)
    _impl(options, device.startswith("cuda"))
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device).index or 0)  # where Triton launches
        torch.set_num_threads(1)  # the host only plans; small tensors lose time to threads
    else:
        keep_freed()
    longest = options.max_length or min(MAX_LENGTH, options.row_length or MAX_LENGTH)
    target = load_target(
        options.target, device=device, dtype=dtype_named(options.dtype), max_length=longest,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    options = _within_context(options, longest, target.context)
    decodes = _decodes(options, target, say)
    target.read_layers(_layers_to_read(options))
    if options.compile_target:
        target.compile()
    target.check_isolation()
    if not target.packs:
        say("this target does not keep packed documents apart, so it reads them one at a time")
    if not options.init_from:
        _new_config(options, target, mask=0)  # what no draft can be is refused before the data is read
    template = _template(options, target)
    documents, held_out = _documents(options, template, decodes, say, progress)
    torch.manual_seed(options.seed)
    draft = _draft(options, target, template, documents, say).to(device=target.device, dtype=target.dtype)
    fit(draft, target)
    rows = Rows(documents, _row_length(options, target, documents, say), options.seed)
    schedule = _schedule(options, draft, rows)
    source = Source(target.features, target.logits)
    schedule = replace(schedule, implementation=_implementation(options, draft, rows, source, schedule, say))
    if options.longest_row:
        return {}
    kept = "recompute" if schedule.implementation.recompute else "keep"
    # a run resumed must not choose slots again: other chunks round otherwise
    implementation = schedule.implementation
    options = replace(options, impl=implementation.attention, slots=implementation.slots, activations=kept)
    evaluate = _evaluator(options, target, template, held_out, say) if decodes else None
    if not options.resume:
        directory.start({"options": _with_whole_paths(options).by_name(), "data_sha256": _fingerprint(documents)})
    elif directory.read_config()["data_sha256"] != _fingerprint(documents):
        raise ValueError(f"the data is not what {options.resume} was started with; resuming needs the same files")
    say(
        f"{sum(p.numel() for p in draft.parameters() if p.requires_grad):,} parameters to train on {device}, "
        f"{schedule.steps:,} steps of {schedule.rows_per_step} x {rows.row_length:,} tokens, lr {schedule.lr:.2g}"
    )
    loggers = _loggers(options.log, directory.path)
    metrics: dict[str, Any] = {}

    def report(step_metrics: dict[str, Any]) -> None:
        metrics.update(step_metrics)
        progress.step(schedule.steps, step_metrics)
        for logger in loggers:
            logger(step_metrics)

    progress.begin("training", schedule.steps)
    try:
        where = train(
            draft, rows, source, schedule, directory,
            save_dtype=torch.bfloat16, evaluate=evaluate, resume=bool(options.resume),
            report=report, say=say, stop=lambda: progress.unheard,
        )  # fmt: skip
    except KeyboardInterrupt:
        progress.close()
        say(_go_on(directory, options, "stopped at once"))
        raise
    except torch.OutOfMemoryError as e:
        saved = directory.checkpoint
        anew = f"train on from its weights (--init-from {saved})" if saved.exists() else "train anew"
        cure = f"{anew} in another --out with fewer than {schedule.implementation.slots:,} --slots, or shorter rows"
        raise ValueError(f"the GPU ran out of memory; {cure}") from e
    finally:
        progress.close()
    if where.step < schedule.steps:
        say(_go_on(directory, options, f"stopped after step {where.step}"))
        raise KeyboardInterrupt
    done = f"trained in {where.seconds:.0f} s" if metrics else "this run was finished"
    say(f"{done}; the draft is {directory.draft}{_best(where, schedule)}")
    return metrics


def _go_on(directory: RunDirectory, options: TrainOptions, how: str) -> str:
    command = f"fledge train --resume {directory.path}" + (" --trust-remote-code" if options.trust_remote_code else "")
    if not directory.checkpoint.exists():
        return f"{how}, before the first checkpoint; begin again with: {command}"
    return f"{how}; go on with: {command}"


def _best(where: Progress, schedule: Schedule) -> str:
    """Which draft it is, where several were measured."""
    several = schedule.eval_every and where.best_step
    return f", of step {where.best_step:,} (decoded τ {where.best_tau:.3f})" if several else ""


def _saved_options(directory: RunDirectory, asked: TrainOptions) -> TrainOptions:
    """The options that a run was started with. Trust is asked for anew, since a file cannot give it: where the run had
    it, --trust-remote-code belongs to the command. Raises ValueError where it had not, or for a damaged file."""
    config = directory.read_config()
    if not isinstance(config.get("options"), dict) or not isinstance(config.get("data_sha256"), str):
        raise ValueError(f"{directory.config} lacks the run's options; it is damaged, start a new run")
    known = {f.name for f in flags(TrainOptions)}
    saved = {k: v for k, v in config["options"].items() if k in known}
    if asked.trust_remote_code and saved.get("trust_remote_code") is not True:
        raise ValueError(f"{directory.path} was started without it; leave --trust-remote-code out")
    saved |= {"resume": asked.resume, "out": asked.resume, "trust_remote_code": asked.trust_remote_code}
    try:
        return TrainOptions(**saved, given=frozenset())
    except ValueError as e:
        raise ValueError(f"{directory.config}: {e}; it is damaged, start a new run") from e


def _with_whole_paths(options: TrainOptions) -> TrainOptions:
    """The options with whole paths, to be gone on with from another directory."""
    from fledge.data.read import absolute_source

    paths = {n: getattr(options, n) for n in ("target", "init_from")}
    there = {n: os.path.abspath(path) for n, path in paths.items() if path and Path(path).exists()}
    prompts = absolute_source(options.eval_prompts) if options.eval_prompts else None
    return replace(options, data=[absolute_source(source) for source in options.data], eval_prompts=prompts, **there)


def _check(options: TrainOptions) -> None:
    from fledge.data.read import check_source
    from fledge.kernels.loss import KINDS
    from fledge.kernels.ttt_attention import IMPLS

    if not options.target or not options.data:
        raise ValueError("give --target and --data (or --resume RUN)")
    if options.row_length and options.max_length and options.row_length < options.max_length:
        raise ValueError(f"--row-length {options.row_length} is shorter than --max-length {options.max_length}")
    for flag, value, known in (
        ("--loss", options.loss, KINDS),
        ("--impl", options.impl, (None, *IMPLS)),
        ("--activations", options.activations, ("keep", "recompute", "auto")),
    ):
        if value not in known:
            raise ValueError(f"{flag} {value} is none of {', '.join(k for k in known if k)}")
    _method(options)
    if options.eval_prompts:
        check_source(options.eval_prompts, "--eval-prompts")
    if options.log not in (None, "tensorboard", "wandb"):
        raise ValueError(f"--log {options.log} is neither 'tensorboard' nor 'wandb'")
    if options.log and importlib.util.find_spec(options.log) is None:
        raise ValueError(f"--log {options.log} needs a package that is not installed: pip install {options.log}")


def _method(options: TrainOptions) -> str:
    """The method to train; a draft to go on with has its own. Raises ValueError for one that there is not, or flags
    of another."""
    from fledge.models.weights import read_draft_config
    from fledge.train.cod import DropTokens

    begun = read_draft_config(options.init_from) if options.init_from else None
    method = options.method or (begun.method if begun else "eagle3")
    if method not in ("eagle1", "eagle3", "eagle3.1", "peagle"):
        raise ValueError(f"--method {method} is none of eagle1, eagle3, eagle3.1, peagle")
    if begun and method.removesuffix(".1") != begun.method:
        raise ValueError(f"--method {method}, but {options.init_from} is a draft of {begun.method}")
    if begun and method == "eagle3.1" and not (begun.fc_norm and begun.norm_output):
        raise ValueError(f"--method eagle3.1, but {options.init_from} was begun without its norms; leave --method out")
    if options.init_from:
        options.refuse(SHAPE, "with --init-from, which keeps the draft's own vocabulary and shape;")
    if method != "eagle1" and (options.fc_bias or options.feature_noise):
        raise ValueError("--fc-bias and --feature-noise are EAGLE-1's; use --method eagle1")
    if method == "peagle" and options.depth == 1:
        raise ValueError("--depth 1 leaves P-EAGLE nothing to draft beside; it is at least 2")
    if method == "peagle":
        options.refuse(["gamma"], "with P-EAGLE, whose depths weigh alike;")
    if method == "eagle1":
        options.refuse(["gamma"], "with EAGLE-1, which trains one step;")
    if method != "peagle" and (options.cod_rate is not None or options.cod_least is not None):
        raise ValueError("--cod-rate and --cod-least are P-EAGLE's; use --method peagle")
    try:
        DropTokens(*_drop(options))
    except ValueError as e:
        raise ValueError(f"--cod-rate and --cod-least: {e}") from e
    if method == "eagle1" and (options.draft_vocab or options.aux_layers or options.train_embeddings):
        raise ValueError(
            "EAGLE-1 reads the target's last state and has its embedding and all its words: leave --draft-vocab, "
            "--aux-layers and --train-embeddings out"
        )
    return method


def _depth_begun(options: TrainOptions) -> int | None:
    """The depth that the draft to go on with was trained to, where it says so."""
    from fledge.models.weights import read_draft_config

    return read_draft_config(options.init_from).provenance.depth if options.init_from else None


def _drop(options: TrainOptions) -> tuple[float, float]:
    return (
        0.8 if options.cod_rate is None else options.cod_rate, 0.2 if options.cod_least is None else options.cod_least
    )  # fmt: skip


def _within_context(options: TrainOptions, longest: int, context: int) -> TrainOptions:
    """The options with the lengths that nobody gave: at most `longest` tokens a document, as many as the target reads.
    Raises ValueError for a length given that is more than that."""
    if options.max_length and options.max_length > context:
        raise ValueError(f"--max-length {options.max_length} is more than the target reads; give {context} or less")
    eval_tokens = options.eval_tokens or new_tokens(64, context)
    return replace(options, max_length=min(longest, context), eval_tokens=eval_tokens)


def _decodes(options: TrainOptions, target: Target, say: Callable[[str], None]) -> bool:
    """Whether τ can be measured by decoding, said where not. Raises ValueError where that was asked for."""
    if not target.rollback_problem:
        return True
    if options.eval_every or options.eval_prompts:
        flag = "--eval-every" if options.eval_every else "--eval-prompts"
        raise ValueError(
            f"{flag} measures τ by decoding, but {target.name} cannot verify drafts: {target.rollback_problem}; leave "
            "it out to train all the same"
        )
    say(
        f"{target.name} cannot verify drafts: {target.rollback_problem}. The draft is trained without decoded τ, and "
        "has to be served by an engine that can restore such states"
    )
    return False


def _layers_to_read(options: TrainOptions) -> tuple[int, ...] | None:
    """Layers whose states a draft learns from, those of the draft to go on with where there is one; None: the
    default."""
    from fledge.models.weights import read_draft_config

    if _method(options) == "eagle1":
        return ()
    return read_draft_config(options.init_from).aux_layers if options.init_from else _layer_ids(options.aux_layers)


def _layer_ids(text: str | None) -> tuple[int, ...] | None:
    try:
        layers = tuple(sorted(int(i) for i in text.split(","))) if text else None
    except ValueError as e:
        raise ValueError(f"--aux-layers {text} is not a list of layer numbers such as 2,16,29") from e
    if layers and len(set(layers)) < len(layers):
        raise ValueError(f"--aux-layers {text} names a layer twice")
    return layers


def _template(options: TrainOptions, target: Target) -> ChatTemplate:
    from fledge.data.template import ChatTemplate
    from fledge.models.weights import read_draft_config

    kwargs = template_kwargs(options.template_kwargs)
    if kwargs is None and options.init_from:
        kwargs = read_draft_config(options.init_from).provenance.template_kwargs
    return ChatTemplate(target.tokenizer, target.stop_ids, kwargs)


def _documents(
    options: TrainOptions, template: ChatTemplate, decodes: bool, say: Callable[[str], None], progress: Any
) -> tuple[list[Document], list[Record]]:
    """Training documents, and the records kept out of them for measuring τ, where that `decodes`."""
    from fledge.data.dataset import make_documents
    from fledge.data.read import read_records

    skipped: list[str] = []
    records = read_records(options.data, options.seed, skip=skipped.append if options.skip_bad else None)
    held_out: list[Record] = []
    if decodes and not options.eval_prompts and len(records) >= 10 * EVAL_RECORDS:
        records, held_out = _hold_out(records, options.seed, say)
    with progress.counting("reading chats", len(records)) as advance:
        documents, report = make_documents(
            records, template, options.max_length, skip_bad=options.skip_bad, skipped=skipped, advance=advance
        )
    say(str(report))
    return documents, held_out


def _hold_out(records: list[Record], seed: int, say: Callable[[str], None]) -> tuple[list[Record], list[Record]]:
    """The records to train on, and those to decode τ on; of a record that is there twice, no copy is trained on. All
    are trained on where that would leave none."""
    chosen = set(random.Random(seed).sample(range(len(records)), EVAL_RECORDS))
    held_out = [r for i, r in enumerate(records) if i in chosen]
    kept_out = {r.content_key() for r in held_out}
    others = [r for r in records if r.content_key() not in kept_out]
    if not others:
        return records, []
    copies = len(records) - len(others) - len(held_out)
    more = f", and {copies:,} more that say the same" if copies else ""
    say(f"{len(held_out)} of {len(records):,} records are held out, to decode τ on{more}")
    return others, held_out


def _row_length(options: TrainOptions, target: Target, documents: list[Document], say: Callable[[str], None]) -> int:
    """Tokens of a packed row: at most what the data has. Raises ValueError where not even what a row's features take
    fits in memory."""
    asked, tokens = options.row_length or 2 * options.max_length, sum(d.tokens.numel() for d in documents)
    if asked > tokens and options.row_length:
        say(f"a row of {asked:,} tokens would hold more than the data's {tokens:,}: rows are as long as that")
    row = min(asked, tokens)
    states, width = len(target.aux_layers) + 1, target.embedding.shape[1]
    least, there = row * (ROW_BYTES + states * width * target.dtype.itemsize), _memory(target.device)
    if least > there:
        raise ValueError(
            f"--row-length {row:,}: the target's hidden states alone take {least / 2**30:,.1f} GiB of the "
            f"{there / 2**30:,.1f} GiB that there are; shorten it to some {there * row // (4 * least):,} or less"
        )
    return row


def _memory(device: Any) -> int:
    """Bytes of memory that a torch device has."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _draft(
    options: TrainOptions, target: Target, template: ChatTemplate, documents: list[Document], say: Callable[[str], None]
) -> Draft:
    """A new draft that starts from the target's own weights, or the one to go on with."""
    from fledge.data.vocab import choose_mask_token, choose_vocabulary, coverage_of
    from fledge.models.draft import Draft
    from fledge.models.init import start_from_target
    from fledge.models.weights import load_draft, mismatch, template_sha256, tokenizer_sha256

    known = dict(
        target=target.name,
        target_layers=target.num_layers,
        tokenizer_sha256=tokenizer_sha256(target.tokenizer),
        template_sha256=template_sha256(target.tokenizer),
        template_kwargs=template.kwargs,
        depth=options.depth,
        max_length=options.max_length,
    )
    vocab = target.embedding.shape[0]
    if options.init_from:
        draft = load_draft(options.init_from)
        if problem := mismatch(draft.config, target):
            raise ValueError(f"--init-from {options.init_from} does not fit {target.name}: {problem}")
        covered = coverage_of(draft.target_ids(), documents, vocab)
        say(f"the draft can say {_covered(covered)}")
        draft.config = draft.config.with_provenance(coverage=covered, **known)
        mask = draft.config.mask_token_id
        if mask is not None and any(bool((d.tokens == mask).any()) for d in documents):
            raise ValueError(
                f"the data holds token {mask} ({target.tokenizer.convert_ids_to_tokens(mask)!r}), which this draft "
                "reads as a word not known yet; train a new one"
            )
        if options.train_embeddings and draft.embed_tokens is None:
            raise ValueError("--train-embeddings cannot be added to a draft that reads the target's; train a new one")
        if draft.embed_tokens is not None:
            draft.embed_tokens.requires_grad_(options.train_embeddings)
        return draft.train()
    method, mask = _method(options), None
    ids, coverage = choose_vocabulary(documents, vocab, _draft_vocab(options, vocab), target.stop_ids)
    say(f"the draft can say {ids.numel():,} of {vocab:,} tokens, {_covered(coverage)}")
    if method == "peagle":
        mask = choose_mask_token(documents, vocab, target.tokenizer, target.stop_ids)
        say(f"token {mask} ({target.tokenizer.convert_ids_to_tokens(mask)!r}) stands for words not known yet")
    if options.train_embeddings:
        say("training embeddings of the draft's own: vLLM serves them, SGLang replaces them by the target's")
    draft = Draft(_new_config(options, target, mask).with_provenance(coverage=coverage, **known))
    draft.set_vocabulary(ids)
    start_from_target(draft, target)
    return draft


def _covered(coverage: float) -> str:
    """The share of the data's words that a draft can say, and what it means where that is small."""
    little = "; the loss is of those alone, and a low one says little: a draft of more words would learn more"
    return f"{coverage:.2%} of the assistant's words" + (little if coverage < 0.5 else "")


def _draft_vocab(options: TrainOptions, vocab: int) -> int:
    """Tokens that a new draft can propose, of the target's."""
    return vocab if _method(options) == "eagle1" else options.draft_vocab or min(vocab, 32_000)


def _new_config(options: TrainOptions, target: Target, mask: int | None) -> DraftConfig:
    """The shape of a new draft; `mask` is P-EAGLE's token. Raises ValueError for what is no draft."""
    from fledge.config import DraftConfig

    method, vocab = _method(options), target.embedding.shape[0]
    return DraftConfig.for_target(
        target.shape, max_length=options.max_length,
        draft_vocab_size=_draft_vocab(options, vocab),
        num_hidden_layers=options.layers, method=method.removesuffix(".1"), fc_bias=options.fc_bias,
        aux_layers=target.aux_layers or None, num_aux_hidden_states=len(target.aux_layers),
        fc_norm=options.fc_norm or method == "eagle3.1", norm_output=options.norm_output or method == "eagle3.1",
        norm_before_fc=options.norm_before_fc, qk_norm=options.qk_norm,
        norm_before_residual=options.norm_before_residual, own_embeddings=options.train_embeddings,
        mask_token_id=mask if method == "peagle" else None,
    )  # fmt: skip


def _schedule(options: TrainOptions, draft: Draft, rows: Any) -> Any:
    from fledge.train.cod import DropTokens
    from fledge.train.objective import Objective
    from fledge.train.trainer import Schedule

    steps = options.steps or math.ceil(options.epochs * len(rows.epoch(0)) / options.rows_per_step)
    objective = Objective(
        depth=draft.family.trained_depth or options.depth, gamma=draft.family.gamma or options.gamma, loss=options.loss,
        keep_out_of_vocab=options.keep_unseen, noise=options.feature_noise,
        drop=DropTokens(*_drop(options)) if draft.family.drops_slots else None,
    )  # fmt: skip
    return Schedule(
        steps=steps, lr=options.lr or 0.5 / draft.config.hidden_size, objective=objective, seed=options.seed,
        rows_per_step=options.rows_per_step, warmup=options.warmup, weight_decay=options.weight_decay,
        clip=options.clip, eval_every=options.eval_every, save_every=options.save_every,
    )  # fmt: skip


def _implementation(
    options: TrainOptions, draft: Draft, rows: Any, source: Any, schedule: Schedule, say: Callable[[str], None]
) -> Implementation:
    """How steps are computed: as asked for, and on a GPU so that they fit, which is tried out.

    Raises ValueError for what this device cannot do, or where nothing fits.
    """
    import torch

    from fledge.train.memory import CPU_SLOTS, LEAST, Trial, choose, ladder, longest_row, of_length
    from fledge.train.objective import Implementation, ttt
    from fledge.train.prefetch import with_features

    attention = _impl(options, draft.device.type == "cuda")
    fast = "eager" if attention == "eager" else "triton"
    implementation = Implementation(attention=attention, loss=fast, layers=fast)
    if draft.device.type != "cuda":
        return replace(implementation, slots=options.slots or CPU_SLOTS)

    def step(row: Any, implementation: Implementation) -> Any:
        upcoming = with_features([row, row], source.features, draft.device, prefetch=implementation.prefetch)
        row, features = next(upcoming)
        ttt(draft, row, features, source.logits, schedule.objective, implementation)
        return upcoming  # which holds the next row's features

    asked = ladder(implementation, slots=options.slots, activations=options.activations)
    trial = Trial(draft, rows.heaviest(), step, schedule.rows_per_step)
    step(of_length(trial.rows[0], LEAST), asked[-1])  # warms up lazy initialisation, before memory is measured
    draft.zero_grad(set_to_none=True)
    free, _ = torch.cuda.mem_get_info(draft.device)
    available = free + torch.cuda.memory_reserved(draft.device)

    def tried(tokens: int, taken: int | None) -> None:
        say(_row_tried(tokens, taken, available))

    if options.longest_row:
        longest = longest_row(trial, asked[-1], available, tried)
        say(
            f"with {asked[-1].slots:,} slots in flight a row of {longest:,} tokens fits, of documents of at most "
            f"{max(d.tokens.numel() for d in rows.documents):,}, and none that is a tenth longer"
        )
        return asked[-1]
    chosen, taken = choose(trial, asked, available, tried)
    say(
        f"about {taken / 2**30:.1f} of {available / 2**30:.1f} GiB for rows of {rows.row_length:,} tokens, computed by "
        f"{attention}, {chosen.slots:,} slots in flight"
        + (", the MLP's activations computed again" if chosen.recompute else "")
        + (", the target one row ahead" if chosen.prefetch else "")
    )
    return chosen


def _row_tried(tokens: int, taken: int | None, available: int) -> str:
    """What a row of so many tokens takes of the bytes there are; None: more than those."""
    from fledge.train.memory import MARGIN

    if taken is None:
        return f"a row of {tokens:,} tokens is too much"
    over = f", too much: {1 - MARGIN:.0%} must stay free" if taken > MARGIN * available else ""
    return f"a row of {tokens:,} tokens takes {taken / 2**30:.1f} of {available / 2**30:.1f} GiB{over}"


def _impl(options: TrainOptions, gpu: bool) -> str:
    """How steps are computed. Raises ValueError for what this machine cannot do."""
    triton = importlib.util.find_spec("triton") is not None
    impl = options.impl or ("triton" if gpu and triton else "eager")
    if gpu and impl != "eager" and not triton:
        raise ValueError(f"--impl {impl} needs the package triton, which this installation of torch came without")
    if not gpu and (impl != "eager" or options.longest_row):
        raise ValueError(f"{'--longest-row' if options.longest_row else f'--impl {impl}'} needs a CUDA GPU")
    if impl == "eager" and options.activations == "recompute":
        raise ValueError("--activations recompute needs a CUDA GPU and --impl triton or flex")
    if impl != "eager" and options.dtype == "float64":
        raise ValueError(f"--impl {impl} computes in float32 at most; use --impl eager for --dtype float64")
    return impl


def _evaluator(
    options: TrainOptions, target: Target, template: ChatTemplate, held_out: list[Record], say: Callable[[str], None]
) -> Callable[[Draft], dict[str, float]] | None:
    """τ of the real decoder on held-out prompts, in the dtype that trains; None, and it is said why, without any.

    Prompts given by name must fit the target's context (ValueError before training starts); of the data's own, texts
    are cut short and longer chats left out.
    """
    from fledge.decode.engine import Engine
    from fledge.eval.prompts import EvalPrompt, prompt_of, read_prompts
    from fledge.eval.run import acceptance, first_prompt

    beyond = 0 if target.rotary else options.depth  # where positions are a table, drafts must stay within it too
    room = target.context - options.eval_tokens - beyond
    if room < 1:
        raise ValueError(f"--eval-tokens {options.eval_tokens} leaves no room in the {target.context} the target reads")

    def fits(prompt: EvalPrompt) -> bool:
        return len(template.prompt_ids(first_prompt(prompt))) <= room

    def usable(prompt: EvalPrompt) -> bool:
        """Whether a held-out prompt fits; one that the template refuses is left out where that is asked for."""
        try:
            return fits(prompt)
        except ValueError:
            if not options.skip_bad:
                raise
            return False

    def start(record: Record) -> list[int]:
        ids = template.prompt_ids(record.text[: record.prompt_length or None])
        return ids[: min(len(ids) if record.prompt_length else len(ids) // 2, options.max_length // 2, room)]

    if options.eval_prompts:
        prompts = read_prompts(options.eval_prompts, 32)
        if not all(map(fits, prompts)):
            raise ValueError(
                f"{options.eval_prompts} has a prompt of over {room} tokens, more than the target can read"
            )
    else:
        starts = [start(r) for r in held_out if r.text is not None]
        prompts = [EvalPrompt(text=target.tokenizer.decode(ids, skip_special_tokens=True)) for ids in starts if ids]
        prompts += [p for p in (prompt_of(r) for r in held_out if r.text is None) if usable(p)]
    if not prompts and options.eval_every:
        raise ValueError(
            f"--eval-every needs prompts that are held out, and data of under {10 * EVAL_RECORDS} records are all "
            "trained on; give --eval-prompts"
        )
    if not prompts:
        why = (
            "no held-out chat fits the target with --eval-tokens"
            if held_out
            else "so few records leave none to hold out"
        )
        say(f"{why}, so τ is not decoded; --eval-prompts FILE would")
        return None
    if len(prompts) < len(held_out):
        others = "the others are too long or refused"
        say(f"τ is decoded on {len(prompts)} of the {len(held_out)} held-out records; {others}")
    if options.eval_tokens < 2:
        say("a token alone needs no draft, so τ is not decoded; --eval-tokens 2 or more would")
        return None

    def evaluate(draft: Draft) -> dict[str, float]:
        found = acceptance(Engine(target, draft, template_kwargs=template.kwargs), prompts, options.eval_tokens)
        if not found:
            say("every held-out answer ended with its first token, before a draft was asked for: there is no decoded τ")
        return found

    return evaluate


def _fingerprint(documents: list[Document]) -> str:
    found = hashlib.sha256()
    for d in documents:
        found.update(d.tokens.numpy().tobytes() + d.spans.numpy().tobytes())
    return found.hexdigest()


def _loggers(name: str | None, path: Any) -> list[Callable[[dict[str, Any]], None]]:
    def scalars(metrics: dict[str, Any]) -> dict[str, float]:
        lists = {f"{k}/{i}": x for k, v in metrics.items() if isinstance(v, list) for i, x in enumerate(v)}
        return lists | {k: v for k, v in metrics.items() if not isinstance(v, list)}

    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(path / "tensorboard"))
        return [lambda m: [writer.add_scalar(k, v, m["step"]) for k, v in scalars(m).items()]]
    if name == "wandb":
        import wandb

        board = wandb.init(project="fledge", dir=str(path))
        return [lambda m: board.log(scalars(m), step=m["step"])]
    return []
