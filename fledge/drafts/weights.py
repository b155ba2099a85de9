"""Draft checkpoints in the layout that vLLM, SGLang and SafeAILab's code load, written atomically."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fledge.config import DraftConfig
from fledge.drafts.draft import Draft
from fledge.drafts.registry import NETWORKS, new_draft
from fledge.io.fields import MOST_LAYERS, read_json, shortened
from fledge.io.files import read_consistent, replace_directory
from fledge.io.fingerprints import vocabulary_sha256
from fledge.io.formats import config_from_hf, config_to_hf, is_speculators
from fledge.io.hub import draft_directory
from fledge.io.tensors import WEIGHTS, read_tensors, stray_weights, weights_file

CONFIG = "config.json"
RECIPE = "recipe.yaml"  # the file with the options of a training run
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def draft_files(draft: Draft, dtype: torch.dtype) -> dict[str, bytes]:
    """The content of a draft's files, model.safetensors with weights in `dtype` and config.json."""
    state = {n: x.detach().to("cpu", dtype if x.is_floating_point() else None) for n, x in draft.state_dict().items()}
    return encode_files(config_json(draft, dtype), portable_tensors(draft.config, state))


def config_json(draft: Draft, dtype: torch.dtype) -> dict[str, Any]:
    """The content of a draft's config.json, with weights in `dtype`."""
    config = draft.config.with_provenance(vocabulary_sha256=vocabulary_sha256(draft.target_ids()))
    return config_to_hf(config, dtype_name(dtype))


