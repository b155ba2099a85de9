"""A conversation: what was asked and answered, how much of it the model sees, and how it is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fledge.files import check_output_path
from fledge.json_text import parse_json

Prompt = str | list[dict[str, Any]]  # a text to continue, or the messages of a chat


@dataclass(frozen=True)
class Exchange:
    """A text of the user, the model's answer to it as a message, and the tokens of the prompt and the answer
    together."""

    asked: str
    answer: dict[str, Any]
    tokens: int = 0


@dataclass
class Conversation:
    """The exchanges so far. With `raw`, for models without a chat template, each text is continued on its own.

    `dropped`: how many of the first exchanges the model does not see any more, because its context is full.
    """

    raw: bool = False
    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    dropped: int = 0

    def prompt(self, asked: str) -> Prompt:
        """What the model is given to answer a text."""
        return asked if self.raw else [*self._messages(self.dropped), {"role": "user", "content": asked}]

    def fit(self, asked: str, tokens_of: Callable[[Prompt], list[int]], limit: int) -> list[int]:
        """The token ids of the prompt for a text, of which there are at most `limit`.

        Drops as many of the first exchanges as needed, and counts them in `dropped`. Raises ValueError, and drops
        nothing, if the text is too long without them.
        """
        before = self.dropped
        while len(ids := tokens_of(self.prompt(asked))) > limit:
            if self.raw or self.dropped == len(self.exchanges):
                self.dropped = before
                raise ValueError(
                    f"this text has {len(ids):,} tokens as a prompt, but the target's context has room for {limit:,} "
                    "before an answer; it was not sent. Shorten it"
                )
            self.dropped += 1
        return ids

    def undo(self) -> Exchange:
        """Removes the last exchange and returns it. Raises ValueError if there is none."""
        if not self.exchanges:
            raise ValueError("nothing was asked yet")
        exchange = self.exchanges.pop()
        self.dropped = 0  # there is more room now
        return exchange

    def reset(self) -> None:
        """Removes all exchanges; the system prompt stays."""
        self.exchanges, self.dropped = [], 0

    def rows(self) -> list[dict[str, Any]]:
        """The conversation as rows of training data: one with all its messages, or one for each continued text."""
        if self.raw:
            return [{"prompt": e.asked, "completion": e.answer["content"]} for e in self.exchanges]
        return [{"messages": self._messages(0)}] if self.exchanges else []

    def _messages(self, first: int) -> list[dict[str, Any]]:
        """The messages from an exchange on, after the system prompt."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges[first:]:
            messages += [{"role": "user", "content": exchange.asked}, exchange.answer]
        return messages


def save(conversation: Conversation, path: str | Path) -> int:
    """Adds a conversation to a JSON lines file, and returns the number of the file's rows. Raises ValueError if nothing
    was said, or if the file holds something else or cannot be written."""
    rows = conversation.rows()
    if not rows:
        raise ValueError("there is nothing to save: nothing was asked yet")
    path = check_output_path(Path(path).expanduser(), "the file")
    path.parent.mkdir(parents=True, exist_ok=True)
    existing = path.read_bytes() if path.exists() else b""
    before = [line for line in existing.splitlines() if line.strip()]
    if not all(map(_is_object, before)):
        raise ValueError(f"{path} is not a JSON lines file; save the conversation to another file")
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    apart = "\n" if existing and not existing.endswith(b"\n") else ""
    with open(path, "a", encoding="utf-8") as file:
        file.write(apart + "".join(lines))
    return len(before) + len(rows)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
