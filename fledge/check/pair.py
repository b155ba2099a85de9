"""All checks of a draft with its target: files, replays of the probe, and decoding."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from fledge.check import draft_files as files
from fledge.check import replays
from fledge.check.draft_files import DraftOnDisk, Finding, Report
from fledge.check.probe import Probe, ProbeDecoding, decode
from fledge.data.template import ChatTemplate
from fledge.decode.chance import AT_CHANCE
from fledge.drafts.weights import DraftFiles, check_draft, open_draft
from fledge.engines.export import export
from fledge.engines.support import SERVERS, TITLES, minimum_version, unsupported
from fledge.io.fields import parse_dtype
from fledge.io.formats import to_engine
from fledge.io.machine import free_bytes, resolve_device
from fledge.targets.compatibility import layers_of, mismatch
from fledge.targets.distributed import model_bytes, out_of_memory
from fledge.targets.loading import load_target
from fledge.targets.parts import ModelTarget

# prompts to decode with a draft that has no probe
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


class TargetTooLarge(ValueError):
    """The target does not fit in memory."""


def check_pair(
    name: str, target_name: str, engine: str | None, *, files_only: bool, device: str, dtype: str | None,
    trust_remote_code: bool, progress: Any,
) -> Report:  # fmt: skip
    """Runs all possible checks of the draft `name`. `engine` None: both vLLM and SGLang may serve the draft. With
    `files_only`, the target has no weights.

    Raises ValueError if the draft or target does not exist, and TargetTooLarge if the target does not fit in memory.
    """
    check_draft(name)
    report = Report()
    draft, probe = files.read_files(name)
    if isinstance(probe, Finding):
        report.findings.append(probe)
        probe = None
    elif probe is None:
        report.notes.append("the draft has no probe (fledge train writes one): there is nothing to replay.")
    if not isinstance(draft, DraftOnDisk):
        report.findings.append(draft)
        return report
    load = functools.partial(
        load_target, target_name, dtype=parse_dtype(dtype), max_length=draft.config.target_max_length,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with _explaining_memory(target_name):
        target = _load_target(load, resolve_device(device), files_only)
        _check_files(report, draft, target, probe, engine)
        if engine:
            _check_engine(report, name, draft, engine)
        elif not report.failed():
            for other in ("vllm",) if draft.speculators else SERVERS:
                if not unsupported(draft.config, other) and (differences := _other_files(name, other)):
                    report.notes.append(f"{differences}. Before serving it there, {_export_cure(name, other)}.")
        if probe is not None and not files_only:
            _replay_target(report, target, probe)
        if probe is not None:
            _replay_draft(report, draft, probe)
        if not files_only:
            _decode(report, name, draft, target, probe, progress.say)
    if files_only:
        report.files_only = True
        report.notes.append(
            "none of the target's weights were read: its hidden states and τ are not compared, so it may be another "
            "model of the same sizes and tokenizer."
        )
    return report


@contextlib.contextmanager
def _explaining_memory(target: str) -> Iterator[None]:
    """Context manager: turns out-of-memory errors into TargetTooLarge."""
    try:
        yield
    except (RuntimeError, MemoryError, ValueError) as e:
        if not out_of_memory(e):
            raise
        reason = next(iter(str(e).splitlines()), type(e).__name__)
        raise TargetTooLarge(
            f"{target} does not fit in the memory here ({reason}); check what needs none of its weights with "
            "--files-only, or choose another --device or a smaller --dtype"
        ) from e


def _load_target(load: Callable[..., ModelTarget], device: str, files_only: bool) -> ModelTarget:
    """The target; with `files_only` without weights. Raises MemoryError if the weights would not fit."""
    empty = load(device=device, weights=False)
    if files_only:
        return empty
    needed, free = model_bytes(empty.model), free_bytes(device)
    if not empty.quantization and free is not None and needed > free:  # loading too much could end the process
        raise MemoryError(f"{needed / 1e9:.1f} GB of weights, and {free / 1e9:.1f} GB are free on {device}")
    return load(device=device)


def _check_files(
    report: Report, draft: DraftOnDisk, target: ModelTarget, probe: Probe | None, engine: str | None
) -> None:
    """The checks that compute nothing."""
    record, config = probe.record if probe else None, draft.config
    engines = (engine,) if engine else ("vllm",) if draft.speculators else SERVERS
    weights = files.weight_findings(draft, record, engines if engine else tuple(TITLES))
    report.add("weights", weights, f"{len(draft.tensors)} tensors: names, shapes, dtypes, values")
    report.add(
        "vocabulary", files.vocabulary_findings(draft, record),
        f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
    )  # fmt: skip
    misfit = []
    if problem := mismatch(config, target):
        cause = f"the draft does not fit {target.name}: {problem}"
        cure = "serve it with the target that it was trained for"
        misfit.append(Finding("target", cause, "engines fail, or accept almost no token", cure))
    fits = report.add("target", misfit, "sizes, layers and tokenizer fit the draft")
    if fits and config.family.reads_layers:
        findings, notes = files.layer_findings(draft, target, record, engines)
        layers = () if findings else layers_of(config, target)
        numbers = (f"{', '.join(map(str, to_engine(layers, e)))} in {TITLES[e]}'s numbering" for e in SERVERS)
        report.add("layers", findings, " and ".join(numbers))
        report.notes += notes
    # a draft without a record may be made for only one engine
    findings = files.config_findings(draft, target, record, engines if engine or record else ())
    report.add("config", findings, "RoPE, norms, context" + (", as recorded in training" if record else ""))
    others = [f for f in files.config_findings(draft, target, record, engines) if f not in findings]
    report.notes += [f"{f.cause}: {f.symptom}. Before serving it there, {f.cure}." for f in others]
    report.notes += [note for note in (files.norm_output_note(draft), files.rope_note(draft, target)) if note]
    known, kwargs = config.provenance.template_sha256, config.provenance.template_kwargs
    if record is not None:
        findings, notes = files.template_findings(draft, target, record)
        shown = "the chat template renders chats as in training"
        if kwargs:
            shown += f", with chat_template_kwargs {json.dumps(kwargs)} in each request"
        if target.tokenizer.chat_template is None:
            shown = "the target has no chat template, as in training"
        report.add("template", findings, shown)
        report.notes += notes
    elif known and known != files.template_sha256(target.tokenizer):
        report.notes.append("the target's chat template is not the one recorded; the draft may see other text.")


def _check_engine(report: Report, name: str, draft: DraftOnDisk, engine: str) -> None:
    """Adds the parts of the draft that an engine would refuse, ignore or compute otherwise."""
    findings = []
    if problem := unsupported(draft.config, engine):
        findings.append(Finding("engine", problem, "", "train a draft without this, or use another engine"))
    elif not report.failed() and (differences := _other_files(name, engine)):
        symptom = "it refuses the draft, or serves it otherwise than it was trained"
        findings.append(Finding("engine", differences, symptom, _export_cure(name, engine)))
    version = minimum_version(draft.config, engine)
    since = f" from version {version} on" if version else ""
    report.add("engine", findings, f"{TITLES[engine]}{since} serves such drafts")


def _other_files(name: str, engine: str) -> str:
    """A phrase about the files in which an engine needs a different content; empty if the draft's files suffice."""
    differences = export(open_draft(name), engine).differences
    return f"{TITLES[engine]} needs other files: {'; '.join(differences)}" if differences else ""


