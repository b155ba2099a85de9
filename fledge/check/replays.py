"""Recomputes a draft's probe: the target's hidden states, the draft's logits, and a short decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.check.draft_files import COPY, DraftOnDisk, Finding, changed_fields
from fledge.check.probe import Probe, ProbeDecoding, ProbeRecord, replay, tensor_sha256
from fledge.config import DraftConfig
from fledge.data.documents import Document
from fledge.data.pack import make_row
from fledge.drafts.weights import DraftFiles, build_draft, meta_draft, tensor_problems
from fledge.io.fingerprints import target_sha256
from fledge.targets.interface import TrainingTarget

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
    names = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
    kind = "of another step or draft, or changed by a conversion"
    return f"{names} {'is' if len(changed) == 1 else 'are'} not what training wrote: {kind}"


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
    for name in ("norm_before_residual", "norm_output"):
        if name in config.family.options and not (config.family.one_pass and name == "norm_output"):
            value = not getattr(config, name)
            text = f"if {name} is {str(value).lower()} in place of {str(not value).lower()}"
            found[text] = replace(draft, config=replace(config, **{name: value})), CORRECT
    return found
