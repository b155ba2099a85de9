"""Which messages of a record are to be generated, and how answers are put back into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fledge.data.record import Record

if TYPE_CHECKING:
    from fledge.data.template import ChatTemplate

TOOL_ROLES = ("tool", "ipython", "function")  # of messages with the result of a tool call


def count_answers(record: Record) -> int:
    """The number of answers to generate for a record."""
    if record.text is not None:
        return 1
    return sum(m["role"] == "assistant" for m in split_conversation(record)[1])


def split_conversation(record: Record) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation in two parts: the messages to keep, and the rest, whose assistant messages are to be generated.

    The first part is the record's prompt, or an assistant message that opens the conversation. The rest ends before the
    result of a tool that an assistant message of the rest has called, since another answer may make another call or
    none. If the rest has no assistant message, a placeholder for one is added.
    """
    placeholder = {"role": "assistant"}
    if record.turns:
        return [], [m for turn in record.turns for m in ({"role": "user", "content": turn}, placeholder)]
    messages = record.messages or []
    kept = _kept(record)
    rest = _answerable(messages[kept:])
    return messages[:kept], [*rest, *([] if any(m["role"] == "assistant" for m in rest) else [placeholder])]


def _kept(record: Record) -> int:
    """The number of a conversation's first messages that are kept."""
    messages = record.messages or []
    return record.prompt_length or int(messages[0]["role"] == "assistant")


def _answerable(rest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages up to the first tool result after an assistant message."""
    first = next((i for i, m in enumerate(rest) if m["role"] == "assistant"), len(rest))
    end = next((i for i, m in enumerate(rest) if i > first and m["role"] in TOOL_ROLES), len(rest))
    return rest[:end]


def answered_conversation(record: Record, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of an answered conversation, up to its last assistant message, in the layout of its record."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    messages, length = messages[: last + 1], record.prompt_length
    fields = {"prompt": messages[:length], "completion": messages[length:]} if length else {"messages": messages}
    own = {"tools": record.tools, "chat_template_kwargs": record.template_kwargs}
    return fields | {name: value for name, value in own.items() if value}


def reasoning_field(template: ChatTemplate) -> str | None:
    """The field of an assistant message that a template renders as its reasoning; None if it renders none."""
    return template.fields.reasoning


def stops_at_tool(record: Record) -> bool:
    """Whether the answers to a record end before the result of a tool call, which answers the data's own call."""
    messages = record.messages or []
    return bool(messages) and len(_answerable(messages[_kept(record) :])) < len(messages[_kept(record) :])
