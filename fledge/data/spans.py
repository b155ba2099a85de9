"""Training documents of records: conversations and texts, tokenized, with the assistant's spans."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from fledge.data.documents import Document
from fledge.data.messages import Message, RenderedFields, reasoning_of, without_spaces
from fledge.data.record import Record
from fledge.data.template import ChatTemplate

REPLACEMENT = "\ufffd"  # decoded from bytes of an invalid or incomplete character
MANY_TURNS = 16  # chats with at least this many turns try `_find_turns`, which takes linear time, first
# the end of a prompt in which reasoning is open, such as "<think>\n", or is closed already
OPENED = re.compile(r"<([\w:]*think[\w:]*)>(\s*)(</\1>\s*)?$")
# what a template, or the tokenizer, drops, and how a note about records with it goes on
LOSSES = {
    "reasoning": "have reasoning that this chat template drops",
    "calls": "have tool calls that this chat template drops",
    "tools": "have tools that this chat template drops",
    "added": "write out special tokens that the tokenizer adds too, such as BOS; one of each two is dropped",
}


def training_documents(template: ChatTemplate, record: Record) -> list[Document]:
    """Tokenizes a record and marks the assistant's spans.

    Returns one document if the template renders each turn independently of the messages after the turn. Some
    templates rewrite earlier turns, for example drop the reasoning. The decoder generated a rewritten turn from a
    different text, so each turn that is rewritten later becomes a document of its own, rendered up to the end of
    the turn. The record's prompt, an assistant message that opens the conversation, and a message that is empty
    because the template drops the message's calls, are context and not supervised. Raises ValueError, quoting the
    conversation, if no token or every token belongs to the assistant, and if a rendered turn does not start with
    the turn's generation prompt.
    """
    if record.turns:
        raise ValueError(f"{record.where} has user turns but no answers to train on; fledge regenerate generates them")
    template = template.of(record.template_kwargs)
    if record.text is not None:
        return [_text_document(template, record)]
    messages = record.messages or []
    answers = [i for i, m in enumerate(messages) if i >= max(record.prompt_length, 1) and m["role"] == "assistant"]
    turns = [i for i in answers if not (messages[i].get("tool_calls") and _is_left_empty(messages[i], template.fields))]
    if not turns:
        excerpt = "; ".join(f"{m['role']}: {str(m.get('content'))[:60]}" for m in messages[:4])
        cure = "; this chat template drops its tool calls, which leaves nothing" if answers else ""
        if messages and messages[0]["role"] == "assistant":
            cure = "; its first message answers nothing, so it is not trained on"
        elif messages and messages[-1]["role"] == "user":
            cure = "; fledge regenerate generates answers"
        raise ValueError(f"{record.where} has no assistant message to train on ({excerpt}){cure}")
    full = _render(template, record, len(messages), prompt=False)
    if len(turns) >= MANY_TURNS and (ranges := _find_turns(template, record, turns, full)):
        return [document_of(template, full, ranges, record.where)]
    unchanged, documents = [], []  # turns that later messages do not rewrite; a document for each rewritten turn
    for i in turns:
        before = _render(template, record, i, prompt=True)
        after = full if i + 1 == len(messages) else _render(template, record, i + 1, prompt=False)
        after = _generated(template, record, i, before, after)
        end = len(after) if full.startswith(after) else _common_prefix_length(full, after)
        if end == len(after) or _has_stop_token(template, full[len(before) : end]):
            unchanged.append((len(before), end))
        else:
            documents.append(document_of(template, after, [(len(before), len(after))], record.where))
    return [document_of(template, full, unchanged, record.where), *documents] if unchanged else documents


def turn_text(template: ChatTemplate, record: Record, before: str) -> str:
    """A conversation that ends with an assistant message, rendered as by `training_documents`. `before` is the prompt
    after which the message was generated. Raises ValueError if the rendered text does not start with `before`."""
    n = len(record.messages or [])
    return _generated(template, record, n - 1, before, _render(template, record, n, prompt=False))


def _generated(template: ChatTemplate, record: Record, i: int, before: str, after: str) -> str:
    """The rendered messages up to message i, `after`, as a text that starts with the message's prompt, `before`.
    Raises ValueError if `after` can't be changed into a text that starts with `before`."""
    if not after.startswith(before):
        after = _after_its_prompt(template, record, i, before, after) or after
    if not after.startswith(before):
        opened = OPENED.search(before)
        if opened and not opened[3] and not _has_reasoning((record.messages or [])[i], opened[1]):
            raise ValueError(
                f"{record.where}, message {i + 1}: the template's generation prompt opens reasoning with "
                f"<{opened[1]}>, but the answer has no reasoning (in reasoning_content, or in content up to "
                f"</{opened[1]}>), so no decoder could generate the answer. Let the target answer with fledge "
                "regenerate, leave such records out with fledge train --skip-bad, or, if the template has a "
                "variable that turns reasoning off, set it with --template-kwargs"
            )
        raise ValueError(
            f"{record.where}, message {i + 1}: the rendered turn does not start with the template's "
            f"generation prompt, so no decoder could generate it. The prompt ends with {before[-60:]!r}, the "
            f"turn is {after[max(len(before) - 60, 0) :][:120]!r}. --template-kwargs may contradict the data"
        )
    return after


