"""Finds the messages of a record to generate, and turns generated answers into messages and texts of the record."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from fledge.data.messages import MARK, REASONING_FIELDS, without_spaces
from fledge.data.record import Record
from fledge.data.spans import turn_text
from fledge.data.template import ChatTemplate, EndlessTemplate

TOOL_ROLES = ("tool", "ipython", "function")  # roles of messages with the result of a tool call


def count_answers(record: Record) -> int:
    """The number of answers to generate for a record."""
    if record.text is not None:
        return 1
    return sum(m["role"] == "assistant" for m in split_conversation(record)[1])


def split_conversation(record: Record) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation in two parts: the messages to keep, and the rest, whose assistant messages are to be generated.

    The first part is the record's prompt, or an assistant message that opens the conversation. The rest ends before the
    result of a tool that an assistant message of the rest has called, since a generated answer may call a different
    tool or none. If the rest has no assistant message, a placeholder message is added.
    """
    placeholder = {"role": "assistant"}
    if record.turns:
        return [], [m for turn in record.turns for m in ({"role": "user", "content": turn}, placeholder)]
    messages = record.messages or []
    kept = _kept(record)
    rest = _answerable(messages[kept:])
    return messages[:kept], [*rest, *([] if any(m["role"] == "assistant" for m in rest) else [placeholder])]


def _kept(record: Record) -> int:
    """The number of messages to keep at the start of a conversation."""
    messages = record.messages or []
    return record.prompt_length or int(messages[0]["role"] == "assistant")


def _answerable(rest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages up to the first tool result after an assistant message."""
    first = next((i for i, m in enumerate(rest) if m["role"] == "assistant"), len(rest))
    end = next((i for i, m in enumerate(rest) if i > first and m["role"] in TOOL_ROLES), len(rest))
    return rest[:end]


def answered_conversation(record: Record, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of an answered conversation, up to the last assistant message, in the layout of `record`."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    messages, length = messages[: last + 1], record.prompt_length
    fields = {"prompt": messages[:length], "completion": messages[length:]} if length else {"messages": messages}
    own = {"tools": record.tools, "chat_template_kwargs": record.template_kwargs}
    return fields | {name: value for name, value in own.items() if value}


def stops_at_tool(record: Record) -> bool:
    """Whether a record's answers end before a tool result of the data, since the result answers a call of the data."""
    messages = record.messages or []
    return bool(messages) and len(_answerable(messages[_kept(record) :])) < len(messages[_kept(record) :])


class AnswerWarning(UserWarning):
    """A chat template renders an answer to a different text than the target generated."""


def history_message(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], prompt: Sequence[int], ids: Sequence[int],
    tools: list[Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The answer to messages as a message for the next prompt: `answer_message`, with an `AnswerWarning` if the
    template renders a different text than the generated text."""
    message, same = answer_message(template, messages, prompt, ids, tools)
    if not same:
        warnings.warn(
            "the chat template does not render an answer as the target generated it, so the next prompt of the "
            "conversation has another text",
            AnswerWarning,
            stacklevel=1,  # a constant location, so Python shows the warning once
        )
    return message


def answer_message(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], prompt: Sequence[int], ids: Sequence[int],
    tools: list[Any] | None = None,
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """The answer to messages as a message, and whether the template renders the generated text again, white space
    aside. `prompt` are the token ids of the prompt, and `ids` the token ids of the answer, with the stop token.

    Candidates, in this order: the message that the tokenizer's response schema reads from the answer, the text without
    the parts that the template writes around a content, and the text with special tokens. Returns the first candidate
    that the template renders to the generated text, else to a text with other white space, else the text.
    """
    before = template.prompt_text(messages, tools=tools)
    text = answer_text(template, prompt, ids)
    loose = None
    for message in _readings(template, messages, before, text, ids, tools):
        rendered = _rendered(template, [*messages, message], before, tools)
        if rendered is None or not without_spaces(rendered).startswith(without_spaces(before + text)):
            continue
        if rendered.startswith(before + text) and _ends(template, rendered[len(before + text) :]):
            return message, True
        loose = loose or message
    return loose or _message(text), loose is not None


def _readings(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], before: str, text: str, ids: Sequence[int],
    tools: list[Any] | None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The candidates for the message of an answer, the best first."""
    whole = template.decode(ids)
    for generated in dict.fromkeys([whole, text]):  # some schemas read the stop token
        if parsed := _parsed(template.tokenizer, generated, before, tools):
            yield parsed
    marked = _rendered(template, [*messages, _message(MARK)], before, tools) or before
    head = marked[len(before) :].partition(MARK)[0]
    if text.startswith(head):
        yield _message(text.removeprefix(head))
    yield _message(text)


def _message(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _parsed(tokenizer: Any, text: str, before: str, tools: list[Any] | None) -> dict[str, Any] | None:
    """The message that the tokenizer's response schema reads from an answer; None without a schema, or if the schema
    cannot read the answer. transformers 5.8 has response schemas, and later versions have response templates."""
    try:
        if getattr(tokenizer, "response_template", None) is not None:
            parsed = tokenizer.parse_response(text, prefix=before, tools=tools)
        elif getattr(tokenizer, "response_schema", None) is not None:
            parsed = tokenizer.parse_response(text)
        else:
            return None
    except Exception:  # schemas come with models, and fail in many ways on unexpected texts
        return None
    if not isinstance(parsed, dict):
        return None
    texts = [parsed.get(name) or "" for name in ("content", *REASONING_FIELDS)]
    return {"role": "assistant", "content": ""} | parsed if all(isinstance(text, str) for text in texts) else None


def _rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], before: str, tools: list[Any] | None
) -> str | None:  # fmt: skip
    """Messages ending with an answer, rendered as in training after the prompt `before`; None if refused."""
    try:
        return turn_text(template, Record("chat", messages=messages, tools=tools), before)
    except EndlessTemplate:
        raise
    except ValueError:
        return None


def _ends(template: ChatTemplate, rest: str) -> bool:
    """Whether a turn ends before the text `rest`: `rest` is empty, starts with a stop token, or has no stop token."""
    ids = template.rendered_ids(rest.lstrip())
    return not ids or ids[0] in template.stop_ids or template.stop_ids.isdisjoint(ids)


def answer_text(template: ChatTemplate, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of generated token ids after the token ids of a prompt: special tokens included, without the stop
    token at the end."""
    ids = list(ids[:-1] if ids and ids[-1] in template.stop_ids else ids)
    context = list(prompt[-1:])  # decoders drop the space before a first token
    before, both = template.decode(context), template.decode(context + ids)
    return both.removeprefix(before) if both.startswith(before) else template.decode(ids)
