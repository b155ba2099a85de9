"""Checks whether a draft's files fit together, fit the target, and agree with the record of training."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.check.probe import Probe, ProbeRecord, render_chats
from fledge.check.read_probe import read_probe
from fledge.config import DraftConfig, RopeConfig
from fledge.data.template import ChatTemplate
from fledge.drafts.registry import NETWORKS
from fledge.drafts.weights import CONFIG, FLOATS, complete_config, find_damage, marked_ids, meta_draft, tensor_problems
from fledge.engines.support import PLACES, SERVERS, TITLES, layers_read, value_at
from fledge.io.fields import format_value, read_json, shortened, some_of
from fledge.io.files import read_consistent
from fledge.io.fingerprints import template_sha256, vocabulary_sha256
from fledge.io.formats import config_from_hf, deviations, flat_config, is_speculators, to_engine
from fledge.io.hub import draft_directory
from fledge.io.tensors import read_tensors, stray_readers, stray_symptom, stray_weights, weights_file
from fledge.targets.compatibility import layers_of
from fledge.targets.interface import UNLIMITED, Target

EMBEDDING = "embed_tokens.weight"
ADDED_EMBEDDING = (
    "vLLM reads tokens through it in place of the target's: acceptance of a few percent, or failure if its size differs"
)
COPY = "copy the draft again, or write it again from its run (fledge train --init-from RUN/checkpoint)"
# the symptoms of a file that lacks tensors, and of tensors that are not part of the draft
MISSING = (
    "vLLM and SGLang load most such files without a message, with norms left at 1, matrices uninitialized and the "
    "target's head in place of a missing head: acceptance falls, mostly to chance"
)
UNKNOWN = "vLLM refuses the file or leaves them out, and SGLang leaves them out: acceptance falls if they were trained"
OTHER_MASK = "lets rows of a block see other rows than in training: fewer tokens are accepted"
# fields of config.json that `DraftConfig` does not depend on, but engines do: the place in config.json, the value that
# engines take for a missing field, and the symptom if the field differs from training
ENGINE_FIELDS = (
    ("architectures", None, "an engine refuses the draft or computes another kind; fledge export writes its class"),
    ("model_type", None, "an engine computes the layer of another family of models"),
    ("bias", False, "vLLM and SGLang then add a bias that the file does not have: acceptance falls"),
    ("draft_vocab_size", None, "SGLang and SafeAILab's code refuse a config without it"),
    ("num_aux_hidden_states", 3, "vLLM expects so many hidden states in fc (three without the field), and fails"),
    ("eagle_config.layer_ids", None, "vLLM 0.33 then reads these hidden states of the target"),
    ("is_causal", None, f"vLLM 0.33 and SGLang {OTHER_MASK}"),
    ("dflash_config.causal", None, f"vLLM 0.26 {OTHER_MASK}"),
    ("dflash_config.block_size", None, "SGLang drafts a block of this many rows"),
)
NOT_COMPARED = (
    "provenance", "aux_layers", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A fault of a draft or its target, found by the check named `check`: the cause, the symptom in an engine that
    serves the draft, and the cure. `cause`, `symptom` and `cure` are sentences without capital and full stop, since a
    sentence may begin with the name of a tensor or field."""

    check: str
    cause: str
    symptom: str
    cure: str

    def __str__(self) -> str:
        return "; ".join(s for s in (self.cause, self.symptom, f"cure: {self.cure}" if self.cure else "") if s) + "."


@dataclass
class Report:
    """The result of all checks. `passed` are (check, description of the comparison), `notes` remarks that are no
    faults, and `measured` the figures of the replay and of decoding by name. `files_only` is True if the target
    computed nothing."""

    findings: list[Finding] = field(default_factory=list)
    passed: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    files_only: bool = False

    def add(self, check: str, findings: list[Finding], otherwise: str) -> bool:
        """Adds the findings of a check; without findings, adds the text `otherwise` to `passed` and returns True."""
        self.findings += findings
        if not findings:
            self.passed.append((check, otherwise))
        return not findings

    def failed(self, *checks: str) -> bool:
        """Whether a check named in `checks` has a finding; without names, whether any check has a finding."""
        return any(not checks or f.check in checks for f in self.findings)


