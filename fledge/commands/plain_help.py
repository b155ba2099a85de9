"""Help as plain text, for files, pipes and narrow terminals, where typer's table would cut off words."""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import typer.core

from fledge.io.display import fit

TABLE_WIDTH = 100  # terminal columns; in a narrower table, names of options are cut off
MAX_WIDTH = 80  # of plain help


class PlainHelp:
    """A command whose help is plain text unless a terminal is wide enough for the table. Lines are broken at spaces
    alone, so that options and addresses stay whole."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        columns = shutil.get_terminal_size().columns
        if sys.stdout.isatty() and columns >= TABLE_WIDTH:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        else:
            formatter.write("\n".join(_lines(self, ctx, min(columns, MAX_WIDTH))))


class Group(PlainHelp, typer.core.TyperGroup):
    """The commands."""


def _lines(command: Any, ctx: Any, width: int) -> Iterator[str]:
    yield command.get_usage(ctx)
    yield ""
    yield from _indented(inspect.cleandoc(command.help or ""), 2, width)
    sections: dict[str, list[tuple[str, str]]] = {}
    for p in command.get_params(ctx):
        if record := p.get_help_record(ctx):
            title = getattr(p, "rich_help_panel", None) or f"{p.param_type_name}s".capitalize()
            sections.setdefault(title, []).append(record)
    if isinstance(command, Group):
        names = command.list_commands(ctx)
        helps = [inspect.cleandoc(command.get_command(ctx, name).help or "").split("\n\n")[0] for name in names]
        sections["Commands"] = list(zip(names, helps, strict=True))
    for title, entries in sections.items():
        if entries:
            yield ""
            yield f"{title}:"
        for name, text in entries:
            yield f"  {name}"
            yield from _indented(text, 6, width)


def _indented(text: str, by: int, width: int) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield textwrap.indent(fit(" ".join(paragraph.split()), width - by), " " * by)
