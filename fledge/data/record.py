"""What a row of data says: a conversation, a text, or user turns to be answered. Everything read is checked here."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
LAYOUTS = "`messages`, `conversations`, `turns`, `prompt`, `instruction` or `text`"
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "thinking")  # what templates print of a message


@dataclass(frozen=True)
class Record:
    """One conversation (`messages`, with `tools` where the data has them), one plain `text`, or user `turns` that
    nobody has answered yet. Its first `given` messages, or characters of the text, are a prompt: read, not learned.
    `where` is its place in the data, for error messages."""

    where: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tools: list[Any] | None = None
    turns: tuple[str, ...] = ()
    given: int = 0

    def said(self) -> str:
        """What it says, wherever it stands."""
        return json.dumps([self.messages, self.text, self.tools, self.turns], sort_keys=True)


def record_of(row: Any, where: str) -> Record:
    """The record that a row holds. Of several layouts the first counts that is filled in: `messages`,
    `conversations`, `turns`, `prompt` with `completion`, `instruction` with `output`, `text`, and last `instruction`
    or `prompt` alone. Raises ValueError, naming the place, for rows of no layout and for what is not text."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object with {LAYOUTS}")
    prompt, completion = row.get("prompt"), row.get("completion")
    instructed = isinstance(row.get("instruction"), str)
    if listed := row.get("messages") or row.get("conversations"):
        return _chat(row, _listed(row, listed, where), where)
    if isinstance(row.get("turns"), list) and row["turns"]:
        return Record(where, turns=_turns(row["turns"], where))
    if prompt is not None and completion is not None:
        return _continued(row, prompt, completion, where)
    if instructed and row.get("output") is not None:
        return _chat(row, [*_instruction(row, where), {"role": "assistant", "content": row["output"]}], where)
    if isinstance(row.get("text"), str):
        return Record(where, text=check_text(row["text"], where))
    if instructed:
        return _chat(row, _instruction(row, where), where)
    if prompt and isinstance(prompt, str | list):
        return _continued(row, prompt, type(prompt)(), where)
    found = ", ".join(f"{k} ({type(row[k]).__name__})" for k in sorted(row)[:12])
    raise ValueError(f"{where} has none of {LAYOUTS} filled in, only {found or 'nothing'}")