@dataclass(frozen=True)
class DraftOnDisk:
    """The files of a draft, read without checking that the files fit together.

    `hf` is the content of config.json, in the flat layout, and `config` the DraftConfig of config.json and the tensors.
    `tensors` have the names of `Draft`'s state dict, `names` are the names in the file, and `marked` the target ids
    that `t2d` marks (`marked_ids`). `speculators` tells whether config.json is in speculators' format, which SGLang
    does not read. `deviations` are the fields of config.json that fledge refuses elsewhere, and `strays` the weight
    files beside the draft's weights (`stray_weights`).
    """

    hf: dict[str, Any]
    config: DraftConfig
    tensors: dict[str, Tensor]
    names: Collection[str]
    marked: Tensor | None
    speculators: bool
    deviations: Sequence[tuple[str, str, str]]
    strays: Sequence[str]


def read_files(name: str | Path) -> tuple[DraftOnDisk | Finding, Probe | Finding | None]:
    """A draft's files and probe (None: no probe). Unreadable files, or an unreadable probe, become a finding."""
    return read_consistent(draft_directory(name), lambda directory: (_read_draft(directory), _read_probe(directory)))


def _read_draft(directory: Path) -> DraftOnDisk | Finding:
    symptom = "engines refuse the draft, or fail while they load it"
    try:
        hf = read_json(directory / CONFIG)
        config = config_from_hf(hf, refuse_deviations=False)
        speculators = is_speculators(hf)
        flat = flat_config(hf)
        odd = deviations(flat, config.family)
    except (OSError, ValueError) as e:
        return Finding("config", f"{directory / CONFIG} cannot be used: {e}", symptom, COPY)
    try:
        raw = read_tensors(weights_file(directory))
        tensors = NETWORKS[config.method].from_file(raw, config)
        config = complete_config(config, tensors, "fledge" in hf)
        meta_draft(config)
        strays = stray_weights(directory, raw)
    except ValueError as e:
        return Finding("weights", str(e), symptom, COPY)
    if config.draft_vocab_size == config.vocab_size and "d2t" in tensors and not tensors["d2t"].any():
        del tensors["d2t"]  # as `open_draft` does
    marked = marked_ids(raw, config.vocab_size)
    return DraftOnDisk(flat, config, tensors, raw.keys(), marked, speculators, odd, strays)


def _read_probe(directory: Path) -> Probe | Finding | None:
    try:
        return read_probe(directory)
    except ValueError as e:
        return Finding("probe", str(e), "nothing can be replayed", "copy the draft again, with its subfolder")


def weight_findings(draft: DraftOnDisk, record: ProbeRecord | None, engines: Sequence[str]) -> list[Finding]:
    """Findings about tensors that are missing, unknown, of wrong shapes or dtypes, or damaged, and about stray weight
    files that `engines` (keys of TITLES) read. A missing or wrong map d2t belongs to `vocabulary_findings`."""
    sized = meta_draft(draft.config)
    expected = sized.state_dict()
    added = _embedding_was_added(draft, record)
    elsewhere = {"d2t", *([EMBEDDING] if added else [])}
    problems = {name: text for name, text in tensor_problems(sized, draft.tensors) if name not in elsewhere}
    missing = [name for name in problems if name not in draft.tensors]
    unknown = [name for name in problems if name not in expected]
    keep = f"if the draft was trained with it, its method or {CONFIG} is wrong; else remove it from the file"
    found = []
    if missing:
        found.append(Finding("weights", f"{_listed(missing)} missing from the file", MISSING, COPY))
    if unknown:
        found.append(Finding("weights", f"{_listed(unknown)} not part of such a draft", UNKNOWN, keep))
    if added:
        cause = f"{EMBEDDING} is in the file, and was not in training"
        found.append(Finding("weights", cause, ADDED_EMBEDDING, f"remove {EMBEDDING} from the file"))
    found += [
        Finding(
            "weights", f"{name} lies beside the draft's weights and holds others", stray_symptom(name), f"remove {name}"
        )
        for name in draft.strays
        if set(stray_readers(name)) & set(engines)
    ]
    for name, problem in problems.items():
        if name in (*missing, *unknown):
            continue
        symptom, cure = "an engine that does not check shapes computes something else: acceptance about 0", COPY
        if draft.tensors[name].shape == expected[name].shape:  # the dtype is wrong
            symptom = "an engine that converts the values without the scales of a quantization computes something else"
            cure = f"{COPY}, in one of {', '.join(str(dtype).removeprefix('torch.') for dtype in FLOATS)}"
        found.append(Finding("weights", problem, symptom, cure))
    damage = find_damage((name, x) for name, x in draft.tensors.items() if x.dtype in FLOATS)
    found += [Finding("weights", text, "no token of the draft is accepted", COPY) for text in damage]
    return found


