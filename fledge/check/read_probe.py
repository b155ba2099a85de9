"""Reads the probe in a draft's directory, which may come from a stranger: every field has a type and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from fledge.check import probe
from fledge.check.probe import RECORD, TENSORS, Excerpt, Probe, ProbeDecoding, ProbeRecord
from fledge.io.fields import LAYERS, OBJECT, TEXT, Fields, Kind, first_line, integer, list_of, non_negative, read_json
from fledge.io.hub import draft_directory
from fledge.states.layout import PRECISIONS

_CHATS = list_of(Kind("a string of at most 100,000 characters", lambda x: isinstance(x, str) and len(x) <= 100_000), 8)
_IDS = list_of(integer(0, 2**24), 4096)
_COUNTS = list_of(integer(0, 2**20), 256)
_RECORD = {
    "format": integer(1, probe.FORMAT),
    "versions": OBJECT,
    "config": OBJECT,
    "tensors": OBJECT,
    "target_sha256": TEXT,
    "chats": _CHATS,
    "precision": Kind(f"float64 or one of {', '.join(PRECISIONS)}", lambda x: x in ("float64", *PRECISIONS)),
    "layers": LAYERS,
    "steps": integer(1, probe.STEPS),
    "spacings": list_of(integer(1, probe.FAR), 4),
    "decoding": OBJECT,
    "step": integer(0, 2**40),
    "eval_tau": non_negative(1e3),
}
_DECODING = {
    "prompts": list_of(_IDS, 256),
    "new_tokens": integer(1, 4096),
    "depth": integer(1, 64),
    "committed": _COUNTS,
    "rounds": _COUNTS,
    "dtype": TEXT,
}


def read_probe(directory: Path) -> Probe | None:
    """The probe in a draft's directory; None without a probe. Raises ValueError for a probe that is damaged or of a
    later version."""
    files = [directory / name for name in (TENSORS, RECORD)]
    if not any(file.exists() for file in files):
        return None
    try:
        if missing := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{missing[0]} is missing")
        record = _read_record(read_json(files[1]))
        return _assembled(load(files[0].read_bytes()), record)
    except Exception as e:  # safetensors, JSON and tensors of wrong shapes raise many types
        raise ValueError(f"the probe in {directory / probe.FOLDER} cannot be read ({first_line(e)})") from e


def _read_record(content: Any) -> ProbeRecord:
    top = Fields(content, _RECORD)
    if top.get("format") is None:
        raise ValueError("its format is not known")
    decoding = None
    if "decoding" in top:
        known = top.nested("decoding", _DECODING)
        decoding = ProbeDecoding(**{name: known.get(name) for name in _DECODING})
        counts = {len(x) if x else 0 for x in (decoding.prompts, decoding.committed, decoding.rounds)}
        if len(counts) > 1 or 0 in counts or None in (decoding.new_tokens, decoding.depth):
            raise ValueError("its prompts and rounds do not belong together")
    rest = {name: top.get(name) for name in _RECORD if name not in ("format", "decoding")}
    if missing := [name for name, value in rest.items() if value is None and name != "eval_tau"]:
        raise ValueError(f"{missing[0]} is missing")
    record = ProbeRecord(**rest, decoding=decoding)
    record.draft_config  # noqa: B018 (raises ValueError for a config that is not a draft's)
    return record


def _assembled(tensors: Mapping[str, Tensor], record: ProbeRecord) -> Probe:
    config = record.draft_config
    token_N, id_J = tensors["tokens"].long(), tensors["draft_ids"].long()
    excerpt = Excerpt(token_N, tensors["states"], record.steps)
    id_U = probe.read_ids(excerpt, config)
    found = Probe(excerpt, id_U, tensors["embedding"], id_J, tensors.get("head"), tensors["logits"].float(), record)
    A = len(record.layers) if config.family.reads_layers else 1
    wanted = {
        "states": (excerpt.states_TAD.shape[0], A, config.target_hidden_size),
        "embedding": (id_U.numel(), config.hidden_size),
        "logits": (len(record.spacings), record.steps, excerpt.slots, id_J.numel() + 1),
    }
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape or min(shape) < 1:
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}, not {list(shape)}")
    if excerpt.start < 0 or int(id_J.max()) >= config.draft_vocab_size or int(id_J.min()) < 0:
        raise ValueError("its tokens do not fit its config")
    return found


def probe_content(name: str | Path) -> dict[str, bytes]:
    """The content of the probe files of a draft, given by directory or hub id; empty if the draft has no probe."""
    directory = draft_directory(name)
    return {name: (directory / name).read_bytes() for name in (TENSORS, RECORD) if (directory / name).is_file()}
