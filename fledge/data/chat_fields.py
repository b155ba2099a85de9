"""Which fields of messages a chat template renders, and messages in the form that the template expects.

Most templates render a content that is a string, and some render only a list of parts. Data sets name reasoning
`reasoning_content`, `reasoning` or `thinking`, and a template reads one of them. The arguments of a tool call are an
object in some data and JSON text in other data, as in OpenAI's API; most templates expect an object and write it as
JSON themselves, and some insert a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.io.fields import parse_json

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
MARK = "fledge_asks_what_is_rendered"
TOOL = {
    "type": "function",
    "function": {"name": MARK, "description": "none", "parameters": {"type": "object", "properties": {}}},
}
ASKED = {"role": "user", "content": "a"}
# the end of a prompt in which reasoning is open, such as "<think>\n", or is closed already
OPENED = re.compile(r"<([\w:]*think[\w:]*)>(\s*)(</\1>\s*)?$")
# what a template, or the tokenizer, drops, and how a note about records with it goes on
LOSSES = {
    "reasoning": "have reasoning that this chat template drops",
    "calls": "have tool calls that this chat template drops",
    "tools": "have tools that this chat template drops",
    "added": "write out special tokens that the tokenizer adds too, such as BOS; one of each two is dropped",
}

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


def has_fields(messages: Sequence[Message]) -> bool:
    """Whether a message has tool calls or reasoning."""
    return any(m.get("tool_calls") or _reasoning_of(m) for m in messages)


def is_left_empty(message: Message, fields: RenderedFields) -> bool:
    """Whether a message is empty because the template drops the message's tool calls."""
    reasoning = fields.reasoning and _reasoning_of(message)
    dropped = message.get("tool_calls") and not fields.calls
    return bool(dropped and not reasoning and not (message.get("content") or "").strip())


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
    reasoning = _reasoning_of(message)
    if reasoning and fields.reasoning:  # only under `fields.reasoning`: some templates render all names of reasoning
        for name in REASONING_FIELDS:
            changed.pop(name, None)
        changed[fields.reasoning] = reasoning
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_with_arguments(call, fields.json_arguments) for call in calls]
        if not (fields.calls and fields.null_content) and message.get("content") is None:
            changed["content"] = ""
    return changed


def _reasoning_of(message: Message) -> str:
    return next((message[name] for name in REASONING_FIELDS if message.get(name)), "")


def has_reasoning(message: Message, tag: str) -> bool:
    """Whether an assistant message has reasoning, in a field of its own or in its content, where `</tag>` ends it."""
    return bool(_reasoning_of(message).strip()) or f"</{tag}>" in (message.get("content") or "")


def continued(opening: str, turn: str, message: Message) -> str | None:
    """The text that the decoder generates after a prompt whose end, `opening`, opens the reasoning (see OPENED).

    `turn` is the message rendered by the template, without the turn's header, with or without reasoning. Reasoning that
    the template drops is put back: the message's reasoning field, closed by the tag that the prompt opens, or the
    content up to `</think>`, unchanged. Returns None if only the message or only the prompt has reasoning.
    """
    tag, space, is_closed = OPENED.search(opening).groups()
    open_, close, content = f"<{tag}>", f"</{tag}>", message.get("content") or ""
    if not has_reasoning(message, tag):
        return re.sub(rf"^\s*({open_})?\s*{close}\s*", "", turn) if is_closed else None
    if is_closed:
        return None
    reasoning, (written, end, answer) = _reasoning_of(message).strip(), content.rpartition(close)
    written = re.sub(rf"^\s*{open_}\s*", "", written)
    if close in turn and (reasoning or written.strip()) in turn.rpartition(close)[0]:
        return re.sub(rf"^\s*{open_}\s*", "", turn)
    turn = re.sub(rf"^\s*({open_})?\s*{close}", "", turn)
    if reasoning:
        return f"{reasoning}\n{close}\n\n{turn.lstrip()}" if space else f"{reasoning}{close}{turn.lstrip()}"
    if answer.strip():  # with the space that the template may strip
        turn = answer[: len(answer) - len(answer.lstrip())] + turn.lstrip()
    return written + end + turn


def as_sent(message: Message) -> Message:
    """A message in the form of OpenAI's API: arguments of calls as JSON text, and reasoning under both names that
    servers read (`reasoning_content`, `reasoning`)."""
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
    """The keys of LOSSES that apply to a conversation. `texts` gives the text of all documents of the conversation."""
    found = []
    thoughts = [r for m in messages if m["role"] == "assistant" and (r := without_spaces(_reasoning_of(m)))]
    if thoughts:
        text = without_spaces(texts())
        found += [] if all(thought in text for thought in thoughts) else ["reasoning"]
    if not fields.calls and any(m.get("tool_calls") for m in messages):
        found.append("calls")
    return (*found, *(["tools"] if tools and not fields.tools else []))


def without_spaces(text: str) -> str:
    """A text without white space, which templates trim."""
    return "".join(text.split())
