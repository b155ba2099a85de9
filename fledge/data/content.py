"""Hashes of what data files contain. A file's hash is remembered, so that an unchanged file is read only once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from fledge.files import replace_text, sha256_of
from fledge.json_text import read_json

SETTLED_NS = (
    2_000_000_000  # a file that changed so recently may change again within one tick of its file system's clock
)

Stamp = tuple[int, int, int]


def stamp(file: Path) -> Stamp:
    """Size and times (in nanoseconds) of the last change of a file's content and metadata."""
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def content_sha256(file: Path, memory: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal.

    It is remembered in the directory `memory`, and used again as long as the file's `stamp` is the same. If the
    directory cannot be written, it is computed each time.
    """
    path = os.path.realpath(file)
    note = memory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    now = stamp(file)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        known = read_json(note)
        if (known["path"], tuple(known["stamp"])) == (path, now):
            return known["sha256"]
    sha256 = sha256_of(file)
    if stamp(file) == now and time.time_ns() - max(now[1:]) > SETTLED_NS:
        with contextlib.suppress(OSError):
            memory.mkdir(parents=True, exist_ok=True)
            replace_text(note, json.dumps({"path": path, "stamp": now, "sha256": sha256}) + "\n")
    return sha256
