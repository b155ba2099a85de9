"""Model names (local directories, or Hugging Face hub ids with an optional revision, owner/name@revision), and the
download of drafts. A counter (`show_progress`) can show the progress of loading a target."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path

from fledge.io.fields import first_line, read_json

HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
DRAFT_FILES = (
    "config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "fledge/record.json"
)  # fmt: skip


# shows the finished items of `total`, as `ProgressDisplay.count` does: called with a label, `total` and `unit`
Counter = Callable[..., AbstractContextManager[Callable[[int], None]]]
_counter: ContextVar[Counter | None] = ContextVar("counter of loaded tensors", default=None)


def show_progress(counter: Counter) -> None:
    """Lets `counter` show loaded tensors, in the current context (`contextvars`) from now on."""
    _counter.set(counter)


def progress_counter() -> Counter | None:
    """The counter of the current context; None without a call of `show_progress`."""
    return _counter.get()


def split_revision(name: str | Path) -> tuple[str, str | None]:
    """Splits `owner/name@revision` into the hub id and the revision, as transformers takes them.

    The revision is None without an @. A name that exists as a local path is returned unchanged.
    """
    match = None if Path(name).exists() else HUB_ID.fullmatch(str(name))
    return (match["id"], match["revision"]) if match else (str(name), None)


def hub_id(name: str | Path) -> str | None:
    """The hub id in a model name, without the revision; None for a local path, and for anything else."""
    match = None if Path(name).exists() else HUB_ID.fullmatch(str(name))
    return match["id"] if match else None


def cached_commit(name: str | Path) -> str | None:
    """The commit of a hub model's config.json in the local cache; None if the cache lacks config.json."""
    from huggingface_hub import try_to_load_from_cache

    if not hub_id(name):
        return None
    repository, revision = split_revision(name)
    path = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(path).parent.name if isinstance(path, str) else None


def draft_directory(name: str | Path) -> Path:
    """The local directory of a draft: the path itself, or the directory that a hub id was downloaded to.

    A name is returned as a path, without asking the hub, if the path exists, the name is not a valid hub id, or the
    path's parent exists (a local path with a typo). Raises ValueError if a hub id cannot be downloaded.
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
        raise ValueError(
            f"the draft {name} is not a local directory and cannot be downloaded from the hub: {first_line(e)}"
        ) from e


def architectures(name: str | Path) -> tuple[str, ...]:
    """The `architectures` in a model's config.json, by directory or hub id; () if config.json cannot be read."""
    from huggingface_hub import hf_hub_download

    try:
        file = Path(name) / "config.json"
        if not Path(name).is_dir():
            repository, revision = split_revision(name)
            file = Path(hf_hub_download(repository, "config.json", revision=revision))
        return tuple(map(str, read_json(file).get("architectures") or []))
    except Exception:  # offline, private or unknown id, no JSON: each raises another type, and the names are optional
        return ()
