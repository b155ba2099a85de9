"""All checks of a draft with its target: files, replays of the probe (the target's hidden states, the draft's logits),
and decoding."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.check import draft_files as files
from fledge.check.draft_files import COPY, DraftOnDisk, Finding, Report, changed_fields
from fledge.check.probe import Probe, ProbeDecoding, ProbeRecord, decode, replay, tensor_sha256
from fledge.config import DraftConfig
from fledge.data.documents import Document
from fledge.data.pack import make_row
from fledge.data.template import ChatTemplate
from fledge.decode.draft_size import AT_CHANCE
from fledge.drafts.weights import DraftFiles, build_draft, check_draft, meta_draft, open_draft, tensor_problems
from fledge.engines.export import export
from fledge.engines.support import PLACES, SERVERS, TITLES, minimum_version, unsupported
from fledge.io.fields import parse_dtype, some_of
from fledge.io.fingerprints import target_sha256
from fledge.io.formats import to_engine
from fledge.io.machine import free_bytes, resolve_device
from fledge.targets.compatibility import layers_of, mismatch
from fledge.targets.distributed import model_bytes, out_of_memory
from fledge.targets.interface import TrainingTarget
from fledge.targets.loading import load_target
from fledge.targets.transformers import TransformersTarget

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
FINAL = "the final state"  # the target's state after the last norm
# Hidden states are equal up to these relative errors (medians over tokens): if both passes computed in 32 bits or more
# (the states are stored in bfloat16), if not, and if the states were stored in fp8.
EXACT, HALF, FP8 = 0.02, 0.08, 0.12
SAME = 1e-3  # logits are equal up to this relative error
ROUNDED = 0.05  # up to this relative error, logits may be explained by rounded weights
WIDE = ("float32", "float64")
ERRORS = 3  # τ may be below the recorded τ by so many standard errors of the difference
LEAST = 0.05  # a smaller relative loss of τ is no fault, whatever the standard error
CORRECT = "correct config.json accordingly"


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


def _load_target(load: Callable[..., TransformersTarget], device: str, files_only: bool) -> TransformersTarget:
    """The target; with `files_only` without weights. Raises MemoryError if the weights would not fit."""
    empty = load(device=device, weights=False)
    if files_only:
        return empty
    needed, free = model_bytes(empty.model), free_bytes(device)
    if not empty.quantization and free is not None and needed > free:  # loading too much could end the process
        raise MemoryError(f"{needed / 1e9:.1f} GB of weights, and {free / 1e9:.1f} GB are free on {device}")
    return load(device=device)


def _check_files(
    report: Report, draft: DraftOnDisk, target: TransformersTarget, probe: Probe | None, engine: str | None
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
        numbers = ((e, to_engine(layers, PLACES[config.family.layout][e][1])) for e in SERVERS)
        named = [f"{', '.join(map(str, ids))} in {TITLES[e]}'s numbering" for e, ids in numbers]
        report.add("layers", findings, " and ".join(named))
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


def _replay_target(report: Report, target: TransformersTarget, probe: Probe) -> None:
    """Computes the probe's hidden states again."""
    try:
        findings, notes, errors = feature_findings(probe, target)
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
    findings, notes, error = logits_findings(draft, probe, report.failed("weights", "config"))
    if error <= ROUNDED or findings:
        shown = f"{error:.2g}"
        report.add("logits", findings, f"the draft computes the logits of training (relative difference {shown})")
    report.notes += notes
    report.measured["logits_error"] = error


