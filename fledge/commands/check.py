"""`fledge check`: whether a draft and its target still are what they were when the draft was trained."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fledge.io.fields import parse_dtype
from fledge.options import Options, dtype_option, opt, trust_remote_code_option

if TYPE_CHECKING:
    from fledge.check.draft_files import DraftOnDisk, Report
    from fledge.check.probe import Probe, ProbeDecoding, ProbeRecord
    from fledge.config import DraftConfig
    from fledge.drafts.draft import Draft
    from fledge.drafts.weights import DraftFiles
    from fledge.io.display import ProgressDisplay, ResultPrinter
    from fledge.targets.parts import ModelTarget

ENGINES = ("vllm", "sglang")
# questions to decode where a draft has no prompts of its own
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a bird that learns to fly.",
    "Explain in a few sentences how a bicycle stays upright.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 120 km in 90 minutes. What is its average speed in km/h?",
    "List five things to pack for a weekend in the mountains.",
    "Summarize the rules of chess for a beginner.",
    "Why is the sky blue?",
)
NEW_TOKENS = 32
TOO_LARGE = 3  # exit code where the target does not fit in memory


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Options):
    """Check that a draft and its target compute what they computed in training, and name what is wrong if not."""

    target: str = opt("target model: a directory or hub id (owner/name or owner/name@revision)")
    trust_remote_code: bool = trust_remote_code_option()
    draft: str = opt("draft model: a directory or hub id")
    engine: str | None = opt("also check what this engine would refuse or ignore: vllm or sglang", None)
    device: str = opt("device: auto, cpu, cuda, cuda:1, ...", "auto")
    dtype: str | None = dtype_option()
    files_only: bool = opt(
        "check only what needs none of the target's weights, for a target that does not fit here: files, vocabulary, "
        "config, tokenizer, template, and the draft's logits", False
    )  # fmt: skip
    json: bool = opt("print the result as JSON", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.files_only:
            self.refuse(("device", "dtype"), "with --files-only, which runs no target;")
        if self.engine not in (None, *ENGINES):
            raise ValueError(f"--engine {self.engine} is none of {', '.join(ENGINES)}")


class TargetTooLarge(ValueError):
    """The target does not fit in memory."""


def run(options: CheckOptions, progress: ProgressDisplay) -> Report:
    """Runs all checks that can be made. Raises ValueError if there is no such draft or target, and TargetTooLarge if
    the target does not fit in memory."""
    from fledge.check.draft_files import DraftOnDisk, Finding, Report, read_files
    from fledge.drafts.weights import check_draft

    check_draft(options.draft)
    report = Report()
    draft, probe = read_files(options.draft)
    if isinstance(probe, Finding):
        report.findings.append(probe)
        probe = None
    elif probe is None:
        report.notes.append("the draft has no probe (fledge train writes one): there is nothing to replay.")
    if not isinstance(draft, DraftOnDisk):
        report.findings.append(draft)
        return report
    with _explaining_memory(options):
        target = _load_target(options, draft)
        with progress.count("parts of the check", 3, passing=True) as advance:
            _check_files(report, draft, target, probe, options.engine)
            if options.engine:
                _check_engine(report, options.draft, draft, options.engine)
            elif not report.failed():
                report.notes += _other_files(options.draft, ("vllm",) if draft.speculators else ENGINES)
            advance()
            if probe is not None and not options.files_only:
                _replay_target(report, target, probe)
            if probe is not None:
                _replay_draft(report, draft, probe)
            advance()
            if not options.files_only:
                _decode(report, options.draft, draft, target, probe, progress.say)
            advance()
    if options.files_only:
        report.files_only = True
        report.notes.append(
            "none of the target's weights were read: its hidden states and τ are not compared, so it may be another "
            "model of the same sizes and tokenizer."
        )
    return report


@contextlib.contextmanager
def _explaining_memory(options: CheckOptions) -> Iterator[None]:
    """Context manager: raises TargetTooLarge where there is not enough memory."""
    from fledge.targets.distributed import out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as e:
        if not out_of_memory(e):
            raise
        raise TargetTooLarge(_too_large(options, next(iter(str(e).splitlines()), type(e).__name__))) from e


def _too_large(options: CheckOptions, reason: str) -> str:
    return (
        f"{options.target} does not fit in the memory here ({reason}); check what needs none of its weights with "
        "--files-only, or choose another --device or a smaller --dtype"
    )


def _load_target(options: CheckOptions, draft: DraftOnDisk) -> ModelTarget:
    """The target; with --files-only without weights."""
    from fledge.io.machine import free_bytes, resolve_device
    from fledge.targets.distributed import model_bytes
    from fledge.targets.loading import load_target

    device = resolve_device(options.device)
    load = functools.partial(
        load_target, options.target, device=device, dtype=parse_dtype(options.dtype),
        max_length=draft.config.target_max_length, trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    empty = load(weights=False)
    if options.files_only:
        return empty
    needed, free = model_bytes(empty.model), free_bytes(device)
    if not empty.quantization and free is not None and needed > free:  # loading it could end the process
        raise TargetTooLarge(
            _too_large(options, f"{needed / 1e9:.1f} GB of weights, and {free / 1e9:.1f} GB are free on {device}")
        )
    return load()


def _check_files(
    report: Report, draft: DraftOnDisk, target: ModelTarget, probe: Probe | None, engine: str | None
) -> None:
    """The checks that compute nothing."""
    from fledge.check import draft_files as files
    from fledge.engines.support import TITLES

    record, config = probe.record if probe else None, draft.config
    engines = (engine,) if engine else ("vllm",) if draft.speculators else ENGINES
    weights = files.weight_findings(draft, record, engines if engine else tuple(TITLES))
    report.add("weights", weights, f"{len(draft.tensors)} tensors: names, shapes, dtypes, values")
    report.add(
        "vocabulary", files.vocabulary_findings(draft, record),
        f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
    )  # fmt: skip
    fits = report.add("target", files.target_findings(draft, target), "sizes, layers and tokenizer fit the draft")
    if fits and config.family.reads_layers:
        findings, notes = files.layer_findings(draft, target, record, engines)
        report.add("layers", findings, "" if findings else _layers_line(draft, target))
        report.notes += notes
    # of a draft from elsewhere, nobody may have meant both engines
    meant = engines if engine or record else ()
    findings = files.config_findings(draft, target, record, meant)
    report.add("config", findings, "RoPE, norms, context" + (", as recorded in training" if record else ""))
    others = [f for f in files.config_findings(draft, target, record, engines) if f not in findings]
    report.notes += [f"{f.cause}: {f.symptom}. Before serving it there, {f.cure}." for f in others]
    report.notes += [note for note in (files.norm_output_note(draft), files.rope_note(draft, target)) if note]
    if record is not None:
        findings, notes = files.template_findings(draft, target, record, _renders(draft, target, record))
        shown = "the chat template renders chats as in training" + _with_kwargs(config)
        if target.tokenizer.chat_template is None:
            shown = "the target has no chat template, as in training"
        report.add("template", findings, shown)
        report.notes += notes
        return
    known = config.provenance.template_sha256
    if known and known != files.template_sha256(target.tokenizer):
        report.notes.append("the target's chat template is not the one recorded; the draft may see other text.")


def _with_kwargs(config: DraftConfig) -> str:
    """What requests to an engine must set."""
    kwargs = config.provenance.template_kwargs
    return f", with chat_template_kwargs {json.dumps(kwargs)} in each request" if kwargs else ""


def _layers_line(draft: DraftOnDisk, target: ModelTarget) -> str:
    """The layers that the draft reads, in the numbering of each engine."""
    from fledge.engines.support import TITLES
    from fledge.io.formats import to_engine
    from fledge.targets.compatibility import layers_of

    layers = layers_of(draft.config, target)
    by_engine = (f"{', '.join(map(str, to_engine(layers, e)))} in {TITLES[e]}'s numbering" for e in ENGINES)
    return " and ".join(by_engine)


def _renders(draft: DraftOnDisk, target: ModelTarget, record: ProbeRecord) -> dict[str, list[str]]:
    from fledge.check.probe import render_chats
    from fledge.data.template import ChatTemplate

    kwargs = {"now": draft.config.provenance.template_kwargs, "before": record.draft_config.provenance.template_kwargs}
    return {k: render_chats(ChatTemplate(target.tokenizer, target.stop_ids, v)) for k, v in kwargs.items()}


def _check_engine(report: Report, name: str, draft: DraftOnDisk, engine: str) -> None:
    """What an engine would refuse, ignore or compute otherwise."""
    from fledge.check.draft_files import Finding
    from fledge.drafts.weights import open_draft
    from fledge.engines.export import export
    from fledge.engines.support import TITLES, minimum_version, unsupported

    findings = []
    if problem := unsupported(draft.config, engine):
        findings.append(Finding("engine", problem, "", "train a draft without this, or use another engine"))
    elif not report.failed():
        differences = export(open_draft(name), engine).differences
        findings += [
            Finding("engine", f"{TITLES[engine]} needs other files: {'; '.join(differences)}",
                    "it refuses the draft, or serves it otherwise than it was trained",
                    f"write them with fledge export --draft {name} --to {engine} --out DIR")
        ] if differences else []  # fmt: skip
    version = minimum_version(draft.config, engine)
    since = f" from version {version} on" if version else ""
    report.add("engine", findings, f"{TITLES[engine]}{since} serves such drafts")


def _other_files(name: str, engines: Sequence[str]) -> Iterator[str]:
    """Which of these engines, if they support a draft at all, need other files than it has."""
    from fledge.drafts.weights import open_draft
    from fledge.engines.export import export
    from fledge.engines.support import TITLES, unsupported

    draft = open_draft(name)
    for engine in engines:
        if not unsupported(draft.config, engine) and (differences := export(draft, engine).differences):
            yield (
                f"{TITLES[engine]} needs other files: {'; '.join(differences)}. Before serving it there, write them "
                f"with fledge export --draft {name} --to {engine} --out DIR."
            )


def _replay_target(report: Report, target: ModelTarget, probe: Probe) -> None:
    """Computes the probe's hidden states again."""
    from fledge.check import replays
    from fledge.check.draft_files import Finding

    try:
        match = replays.match_features(probe, target)
    except ValueError as e:
        if not report.failed("target"):
            report.findings.append(Finding("target", str(e), "", "use the target that the draft was trained for"))
    else:
        findings, notes = replays.feature_findings(match, probe, target)
        shown = ", ".join(f"{e:.2%}" for e in match.errors)
        report.add("features", findings, f"the target computes the hidden states of training (differences {shown})")
        report.notes += notes
        report.measured["feature_errors"] = match.errors


