"""What a terminal of 60 columns would show of the messages and tables that commands print."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from fledge.io.display import ProgressDisplay
from fledge.io.results import ResultPrinter

WIDTH = 60


class NarrowTerminal:
    """A terminal that also gets everything that `ResultPrinter` and `ProgressDisplay.say` print, in its own form."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._file = io.StringIO()
        self._copying = False
        self._printer, self._display = ResultPrinter(), ProgressDisplay()
        console = Console(
            file=self._file, width=WIDTH, force_terminal=True, color_system=None, highlight=False, markup=False
        )
        self._printer.console = self._display.console = console
        for kind, own, names in (
            (ResultPrinter, self._printer, ("print", "amounts", "table")), (ProgressDisplay, self._display, ("say",)),
        ):  # fmt: skip
            for name in names:
                patch.setattr(kind, name, self._copied(getattr(kind, name), own))

    def _copied(self, original: Callable[..., Any], own: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def both(printer: Any, *given: Any, **named: Any) -> Any:
            if not self._copying:  # the outermost call: `amounts` calls others
                self._copying = True
                try:
                    original(own, *given, **named)
                finally:
                    self._copying = False
            return original(printer, *given, **named)

        return both

    def take(self) -> list[str]:
        """The lines so far, which are then forgotten."""
        lines = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in self._file.getvalue().split("\n")]
        self._file.seek(0)
        self._file.truncate()
        return lines


def misfits(lines: list[str], width: int = WIDTH) -> list[str]:
    """The lines that do not fit, or from which something was cut. One word, such as a path, and a command to be copied
    may be longer."""
    whole = re.compile(r"\s*\S+|(\$ |  )?(fledge|vllm|torchrun|\S*python[\d.]*) .*")
    return [line for line in lines if "…" in line or (cell_len(line) > width and not whole.fullmatch(line))]
