"""Computes a draft's probe again: the target's hidden states, the draft's logits, and a short decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.check.causes import ROUNDED, SAME, changed_tensors, find_cause, likeliest_repairs, replay_error
from fledge.check.draft_files import COPY, DraftOnDisk, changed_fields
from fledge.check.findings import Finding
from fledge.check.probe import Probe, ProbeDecoding
from fledge.data.documents import Document
from fledge.data.pack import make_row
from fledge.drafts.weights import DraftFiles, target_sha256
from fledge.targets.interface import Target, TrainingTarget

FINAL = "the final state"  # of the target, after its last norm
# The relative error of hidden states, the median over tokens, up to which they are the same: if all computed in 32
# bits or more (the states are stored in bfloat16), if not, and if they were stored in fp8.
EXACT, HALF, FP8 = 0.02, 0.08, 0.12
WIDE = ("float32", "float64")
ERRORS = 3  # standard errors of the difference by which τ may be below the recorded one
LEAST = 0.05  # relative loss of τ that is no fault, whatever its standard error
FALLS = "acceptance falls, mostly to chance"
CORRECT = "correct config.json accordingly"


# -- the target -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureMatch:
    """How well the target's hidden states fit the stored ones. `error_LA` is the relative error of each state that the
    target has (`names` of the L states) against each of the A stored ones; `expected` are the states that these should
    be, and `tolerance` the largest error of equal states."""

    names: list[int | str]
    error_LA: Tensor
    expected: list[int | str]
    tolerance: float

    @property
    def errors(self) -> list[float]:
        """The error of each expected state."""
        return [float(self.error_LA[self.names.index(name), a]) for a, name in enumerate(self.expected)]

    @property
    def nearest(self) -> list[int | str]:
        """The state that is nearest to each stored one."""
        return [self.names[i] for i in self.error_LA.argmin(0).tolist()]

    @property
    def nearest_errors(self) -> list[float]:
        return self.error_LA.min(0).values.tolist()


@torch.no_grad()
def match_features(probe: Probe, target: TrainingTarget) -> FeatureMatch:
    """Compares the target's hidden states at all layers with the probe's. Raises ValueError if the target has not the
    probe's tokens, layers or width."""
    excerpt, layers = probe.excerpt, list(range(target.num_layers + 1))
    vocabulary, width = target.embedding.shape
    if width != excerpt.states_TAD.shape[2] or int(excerpt.token_N.max()) >= vocabulary:
        raise ValueError("the target has another hidden size or a smaller vocabulary than that of training")
    if max(probe.record.layers, default=0) > target.num_layers:
        raise ValueError(f"the target has {target.num_layers} layers, fewer than that of training")
    tokens = excerpt.token_N.int().numpy()
    row = make_row([Document(tokens, np.full_like(tokens, -1))], len(tokens))
    features = target.features(row, layers)
    states = torch.cat([features.aux_TAD, features.last_TD[:, None]], dim=1)[excerpt.start :].float().cpu()
    stored = excerpt.states_TAD.float()
    errors = [
        ((states - stored[:, a : a + 1]).norm(dim=-1) / stored[:, a : a + 1].norm(dim=-1).clamp_min(1e-30))
        .median(0)
        .values
        for a in range(stored.shape[1])
    ]
    precision, dtype = probe.record.precision, str(target.dtype).removeprefix("torch.")
    exact = precision in WIDE and dtype in WIDE
    tolerance = FP8 if precision == "fp8" else EXACT if exact else HALF
    expected = probe.record.layers if probe.record.draft_config.family.reads_layers else [FINAL]
    return FeatureMatch([*layers, FINAL], torch.stack(errors, dim=1), list(expected), tolerance)


def feature_findings(match: FeatureMatch, probe: Probe, target: Target) -> tuple[list[Finding], list[str]]:
    """Findings and notes about the target's hidden states."""
    fine = [error <= match.tolerance for error in match.errors]
    shown = ", ".join(f"{error:.1%}" for error in match.errors)
    if all(fine):
        known = probe.record.target_sha256  # empty where another program ran the target
        if known in ("", target_sha256(target.embedding, target.head_weight, target.last_layer_weights())):
            return [], []
        return [], [
            f"some of the target's weights are not those of training, but its hidden states differ by only {shown}: it "
            "was quantized, trained further, or is loaded in a dtype that rounds it. Acceptance may be lower."
        ]
    known_elsewhere = all(e <= match.tolerance for e in match.nearest_errors)
    if known_elsewhere:
        return [
            Finding(
                "target", f"the hidden states that the draft was trained on are {match.nearest} of this target, and "
                f"config.json calls them {match.expected}" + _moved(match.nearest, match.expected),
                "the draft reads other layers than it was trained on, and acceptance falls, often to that of chance",
                f"list {match.nearest} as its layers, or train on hidden states captured by fledge's numbering",
            )
        ], []  # fmt: skip
    embedding = _embedding_error(probe, target)
    if embedding is not None and embedding > match.tolerance:
        cause = f"the target embeds the probe's tokens otherwise than in training (by {embedding:.0%})"
    else:
        agree = [name for name, ok in zip(match.expected, fine, strict=True) if ok]
        upto = f"; they agree at {agree}" if agree else ""
        cause = f"the target's hidden states {match.expected} differ from those of training by {shown}{upto}"
    symptom = "the draft reads states that it does not know: acceptance falls, to chance with another model"
    return [Finding("target", cause, symptom, "serve the weights that it was trained for, or train it for these")], []


