"""Functions that read, write, change and list files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def listing(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def write_rows(file: Path, rows: Iterable[Any]) -> Path:
    """Writes a file of JSON lines, one per row."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def rows_of(file: Path) -> list[Any]:
    """Reads the rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a training run, one row per step."""
    return rows_of(run / "metrics.jsonl")


def change_json(file: Path, **changes: Any) -> None:
    """Sets keys of the object in a JSON file; None removes a key."""
    changed = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in changed.items() if v is not None}))


def reconfigure(directory: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes a key."""
    change_json(directory / "config.json", **changes)
