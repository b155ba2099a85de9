"""Reading JSON that others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 2**26  # of a JSON file; configs, indices and records have far fewer


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, or nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def read_json(file: Path, most: int | None = None) -> Any:
    """The value in a JSON file. Raises ValueError as `parse_json`, and for more than `most` bytes (default:
    MOST_BYTES)."""
    most = MOST_BYTES if most is None else most
    with file.open("rb") as f:  # its size is not asked for, since that of a device is 0
        content = f.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return parse_json(content.decode())
