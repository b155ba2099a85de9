"""Draft checkpoints: the portable layout that vLLM, SGLang and SafeAILab load, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fledge.config import DraftConfig
from fledge.models.draft import Draft
from fledge.models.target import Target

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PICKLED = "pytorch_model.bin"  # where the EAGLE authors' drafts have theirs
SGLANG_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


# -- whole or not at all ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yields a fresh directory to write into, which takes the place of `directory` when the block ends well.

    A reader finds the old content or the new, never a part: a crash between leaves the old one under a name of
    fledge's own, from which `recover` puts it back. A full disk raises OSError with the cause and the cure, and leaves
    the old content.
    """
    directory = Path(directory)
    new, old = _beside(directory, "new"), _beside(directory, "old")
    recover(directory)
    shutil.rmtree(old, ignore_errors=True)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        yield new
        for file in new.iterdir():
            _flush(file)
        _flush(new)
    except BaseException as e:
        shutil.rmtree(new, ignore_errors=True)
        full = disk_full(e)
        if full is None:
            raise
        raise OSError(
            full,
            f"no room to save {directory} ({os.strerror(full)}); what was there is untouched. Free some "
            "space; training then goes on with fledge train --resume",
        ) from e
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    _flush(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def disk_full(error: BaseException | None) -> int | None:
    """The errno of a full disk that an exception is, or hides: torch.save makes a RuntimeError of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def recover(directory: Path) -> None:
    """Undoes a replacement that was stopped between its two renames. Deletes nothing."""
    old = _beside(directory, "old")
    if old.exists() and not Path(directory).exists():
        old.rename(directory)


def _beside(directory: Path, which: str) -> Path:
    """A place that nobody else has a use for."""
    return Path(directory).with_name(f".{Path(directory).name}.fledge-{which}")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        if draft.eagle1:
            name = name.replace("midlayer.", "layers.0.")  # as every engine and the authors name it
        tensors[name] = tensor.contiguous()
        if not draft.eagle1 and name.startswith("layers.") and name.endswith("input_layernorm.weight"):
            tensors[name.replace("input_layernorm", "hidden_norm")] = tensor.clone()
    if draft.d2t is not None:
        t2d = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
        t2d[draft.target_ids().cpu()] = True
        tensors["t2d"] = t2d
    if draft.eagle1 and draft.fc.bias is None:  # SGLang's draft has one, which would be left to chance
        tensors["fc.bias"] = torch.zeros(draft.config.hidden_size, dtype=dtype)
    config = draft.config.with_provenance(vocabulary_sha256=vocabulary_sha256(draft.target_ids()))
    (directory / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    text = json.dumps(config.to_hf(str(dtype).removeprefix("torch.")), indent=2)
    (directory / CONFIG).write_text(text + "\n")


def save_draft(draft: Draft, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a draft's directory whole, replacing what was there. Raises OSError for a full disk."""
    with replacing(Path(directory)) as new:
        write_draft(draft, new, dtype)


def read_draft_config(directory: str | Path) -> DraftConfig:
    """config.json of a draft. Raises ValueError with the cause where there is none or it is not an EAGLE draft."""
    directory = Path(directory)
    recover(directory)
    file = directory / CONFIG
    if not file.is_file():
        run = directory / "draft"
        cure = f"the run's draft is {run}" if run.is_dir() else f"a draft is a directory with {CONFIG} and {WEIGHTS}"
        raise ValueError(f"{directory} holds no {CONFIG}; {cure}")
    try:
        hf = json.loads(file.read_text())
    except ValueError as e:
        raise ValueError(f"{file} is not JSON ({e}); the file is damaged, copy it again") from e
    try:
        return DraftConfig.from_hf(hf)
    except (ValueError, TypeError) as e:  # TypeError: a field of a kind that it cannot have
        raise ValueError(f"{file}: {e}") from e


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or of torch's. Raises ValueError where it is missing, empty or cut short."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist; the draft's weights are missing")
    if file.name == PICKLED:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as e:
            why = next(iter(str(e).splitlines()), type(e).__name__)
            raise ValueError(f"{file} cannot be read ({why}); it is cut short or damaged, copy it again") from e
    try:
        with safe_open(file, framework="pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (a handle, not a dict)
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{file} cannot be read ({e}); it is cut short or damaged, copy it again") from e


def load_draft(
    directory: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Draft:
    """Reads a draft in the portable layout (SafeAILab's `midlayer.` or vLLM's `layers.0.` names alike), or from the
    authors' pytorch_model.bin where there is no safetensors file.

    Raises ValueError naming what is wrong: a missing, foreign or wrongly shaped tensor, no vocabulary map where the
    draft needs one, or a map other than the one its config was written with.
    """
    directory = Path(directory)
    config = read_draft_config(directory)
    file = directory / WEIGHTS
    if not file.is_file() and (directory / PICKLED).is_file():
        file = directory / PICKLED
    tensors = _renamed(read_tensors(file))
    if "embed_tokens.weight" in tensors:  # as vLLM decides it: an embedding that is shipped is used
        config = replace(config, own_embeddings=True)
    if config.method == "eagle1":
        if not config.fc_bias and "fc.bias" in tensors and not tensors["fc.bias"].any():
            del tensors["fc.bias"]  # there for SGLang alone
        config = replace(config, fc_bias="fc.bias" in tensors)
    if config.draft_vocab_size < config.vocab_size and "d2t" not in tensors:
        raise ValueError(
            f"{file} has no d2t: this draft predicts {config.draft_vocab_size} of "
            f"{config.vocab_size} tokens and nothing says which. Without its map every token it drafts would be wrong; "
            "get the file as its trainer wrote it"
        )
    draft = Draft(config)
    wanted = draft.state_dict()
    problems = [f"{n} is missing" for n in wanted if n not in tensors]
    problems += [f"{n} is not part of such a draft" for n in tensors if n not in wanted]
    problems += [
        f"{n} is {list(tensors[n].shape)} where the config says {list(wanted[n].shape)}"
        for n in wanted
        if n in tensors and tensors[n].shape != wanted[n].shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"{file} does not fit its {CONFIG}: {'; '.join(problems[:3])}{more}")
    draft.load_state_dict(tensors)
    ids = draft.target_ids()
    try:
        draft.set_vocabulary(ids)
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from e
    recorded = config.provenance.vocabulary_sha256
    if recorded and recorded != vocabulary_sha256(ids):
        raise ValueError(f"the vocabulary map in {file} is not the one its {CONFIG} was written with")
    return draft.to(device=device, dtype=dtype).eval()


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Foreign names to ours; what engines accept and no draft needs is left out."""
    out = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
        name = SGLANG_NORMS.get(name, name)
        twin = name.startswith("layers.") and name.endswith("hidden_norm.weight")
        if name == "t2d" or name.endswith("rotary_emb.inv_freq") or twin:
            continue
        tensor = tensor.view(1, 1, -1) if name == "mask_hidden" else tensor  # vLLM takes it without an axis too
        out[name] = tensor.to(torch.int64) if name == "d2t" else tensor
    return out


def fit(draft: Draft, target: Target) -> None:
    """Checks that a draft belongs to a target and joins them: its layers are captured, its embedding shared.

    Raises ValueError naming the first thing that does not fit.
    """
    config = draft.config
    problem = mismatch(config, target)
    if problem:
        raise ValueError(f"this draft does not fit {target.name or 'the target'}: {problem}")
    target.read_layers(() if draft.eagle1 else config.aux_layers)
    draft.share(target.embedding, target.head.weight)


def mismatch(config: DraftConfig, target: Target) -> str | None:
    """Why a draft cannot serve a target, in words, or None."""
    known = config.provenance
    vocabulary, width = target.embedding.shape
    if config.target_hidden_size != width:
        return f"it reads hidden states {config.target_hidden_size} wide and the target's are {width}"
    if config.vocab_size != vocabulary:
        return f"it was made for a vocabulary of {config.vocab_size} tokens and the target has {vocabulary}"
    if known.target_layers and known.target_layers != target.num_layers:
        return f"it was trained on a target of {known.target_layers} layers and this one has {target.num_layers}"
    other = known.tokenizer_sha256 and target.tokenizer is not None
    if other and known.tokenizer_sha256 != tokenizer_sha256(target.tokenizer):
        return "it was trained with another tokenizer, so its tokens mean other text; use the target it was made for"
    if config.method == "eagle1" and not target.plain_head:
        return "it speaks through the target's head, whose logits are not its weight's product alone; use EAGLE-3"
    if config.rope.rope_type == "longrope" and config.rope.for_length(target.max_length).long != config.rope.long:
        used = "long" if config.rope.long else "short"
        return f"it was trained with longrope's {used} factors; load the target with max_length={known.max_length}"
    return None