def _decode(
    report: Report, name: str, draft: DraftOnDisk, target: TransformersTarget, probe: Probe | None,
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
    findings, figures = decoding_findings(now, before, report.failed())
    shown = f"τ {now.tau:.2f} on {len(now.prompts)} prompts, {before.tau:.2f} after training"
    report.add("decoding", findings, f"{shown} (lowest that passes: {before.tau - figures['margin']:.2f})")
    report.measured |= figures


def _decoded(target: TransformersTarget, draft: DraftFiles, *how: Any) -> ProbeDecoding:
    return decode(target, draft.build(target.device, target.dtype), *how)


def _decode_questions(
    report: Report, draft: DraftFiles, target: TransformersTarget, say: Callable[[str], None]
) -> None:
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
        others = variants(draft, layers_of(draft.config, target), target.num_layers)
        for text, (other, cure) in others.items():
            tried[text] = _decoded(target, other, prompts, NEW_TOKENS, depth), cure
    cause = f"τ is {now.tau:.2f} on {len(prompts)} questions" + ", about as by chance" * at_chance
    cure = "compare its config with its trainer's options: layers, norms, RoPE, target, template"
    best = max(tried, key=lambda text: tried[text][0].tau, default=None)
    if best is not None:
        other = tried[best][0]
        least = max(ERRORS * tau_error(other, now), AT_CHANCE, 2 * LEAST * now.tau)
        best = best if other.tau > now.tau + least else None
    if best is not None:
        cause, cure = f"{cause}, and {tried[best][0].tau:.2f} {best}", tried[best][1]
    elif not at_chance or not any(now.rounds):
        report.passed.append(("decoding", f"τ {now.tau:.2f} on {len(prompts)} questions"))
        return
    symptom = "the draft only costs time" if at_chance else "fewer tokens are accepted than could be"
    report.findings.append(Finding("decoding", cause, symptom, cure))


@torch.no_grad()
def feature_findings(probe: Probe, target: TrainingTarget) -> tuple[list[Finding], list[str], list[float]]:
    """Findings and notes about the target's hidden states, and the relative errors of the states. Raises ValueError if
    the target lacks the probe's tokens or layers, or has a different width."""
    excerpt, layers = probe.excerpt, probe.record.layers
    vocabulary, width = target.embedding.shape
    if width != excerpt.states_TAD.shape[2] or int(excerpt.token_N.max()) >= vocabulary:
        raise ValueError("the target has another hidden size or a smaller vocabulary than that of training")
    if max(layers, default=0) > target.num_layers:
        raise ValueError(f"the target has {target.num_layers} layers, fewer than that of training")
    tokens = excerpt.token_N.int().numpy()
    features = target.features(make_row([Document(tokens, np.full_like(tokens, -1))], len(tokens)), layers)
    reads_layers = probe.record.draft_config.family.reads_layers
    states = features.aux_TAD if reads_layers else features.last_TD[:, None]
    stored = excerpt.states_TAD.float()
    error_TA = (states[excerpt.start :].float().cpu() - stored).norm(dim=-1) / stored.norm(dim=-1).clamp_min(1e-30)
    errors = error_TA.median(0).values.tolist()
    precision, dtype = probe.record.precision, str(target.dtype).removeprefix("torch.")
    tolerance = FP8 if precision == "fp8" else EXACT if precision in WIDE and dtype in WIDE else HALF
    shown = ", ".join(f"{error:.1%}" for error in errors)
    if max(errors) > tolerance:
        names = list(layers) if reads_layers else [FINAL]
        cause = f"the target's hidden states {names} differ from those of training by {shown}"
        symptom = "the draft reads states that it does not know: acceptance falls, to chance with another model"
        cure = "serve the weights that it was trained for, or train it on hidden states that fledge captures of these"
        return [Finding("target", cause, symptom, cure)], [], errors
    known = probe.record.target_sha256  # empty where another program ran the target
    if known in ("", target_sha256(target.embedding, target.head_weight, target.last_layer_weights())):
        return [], [], errors
    note = (
        f"some of the target's weights are not those of training, but its hidden states differ by only {shown}: it "
        "was quantized, trained further, or is loaded in a dtype that rounds it. Acceptance may be lower."
    )
    return [], [note], errors


def logits_error(found: Tensor, stored: Tensor) -> float:
    """The norm of `found - stored`, relative to the norm of the stored logits minus their mean; infinite for logits of
    a different shape, NaN or infinity."""
    if found.shape != stored.shape or not bool(found.isfinite().all()):
        return float("inf")
    spread = stored - stored.mean(-1, keepdim=True)
    return float((found - stored).norm() / spread.norm().clamp_min(1e-30))


def tau_error(now: ProbeDecoding, before: ProbeDecoding) -> float:
    """The standard error of the difference between the τ of two decodes of the same prompts: two ratios of sums over
    answers, paired, since a prompt may be easy or hard in both decodes."""
    n = len(now.rounds)
    if n < 2 or not any(now.rounds) or not any(before.rounds):
        return 0.0
    # the first-order influence of each answer on τ
    ours, theirs = (
        [(c - d.tau * r) / sum(d.rounds) for c, r in zip(d.committed, d.rounds, strict=True)] for d in (now, before)
    )
    return (n / (n - 1) * sum((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))) ** 0.5


def replay_error(config: DraftConfig, tensors: Mapping[str, Tensor], probe: Probe) -> float:
    """The `logits_error` of a draft on its probe, ignoring d2t; infinite if the draft cannot be computed."""
    try:
        sized = meta_draft(config)
        known = dict(tensors) | {n: torch.zeros_like(x, device="cpu") for n, x in sized.named_buffers() if n == "d2t"}
        if tensor_problems(sized, known):
            return float("inf")
        return logits_error(replay(build_draft(config, known), probe), probe.logits_RKSJ)
    except ValueError:  # a config that contradicts the probe
        return float("inf")


def changed_tensors(tensors: Mapping[str, Tensor], record: ProbeRecord) -> tuple[list[str], dict[str, str]]:
    """The recorded tensors, except d2t, that are missing or have changed values. The dict maps each changed tensor
    whose values training wrote under a different name to that name."""
    now = {name: tensor_sha256(x) for name, x in tensors.items()}
    changed = [name for name in record.tensors if now.get(name) != record.tensors[name] and name != "d2t"]
    written = {sha: name for name, sha in record.tensors.items()}
    return changed, {name: written[now[name]] for name in changed if name in now and now[name] in written}


def logits_findings(draft: DraftOnDisk, probe: Probe, explained: bool) -> tuple[list[Finding], list[str], float]:
    """Findings and notes about the draft's logits, and the logits' relative error. `explained` tells whether earlier
    findings already explain a difference of the logits."""
    config, record = draft.config, probe.record
    error = replay_error(config, draft.tensors, probe)
    changed, written_as = changed_tensors(draft.tensors, record)
    moved = bool(written_as) and sorted(written_as) == sorted(written_as.values())  # the names are permuted
    if error <= SAME and (explained or not moved):
        dtype = record.config.get("torch_dtype")  # values in a different dtype were rounded
        changed = [n for n in changed if n in draft.tensors and str(draft.tensors[n].dtype) == f"torch.{dtype}"]
        if not changed or explained:
            return [], [], error
        return [], [f"{_changed(changed, {})}, though the logits are."], error
    if error > SAME:
        trained = replace(record.draft_config, provenance=config.provenance)
        if trained != config and replay_error(trained, draft.tensors, probe) <= SAME:
            note = "with the fields of config.json as in training, the draft's logits are those of training."
            return [], [note], error
        # rounding changes all tensors: a single changed tensor is no rounding
        if error <= ROUNDED and len(changed) != 1 and not moved and not changed_fields(config, record):
            why = "its weights were rounded, or are of a step close to that one"
            return [], [f"the draft's logits differ by {error:.1%} from those of training: {why}."], error
        if explained:
            return [], [f"the draft's logits differ from those of training ({_percent(error)})."], error
    symptom = (
        f"its logits are not those of training (they differ by {_percent(error)}): acceptance falls, mostly to chance"
    )
    return [Finding("weights", _changed(changed, written_as), symptom, COPY)], [], error


def _percent(error: float) -> str:
    return f"{error:.2%}" if error < 0.01 else f"{error:.0%}" if error < 10 else "beyond all measure"


def _changed(changed: Sequence[str], written_as: dict[str, str]) -> str:
    moved = [f"{name} is what training wrote as {other}" for name, other in written_as.items()]
    if moved:
        return "; ".join(moved)
    if not changed:
        return "the weights are those of training, but the draft computes something else with them"
    kind = "of another step or draft, or changed by a conversion"
    return f"{some_of(changed, 4)} {'is' if len(changed) == 1 else 'are'} not what training wrote: {kind}"


def decoding_findings(
    now: ProbeDecoding, before: ProbeDecoding, explained: bool
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings about a decode of the recorded prompts, and the figures of the decode."""
    margin = max(ERRORS * tau_error(now, before), LEAST * before.tau)
    figures = {"tau": now.tau, "recorded_tau": before.tau, "margin": margin}
    if now.tau >= before.tau - margin or explained:
        return [], figures
    return [
        Finding(
            "decoding", f"τ is {now.tau:.2f} on the prompts that were decoded with τ {before.tau:.2f} after training",
            "fewer tokens are accepted than were, though target and draft compute what they computed",
            "compare the drafting options and the versions in fledge/record.json, and report this",
        )
    ], figures  # fmt: skip


def variants(draft: DraftFiles, layers: Sequence[int], target_layers: int) -> dict[str, tuple[DraftFiles, str]]:
    """Variants of the config of a draft without a record: (draft, cure) by a phrase that completes "τ is .. "."""
    config, found = draft.config, {}
    if not config.family.reads_layers:
        return found
    for distance, kind in ((1, "outputs"), (-1, "inputs")):
        moved = tuple(i + distance for i in layers)
        if min(moved) >= 0 and max(moved) <= target_layers:
            text = f"if its layers are {list(moved)} in place of {list(layers)}: its ids count {kind} of layers"
            found[text] = replace(draft, config=replace(config, aux_layers=moved)), CORRECT
    for name in ("norm_before_residual", "norm_output", "block_causal"):
        if name in config.family.options and not (config.family.one_pass and name == "norm_output"):
            value = not getattr(config, name)
            text = f"if {name} is {str(value).lower()} in place of {str(not value).lower()}"
            found[text] = replace(draft, config=replace(config, **{name: value})), CORRECT
    return found
