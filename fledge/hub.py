"""Model names: local directories, or Hugging Face hub ids with an optional revision (owner/name@revision)."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
DRAFT_FILES = (
    "config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "fledge/record.json"
)  # fmt: skip


def split_revision(name: str | Path) -> tuple[str, str | None]:
    """Splits `owner/name@revision` into the hub id and the revision, as transformers takes them.

    The revision is None without an @. A name that exists as a local path is returned unchanged.
    """
    match = None if Path(name).exists() else HUB_ID.fullmatch(str(name))
    return (match["id"], match["revision"]) if match else (str(name), None)


def hub_id(name: str | Path) -> str | None:
    """The hub id in a model name, without its revision; None for a local path, and for anything else."""
    match = None if Path(name).exists() else HUB_ID.fullmatch(str(name))
    return match["id"] if match else None


def cached_commit(name: str | Path) -> str | None:
    """The commit of a hub model's config.json in the local cache, from which it is loaded; None if it is not there."""
    if hub_id(name) is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    repository, revision = split_revision(name)
    file = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(file).parent.name if isinstance(file, str) else None


def draft_directory(name: str | Path) -> Path:
    """The local directory of a draft: the path itself, or the directory that a hub id was downloaded to.

    A name is returned as a path, without asking the hub, if it exists, if it is not a valid hub id, or if its parent
    is an existing directory (a local path with a typo). Raises ValueError if a hub id cannot be downloaded.
    """
    path = Path(name)
    parent_exists = path.parent != Path() and path.parent.is_dir()
    if path.exists() or parent_exists or not HUB_ID.fullmatch(str(name)):
        return path
    return _download(str(name))


@functools.cache
def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repository, revision = split_revision(name)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(DRAFT_FILES)))
    except Exception as e:  # offline, unknown or private id, unknown revision: each raises another type
        reason = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise ValueError(
            f"the draft {name} is not a local directory and cannot be downloaded from the hub: {reason}"
        ) from e


def architectures(name: str | Path) -> tuple[str, ...]:
    """The `architectures` in a model's config.json, by directory or hub id; () if the file cannot be had."""
    try:
        directory = Path(name)
        file = directory / "config.json" if directory.is_dir() else _download_config(str(name))
        found = json.loads(file.read_text()).get("architectures") or []
        return tuple(str(architecture) for architecture in found)
    except Exception:  # offline, private or unknown id, no JSON: each raises another type, and the names are optional
        return ()


def _download_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    repository, revision = split_revision(name)
    with _without_hub_warnings():
        return Path(hf_hub_download(repository, "config.json", revision=revision))


@contextlib.contextmanager
def _without_hub_warnings() -> Iterator[None]:
    """Keeps huggingface_hub from printing two lines for every attempt to reach the hub."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
