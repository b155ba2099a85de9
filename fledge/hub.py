"""Names of models: directories here, or ids on the Hugging Face hub, which may end in a revision (owner/name@rev)."""

from __future__ import annotations

import functools
import re
from pathlib import Path

HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
DRAFT_FILES = ("config.json", "*.safetensors", "pytorch_model.bin")


def split_revision(name: str | Path) -> tuple[str, str | None]:
    """A name as transformers takes it, and the revision that stood after its @. What exists here is a path as it is."""
    found = None if Path(name).exists() else HUB_ID.fullmatch(str(name))
    return (found["id"], found["revision"]) if found else (str(name), None)


def draft_directory(name: str | Path) -> Path:
    """The directory of a draft: the path, or where the hub's draft of that name was downloaded to.

    What has the form of a path, or whose parent is a directory here, is never looked for on the hub. Raises ValueError
    where it is neither here nor to be had there.
    """
    path = Path(name)
    beside_others = path.parent != Path() and path.parent.is_dir()
    if path.exists() or beside_others or not HUB_ID.fullmatch(str(name)):
        return path
    return _download(str(name))


@functools.cache
def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    repository, revision = split_revision(name)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(DRAFT_FILES)))
    except Exception as e:  # offline, unknown, private, no such revision: each has an error of its own
        reason = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise ValueError(
            f"the draft {name} is no directory here, and as a hub id it cannot be downloaded: {reason}"
        ) from e