def _embedding_was_added(draft: DraftOnDisk, record: ProbeRecord | None) -> bool:
    """Whether the draft has an embedding of its own, and had none when fledge wrote the draft."""
    own = draft.hf.get("fledge", {}).get("own_embeddings")
    trained = record.draft_config.own_embeddings if record else own
    return EMBEDDING in draft.tensors and trained is False


def _listed(names: Sequence[str]) -> str:
    """The first names of tensors, with "is" or "are"."""
    return f"{some_of([*map(shortened, names)])} {'is' if len(names) == 1 else 'are'}"


def vocabulary_findings(draft: DraftOnDisk, record: ProbeRecord | None) -> list[Finding]:
    """A finding about the map between the vocabularies of draft and target; empty if the map is right."""

    def fault(cause: str, symptom: str, cure: str) -> list[Finding]:
        return [Finding("vocabulary", cause, symptom, cure)]

    config, d2t = draft.config, draft.tensors.get("d2t")
    W, V = config.draft_vocab_size, config.vocab_size
    cure = "copy the draft again; d2t[i] is the target's id of draft token i, minus i"
    served = "engines then verify other tokens than the draft means: acceptance about 0"
    if W == V:
        cause = "d2t is in the file, but the draft has the whole vocabulary"
        return [] if d2t is None else fault(cause, "vLLM 0.33 refuses it", "remove d2t from the file")
    if d2t is None:
        cause = f"d2t is missing, and the draft predicts {W:,} of {V:,} tokens"
        return fault(cause, "vLLM then reads draft ids as target ids: acceptance about 0", cure)
    if d2t.shape != (W,) or d2t.is_floating_point():
        cause = f"d2t has shape {list(d2t.shape)} and dtype {str(d2t.dtype).split('.')[-1]}, not [{W}] and int64"
        return fault(cause, served, cure)
    ids, listed = d2t + torch.arange(W), draft.marked
    known = record.draft_config.provenance.vocabulary_sha256 if record else config.provenance.vocabulary_sha256

    def right(found: Tensor) -> bool:
        if known:
            return vocabulary_sha256(found) == known
        return listed is not None and torch.equal(found, listed)

    if not d2t.any() and not right(ids):
        return fault("d2t is wrong: all of it is zero, so that draft ids are taken for target ids", served, cure)
    in_order = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < V
    if not in_order or (known and not right(ids)):
        cause = (
            "it is not the vocabulary map of training" if in_order else "its ids are not ascending within the target's"
        )
        if right(d2t):
            cause = "it holds the target's ids in place of their distances from the draft's ids"
        return fault(f"d2t is wrong: {cause}", served, cure)
    if listed is None or torch.equal(listed, ids):
        return []
    cure = "write t2d again: true for the target's ids that d2t maps to"
    if not known:  # no hash tells that d2t is right
        cure = f"copy the draft again, as either may be wrong; if d2t is known to be right, {cure}"
    symptom = "vLLM and SGLang read d2t, and SafeAILab's code and trainers t2d: continued training is wrong"
    return fault("t2d and d2t contradict each other: t2d marks other tokens as the draft's", symptom, cure)


def layer_findings(
    draft: DraftOnDisk, target: Target, record: ProbeRecord | None, engines: Sequence[str] = SERVERS
) -> tuple[list[Finding], list[str]]:
    """Findings and notes about the lists of the target's layers in config.json: every list that fledge or one of
    `engines` reads is compared with the layers of training."""
    try:
        ours = tuple(sorted(layers_of(draft.config, target)))
        layout = draft.config.family.layout
        read = {engine: layers_read(draft.hf, engine, target.num_layers, layout) for engine in engines}
    except ValueError as e:
        return [Finding("layers", str(e), "engines refuse the draft", COPY)], []
    trained = tuple(record.layers) if record else ours
    readers = [("fledge", "fledge.aux_layers", list(trained), ours)]
    places = PLACES[layout]
    readers += [
        (TITLES[e], places[e][0], to_engine(trained, places[e][1]), layers) for e, layers in read.items() if layers
    ]
    wrong: dict[tuple[int, ...], list[tuple[str, str, list[int]]]] = {}
    notes = []
    for *reader, layers in readers:
        elsewhere = record is None and "fledge" not in draft.hf
        if layers != trained and elsewhere and value_at(draft.hf, reader[1]) is None:
            # the draft may not be made for this engine
            finding = _layer_finding([reader], layers, trained)
            notes.append(f"{finding.cause}. Before serving it there, {finding.cure}.")
        elif layers != trained:
            wrong.setdefault(layers, []).append(reader)
    return [_layer_finding(alike, layers, trained) for layers, alike in wrong.items()], notes