def portable_tensors(config: DraftConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file that every engine loads, from a `Draft`'s state dict on the CPU.

    The vocabulary map is written as `d2t` (target id minus draft id, int64 [W]) and `t2d` (bool [V]). Both are left out
    if the draft predicts the whole vocabulary, since vLLM refuses them then. The method sets all other names
    (`Draft.to_file`).
    """
    tensors = NETWORKS[config.method].to_file(config, {name: x.contiguous() for name, x in state.items()})
    if (d2t := state.get("d2t")) is not None:
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[torch.arange(len(d2t)) + d2t] = True
        tensors["t2d"] = t2d
    return tensors


def encode_files(hf: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """The content of a draft's two files, from the object in config.json and the tensors."""
    text = json.dumps(hf, indent=2)
    return {WEIGHTS: save(tensors, metadata={"format": "pt"}), CONFIG: (text + "\n").encode()}


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in config.json, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Writes files, given by their paths in an existing directory."""
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def read_files(name: str | Path) -> dict[str, bytes]:
    """The content of config.json and the weights file of a draft, given its directory or hub id, by name."""
    return read_consistent(
        draft_directory(name), lambda at: {file.name: file.read_bytes() for file in (at / CONFIG, weights_file(at))}
    )


def save_draft(
    draft: Draft, directory: str | Path, dtype: torch.dtype = torch.bfloat16, more: Mapping[str, bytes] | None = None
) -> None:
    """Writes a draft's directory atomically, and replaces an existing directory. `more` are further files, by their
    paths in the directory. Raises OSError, e.g. for a full disk."""
    with replace_directory(Path(directory)) as new:
        write_files(draft_files(draft, dtype) | dict(more or {}), new)


def read_draft_config(name: str | Path) -> DraftConfig:
    """Reads the config.json of a draft, by directory or hub id. Raises ValueError if config.json is missing, or is not
    the config of an EAGLE draft."""
    return read_consistent(draft_directory(name), lambda directory: _read_config(_config_file(directory))[1])


def check_draft(name: str | Path) -> None:
    """Raises ValueError if there is no draft with this directory or hub id."""
    read_consistent(draft_directory(name), _config_file)


def _config_file(directory: Path) -> Path:
    file = directory / CONFIG
    if directory.is_file():
        raise ValueError(f"the draft {directory} is a file; give the directory that it is in")
    if not file.is_file():
        raise ValueError(f"{directory} holds no {CONFIG}; {_where_the_draft_is(directory)}")
    return file


def _where_the_draft_is(directory: Path) -> str:
    """The place of the draft, for messages about a directory without a draft, which may be a run or a part of a run."""
    for run in (directory, directory.parent):
        draft, checkpoint, is_run = run / "draft", run / "checkpoint", (run / RECIPE).is_file()
        if draft.is_dir() and draft != directory and (is_run or run == directory):
            return f"the run's draft is {draft}"
        if is_run:
            so_far = f"its draft so far is {checkpoint}" if checkpoint.is_dir() else "it has saved no draft yet"
            return f"the run in {run} is not finished: {so_far}, and fledge train --resume {run} continues it"
    return f"a draft is a directory with {CONFIG} and {WEIGHTS}"


def _read_config(file: Path) -> tuple[dict[str, Any], DraftConfig]:
    """The object in a config.json, and the `DraftConfig` that the object describes."""
    try:
        hf = read_json(file)
    except ValueError as e:
        raise ValueError(f"{file} is not JSON ({e}); the file is damaged, copy it again") from e
    try:
        return hf, config_from_hf(hf)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e


@dataclass(frozen=True)
class DraftFiles:
    """The checked content of a draft's files.

    `tensors` have the names of `Draft`'s state dict. `hf`, `names` and `file` are the object in config.json, the names
    of the tensors and the weights file as they were found, and `strays` weight files beside it that are not the draft's
    (`stray_weights`).
    """

    config: DraftConfig
    tensors: dict[str, Tensor]
    hf: dict[str, Any]
    names: frozenset[str]
    file: str
    strays: tuple[str, ...] = ()

    @property
    def layout(self) -> str:
        """The layout of the files, as a noun phrase."""
        if is_speculators(self.hf):
            return "speculators' format"
        if "fledge" in self.hf:
            return "fledge's layout"
        if self.config.family.layout == "dflash":
            return "DFlash's layout, as its authors and SpecForge write it"
        if any(name.startswith("model.") for name in self.names):
            return "a layout with model. before the names of tensors (AutoModel)"
        if any(name.startswith("layers.0.") for name in self.names) and self.config.family.reads_layers:
            return "vLLM's layout, with numbered layers"
        return "SafeAILab's layout"

    def build(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Draft:
        """Creates the draft, in eval mode."""
        return build_draft(self.config, self.tensors).to(device=device, dtype=dtype)


def build_draft(config: DraftConfig, tensors: Mapping[str, Tensor]) -> Draft:
    """A draft in eval mode on the CPU, in float32, with the tensors as its state dict."""
    draft = meta_draft(config)
    saved = draft.state_dict()
    if lost := [name for name, x in draft.named_buffers() if x.is_meta and name not in saved]:
        raise ValueError(
            f"{type(draft).__name__} makes buffers that are not saved ({', '.join(lost)}); make them under "
            'torch.device("cpu"), or save them'
        )
    draft = draft.to_empty(device="cpu")
    draft.load_state_dict(tensors)
    return draft.to(dtype=torch.float32).eval()


def open_draft(name: str | Path) -> DraftFiles:
    """Reads and checks a draft's files, given its directory or hub id.

    The config and the names of the tensors may be those of fledge, vLLM, SGLang, SafeAILab's code, speculators and
    other trainers (`config_from_hf`, `io.tensors`). Raises ValueError for an invalid field of the config, a
    missing, unknown or wrongly shaped tensor, a vocabulary map that is missing or does not match the hash in the
    config, and damaged weights (`find_damage`). Only `build` allocates the parameters, so that a wrong config cannot
    allocate more memory than the file has.
    """
    return read_consistent(draft_directory(name), _open)


def _open(directory: Path, find_strays: bool = True) -> DraftFiles:
    config_file = _config_file(directory)
    hf, config = _read_config(config_file)
    file = weights_file(directory)
    raw = read_tensors(file)
    try:
        tensors = NETWORKS[config.method].from_file(raw, config)
        config = complete_config(config, tensors, by_fledge="fledge" in hf)
        draft = meta_draft(config)
        if draft.d2t is None and "d2t" in tensors and not tensors["d2t"].any():
            del tensors["d2t"]  # SpecForge writes a map of zeros if the draft has the whole vocabulary
        _check_tensors(draft, tensors)
        _check_vocabulary(draft, tensors, marked_ids(raw, config.vocab_size))
        if damage := find_damage(tensors.items()):
            raise ValueError(
                f"{'; '.join(damage)}. The target would accept no token of this draft: copy it again or train another"
            )
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e
    strays = stray_weights(directory, raw) if find_strays else ()
    return DraftFiles(config, tensors, hf, frozenset(raw), file.name, strays)


def load_draft(name: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Draft:
    """Loads a draft by its directory or hub id. Raises ValueError like `open_draft`."""
    # strays are not read: that takes as long as reading the draft
    return read_consistent(draft_directory(name), lambda at: _open(at, find_strays=False)).build(device, dtype)


def complete_config(config: DraftConfig, tensors: dict[str, Tensor], by_fledge: bool) -> DraftConfig:
    """The config with the properties that only the weights show. Configs of other trainers (AutoModel) may have the
    target's number of layers and q/k norms; unless fledge wrote the file, the weights decide."""
    if "embed_tokens.weight" in tensors:  # as in vLLM: an embedding in the file is used
        config = replace(config, own_embeddings=True)
    if config.family.fuses_embedding:
        if not config.fc_bias and "fc.bias" in tensors and not tensors["fc.bias"].any():
            del tensors["fc.bias"]  # written for SGLang only, see `draft_files`
        config = replace(config, fc_bias="fc.bias" in tensors)
    if not by_fledge:
        further = {found[1] for name in tensors if (found := re.match(r"layers\.([1-9]\d*)\.", name))}
        normed = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
        config = replace(config, num_hidden_layers=1 + len(further), qk_norm=config.qk_norm and normed)
    return config


def meta_draft(config: DraftConfig) -> Draft:
    """A draft on the meta device. Raises ValueError if the config has too many layers."""
    if config.num_hidden_layers > MOST_LAYERS:
        raise ValueError(f"it has {config.num_hidden_layers:,} layers; fledge reads at most {MOST_LAYERS}")
    with torch.device("meta"):
        return new_draft(config)


def _check_tensors(draft: Draft, tensors: dict[str, Tensor]) -> None:
    """Raises ValueError unless the tensors have the names, shapes and dtypes of the draft's state dict."""
    config = draft.config
    if draft.d2t is not None and "d2t" not in tensors:
        raise ValueError(
            f"it has no d2t: this draft predicts {config.draft_vocab_size} of {config.vocab_size} tokens, and without "
            "that map their target ids are unknown; get the file as its trainer wrote it"
        )
    if problems := [text for _, text in tensor_problems(draft, tensors)]:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"it does not match its {CONFIG}: {'; '.join(problems[:3])}{more}")


