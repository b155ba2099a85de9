"""Methods that a test registers, for as long as it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from fledge.drafts.registry import NETWORKS
from fledge.methods import CHOICES, METHODS
from support.pages import BLOCKS


@contextmanager
def registered() -> Iterator[None]:
    """Context manager: methods that are registered are forgotten at its end."""
    tables = (METHODS, CHOICES, NETWORKS)
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, rows in zip(tables, before, strict=True):
            table.clear()
            table.update(rows)
        sys.modules.pop("queries", None)


def documented_method(directory: Path) -> ModuleType:
    """The module of the method in docs/adding-a-method.md, which is written to a directory and registers it."""
    (text,) = (b.text for b in BLOCKS if b.page == "docs/adding-a-method.md" and b.text.startswith("# queries.py"))
    file = directory / "queries.py"
    file.write_text(text)
    spec = spec_from_file_location("queries", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
