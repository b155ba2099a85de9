"""Messages of chats: their checks, which fields a chat template renders, and the form that the template expects.

Most templates render a content that is a string, and some render only a list of parts. Data sets name reasoning
`reasoning_content`, `reasoning` or `thinking`, and a template reads one of them. The arguments of a tool call are an
object in some data and JSON text in other data, as in OpenAI's API; most templates expect an object and write it as
JSON themselves, and some insert a text.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from fledge.io.fields import parse_json

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
TEXT_FIELDS = ("content", *REASONING_FIELDS)  # the fields of a message that templates render
MARK = "fledge_asks_what_is_rendered"
TOOL = {
    "type": "function",
    "function": {"name": MARK, "description": "none", "parameters": {"type": "object", "properties": {}}},
}
ASKED = {"role": "user", "content": "a"}
Message = dict[str, Any]
Render = Callable[[list[Message], list[Any] | None], str | None]


@dataclass(frozen=True)
class RenderedFields:
    """The fields that a chat template renders. `reasoning` is the message field that the template reads as reasoning
    (None: none). `tools`: the template renders a row's tools. `calls`: the template renders tool calls.
    `json_arguments`: the template inserts a call's arguments unchanged, so the arguments must be JSON text.
    `null_content`: the template accepts null as the content of a message with calls. `parts` are the roles whose
    contents the template renders only as a list of parts."""

    reasoning: str | None
    tools: bool
    calls: bool
    json_arguments: bool
    null_content: bool
    parts: frozenset[str] = frozenset()


def ask_template(render: Render) -> RenderedFields:
    """Finds out which fields a template renders, by rendering a few chats. `render` renders messages with tools, and
    returns None for messages that the template refuses."""
    parts: frozenset[str] = frozenset()

    def rendered(messages: list[Message], tools: list[Any] | None = None) -> str | None:
        return render([_with_parts(m, parts) for m in messages], tools)

    def shows(messages: list[Message]) -> bool:
        return MARK in (rendered(messages) or "")

    for role, before, after in (("user", [], []), ("system", [], [ASKED]), ("assistant", [ASKED], [])):
        chat = [*before, {"role": role, "content": MARK}, *after]
        if not shows(chat):
            asked, parts = parts, parts | {role}
            parts = parts if shows(chat) else asked
    answers = {name: [ASKED, {"role": "assistant", "content": "b", name: MARK}] for name in REASONING_FIELDS}
    reasoning = next((name for name, chat in answers.items() if shows(chat)), None)
    calls, json_arguments, null_content = _ask_for_calls(rendered)
    with_tools = rendered([ASKED], [TOOL])
    tools = with_tools is None or MARK in with_tools
    return RenderedFields(reasoning, tools, calls, json_arguments, null_content, parts)


def _ask_for_calls(rendered: Callable[[list[Message]], str | None]) -> tuple[bool, bool, bool]:
    """`calls`, `json_arguments` and `null_content` of RenderedFields."""
    refused = True
    for arguments in ({"key": "value"}, '{"key": "value"}'):
        for content in (None, ""):
            call = {"id": "fledge001", "type": "function", "function": {"name": MARK, "arguments": arguments}}
            text = rendered([ASKED, {"role": "assistant", "content": content, "tool_calls": [call]}])
            if text is not None and MARK in text and "{'key'" not in text:  # not as Python writes an object
                return True, isinstance(arguments, str), content is None
            refused = refused and text is None
    return refused, False, True  # a template that refuses all calls drops none


def prepared(messages: Sequence[Message], fields: RenderedFields) -> list[Message]:
    """The messages with contents, tool calls and reasoning in the form that a template expects."""
    made = [_prepared(m, fields) if m.get("role") == "assistant" else m for m in messages]
    return [_with_parts(m, fields.parts) for m in made] if fields.parts else made


def _with_parts(message: Message, roles: frozenset[str]) -> Message:
    """The message, with a list of parts as its content if `roles` has its role. All other roles count as users."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(content, str) or (role if role in ("system", "assistant") else "user") not in roles:
        return message
    return message | {"content": [{"type": "text", "text": content}]}