def tensor_problems(draft: Draft, tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """The tensors that do not have the names, shapes and dtypes of the draft's state dict: (name, problem)."""
    expected = draft.state_dict()
    problems = [(n, f"{n} is missing") for n in expected if n not in tensors]
    problems += [(n, f"{shortened(n)} is not part of such a draft") for n in tensors if n not in expected]
    for name in (n for n in expected if n in tensors):
        wanted, found = expected[name], tensors[name]
        if found.shape != wanted.shape:
            text = f"{name} has shape {list(found.shape)}, but the config requires {list(wanted.shape)}"
            problems.append((name, text))
        elif found.dtype not in (FLOATS if wanted.is_floating_point() else (torch.int64,)):
            text = f"{name} has dtype {str(found.dtype).removeprefix('torch.')}, which fledge does not read"
            problems.append((name, text))
    return problems


def marked_ids(tensors: Mapping[str, Tensor], V: int) -> Tensor | None:
    """The target ids that `t2d` marks, by the names of a draft's file; None without a `t2d` of shape [V]."""
    t2d = next((x for name, x in tensors.items() if name.removeprefix("model.") == "t2d"), None)
    return t2d.nonzero().squeeze(-1) if t2d is not None and t2d.shape == (V,) else None


def _check_vocabulary(draft: Draft, tensors: dict[str, Tensor], marked: Tensor | None) -> None:
    """Raises ValueError for a vocabulary map with invalid target ids, for a map that does not match the config's hash,
    and for zeros that neither the hash nor the ids that t2d marks confirm."""
    ids = torch.arange(draft.config.draft_vocab_size)
    if "d2t" in tensors:
        ids = ids + tensors["d2t"]
    draft.set_vocabulary(ids)
    recorded = draft.config.provenance.vocabulary_sha256
    if recorded and recorded != vocabulary_sha256(ids):
        raise ValueError(f"its vocabulary map does not match the hash in its {CONFIG}")
    confirmed = recorded or (marked is not None and torch.equal(marked, ids))
    if "d2t" in tensors and not tensors["d2t"].any() and not confirmed:
        W = len(ids)
        raise ValueError(
            "its d2t is all zeros, which takes draft ids for target ids: engines would accept hardly a token. Get the "
            f"file as its trainer wrote it; if the draft really predicts the target's first {W} tokens, add a t2d that "
            f"is true for the first {W}"
        )


MAX_VALUE = 1e5  # trained weights are far smaller; float16 ends at 65,504
ZERO = 1e-12  # a tensor counts as zero if all its values are smaller in magnitude
# ends of names: P-EAGLE's learned state, and parts of DFlash 2 that are zero before training
MAY_BE_ZERO = ("mask_hidden", "kernel_projection.weight", "successor_codebook")
MAX_NAMES = 3  # tensor names in a message


def find_damage(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Checks (name, tensor) pairs, and returns one message for each kind of damage found, with the tensors' names.

    Damage is a NaN or infinite value, a value above MAX_VALUE, or a tensor of zeros. Biases and the tensors of
    MAY_BE_ZERO may be zero. Integer tensors are not checked; floating-point tensors need a dtype of 16 bits or more.
    """
    nonfinite, zero, huge = [], [], []
    for name, tensor in tensors:
        if not tensor.numel() or not tensor.is_floating_point():
            continue
        low, high = (float(x) for x in tensor.aminmax())  # NaN if any value is NaN
        largest = max(-low, high)
        if not math.isfinite(low) or not math.isfinite(high):
            nonfinite.append(name)
        elif largest > MAX_VALUE:
            huge.append(name)
        elif largest < ZERO and not name.endswith((".bias", *MAY_BE_ZERO)):
            zero.append(name)
    kinds = (nonfinite, "NaN or infinite values"), (zero, "only zeros"), (huge, f"values above {MAX_VALUE:,.0f}")
    return [f"{_join(names)} {'has' if len(names) == 1 else 'have'} {what}" for names, what in kinds if names]


def _join(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(map(shortened, names[:MAX_NAMES])) + more