def _moved(nearest: Sequence[int | str], expected: Sequence[int | str]) -> str:
    if FINAL in (*nearest, *expected):
        return ""
    distances = {a - b for a, b in zip(nearest, expected, strict=True)}
    counted = "inputs" if distances == {-1} else "outputs"
    return f": the captured ids are moved by one, {counted} of layers were counted" if distances in ({1}, {-1}) else ""


def _embedding_error(probe: Probe, target: Target) -> float | None:
    """The relative difference of the target's embeddings from the stored ones; None if the draft has its own."""
    if probe.record.draft_config.own_embeddings:
        return None
    now = target.embedding[probe.id_U.to(target.embedding.device)].float().cpu()
    before = probe.embedding_UE.float()
    return float((now - before).norm() / before.norm())


# -- the draft --------------------------------------------------------------------------------------------------------


def logits_findings(draft: DraftOnDisk, probe: Probe, explained: bool) -> tuple[list[Finding], list[str], float]:
    """Findings and notes about the draft's logits, and their relative error. `explained` tells whether other findings
    say already why they may differ."""
    error = replay_error(draft.config, draft.tensors, probe)
    changed, written_as = changed_tensors(draft.tensors, probe.record)
    moved = bool(written_as) and sorted(written_as) == sorted(written_as.values())  # each is another one's
    if error <= SAME and not (moved and not explained):
        dtype = probe.record.config.get("torch_dtype")  # values in another one were rounded
        changed = [n for n in changed if n in draft.tensors and str(draft.tensors[n].dtype) == f"torch.{dtype}"]
        if not changed or explained:
            return [], [], error
        return [], [f"{_changed(changed, {}, len(probe.record.tensors))}, though the logits are."], error
    recorded = replace(probe.record.draft_config, provenance=draft.config.provenance)
    found = find_cause(draft.config, draft.tensors, probe) if error > SAME else None
    rounded = error <= ROUNDED and len(changed) != 1 and not moved  # what rounds one tensor rounds all
    if found is None and rounded and not changed_fields(draft.config, probe.record):
        why = "its weights were rounded, or are of a step close to that one"
        return [], [f"the draft's logits differ by {error:.1%} from those of training: {why}."], error
    if found is None and explained:
        return [], [f"the draft's logits differ from those of training ({_percent(error)})."], error
    if found is not None and recorded != draft.config and replay_error(recorded, draft.tensors, probe) <= SAME:
        return [], ["with the fields of config.json as in training, the draft's logits are those of training."], error
    cause, cure = found or (_changed(changed, written_as, len(probe.record.tensors)), COPY)
    symptom = f"its logits are not those of training (they differ by {_percent(error)}): {FALLS}"
    return [Finding("weights", cause, symptom, cure)], [], error


def _percent(error: float) -> str:
    return f"{error:.2%}" if error < 0.01 else f"{error:.0%}" if error < 10 else "beyond all measure"


def _changed(changed: Sequence[str], written_as: dict[str, str], count: int) -> str:
    if len(written_as) == 2 and sorted(written_as) == sorted(written_as.values()):
        return f"{' and '.join(written_as)} are swapped"
    moved = [f"{name} is what training wrote as {other}" for name, other in written_as.items()]
    if moved:
        return "; ".join(moved)
    if not changed:
        return "the weights are those of training, but the draft computes something else with them"
    if len(changed) > count / 2:
        return "most of the weights are not those that training wrote: they are of another draft or another step"
    names = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
    return f"{names} {'is' if len(changed) == 1 else 'are'} not what training wrote: of another step or another draft"


# -- decoding ---------------------------------------------------------------------------------------------------------


def decoding_findings(
    now: ProbeDecoding, before: ProbeDecoding, explained: bool
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings about a decode of the recorded prompts, and its figures."""
    margin = max(ERRORS * now.error_against(before), LEAST * before.tau)
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


def with_measured(findings: Sequence[Finding], figures: dict[str, Any]) -> list[Finding]:
    """Findings with the measured τ in place of what such a fault mostly does to it."""
    measured = f"τ is {figures['tau']:.2f} on the recorded prompts, and was {figures['recorded_tau']:.2f}"
    return [replace(f, symptom=f.symptom.replace(FALLS, measured)) for f in findings]


def variants(draft: DraftFiles, layers: Sequence[int], target_layers: int) -> dict[str, tuple[DraftFiles, str]]:
    """Other ways to read a draft whose record says nothing, each with its cure, by words that complete "τ is .. "."""
    config, found = draft.config, {}
    for cause, tensors in likeliest_repairs(config, draft.tensors):
        found[f"after undoing that {cause}"] = replace(draft, tensors=dict(tensors)), "undo this in the file"
    if not config.family.reads_layers:
        return found
    for distance, kind in ((1, "outputs"), (-1, "inputs")):
        moved = tuple(i + distance for i in layers)
        if min(moved) >= 0 and max(moved) <= target_layers:
            text = f"if its layers are {list(moved)} in place of {list(layers)}: its ids count {kind} of layers"
            found[text] = replace(draft, config=replace(config, aux_layers=moved)), CORRECT
    for name in ("norm_before_residual", "norm_output"):
        if not config.family.one_pass or name != "norm_output":
            value = not getattr(config, name)
            text = f"if {name} is {str(value).lower()} in place of {str(not value).lower()}"
            found[text] = replace(draft, config=replace(config, **{name: value})), CORRECT
    return found