def _after_its_prompt(template: ChatTemplate, record: Record, i: int, before: str, after: str) -> str | None:
    """The prompt of message i, `before`, followed by the turn of message i, for templates that rewrite the turn or
    the earlier messages once message i is present; None if the turn is not found.

    DeepSeek-R1's template opens the reasoning in the prompt, and drops the reasoning from the turn (see
    `_continued`). gpt-oss's template drops the reasoning before a tool call as soon as the final answer follows. The
    decoder saw the dropped reasoning when it generated the answer, so the turn is cut out of `after` and appended
    to `before`. The turn begins at the last turn opening before the first difference between `after` and the same
    chat rendered with a different answer.
    """
    plain = _render(template, record, i, prompt=False)
    opening = before.removeprefix(plain)
    if not before.startswith(plain) or not opening:
        return None
    if after.startswith(plain):
        opened = OPENED.search(opening)
        header = plain + opening[: opened.start()] if opened else ""
        if not opened or not after.startswith(header):
            return None
        turn = _continued(opening, after[len(header) :], (record.messages or [])[i])
        return None if turn is None else before + turn
    other = [*(record.messages or [])[:i], {"role": "assistant", "content": "fledge looks for this turn"}]
    end = _common_prefix_length(after, template.render(other, prompt=False, tools=record.tools, where=record.where))
    start = after.rfind(opening, 0, end) + len(opening)
    if start < len(opening) or _has_stop_token(template, after[start:end]):
        return None
    return before + after[start:]


def losses(template: ChatTemplate, record: Record, documents: Sequence[Document]) -> tuple[str, ...]:
    """The parts of a record, with the documents `documents`, that the template drops, as keys of LOSSES."""
    messages = record.messages or []
    if (text := record.text) is not None:
        ends = text if len(text) < 200 else text[:100] + text[-100:]  # where special tokens may be written out
        return ("added",) if any(template.added) and template.plain(ends)[1] else ()
    answers = [m for m in messages[max(record.prompt_length, 1) :] if m["role"] == "assistant"]
    thoughts = [thought for m in answers if (thought := without_spaces(reasoning_of(m)))]
    calls = any(m.get("tool_calls") for m in answers)
    if not (record.tools or thoughts or calls):
        return ()
    fields = template.of(record.template_kwargs).fields
    text = (
        without_spaces("\n".join(template.tokenizer.decode(d.tokens.tolist()) for d in documents)) if thoughts else ""
    )
    lost = {
        "reasoning": not all(thought in text for thought in thoughts),
        "calls": calls and not fields.calls,
        "tools": bool(record.tools) and not fields.tools,
    }
    return tuple(kind for kind, is_lost in lost.items() if is_lost)


