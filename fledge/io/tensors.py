"""Reads the tensors of drafts, from every file format of drafts."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fledge.io.fields import first_line, read_json, shortened

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # the index of weights that are split into several files
PICKLED = "pytorch_model.bin"  # the weights file of the EAGLE authors' drafts
MAX_INDEX_BYTES = 2**24


def weights_file(directory: Path) -> Path:
    """The file with a draft's weights: a safetensors file, an index of several safetensors files, or a pickle, in this
    order. The path of the safetensors file if no weights file exists."""
    candidates = (directory / name for name in (WEIGHTS, INDEX, PICKLED))
    return next((file for file in candidates if file.is_file()), directory / WEIGHTS)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a `weights_file`. Code in a pickle is not run. Raises ValueError if the file, or a file that the
    index names, is missing, truncated or of an unknown format."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist; the draft's weights are missing")
    if file.name == INDEX:
        return _read_shards(file)
    try:
        if file.name == PICKLED:
            with warnings.catch_warnings(action="ignore"):  # torch warns about pickles of other programs
                return _named_tensors(torch.load(file, map_location="cpu", weights_only=True))
        with safe_open(file, framework="pt") as f:
            return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (a handle, not a dict)
    except pickle.UnpicklingError as e:
        if "GLOBAL" in str(e):  # torch's message has GLOBAL if the pickle refers to a function or class
            raise ValueError(
                f"{file} holds more than tensors: loading it would run Python code, which fledge does not do. Get the "
                f"draft as {WEIGHTS}"
            ) from e
        raise ValueError(
            f"{file} is no file of tensors alone: it holds something that fledge does not load, since that could run "
            f"Python code, or it is damaged. Get the draft as {WEIGHTS}"
        ) from e
    except Exception as e:  # a damaged file can raise anything, from its archive, pickle or header
        raise _unreadable(file, e) from e


def stray_weights(directory: Path, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of stray weight files: files beside the draft's weights that engines read too, or read instead.

    `tensors` are the tensors of the draft's own files (`read_tensors`). vLLM and SGLang read all safetensors files, or
    all files that an index lists; SafeAILab's code reads `pytorch_model.bin` before safetensors. A file with the same
    tensors is no stray: conversions leave two copies.
    """
    file = weights_file(directory)
    own = {file.name, *(_read_index(file).values() if file.name == INDEX else ())}
    others = sorted(path for path in directory.iterdir() if path.name not in own and path.is_file())
    return tuple(path.name for path in others if _is_weights(path) and not _is_copy(path, tensors))


def stray_readers(stray: str) -> tuple[str, ...]:
    """The engines that read a file of `stray_weights`, as keys of `engines.support.TITLES`."""
    return ("safeailab",) if stray.endswith(".bin") else ("vllm", "sglang", "speculators")


def stray_symptom(stray: str) -> str:
    """The effect of a file of `stray_weights` in the engines that read the file."""
    if "safeailab" in stray_readers(stray):
        return "SafeAILab's code reads it in place of the draft's weights"
    return "vLLM and SGLang read it too: its tensors replace those of the draft, or vLLM refuses them"


def _is_weights(file: Path) -> bool:
    pickled = file.name.startswith("pytorch_model") and file.suffix == ".bin"
    return file.name == INDEX or file.suffix == ".safetensors" or pickled


def _is_copy(file: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a file has only tensors of the draft; a pickle, which SafeAILab's code reads alone, must have all."""
    try:
        if file.name == INDEX:
            return set(_read_index(file).values()) == {WEIGHTS}
        found = read_tensors(file)
    except ValueError:
        return False
    if file.suffix == ".bin" and found.keys() != tensors.keys():
        return False

    def is_same(a: Tensor, b: Tensor) -> bool:  # bit for bit, in any dtype
        kinds = (a.dtype, a.shape) == (b.dtype, b.shape)
        return kinds and torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))

    return all(name in tensors and is_same(x, tensors[name]) for name, x in found.items())


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read ({first_line(error)}); it is truncated or damaged, copy it again")


def _named_tensors(content: Any) -> dict[str, Tensor]:
    """Returns a pickle's content. Raises ValueError unless the content is a dict of complete, dense tensors."""
    if not isinstance(content, dict):
        raise ValueError(f"it holds a value of type {type(content).__name__}, not a dict of tensors")
    for name, x in content.items():
        if not isinstance(name, str) or not isinstance(x, Tensor) or x.layout != torch.strided:
            raise ValueError(f"{shortened(str(name))} is not a dense tensor")
        if x.numel() * x.element_size() > x.untyped_storage().nbytes():
            raise ValueError(f"{shortened(name)} has shape {list(x.shape)}, but the file has only a part of its values")
    return content


def _read_shards(index: Path) -> dict[str, Tensor]:
    """The tensors of all files that an index lists."""
    file_of = _read_index(index)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(file_of.values())):
        found = read_tensors(index.with_name(shard))
        listed = {name for name, file in file_of.items() if file == shard}
        if odd := sorted(listed ^ found.keys()):
            where = "not in that file" if odd[0] in listed else "in that file and not in the index"
            raise ValueError(f"{index} does not match {shard}: {shortened(odd[0])} is {where}; copy the draft again")
        tensors |= found
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    """The file name of each tensor. Raises ValueError if an entry is not a plain .safetensors file name, for example a
    path."""
    try:
        content = read_json(index, MAX_INDEX_BYTES)
        file_of = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(file_of, dict) or not file_of:
            raise ValueError("it has no weight_map")
        if odd := next((p for p in file_of.values() if not _is_shard(p)), None):
            raise ValueError(f"{shortened(repr(odd))} is not the name of a safetensors file")
    except ValueError as e:
        raise _unreadable(index, e) from e
    return file_of


def _is_shard(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
