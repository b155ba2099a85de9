"""Tool calls and reasoning in messages: which fields a chat template renders, and messages in the form that it expects.

Data sets name reasoning `reasoning_content`, `reasoning` or `thinking`, and a template reads one of them. The arguments
of a tool call are an object in some data and JSON text in other data, as in OpenAI's API; most templates expect an
object and write it as JSON themselves, and some insert a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.json_text import parse_json

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
MARK = "fledge_asks_what_is_rendered"
TOOL = {
    "type": "function",
    "function": {"name": MARK, "description": "none", "parameters": {"type": "object", "properties": {}}},
}
ASKED = {"role": "user", "content": "a"}
# what a template may drop, and how a note about records with it goes on
LOSSES = {
    "reasoning": "have reasoning that this chat template drops",
    "calls": "have tool calls that this chat template drops",
    "tools": "have tools that this chat template drops",
}

Message = dict[str, Any]
Render = Callable[[list[Message], list[Any] | None], str]


@dataclass(frozen=True)
class RenderedFields:
    """What a chat template renders. `reasoning` is the field of an assistant message that it reads as its reasoning
    (None: none). `tools` and `calls` say whether it renders a row's tools and the calls of messages; `json_arguments`
    whether it inserts the arguments of calls as they are, so that they must be JSON text; and `null_content` whether it
    accepts null as the content of a message with calls."""

    reasoning: str | None
    tools: bool
    calls: bool
    json_arguments: bool
    null_content: bool


def ask_template(render: Render) -> RenderedFields:
    """Finds out what a template renders, by rendering a few chats. `render` renders messages with tools, and raises
    ValueError if the template refuses them."""

    def rendered(messages: list[Message], tools: list[Any] | None = None) -> str | None:
        try:
            return render(messages, tools)
        except ValueError:
            return None

    reasoning = next(
        (
            name
            for name in REASONING_FIELDS
            if MARK in (rendered([ASKED, {"role": "assistant", "content": "b", name: MARK}]) or "")
        ),
        None,
    )
    calls, json_arguments, null_content = _ask_for_calls(rendered)
    with_tools = rendered([ASKED], [TOOL])
    return RenderedFields(reasoning, with_tools is None or MARK in with_tools, calls, json_arguments, null_content)


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


def has_fields(messages: Sequence[Message]) -> bool:
    """Whether a message has tool calls or reasoning."""
    return any(m.get("tool_calls") or _reasoning_of(m) for m in messages)


def prepared(messages: Sequence[Message], fields: RenderedFields) -> list[Message]:
    """The messages with tool calls and reasoning in the form that a template expects."""
    return [_prepared(m, fields) if m.get("role") == "assistant" else m for m in messages]


def _prepared(message: Message, fields: RenderedFields) -> Message:
    changed = dict(message)
    reasoning = _reasoning_of(message)
    if reasoning and fields.reasoning:  # under this name alone: some templates would render every name that they know
        for name in REASONING_FIELDS:
            changed.pop(name, None)
        changed[fields.reasoning] = reasoning
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_with_arguments(call, fields.json_arguments) for call in calls]
        if fields.calls and not fields.null_content and message.get("content") is None:
            changed["content"] = ""
    return changed


def _reasoning_of(message: Message) -> str:
    return next((message[name] for name in REASONING_FIELDS if message.get(name)), "")


def as_sent(message: Message) -> Message:
    """A message as OpenAI's API takes it: the arguments of its calls as JSON text, and its reasoning under both names
    that servers read."""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
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


def find_losses(
    messages: Sequence[Message], tools: Any, fields: RenderedFields, texts: Callable[[], str]
) -> tuple[str, ...]:
    """The keys of LOSSES that apply to a conversation. `texts` gives the text of all its documents."""
    found = []
    thoughts = [r for m in messages if m["role"] == "assistant" and (r := _reasoning_of(m)).strip()]
    if thoughts and (fields.reasoning is None or not _all_in(thoughts, texts())):
        found.append("reasoning")
    if not fields.calls and any(m.get("tool_calls") for m in messages):
        found.append("calls")
    return (*found, *(["tools"] if tools and not fields.tools else []))


def _all_in(parts: Sequence[str], text: str) -> bool:
    """Whether a text contains all parts, whatever their white space, which templates trim."""
    text = "".join(text.split())
    return all("".join(part.split()) in text for part in parts)