def _find_turns(template: ChatTemplate, record: Record, turns: list[int], full: str) -> list[tuple[int, int]] | None:
    """The [start, end) character ranges of a chat's turns in its full text, in time linear in the number of turns.

    Rendering the chat up to every turn, as `training_documents` does otherwise, takes quadratic time. Here each turn,
    with the messages since the previous turn, is rendered directly after the opening exchange, as the last turn, as
    when the decoder generated the turn. If the concatenation of the rendered pieces is a prefix of the full text, the
    template renders every turn independently of the surrounding messages. Otherwise returns None: the caller must
    render the chat up to every turn.
    """
    messages, first = record.messages or [], turns[0] + 1
    try:
        prompt = _render(template, record, turns[0], prompt=True)
        opening = _render(template, record, first, prompt=False)
        if not (opening.startswith(prompt) and full.startswith(opening)):
            return None
        ranges, at = [(len(prompt), len(opening))], len(opening)
        for last, i in pairwise(turns):
            exchange = [*messages[:first], *messages[last + 1 : i + 1]]
            before = template.render(exchange[:-1], prompt=True, tools=record.tools)
            after = template.render(exchange, prompt=False, tools=record.tools)
            new = after.removeprefix(opening)
            if not (before.startswith(opening) and after.startswith(before) and full.startswith(new, at)):
                return None
            ranges.append((at + len(before) - len(opening), at + len(new)))
            at += len(new)
    except ValueError:  # a template may require the omitted messages, such as the tool call before a tool's answer
        return None
    return ranges


def _has_stop_token(template: ChatTemplate, text: str) -> bool:
    """Whether a turn that starts with `text` ends within `text`."""
    return not template.stop_ids.isdisjoint(template.rendered_ids(text))


def _render(template: ChatTemplate, record: Record, n: int, *, prompt: bool) -> str:
    return template.render((record.messages or [])[:n], prompt=prompt, tools=record.tools, where=record.where)


def document_of(template: ChatTemplate, text: str, turns: Sequence[tuple[int, int]], where: str) -> Document:
    """Tokenizes a rendered text; `turns` are the [start, end) character ranges of the assistant's turns.

    Raises ValueError, naming `where`, if no token or every token belongs to the assistant.
    """
    coded = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, starts = coded["input_ids"], [a for a, _ in coded["offset_mapping"]]
    spans = np.full(len(ids), -1, dtype=np.int32)
    for span, (start, end) in enumerate(turns):
        a, b = _first_token(template, ids, starts, start, text), bisect_left(starts, end)
        # b + 1: some templates (GLM) end a turn with the next role's token, which is a stop token
        stops = [j for j in range(a, min(b + 1, len(ids))) if ids[j] in template.stop_ids]
        spans[a : stops[0] + 1 if stops else b] = span
    supervised = int((spans >= 0).sum())
    if supervised in (0, len(ids)):
        raise ValueError(
            f"{where}: {supervised} of {len(ids)} tokens are the assistant's with this template; the "
            f"conversation starts with {text[:120]!r}"
        )
    return Document(np.array(ids, dtype=np.int32), spans)


def _text_document(template: ChatTemplate, record: Record) -> Document:
    """A plain text without a template, supervised from the second token. With a prompt, only the completion and the
    end token are supervised; the tokenizer's end token is added if the completion lacks an end token."""
    coded, _ = template.plain(record.text, return_offsets_mapping=True)
    ids, starts = coded["input_ids"], [a for a, _ in coded["offset_mapping"]]
    eos = template.tokenizer.eos_token_id
    ended = not record.prompt_length or eos is None or not {eos, *template.stop_ids}.isdisjoint(ids[-1:])
    end = [] if ended else [eos]
    if len(ids) + len(end) < 3:
        raise ValueError(f"{record.where}: a text of {len(ids)} tokens is too short; at least 3 are needed")
    starts = list(accumulate(starts, max))  # a special token after the text has offset 0
    first = max(_first_token(template, ids, starts, record.prompt_length, record.text), 1)
    if first == len(ids):
        raise ValueError(f"{record.where} has a prompt but no completion to train on; fledge regenerate generates one")
    spans = np.zeros(len(ids) + len(end), dtype=np.int32)
    spans[:first] = -1
    return Document(np.array(ids + end, dtype=np.int32), spans)


