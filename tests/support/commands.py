"""How a command ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ran:
    """How a command ended: exit code, standard output and standard error."""

    code: int
    out: str
    err: str
