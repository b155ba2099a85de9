"""Evaluation prompts from files: `turns`, `messages`, `conversations`, `prompt` or `text`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.data.read import Record, read_records


@dataclass(frozen=True)
class EvalPrompt:
    """Either a raw `text`, or user `turns` to be answered one after another behind fixed `messages`; and `where` it
    stands."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    turns: tuple[str, ...] = ()
    where: str = "a prompt"

    @property
    def answers(self) -> int:
        """How many answers it asks for."""
        return max(len(self.turns), 1)


def read_prompts(path: str | Path, limit: int | None = None) -> list[EvalPrompt]:
    """At most `limit` prompts, spread evenly over the file. Raises ValueError for a file without any.

    `turns` is a list of user messages; `messages` are cut before the middle assistant turn; a `text` is cut in half.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; prompts are read from JSON lines")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text ({e}); convert it first") from e
    numbered = [(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path} is empty")
    first = _parse(*numbered[0])
    if isinstance(first, dict) and ("turns" in first or "prompt" in first):
        prompts = [_from_row(_parse(line, where), where) for line, where in numbered]
    else:
        prompts = [prompt_of(record) for record in read_records([str(path)])]
    return spread(prompts, limit)


def spread(items: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` of the items, evenly spaced and in order."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def prompt_of(record: Record) -> EvalPrompt:
    """A record cut where a decoder could go on: before its middle assistant turn, or in the middle of its text."""
    if record.text is not None:
        return EvalPrompt(text=record.text[: max(len(record.text) // 2, 1)], where=record.where)
    messages = record.messages or []
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not answers:
        raise ValueError(f"{record.where} has no assistant turn to be decoded")
    return EvalPrompt(messages=tuple(messages[: answers[len(answers) // 2]]), where=record.where)


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as e:
        raise ValueError(f"{where} is not JSON: {e}") from e


def _from_row(row: Any, where: str) -> EvalPrompt:
    row = row if isinstance(row, dict) else {}
    if isinstance(row.get("prompt"), str):
        return EvalPrompt(text=row["prompt"], where=where)
    turns = row.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(t, str) for t in turns):
        return EvalPrompt(turns=tuple(turns), where=where)
    raise ValueError(f"{where} has neither `turns`, a list of user messages, nor a `prompt`")
