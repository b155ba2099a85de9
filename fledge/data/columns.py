"""Column mappings: rows whose columns have other names than those of fledge's layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = (
    "messages", "conversations", "turns", "prompt", "completion", "instruction", "input", "output", "history", "text",
    "system", "tools", "chat_template_kwargs",
)  # fmt: skip
BESIDE = ("system", "tools", "chat_template_kwargs")  # the columns that are read by these names beside mapped ones
MOST_SHOWN = 20  # columns that a message lists
EXAMPLE = "messages=dialog, or prompt=question,completion=answer"


def parse_columns(text: str | None) -> dict[str, str] | None:
    """--columns as a mapping of names in fledge's layouts to names of columns; None for None.

    Raises ValueError if it is not a list of such pairs.
    """
    if text is None:
        return None
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(key.strip() and column.strip() for key, _, column in pairs):
        raise ValueError(f"--columns {text} is not a list of NAME=COLUMN, such as {EXAMPLE}")
    names = [key.strip() for key, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"--columns {text} has {twice} twice")
    return check_columns({key.strip(): column.strip() for key, _, column in pairs}, "--columns")


def check_columns(columns: dict[str, str], what: str) -> dict[str, str]:
    """Returns a mapping if all its keys are names of fledge's layouts. Raises ValueError, calling it `what`."""
    if unknown := next((name for name in columns if name not in KEYS), None):
        swapped = f"; write {columns[unknown]}={unknown}" if columns[unknown] in KEYS else ""
        raise ValueError(f"{what}: {unknown} is not a name that fledge reads ({', '.join(KEYS)}){swapped}")
    return columns


def map_columns(row: Any, columns: Mapping[str, str], where: str) -> Any:
    """A row under the names of fledge's layouts: the mapped columns, and BESIDE.

    Raises ValueError, listing the columns that the row has, if it lacks one that is mapped.
    """
    if not isinstance(row, dict):
        return row
    if missing := next((column for column in columns.values() if column not in row), None):
        found = ", ".join(list(row)[:MOST_SHOWN])
        raise ValueError(f"{where} has no column {missing}, which `columns` names; its columns are {found}")
    beside = {name: row[name] for name in BESIDE if name in row and name not in columns}
    return beside | {name: row[column] for name, column in columns.items()}


def suggestion(row: Mapping[str, Any]) -> str:
    """The mapping to try for a row that has none of fledge's layouts: one that fits the types of its columns."""
    lists = [k for k, v in row.items() if isinstance(v, list) and v and all(isinstance(x, dict) for x in v)]
    texts = [k for k, v in row.items() if isinstance(v, str)]
    asked = next((k for k in texts if k.lower() in ("question", "query", "problem", "user", "input", "context")), None)
    told = next((k for k in texts if k.lower() in ("answer", "response", "solution", "assistant", "output")), None)
    if lists:
        return f"messages={lists[0]}"
    if asked and told:
        return f"instruction={asked},output={told}"
    return "messages=COLUMN, or instruction=COLUMN,output=COLUMN"