def _layer_finding(
    readers: Sequence[tuple[str, str, list[int]]], read: Sequence[int], trained: Sequence[int]
) -> Finding:  # fmt: skip
    """The finding for readers of the layers `read`, where training read the layers `trained`. A reader is a name, the
    place of the reader's list in config.json, and the right value of the list."""
    names = " and ".join(f"{name} ({place})" for name, place, _ in readers)
    names += " reads" if len(readers) == 1 else " read"
    return Finding(
        "layers",
        f"{names} the hidden states {list(read)} in place of {list(trained)}",
        "the checkpoint loads without a message, and acceptance falls, often to that of chance",
        "set " + " and ".join(f"{place} to {wanted}" for _, place, wanted in readers),
    )


def config_findings(
    draft: DraftOnDisk, target: Target, record: ProbeRecord | None, engines: Sequence[str] = SERVERS
) -> list[Finding]:
    """Findings about fields of config.json that differ from training, contradict each other, or are refused or misread
    by `engines`."""
    config, hf = draft.config, draft.hf
    found = [Finding("config", *odd) for odd in draft.deviations]
    changed = changed_fields(config, record) if record else []
    if _embedding_was_added(draft, record):  # not a field of config.json, see `weight_findings`
        changed = [each for each in changed if each[0] != "own_embeddings"]
    for name, now, before in changed:
        cause = f"{'RoPE' if name == 'rope' else name} is {now} in {CONFIG}, and was {before} in training"
        symptom = "the draft is computed otherwise than it was trained: acceptance falls, often to that of chance"
        found.append(Finding("config", cause, symptom, f"set it back to {before}"))
    if record and not draft.speculators:
        found += _engine_findings(draft, record, {name for name, *_ in changed})
    if not any(f.cause.startswith("RoPE") for f in found) and (problem := _rope_contradiction(hf)):
        symptom = "SafeAILab's code reads the first, vLLM and SGLang the second: one of them turns positions wrongly"
        found.append(Finding("config", problem, symptom, "make both those of training"))
    if "sglang" not in engines:
        return found
    limit, context = config.max_position_embeddings, target.context
    if limit < context < UNLIMITED:
        found.append(
            Finding("config", f"max_position_embeddings is {limit:,}, and the target's context is {context:,}",
                    "SGLang refuses to start with this draft", f"set max_position_embeddings to {context:,}")
        )  # fmt: skip
    if hf.get("tie_word_embeddings") is True and not config.family.borrows_head:
        found.append(
            Finding("config", "tie_word_embeddings is true, but the draft has a head of its own",
                    "SGLang then uses the embedding as head: acceptance about 0", "set tie_word_embeddings to false")
        )  # fmt: skip
    return found


def _engine_findings(draft: DraftOnDisk, record: ProbeRecord, known: Container[str]) -> Iterator[Finding]:
    """Findings about ENGINE_FIELDS that differ from training, except fields in `known`."""
    for place, default, symptom in ENGINE_FIELDS:
        now, before = (value_at(hf, place) for hf in (draft.hf, record.config))
        if place in known or (default if now is None else now) == (default if before is None else before):
            continue
        if place == "bias" and draft.config.family.fuses_embedding:  # the weights decide the bias of fc
            continue
        was, cure = f"was {_short_json(before)} in training", f"set it back to {_short_json(before)}"
        if before is None:
            was, cure = "training wrote none", f"remove {place}"
        is_now = "missing" if now is None else _short_json(now)
        yield Finding("config", f"{place} is {is_now} in {CONFIG}, and {was}", symptom, cure)


def changed_fields(config: DraftConfig, record: ProbeRecord) -> list[tuple[str, str, str]]:
    """The fields of a draft's config that differ from the record: (name, value now, value before)."""
    before = record.draft_config
    return [
        (name, *_shown(name, getattr(config, name), getattr(before, name)))
        for name in (f.name for f in fields(DraftConfig))
        if name not in NOT_COMPARED and getattr(config, name) != getattr(before, name)
    ]


