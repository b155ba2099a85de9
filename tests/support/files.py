"""Reading, changing and listing files."""

from __future__ import annotations

import json
from pathlib import Path


def listing(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def reconfigure(directory: Path, **changes) -> None:
    """Changes config.json; None removes a key."""
    file = directory / "config.json"
    hf = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in hf.items() if v is not None}))
