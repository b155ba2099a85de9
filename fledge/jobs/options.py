"""Options as dataclasses: `opt` gives a field its help text, which the command line shows."""

from __future__ import annotations

import json
from dataclasses import MISSING, field
from pathlib import Path
from typing import Any


def opt(help: str, default: Any = MISSING, *, many: bool = False, flag: str | None = None) -> Any:
    """A field that is a command-line flag: required without a default, repeatable with `many`."""
    metadata = {"help": help, "flag": flag}
    if many:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


def template_kwargs(text: str | None) -> dict[str, Any] | None:
    """--template-kwargs as a dict. Raises ValueError where it is not a JSON object."""
    if text is None:
        return None
    try:
        kwargs = json.loads(text)
    except ValueError as e:
        raise ValueError(f"--template-kwargs is not JSON ({e}); write e.g. '{{\"enable_thinking\": false}}'") from e
    if not isinstance(kwargs, dict):
        raise ValueError("--template-kwargs must be a JSON object such as '{\"enable_thinking\": false}'")
    return kwargs


def dtype_named(name: str | None):
    """A torch dtype by name, or None. Raises ValueError for others than the floating-point ones."""
    if name is None:
        return None
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if name not in known:
        raise ValueError(f"--dtype {name} is none of {', '.join(known)}")
    return known[name]


def write_json(path: str | Path, record: Any) -> None:
    """Writes a record whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(record, indent=2) + "\n")
    new.replace(path)
