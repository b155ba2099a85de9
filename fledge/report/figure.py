"""A figure of the page, and a figure that is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """The numbers under a figure, as text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A figure: its id on the page, the finding, how to read it, the drawing and its numbers. If `svg` is empty, the
    page's template draws it. `missing` is a sentence on what would be needed, if there is nothing to draw."""

    id: str
    title: str
    caption: str = ""
    svg: str = ""
    table: Table | None = None
    missing: str = ""


def shown(value: float | None, digits: int = 2) -> str:
    """A number for a table, or a dash."""
    return "–" if value is None else f"{value:,.{digits}f}"


def spanned(value: float | None, interval: tuple[float, float] | None, digits: int = 2) -> str:
    """A number with its interval, if that is known."""
    between = f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]" if interval and value is not None else ""
    return shown(value, digits) + between