def text_prompt(template: ChatTemplate, text: str, limit: int) -> tuple[list[int], str]:
    """The start of a plain text as a prompt: at most `limit` token ids, and the text of the ids. The ids include the
    tokens that the tokenizer adds (BOS); the text includes a special token only if `text` contains the special token.
    No character is cut apart."""
    coded = template.tokenizer(text, return_special_tokens_mask=True, verbose=False)
    ids, added = coded["input_ids"][:limit], coded["special_tokens_mask"]

    def kept() -> str:
        return template.decode([token for token, is_added in zip(ids, added, strict=False) if not is_added])

    while len(ids) > 1 and len(ids) < len(added) and kept().endswith(REPLACEMENT):
        ids = ids[:-1]
    return template.prompt_ids(kept())[: len(ids)], kept()


def _first_token(template: ChatTemplate, ids: list[int], starts: list[int], start: int, text: str) -> int:
    """The index of the first token that starts at or after character `start`.

    A token that straddles `start` belongs to the prompt.
    """
    a = bisect_left(starts, start)
    return a + (a < len(ids) and starts[a] - _hidden_spaces(template, ids[a], starts[a], text) < start)


def _hidden_spaces(template: ChatTemplate, token: int, start: int, text: str) -> int:
    """The number of a byte-level token's leading spaces outside the token's offsets (Llama-3, GPT-2)."""
    name = template.tokenizer.convert_ids_to_tokens(token)
    spaces = len(name) - len(name.lstrip("\u0120"))  # U+0120 represents a space in byte-level vocabularies
    return spaces if text[start - spaces : start] == " " * spaces and not text.startswith(" ", start) else 0


def _common_prefix_length(a: str, b: str) -> int:
    """The length of the common prefix of two strings, by bisection."""
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda n: not b.startswith(a[:n]))


def _has_reasoning(message: Message, tag: str) -> bool:
    """Whether an assistant message has reasoning, in a field of its own or in its content, where `</tag>` ends it."""
    return bool(reasoning_of(message).strip()) or f"</{tag}>" in (message.get("content") or "")


def _continued(opening: str, turn: str, message: Message) -> str | None:
    """The text that the decoder generates after a prompt whose end, `opening`, opens the reasoning (see OPENED).

    `turn` is the message rendered by the template, without the turn's header, with or without reasoning. Reasoning that
    the template drops is put back: the message's reasoning field, closed by the tag that the prompt opens, or the
    content up to `</think>`, unchanged. Returns None if only the message or only the prompt has reasoning.
    """
    tag, space, is_closed = OPENED.search(opening).groups()
    open_, close, content = f"<{tag}>", f"</{tag}>", message.get("content") or ""
    if not _has_reasoning(message, tag):
        return re.sub(rf"^\s*({open_})?\s*{close}\s*", "", turn) if is_closed else None
    if is_closed:
        return None
    reasoning, (written, end, answer) = reasoning_of(message).strip(), content.rpartition(close)
    written = re.sub(rf"^\s*{open_}\s*", "", written)
    if close in turn and (reasoning or written.strip()) in turn.rpartition(close)[0]:
        return re.sub(rf"^\s*{open_}\s*", "", turn)
    turn = re.sub(rf"^\s*({open_})?\s*{close}", "", turn)
    if reasoning:
        return f"{reasoning}\n{close}\n\n{turn.lstrip()}" if space else f"{reasoning}{close}{turn.lstrip()}"
    if answer.strip():  # with the space that the template may strip
        turn = answer[: len(answer) - len(answer.lstrip())] + turn.lstrip()
    return written + end + turn


def _is_left_empty(message: Message, fields: RenderedFields) -> bool:
    """Whether a message is empty because the template drops the message's tool calls."""
    reasoning = fields.reasoning and reasoning_of(message)
    dropped = message.get("tool_calls") and not fields.calls
    return bool(dropped and not reasoning and not (message.get("content") or "").strip())
