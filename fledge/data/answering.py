"""Which messages of a record are to be generated, and how answers become messages and texts of the record."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from fledge.data.chat_fields import MARK, REASONING_FIELDS, without_spaces
from fledge.data.record import Record
from fledge.data.template import ChatTemplate, EndlessTemplate

REPLACEMENT = "\ufffd"  # what bytes that are no character, or not yet, are decoded to
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


# -- generated tokens as messages and texts -----------------------------------------------------------------------


class AnswerWarning(UserWarning):
    """A chat template does not render an answer as it was generated."""


def history_message(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], prompt: Sequence[int], ids: Sequence[int],
    tools: list[Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The answer to messages as a message that the next prompt contains: `answer_message`, with an `AnswerWarning` if
    the template renders other text than was generated."""
    message, same = answer_message(template, messages, prompt, ids, tools)
    if not same:
        warnings.warn(
            "the chat template does not render an answer as the target generated it, so the next prompt of the "
            "conversation has another text",
            AnswerWarning,
            stacklevel=1,  # Python shows one warning of a place
        )
    return message


def answer_message(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], prompt: Sequence[int], ids: Sequence[int],
    tools: list[Any] | None = None,
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """The answer to messages as a message, and whether the template renders the generated text again, white space
    aside. `prompt` are the token ids of the prompt, and `ids` those of the answer, its stop token included.

    The message is what the tokenizer's response schema reads from the answer, else the text without what the template
    writes around it, else the text, special tokens included. The first of these that the template renders as it was
    generated is taken, else the first that differs in white space only, else the text.
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
    """The messages that an answer may be, the best first."""
    whole = template.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
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
    """What the tokenizer's response schema reads from an answer; None without a schema, or if it cannot be read.
    transformers 5.8 has schemas, and later versions templates of responses."""
    try:
        if getattr(tokenizer, "response_template", None) is not None:
            parsed = tokenizer.parse_response(text, prefix=before, tools=tools)
        elif getattr(tokenizer, "response_schema", None) is not None:
            parsed = tokenizer.parse_response(text)
        else:
            return None
    except Exception:  # schemas come with models, and fail in many ways on texts that they do not expect
        return None
    if not isinstance(parsed, dict):
        return None
    texts = [parsed.get(name) or "" for name in ("content", *REASONING_FIELDS)]
    return {"role": "assistant", "content": ""} | parsed if all(isinstance(text, str) for text in texts) else None


def _rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], before: str, tools: list[Any] | None
) -> str | None:  # fmt: skip
    """Messages that end with an answer, rendered as training does after the prompt `before`; None if it refuses."""
    try:
        return template.turn(Record("chat", messages=messages, tools=tools), before)
    except EndlessTemplate:
        raise
    except ValueError:
        return None


def _ends(template: ChatTemplate, rest: str) -> bool:
    """Whether a turn ends before the text `rest`: with a stop token, or without one in a template that has none."""
    ids = template.rendered_ids(rest.lstrip())
    return not ids or ids[0] in template.stop_ids or template.stop_ids.isdisjoint(ids)


def answer_text(template: ChatTemplate, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of generated token ids after the token ids of a prompt: special tokens included, without the stop
    token at the end."""
    ids = list(ids[:-1] if ids and ids[-1] in template.stop_ids else ids)
    context = list(prompt[-1:])  # decoders drop the space before a first token
    before, both = _decoded(template, context), _decoded(template, context + ids)
    return both.removeprefix(before) if both.startswith(before) else _decoded(template, ids)


def text_prompt(template: ChatTemplate, text: str, limit: int) -> tuple[list[int], str]:
    """The first tokens of a plain text as its prompt: at most `limit` token ids, and their text. The ids have the
    tokens that the tokenizer adds (BOS), and the text only special tokens that the whole text has. No character is cut
    apart."""
    coded = template.tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids, added = coded["input_ids"][:limit], coded["special_tokens_mask"]

    def kept() -> str:
        return _decoded(template, [token for token, is_added in zip(ids, added, strict=False) if not is_added])

    while len(ids) > 1 and len(ids) < len(added) and kept().endswith(REPLACEMENT):
        ids = ids[:-1]
    return template.prompt_ids(kept())[: len(ids)], kept()


def _decoded(template: ChatTemplate, ids: list[int]) -> str:
    return template.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
