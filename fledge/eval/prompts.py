"""Evaluation prompts, from the same files and hub data sets as training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.data.read import read_records
from fledge.data.record import Record


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


def read_prompts(source: str | Path, limit: int | None = None) -> list[EvalPrompt]:
    """At most `limit` prompts, spread evenly over a source. Raises ValueError as `read_records`."""
    return spread([prompt_of(record) for record in read_records([str(source)])], limit)


def spread(items: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` of the items, evenly spaced and in order."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def prompt_of(record: Record) -> EvalPrompt:
    """Where a decoder goes on: behind what the record gives as a prompt. Where it gives none, before the middle
    assistant turn, or behind the messages if nobody answered them, or in the middle of the text. User turns are all
    answered, one after another."""
    if record.turns:
        return EvalPrompt(turns=record.turns, where=record.where)
    if record.text is not None:
        cut = record.prompt_length or max(len(record.text) // 2, 1)
        return EvalPrompt(text=record.text[:cut], where=record.where)
    messages = record.messages or []
    answers = [i for i, m in enumerate(messages) if i > 0 and m["role"] == "assistant"]
    cut = record.prompt_length or (answers[len(answers) // 2] if answers else len(messages))
    return EvalPrompt(messages=tuple(messages[:cut]), where=record.where)
