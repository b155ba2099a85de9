"""Model names (local directories, or Hugging Face hub ids with an optional revision, owner/name@revision), and the
download of named files. A counter (`show_progress`) can show the progress of downloads."""

from __future__ import annotations

import contextlib
import functools
import glob
import io
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from fledge.io.fields import first_line, read_json

MEGABYTE = 10**6
HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
DRAFT_FILES = (
    "config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "fledge/record.json"
)  # fmt: skip


class Counter(Protocol):
    """A callable like `ProgressDisplay.count`: shows the finished items of `total`. `unit` names the items."""

    def __call__(self, label: str, total: int, *, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """A context manager that yields a function, to be called with the number of newly finished items."""


_counter: ContextVar[Counter | None] = ContextVar("counter of downloads and loaded tensors", default=None)


def show_progress(counter: Counter) -> None:
    """Lets `counter` show downloads and loaded tensors, in the current context (`contextvars`) from now on."""
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
    path = _cached(*split_revision(name), "config.json") if hub_id(name) else None
    return path and path.parent.name


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
    try:
        return _snapshot(*split_revision(name), DRAFT_FILES)
    except Exception as e:  # offline, unknown or private id, unknown revision: each raises another type
        raise ValueError(
            f"the draft {name} is not a local directory and cannot be downloaded from the hub: {first_line(e)}"
        ) from e


def download_weights(repository: str, revision: str | None) -> None:
    """`download_files` of all safetensors files of a model. Weights of other formats are left to the reader."""
    from fledge.io.tensors import INDEX, WEIGHTS

    if not _shows_downloads(repository) or _cached(repository, revision, WEIGHTS):
        return
    with contextlib.suppress(Exception), quiet_hub():
        path = _cached(repository, revision, INDEX) or _download_if_there(repository, revision, INDEX)
        of_tensors = {} if path is None else read_json(path)["weight_map"]
        download_files(repository, revision, set(of_tensors.values()) or {WEIGHTS})


def download_files(repository: str, revision: str | None, files: Collection[str]) -> None:
    """Downloads a model's missing files to the hub library's cache, with progress. Does nothing for a local directory,
    or without `show_progress`: the later reader, such as transformers, then downloads the files, without progress.
    Files that cannot be downloaded are left to the later reader, which reports the error."""
    from huggingface_hub import HfApi

    if not _shows_downloads(repository):
        return
    if missing := [file for file in files if not _cached(repository, revision, file)]:
        with contextlib.suppress(Exception), quiet_hub():
            size = sum(info.size for info in HfApi().get_paths_info(repository, missing, revision=revision))
            _snapshot(repository, revision, map(glob.escape, missing), size)


def _shows_downloads(repository: str) -> bool:
    return progress_counter() is not None and not Path(repository).is_dir()


def _cached(repository: str, revision: str | None, file: str) -> Path | None:
    """The path of a file in the hub library's cache, without asking the hub; None if the cache lacks the file."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repository, file, revision=revision)
    return Path(path) if isinstance(path, str) else None


def _download_if_there(repository: str, revision: str | None, file: str) -> Path | None:
    """The path of a file of a model after its download; None if the model has no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except EntryNotFoundError:
        return None


def _snapshot(repository: str, revision: str | None, patterns: Iterable[str], size: int | None = None) -> Path:
    """Downloads a hub model's files that match `patterns`. Returns the directory. `size`: sum of bytes, if known."""
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = dict(revision=revision, allow_patterns=list(patterns))
    with contextlib.ExitStack() as stack:
        if (counter := progress_counter()) is not None:
            options["tqdm_class"] = _counting_bar(repository, counter, stack, size)
        return Path(snapshot_download(repository, **options))


def _counting_bar(repository: str, counter: Counter, stack: contextlib.ExitStack, size: int | None) -> type:
    """A tqdm class for the hub library whose bars are not drawn: a single bar of `counter` shows the megabytes of all
    bars. The shown bar begins with the first megabyte, and `stack` ends the shown bar. If `size` is None, the total is
    the size of the files whose download has begun at the first megabyte."""
    from tqdm import tqdm

    lock, advance, shown = threading.Lock(), None, 0

    class CountingBar(tqdm):
        monitor_interval = 0  # no thread that redraws

        def __init__(self, *args: Any, name: str | None = None, **options: Any):
            """Ignores `name`, the name of a group of bars, which some versions of the hub library pass."""
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> bool:
            return True

        def update(self, n: float | None = 1) -> bool | None:
            """Called by the downloading threads. Of received and written bytes, the larger count is shown."""
            nonlocal advance, shown
            with lock:
                updated = super().update(n)
                done = int(self.n // MEGABYTE)
                if self.unit == "B" and done > shown:
                    if advance is None:
                        total = max(size or 0, self.total or 0, self.n)
                        bar = counter(f"MB of {repository} from the hub", round(total / MEGABYTE), unit="MB")
                        advance = stack.enter_context(bar)
                    advance(done - shown)
                    shown = done
            return updated

    return CountingBar


def architectures(name: str | Path) -> tuple[str, ...]:
    """The `architectures` in a model's config.json, by directory or hub id; () if config.json cannot be read."""
    try:
        file = Path(name) / "config.json"
        if not Path(name).is_dir():
            with quiet_hub():
                file = _download_if_there(*split_revision(name), "config.json")
        return tuple(map(str, read_json(file).get("architectures") or []))
    except Exception:  # offline, private or unknown id, no JSON: each raises another type, and the names are optional
        return ()


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Context manager without the hub library's two lines about each attempt to reach the hub; an error says enough."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