def _prepared(message: Message, fields: RenderedFields) -> Message:
    changed = dict(message)
    reasoning = reasoning_of(message)
    if reasoning and fields.reasoning:  # only under `fields.reasoning`: some templates render all names of reasoning
        for name in REASONING_FIELDS:
            changed.pop(name, None)
        changed[fields.reasoning] = reasoning
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_with_arguments(call, fields.json_arguments) for call in calls]
        if not (fields.calls and fields.null_content) and message.get("content") is None:
            changed["content"] = ""
    return changed


def reasoning_of(message: Message) -> str:
    return next((message[name] for name in REASONING_FIELDS if message.get(name)), "")


def as_sent(message: Message) -> Message:
    """A message in the form of OpenAI's API: arguments of calls as JSON text, and reasoning under both names that
    servers read (`reasoning_content`, `reasoning`)."""
    reasoning = reasoning_of(message)
    sent = message | ({"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {})
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_with_arguments(call, as_json=True) for call in calls]
    return sent


def _with_arguments(call: Any, as_json: bool) -> Any:
    """A tool call with its arguments as JSON text or as an object. A text that is not JSON stays as it is."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"], as_json)}
    arguments = call.get("arguments")
    if as_json and isinstance(arguments, dict | list):
        return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    if not as_json and isinstance(arguments, str):
        try:
            return call | {"arguments": parse_json(arguments) if arguments.strip() else {}}
        except ValueError:
            return call
    return call


def without_spaces(text: str) -> str:
    """A text without white space, which templates trim."""
    return "".join(text.split())


def check_messages(messages: Sequence[Any], where: str) -> list[dict[str, Any]]:
    """Normalizes messages to the form that chat templates take, with every content a string.

    A list of text parts is joined by newlines, as in vLLM. Null is allowed as the content of an assistant message that
    calls tools. Raises ValueError, naming the location, for any other content (images, numbers, objects, null) and for
    values that JSON cannot represent.
    """
    checked = [_message(m, where, i) for i, m in enumerate(messages, 1)]
    try:  # a fast check for messages that contain only strings, as nearly all do
        "".join([text for m in checked for field in m.items() for text in field]).encode()
    except (TypeError, UnicodeEncodeError):
        for i, m in enumerate(checked, 1):
            check_json(m, f"{where}, message {i}")
    return checked


def check_text(text: str, where: str) -> str:
    """Returns the text. Raises ValueError, naming the location, if it contains an unpaired surrogate."""
    check_json(text, where)
    return text


def _message(message: Any, where: str, number: int) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or _lacks_content(message):
        raise ValueError(f"{where}, message {number} needs a `role` and a `content`, got {shown(message)}")
    if {str}.issuperset(map(type, message.values())):  # the common case needs no changes
        return message
    # table formats store absent fields as null, and some templates treat a field that is null as present
    cleaned = {k: v for k, v in message.items() if k == "content" or (v is not None and (k, v) != ("tool_calls", []))}
    for field in TEXT_FIELDS:
        if not isinstance(cleaned.get(field, ""), (str, NoneType)):
            cleaned[field] = _join_parts(cleaned[field], field, f"{where}, message {number}")
    return cleaned


def _lacks_content(message: dict[str, Any]) -> bool:
    """Whether the content is missing or null, except in an assistant message that calls tools."""
    return message.get("content") is None and not (message["role"] == "assistant" and message.get("tool_calls"))


def _join_parts(content: Any, field: str, where: str) -> str:
    """The text of a list of text parts, joined by newlines."""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{where}: its {field} is {shown(content)}, but fledge only reads text: a string, or a list of "
            '{"type": "text", "text": ..} parts'
        )
    return "\n".join(texts)


def check_json(value: Any, where: str) -> None:
    """Raises ValueError, naming the location, for a value that cannot be written as JSON in UTF-8, such as the dates
    and bytes of parquet files."""

    def refuse(part: Any) -> None:
        kind = type(part).__name__
        raise ValueError(f"{where}: it contains a {kind}, which JSON cannot represent; convert it to a string")

    try:
        json.dumps(value, ensure_ascii=False, default=refuse).encode()
    except UnicodeEncodeError as e:
        surrogate, before = e.object[e.start], e.object[max(e.start - 30, 0) : e.start]
        raise ValueError(
            f"{where}: the escape \\u{ord(surrogate):x} after {before!r} is an unpaired surrogate; remove it"
        ) from e
    except RecursionError as e:
        raise ValueError(f"{where}: it is nested too deeply to be read") from e


def shown(value: Any) -> str:
    """A value of data as text for messages, limited in length and depth."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlist = 12
