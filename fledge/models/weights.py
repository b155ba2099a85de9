"""Draft checkpoints: the portable layout that vLLM, SGLang and SafeAILab load, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fledge.config import DraftConfig
from fledge.fields import MOST_LAYERS, shortened
from fledge.files import reading, replacing
from fledge.hub import draft_directory
from fledge.models.draft import Draft
from fledge.models.health import findings

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PICKLED = "pytorch_model.bin"  # where the EAGLE authors' drafts have theirs
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SGLANG_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


# -- fingerprints -----------------------------------------------------------------------------------------------


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hash of the vocabulary and of how a probe text is split: two tokenizers that agree on it are interchangeable."""
    probe = "def f(x):\n    return  x+1 # 12345 Ünïcødé 你好\n\n\tThe quick brown fox."
    known = [sorted(tokenizer.get_vocab().items()), tokenizer(probe, add_special_tokens=False)["input_ids"]]
    return _sha256(json.dumps(known))


def template_sha256(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    return None if template is None else _sha256(json.dumps(template, sort_keys=True))


def vocabulary_sha256(ids_W: Tensor) -> str:
    return hashlib.sha256(ids_W.to("cpu", torch.int64).numpy().tobytes()).hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- drafts on disk ---------------------------------------------------------------------------------------------


def write_draft(draft: Draft, directory: Path, dtype: torch.dtype) -> None:
    """Writes model.safetensors and config.json into an existing directory, weights in `dtype`.

    The vocabulary map goes in as `d2t` (offsets, int64) and `t2d` (bool [V]); both are left out when the draft
    predicts the whole vocabulary, since vLLM refuses them there. Further layers carry their input norm under
    `hidden_norm` as well, which is the name SGLang reads it by.
    """
    tensors = {}
    for name, tensor in draft.state_dict().items():
        tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
        name = name.replace("midlayer.", f"{draft.family.first_layer}.")  # as the engines name it for this method
        tensors[name] = tensor.contiguous()
        if name.startswith("layers.") and name.endswith("input_layernorm.weight") and draft.family.reads_layers:
            tensors[name.replace("input_layernorm", "hidden_norm")] = tensor.clone()
    if draft.d2t is not None:
        t2d = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
        t2d[draft.target_ids().cpu()] = True
        tensors["t2d"] = t2d
    if draft.family.fuses_embedding and draft.fc.bias is None:  # SGLang would leave its own bias uninitialised
        tensors["fc.bias"] = torch.zeros(draft.config.hidden_size, dtype=dtype)
    config = draft.config.with_provenance(vocabulary_sha256=vocabulary_sha256(draft.target_ids()))
    (directory / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    text = json.dumps(config.to_hf(str(dtype).removeprefix("torch.")), indent=2)
    (directory / CONFIG).write_text(text + "\n")


def save_draft(draft: Draft, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a draft's directory whole, replacing what was there. Raises OSError for a full disk."""
    with replacing(Path(directory)) as new:
        write_draft(draft, new, dtype)


def read_draft_config(name: str | Path) -> DraftConfig:
    """config.json of a draft, by its directory or hub id. Raises ValueError with the cause where there is none or it is
    not an EAGLE draft's."""
    return reading(draft_directory(name), lambda directory: _read_config(_config_file(directory))[0])


def check_draft(name: str | Path) -> None:
    """Raises ValueError where there is no draft of that name, a directory or hub id."""
    reading(draft_directory(name), _config_file)


def _config_file(directory: Path) -> Path:
    file = directory / CONFIG
    if not file.is_file():
        run = directory / "draft"
        cure = f"the run's draft is {run}" if run.is_dir() else f"a draft is a directory with {CONFIG} and {WEIGHTS}"
        raise ValueError(f"{directory} holds no {CONFIG}; {cure}")
    return file


def _read_config(file: Path) -> tuple[DraftConfig, bool]:
    """What a config.json says, and whether fledge wrote it."""
    try:
        hf = json.loads(file.read_text())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file} is not JSON ({e}); the file is damaged, copy it again") from e
    try:
        return DraftConfig.from_hf(hf), "fledge" in hf
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of torch's. Raises ValueError where the file is missing, empty, cut short
    or holds something else."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist; the draft's weights are missing")
    try:
        if file.name == PICKLED:
            return _named_tensors(torch.load(file, map_location="cpu", weights_only=True))
        with safe_open(file, framework="pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (a handle, not a dict)
    except Exception as e:  # a damaged file fails as it likes: in its archive, its pickle, its header, its types
        why = next(iter(str(e).splitlines()), type(e).__name__)
        raise ValueError(f"{file} cannot be read ({why}); it is cut short or damaged, copy it again") from e


def _named_tensors(content: Any) -> dict[str, Tensor]:
    """Raises ValueError unless a pickle's content is tensors by name, each with a place in the file for every value."""
    if not isinstance(content, dict):
        raise ValueError(f"it holds a value of type {type(content).__name__}, not tensors by name")
    for name, x in content.items():
        if not isinstance(name, str) or not isinstance(x, Tensor) or x.layout != torch.strided:
            raise ValueError(f"{shortened(str(name))} is no dense tensor")
        if x.numel() * x.element_size() > x.untyped_storage().nbytes():
            raise ValueError(f"{shortened(name)} is {list(x.shape)}, of which the file holds a part")
    return content


@dataclass(frozen=True)
class DraftFiles:
    """A draft's files that fit each other and whose weights are sound: `tensors` by our names."""

    config: DraftConfig
    tensors: dict[str, Tensor]

    def build(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Draft:
        """The draft itself."""
        draft = _without_memory(self.config).to_empty(device="cpu")
        draft.load_state_dict(self.tensors)
        return draft.to(device=device, dtype=dtype).eval()


def open_draft(name: str | Path) -> DraftFiles:
    """Reads and checks a draft's files in the portable layout (SafeAILab's `midlayer.` or vLLM's `layers.0.` names
    alike), or the authors' pytorch_model.bin where there is no safetensors file. `name` is a directory or a hub id.

    Raises ValueError naming what is wrong: a field of the config, a missing, foreign or wrongly shaped tensor, no
    vocabulary map where the draft needs one or a map other than the one its config was written with, weights that can
    say nothing. Memory for the weights is taken only by `build`, so that no config can ask for more than the file has.
    """
    return reading(draft_directory(name), _open)


def _open(directory: Path) -> DraftFiles:
    written = _config_file(directory)
    config, ours = _read_config(written)
    file = written.with_name(WEIGHTS)
    if not file.is_file() and written.with_name(PICKLED).is_file():
        file = written.with_name(PICKLED)
    raw = read_tensors(file)
    try:
        tensors = _renamed(raw)
        config = _as_in_file(config, tensors, ours)
        empty = _without_memory(config)
        if empty.d2t is None and "d2t" in tensors and not tensors["d2t"].any():
            del tensors["d2t"]  # SpecForge's way to say that every id is itself
        _check_tensors(empty, tensors)
        _check_vocabulary(empty, tensors)
        if dead := findings(tensors.items()):
            raise ValueError(f"{'; '.join(dead)}. No guess of such a draft is accepted: copy it again or train it anew")
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e
    return DraftFiles(config, tensors)


def load_draft(name: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Draft:
    """A draft by its directory or hub id. Raises ValueError for everything that `open_draft` does."""
    return open_draft(name).build(device, dtype)


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Foreign names to ours; what engines accept and no draft needs is left out."""
    out: dict[str, Tensor] = {}
    for given, tensor in tensors.items():
        name = given.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
        name = SGLANG_NORMS.get(name, name)
        twin = name.startswith("layers.") and name.endswith("hidden_norm.weight")
        if name == "t2d" or name.endswith("rotary_emb.inv_freq") or twin:
            continue
        if name in out:
            raise ValueError(f"{shortened(given)} is there twice, under two names")
        tensor = tensor.reshape(1, 1, -1) if name == "mask_hidden" else tensor  # vLLM takes it without an axis too
        out[name] = tensor.to(torch.int64) if tensor.dtype == torch.int32 else tensor  # d2t of some writers
    return out


def _as_in_file(config: DraftConfig, tensors: dict[str, Tensor], ours: bool) -> DraftConfig:
    """The config where it leaves to the file what the draft has. Other trainers keep the target's number of layers and
    kind of attention in it (AutoModel)."""
    if "embed_tokens.weight" in tensors:  # as vLLM decides it: an embedding that is shipped is used
        config = replace(config, own_embeddings=True)
    if config.family.fuses_embedding:
        if not config.fc_bias and "fc.bias" in tensors and not tensors["fc.bias"].any():
            del tensors["fc.bias"]  # there for SGLang alone
        config = replace(config, fc_bias="fc.bias" in tensors)
    if not ours:
        further = {found[1] for name in tensors if (found := re.match(r"layers\.(\d+)\.", name))}
        normed = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
        config = replace(config, num_hidden_layers=1 + len(further), qk_norm=config.qk_norm and normed)
    return config


def _without_memory(config: DraftConfig) -> Draft:
    """A draft of which there are only names and shapes. Raises ValueError where the config makes none."""
    if config.num_hidden_layers > MOST_LAYERS:
        raise ValueError(f"it has {config.num_hidden_layers:,} layers; fledge reads at most {MOST_LAYERS}")
    with torch.device("meta"):
        return Draft(config)


def _check_tensors(draft: Draft, tensors: dict[str, Tensor]) -> None:
    """Raises ValueError unless the tensors are the draft's, in name, shape and type."""
    config, wanted = draft.config, draft.state_dict()
    if "d2t" in wanted and "d2t" not in tensors:
        raise ValueError(
            f"it has no d2t: this draft predicts {config.draft_vocab_size} of {config.vocab_size} tokens and nothing "
            "says which. Without its map every token it drafts would be wrong; get the file as its trainer wrote it"
        )
    problems = [f"{n} is missing" for n in wanted if n not in tensors]
    problems += [f"{shortened(n)} is not part of such a draft" for n in tensors if n not in wanted]
    for name in (n for n in wanted if n in tensors):
        theirs, there = wanted[name], tensors[name]
        if there.shape != theirs.shape:
            problems.append(f"{name} is {list(there.shape)} where the config says {list(theirs.shape)}")
        elif there.dtype not in (FLOATS if theirs.is_floating_point() else (torch.int64,)):
            problems.append(f"{name} is of {str(there.dtype).removeprefix('torch.')}, which fledge does not read")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"it does not fit its {CONFIG}: {'; '.join(problems[:3])}{more}")


def _check_vocabulary(draft: Draft, tensors: dict[str, Tensor]) -> None:
    """Raises ValueError for a map that names no tokens of the target, or not those that its config was written with."""
    ids = torch.arange(draft.config.draft_vocab_size)
    if "d2t" in tensors:
        ids = ids + tensors["d2t"]
    draft.set_vocabulary(ids)
    recorded = draft.config.provenance.vocabulary_sha256
    if recorded and recorded != vocabulary_sha256(ids):
        raise ValueError(f"the vocabulary map in it is not the one its {CONFIG} was written with")
