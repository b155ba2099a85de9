"""Which messages of a record are to be generated, and how answers are put back into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fledge.data.record import Record

if TYPE_CHECKING:
    from fledge.data.template import ChatTemplate

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # templates read one of them, if any


def count_answers(record: Record) -> int:
    """The number of answers to generate for a record."""
    if record.text is not None:
        return 1
    return sum(m["role"] == "assistant" for m in split_conversation(record)[1])


def split_conversation(record: Record) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation in two parts: the messages to keep, and the rest, whose assistant messages are to be generated.

    The first part is the record's prompt, or an assistant message that opens the conversation. If the rest has no
    assistant message, a placeholder for one is added.
    """
    placeholder = {"role": "assistant"}
    if record.turns:
        return [], [m for turn in record.turns for m in ({"role": "user", "content": turn}, placeholder)]
    messages = record.messages or []
    kept = record.prompt_length or int(messages[0]["role"] == "assistant")
    rest = messages[kept:]
    return messages[:kept], [*rest, *([] if any(m["role"] == "assistant" for m in rest) else [placeholder])]


def answered_conversation(record: Record, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of an answered conversation, up to its last assistant message, in the layout of its record."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    messages, length = messages[: last + 1], record.prompt_length
    fields = {"prompt": messages[:length], "completion": messages[length:]} if length else {"messages": messages}
    return fields | ({"tools": record.tools} if record.tools else {})


def reasoning_field(template: ChatTemplate) -> str | None:
    """The field of an assistant message that a template renders as its reasoning; None if it renders none."""
    marked = "fledge asks which field is rendered"
    for name in REASONING_FIELDS:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: marked}]
        if marked in template.render(chat, prompt=False):
            return name
    return None