def _export_cure(name: str, engine: str) -> str:
    return f"write them with fledge export --draft {name} --to {engine} --out DIR"


def _replay_target(report: Report, target: ModelTarget, probe: Probe) -> None:
    """Computes the probe's hidden states again."""
    try:
        findings, notes, errors = replays.feature_findings(probe, target)
    except ValueError as e:
        if not report.failed("target"):
            report.findings.append(Finding("target", str(e), "", "use the target that the draft was trained for"))
        return
    shown = ", ".join(f"{e:.2%}" for e in errors)
    report.add("features", findings, f"the target computes the hidden states of training (differences {shown})")
    report.notes += notes
    report.measured["feature_errors"] = errors


def _replay_draft(report: Report, draft: DraftOnDisk, probe: Probe) -> None:
    """Computes the draft's logits again from the probe's hidden states."""
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
    try:
        target.check_rollback()
        opened = open_draft(name)
        if probe is None:
            _decode_questions(report, opened, target, say)
            return
        if (before := probe.record.decoding) is None:
            report.notes.append("nothing was decoded when the draft was written, so τ is not compared.")
            return
        now = _decoded(target, opened, before.prompts, before.new_tokens, before.depth)
    except ValueError as e:
        why = "fledge does not load a draft with such a config.json" if draft.deviations else e
        report.notes.append(f"nothing is decoded: {why}.")
        return
    if report.failed():
        report.notes.append(f"τ is {now.tau:.2f} on the recorded prompts, and was {before.tau:.2f}.")
    findings, figures = replays.decoding_findings(now, before, report.failed())
    shown = f"τ {now.tau:.2f} on {len(now.prompts)} prompts, {before.tau:.2f} after training"
    report.add("decoding", findings, f"{shown} (lowest that passes: {before.tau - figures['margin']:.2f})")
    report.measured |= figures


def _decoded(target: ModelTarget, draft: DraftFiles, *how: Any) -> ProbeDecoding:
    return decode(target, draft.build(target.device, target.dtype), *how)


def _decode_questions(report: Report, draft: DraftFiles, target: ModelTarget, say: Callable[[str], None]) -> None:
    """Decodes QUESTIONS with a draft without a record, with the draft's config and with variants of the config."""
    template = ChatTemplate(target.tokenizer, target.stop_ids, draft.config.provenance.template_kwargs)
    chats = target.tokenizer.chat_template is not None
    prompts = [template.prompt_ids([{"role": "user", "content": q}] if chats else q) for q in QUESTIONS]
    depth = draft.config.provenance.depth or 5
    now = _decoded(target, draft, prompts, NEW_TOKENS, depth)
    report.measured["tau"] = now.tau
    at_chance = now.tau < 1 + AT_CHANCE
    tried: dict[str, tuple[ProbeDecoding, str]] = {}
    if any(now.rounds):
        say("the draft has no probe; other ways to read it are tried")
        others = replays.variants(draft, layers_of(draft.config, target), target.num_layers)
        for text, (other, cure) in others.items():
            tried[text] = _decoded(target, other, prompts, NEW_TOKENS, depth), cure
    cause = f"τ is {now.tau:.2f} on {len(prompts)} questions" + ", about as by chance" * at_chance
    cure = "compare its config with its trainer's options: layers, norms, RoPE, target, template"
    best = max(tried, key=lambda text: tried[text][0].tau, default=None)
    if best is not None:
        other = tried[best][0]
        least = max(replays.ERRORS * replays.tau_error(other, now), AT_CHANCE, 2 * replays.LEAST * now.tau)
        best = best if other.tau > now.tau + least else None
    if best is not None:
        cause, cure = f"{cause}, and {tried[best][0].tau:.2f} {best}", tried[best][1]
    elif not at_chance or not any(now.rounds):
        report.passed.append(("decoding", f"τ {now.tau:.2f} on {len(prompts)} questions"))
        return
    symptom = "the draft only costs time" if at_chance else "fewer tokens are accepted than could be"
    report.findings.append(Finding("decoding", cause, symptom, cure))