def check_messages(messages: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Messages as chat templates take them: every content a string. Lists of text parts are joined by line ends, as
    vLLM joins them. Raises ValueError, naming the place, for every other content (images, numbers, objects), for null
    but where an assistant calls tools, and for values that are not JSON."""
    told = [_message(m, where, i) for i, m in enumerate(messages, 1)]
    try:  # quick, for messages that are strings throughout, as nearly all are
        "".join([text for m in told for field in m.items() for text in field]).encode()
    except (TypeError, UnicodeEncodeError):
        for i, m in enumerate(told, 1):
            _check_json(m, f"{where}, message {i}")
    return told


def check_text(text: str, where: str) -> str:
    """The text. Raises ValueError, naming the place, where it holds half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{where}: {_half(e)}") from e
    return text


# -- layouts ------------------------------------------------------------------------------------------------------


def _chat(row: dict[str, Any], messages: list[Any], where: str, given: int = 0) -> Record:
    """A conversation with the row's `system` message and `tools`."""
    told, tools = check_messages(messages, where), row.get("tools")
    if row.get("system") and told[0]["role"] != "system":
        told = [*check_messages([{"role": "system", "content": row["system"]}], f"{where}, `system`"), *told]
        given += bool(given)
    if tools:
        _check_json(tools, f"{where}, `tools`")
    return Record(where, messages=told, tools=tools, given=given)


def _listed(row: dict[str, Any], listed: Any, where: str) -> list[Any]:
    if not isinstance(listed, list):
        raise ValueError(f"{where}: its messages are a {type(listed).__name__}, not a list: {_short(listed)}")
    if row.get("messages") or all(isinstance(t, dict) and "role" in t for t in listed):
        return listed
    return [_sharegpt(t, where) for t in listed]


def _sharegpt(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise ValueError(f"{where}: a ShareGPT turn needs `from` and `value`, got {_short(turn)}")
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(f"{where}: unknown speaker {_short(speaker)}; known are {', '.join(SHAREGPT_ROLES)}")
    return {"role": SHAREGPT_ROLES[speaker], "content": turn["value"]}


def _turns(turns: list[Any], where: str) -> tuple[str, ...]:
    if not all(isinstance(t, str) for t in turns):
        raise ValueError(f"{where}: its `turns` are no list of user messages: {_short(turns)}")
    return tuple(check_text(t, where) for t in turns)


def _continued(row: dict[str, Any], prompt: Any, completion: Any, where: str) -> Record:
    """TRL's prompt and completion: two texts, or two lists of messages."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return Record(where, text=check_text(prompt + completion, where), given=len(prompt))
    if isinstance(prompt, list) and isinstance(completion, list) and prompt:
        return _chat(row, prompt + completion, where, given=len(prompt))
    raise ValueError(
        f"{where}: its prompt is a {type(prompt).__name__} and its completion a {type(completion).__name__}; give two "
        "texts or two lists of messages"
    )


def _instruction(row: dict[str, Any], where: str) -> list[Any]:
    """Alpaca's history, and its instruction and input as one user message, joined as LLaMA-Factory joins them."""
    told: list[Any] = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{where}: its `history` is no list of [instruction, output] pairs: {_short(pair)}")
        told += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    more = row.get("input")
    if not isinstance(more, str | None):
        raise ValueError(f"{where}: its `input` is a {type(more).__name__}, not text: {_short(more)}")
    asked = row["instruction"] + (f"\n{more}" if more else "")
    return [*told, {"role": "user", "content": asked}]


# -- messages -----------------------------------------------------------------------------------------------------


def _message(message: Any, where: str, number: int) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or _silent(message):
        raise ValueError(f"{where}, message {number} needs a `role` and a `content`, got {_short(message)}")
    if {str}.issuperset(map(type, message.values())):  # nearly every message: nothing to change
        return message
    # table formats fill absent fields with null, which some templates take for present ones
    told = {k: v for k, v in message.items() if v is not None or k == "content"}
    for field in TEXT_FIELDS:
        if not isinstance(told.get(field, ""), (str, NoneType)):
            told[field] = _joined(told[field], field, f"{where}, message {number}")
    return told


def _silent(message: dict[str, Any]) -> bool:
    """Whether it has no content, and is no assistant's that calls tools instead."""
    return message.get("content") is None and not (message["role"] == "assistant" and message.get("tool_calls"))


def _joined(content: Any, field: str, where: str) -> str:
    texts = [_text_of(part) for part in content] if isinstance(content, list) else [None]
    if None in texts:
        raise ValueError(
            f"{where}: its {field} is {_short(content)}, and fledge reads text alone: a string, or a list of "
            '{"type": "text", "text": ..}'
        )
    return "\n".join(texts)


def _text_of(part: Any) -> str | None:
    is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    return part["text"] if is_text else None


# -- values -------------------------------------------------------------------------------------------------------


class _Foreign(Exception):
    """A value that JSON has no form for, such as the dates and bytes of parquet files."""


def _foreign(value: Any) -> None:
    raise _Foreign(type(value).__name__)


_JSON = json.JSONEncoder(ensure_ascii=False, default=_foreign)


def _check_json(value: Any, where: str) -> None:
    """Raises ValueError, naming the place, for what could not be written as JSON lines again."""
    try:
        _JSON.encode(value).encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{where}: {_half(e)}") from e
    except _Foreign as e:
        raise ValueError(f"{where}: it holds a {e}, which is neither text nor a number; make it a string") from e
    except RecursionError as e:
        raise ValueError(f"{where}: it is nested too deeply to be read") from e


def _half(error: UnicodeEncodeError) -> str:
    found, before = error.object[error.start], error.object[max(error.start - 30, 0) : error.start]
    return f"the escape \\u{ord(found):x} behind {before!r} is half of a character; remove it"


def _short(value: Any) -> str:
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()  # limits depth too, which str() of what was read does not
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlist = 12