def _replay_draft(report: Report, draft: DraftOnDisk, probe: Probe) -> None:
    """Computes the draft's logits again from the probe's hidden states."""
    from fledge.check import replays

    findings, notes, error = replays.logits_findings(draft, probe, report.failed("weights", "config"))
    if error <= replays.ROUNDED or findings:
        shown = f"{error:.2g}"
        report.add("logits", findings, f"the draft computes the logits of training (relative difference {shown})")
    report.notes += notes
    report.measured["logits_error"] = error


def _decode(
    report: Report, name: str, draft: DraftOnDisk, target: ModelTarget, probe: Probe | None,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Decodes a few prompts, if draft and target can be used together."""
    from fledge.check.replays import decoding_findings, with_measured
    from fledge.drafts.weights import open_draft

    try:
        target.check_rollback()
        files = open_draft(name)
        if probe is None:
            _decode_questions(report, files, target, say)
            return
        if (before := probe.record.decoding) is None:
            report.notes.append("nothing was decoded when the draft was written, so τ is not compared.")
            return
        now = _decoded(target, files.build(target.device, target.dtype), before)
    except ValueError as e:
        why = "fledge does not load a draft with such a config.json" if draft.deviations else e
        report.notes.append(f"nothing is decoded: {why}.")
        return
    findings, figures = decoding_findings(now, before, report.failed())
    report.findings = with_measured(report.findings, figures)
    shown = f"τ {now.tau:.2f} on {len(now.prompts)} prompts, {before.tau:.2f} after training"
    report.add("decoding", findings, f"{shown} (lowest that passes: {before.tau - figures['margin']:.2f})")
    report.measured |= figures


def _decoded(target: ModelTarget, draft: Draft, before: ProbeDecoding) -> ProbeDecoding:
    from fledge.check.probe import decode

    return decode(target, draft, before.prompts, before.new_tokens, before.depth)


def _decode_questions(report: Report, draft: DraftFiles, target: ModelTarget, say: Callable[[str], None]) -> None:
    """Decodes QUESTIONS with a draft without a record, as its files say and in other ways to read them."""
    from fledge.check.draft_files import Finding
    from fledge.check.probe import decode
    from fledge.check.replays import ERRORS, LEAST, variants
    from fledge.data.template import ChatTemplate
    from fledge.decode.chance import AT_CHANCE
    from fledge.targets.compatibility import layers_of

    template = ChatTemplate(target.tokenizer, target.stop_ids, draft.config.provenance.template_kwargs)
    chats = target.tokenizer.chat_template is not None
    prompts = [template.prompt_ids([{"role": "user", "content": q}] if chats else q) for q in QUESTIONS]
    depth = draft.config.provenance.depth or 5

    def decoded(files: DraftFiles) -> ProbeDecoding:
        return decode(target, files.build(target.device, target.dtype), prompts, NEW_TOKENS, depth)

    now = decoded(draft)
    report.measured["tau"] = now.tau
    at_chance = now.tau < 1 + AT_CHANCE
    tried: dict[str, tuple[ProbeDecoding, str]] = {}
    if any(now.rounds):
        say("the draft has no probe; other ways to read it are tried")
        others = variants(draft, layers_of(draft.config, target), target.num_layers)
        tried = {text: (decoded(files), cure) for text, (files, cure) in others.items()}
    cause = f"τ is {now.tau:.2f} on {len(prompts)} questions" + ", about as by chance" * at_chance
    cure = "compare its config with its trainer's options: layers, norms, RoPE, target, template"
    best = max(tried, key=lambda text: tried[text][0].tau, default=None)
    if best is not None:
        other = tried[best][0]
        least = max(ERRORS * other.error_against(now), AT_CHANCE, 2 * LEAST * now.tau)
        best = best if other.tau > now.tau + least else None
    if best is not None:
        cause, cure = f"{cause}, and {tried[best][0].tau:.2f} {best}", tried[best][1]
    elif not at_chance or not any(now.rounds):
        report.passed.append(("decoding", f"τ {now.tau:.2f} on {len(prompts)} questions"))
        return
    symptom = "the draft only costs time" if at_chance else "fewer tokens are accepted than could be"
    report.findings.append(Finding("decoding", cause, symptom, cure))


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON-ready data."""
    return {
        "sound": not report.findings,
        "replayed": "logits_error" in report.measured,
        "files_only": report.files_only,
        "findings": [asdict(f) for f in report.findings],
        "passed": [dict(zip(("check", "shown"), pair, strict=True)) for pair in report.passed],
        "notes": report.notes,
        "measured": {k: _finite(v) for k, v in report.measured.items()},
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: None in its place."""
    return None if value == float("inf") else value


def print_report(report: Report, printer: ResultPrinter) -> None:
    """Prints a line for each check, note and finding."""
    for check, shown in report.passed:
        printer.print(f"{check}: {shown}.")
    for note in report.notes:
        printer.print(f"Note: {note}")
    for finding in report.findings:
        printer.print(f"Wrong, {finding.check}: {finding}")
    count = len(report.findings)
    if count:
        printer.print(f"{count} problem{'s' if count > 1 else ''}.")
    elif report.files_only:
        printer.print("No fault found in the files; what the target computes was not compared.")
    elif "logits_error" in report.measured:
        printer.print("The draft is sound.")
    else:
        printer.print("No fault found; without a probe the weights cannot be compared with training's.")