def _short_json(value: Any) -> str:
    return shortened(json.dumps(value))


def _shown(name: str, now: Any, before: Any) -> tuple[str, str]:
    """Two values of a field as text; for two RoPE configs, only the differing fields."""
    if name != "rope":
        return format_value(now), format_value(before)
    names = [f.name for f in fields(RopeConfig) if getattr(now, f.name) != getattr(before, f.name)]
    return tuple(", ".join(f"{n} {format_value(getattr(rope, n))}" for n in names) for rope in (now, before))


def _rope_contradiction(hf: dict[str, Any]) -> str:
    """How rope_theta and rope_scaling contradict rope_parameters in a config.json; empty without a contradiction."""
    older = {k: v for k, v in hf.items() if k != "rope_parameters"}
    newer = {k: v for k, v in hf.items() if k not in ("rope_theta", "rope_scaling")}
    if not hf.get("rope_parameters") or not (hf.get("rope_theta") or hf.get("rope_scaling")):
        return ""
    try:
        first, second = RopeConfig.from_hf(older), RopeConfig.from_hf(newer)
    except ValueError:
        return ""  # one of the two is incomplete and needs the fields of the second
    if first == second:
        return ""
    now, before = _shown("rope", first, second)
    return f"rope_theta and rope_scaling say {now}, and rope_parameters say {before}"


def norm_output_note(draft: DraftOnDisk) -> str:
    """A note on `norm_output` in older versions of SpecForge; empty for a draft that SpecForge cannot have trained."""
    config = draft.config
    by_specforge = "fledge" not in draft.hf and any(name.startswith("midlayer.") for name in draft.names)
    if not config.norm_output or config.family.one_pass or not by_specforge:
        return ""
    return (
        "norm_output is true. With this field, SpecForge before its pull request 879 (September 2026) fed the state "
        "before the norm back in training, while fledge and all engines feed the normed state back: drafted tokens "
        "after the first are accepted less often. If such a version trained this draft, remove norm_output from "
        f"{CONFIG}, which gives the draft of training. fledge check decodes with and without norm_output."
    )


def rope_note(draft: DraftOnDisk, target: Target) -> str:
    """A note on differences between the draft's and the target's RoPE; empty for equal or unknown RoPE."""
    known = draft.config.provenance.max_length or draft.config.max_position_embeddings
    try:
        theirs = RopeConfig.from_hf(target.shape).for_length(known)
    except ValueError:
        return ""
    if theirs == draft.config.rope:
        return ""
    now, other = _shown("rope", draft.config.rope, theirs)
    return f"its RoPE has {now}, and the target's {other}; wrong unless it was trained so."


def template_findings(draft: DraftOnDisk, target: Target, record: ProbeRecord) -> tuple[list[Finding], list[str]]:
    """Findings and notes about the chat template: the record's chats are rendered by the target's template with the
    template arguments of training, and with those of config.json."""
    kwargs, before = draft.config.provenance.template_kwargs, record.draft_config.provenance
    symptom = "the draft sees other text than in training: acceptance falls, by little or by much"
    same_file = before.template_sha256 == template_sha256(target.tokenizer)
    now = _render(target, before.template_kwargs)
    if now != record.chats:
        if same_file:
            return [], [
                "the chat template renders a chat otherwise than when the draft was trained, e.g. another date."
            ]
        cure = "use the chat template of training with this draft, or train it on chats with the new one"
        shown = _first_difference(record.chats, now)
        return [Finding("template", f"the target's chat template is not that of training: {shown}", symptom, cure)], []
    if kwargs != before.template_kwargs and (now := _render(target, kwargs)) != record.chats:
        shown = _first_difference(record.chats, now)
        cause = f"template_kwargs are {kwargs}, and were {before.template_kwargs} in training (thinking mode): {shown}"
        return [Finding("template", cause, symptom, f"set them to {before.template_kwargs}")], []
    return [], []


def _render(target: Target, kwargs: dict[str, Any] | None) -> list[str]:
    return render_chats(ChatTemplate(target.tokenizer, target.stop_ids, kwargs))


def _first_difference(before: Sequence[str], now: Sequence[str]) -> str:
    """A phrase that quotes the first difference between the texts `before` and `now`."""
    if len(before) != len(now):
        return "it renders other chats"
    a, b = next((x, y) for x, y in zip(before, now, strict=True) if x != y)
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"a chat has {b[at : at + 60]!r} where it had {a[at : at + 60]!r}"
