"""JSON records of measurements, as `fledge eval --out` and the benchmarks write them."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from fledge.io.fields import read_json
from fledge.io.files import check_output_path, replace_text

MAX_RECORD_BYTES = 2**26  # a larger file counts as no record, without being parsed
_SCALAR = r'(?:"(?:[^"\\]|\\.)*"|[^\s"\[\]{},]+)'
# a list without lists and objects, as indented by json.dumps; line ends within texts are escaped
_FLAT_LIST = re.compile(rf"\[\n\s+({_SCALAR}(?:,\n\s+{_SCALAR})*)\n\s+\]")
_BREAK = r",\n\s+"
ENVIRONMENT_KEYS = frozenset({"device", "dtype", "python", "torch", "transformers", "commit"})


def check_record_path(path: str | Path, flag: str) -> Path:
    """Checks, before a job starts, that a record can be written at `path`, and returns the path.

    Only an empty file or an earlier record may be replaced. Raises ValueError, naming the option `flag`, if the path
    cannot be written or has a file that may not be replaced.
    """
    path = check_output_path(path, flag)
    earlier = not path.exists() or not path.stat().st_size
    with contextlib.suppress(ValueError):  # no JSON
        earlier = earlier or is_record(read_json(path, MAX_RECORD_BYTES))
    if not earlier:
        raise ValueError(
            f"{flag} {path} already exists and is not a record that fledge wrote, so it is not replaced; choose "
            "another name"
        )
    return path


def is_record(value: Any) -> bool:
    """Whether a JSON value is a record: an object with an `environment` as `fledge.io.machine` makes it, or an
    object whose values are all records."""
    if not isinstance(value, dict) or not value:
        return False
    environment = value.get("environment")
    if isinstance(environment, dict):
        return environment.keys() >= ENVIRONMENT_KEYS
    return all(is_record(v) for v in value.values())


def write_record(path: str | Path, record: Any) -> None:
    """Writes a record atomically. Replaces an earlier record; raises ValueError instead of replacing any other file."""
    path = check_record_path(path, "the record")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, record_text(record) + "\n")


def record_text(record: Any) -> str:
    """A record as indented JSON. A list of numbers or texts takes one line, since every request has several lists."""
    return _FLAT_LIST.sub(lambda m: f"[{re.sub(_BREAK, ', ', m[1])}]", json.dumps(record, indent=2))
