"""Chat templates: rendering conversations, tokenizing them, and locating the assistant's spans."""

from __future__ import annotations

import copy
import difflib
import functools
import json
import re
import signal
import threading
import traceback
import warnings
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise, takewhile
from typing import Any

import numpy as np

from fledge.data.chat_fields import (
    OPENED,
    RenderedFields,
    ask_template,
    continued,
    find_losses,
    has_fields,
    has_reasoning,
    is_left_empty,
    prepared,
)
from fledge.data.documents import Document
from fledge.data.record import Record, check_messages, check_text
from fledge.io.fields import check_template_kwargs

RENDER_SECONDS = 10.0  # limit of CPU time for one rendering; the longest chats take a few hundredths of a second
MOST_KNOWN = 64  # sets of arguments whose fields are remembered
MANY_TURNS = 16  # chats with at least this many turns try `_find_turns`, which takes linear time, first


class TemplateWarning(UserWarning):
    """A chat template does not read a variable that was given for it, or a prompt has a special token twice."""


class EndlessTemplate(ValueError):
    """A chat template was stopped after RENDER_SECONDS of CPU time. No further record is rendered with the template."""


class ComputeTimeout(Exception):
    """Raised by `limit_compute_time` inside a block that has used up its CPU time."""


class ChatTemplate:
    """The chat template of a tokenizer, with fixed keyword arguments such as enable_thinking=False.

    `stop_ids` are the token ids that end a turn. A `TemplateWarning` names arguments that the template does not read.
    Raises ValueError for arguments that `check_template_kwargs` refuses, and for a tokenizer without character offsets
    (not a "fast" one).
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int], kwargs: dict[str, Any] | None = None):
        self.tokenizer, self.stop_ids = tokenizer, frozenset(stop_ids)
        self.kwargs = dict(check_template_kwargs(kwargs or {}, "the template's arguments"))
        self._known_fields: dict[str, RenderedFields] = {}  # by the arguments, as JSON; shared with `with_exactly`
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{type(tokenizer).__name__} provides no character offsets; fledge needs a fast tokenizer")
        if problem := _unread(tokenizer.chat_template, self.kwargs):
            warnings.warn(problem, TemplateWarning, stacklevel=1)  # a constant location: Python shows the warning once

    def with_exactly(self, kwargs: dict[str, Any]) -> ChatTemplate:
        """The same template with other arguments; arguments that the template does not read cause no warning."""
        other = copy.copy(self)
        other.kwargs = dict(check_template_kwargs(kwargs, "the template's arguments"))
        return other

    def of(self, kwargs: dict[str, Any] | None) -> ChatTemplate:
        """The template for a record or prompt with the arguments `kwargs`, which take precedence over `self.kwargs`."""
        return self.with_exactly({**self.kwargs, **kwargs}) if kwargs else self

    @property
    def fields(self) -> RenderedFields:
        """Whether the template renders tools, tool calls and reasoning, and the form that the template expects."""
        return self._fields("chat")

    def _fields(self, where: str) -> RenderedFields:
        """`fields`. Raises EndlessTemplate, naming `where`."""
        key = json.dumps(self.kwargs, sort_keys=True)
        if key not in self._known_fields:
            if len(self._known_fields) == MOST_KNOWN:  # each row of some data has arguments of its own
                self._known_fields.clear()
            self._known_fields[key] = ask_template(lambda messages, tools: self._unless_refused(messages, tools, where))
        return self._known_fields[key]

    def _unless_refused(self, messages: list[dict[str, Any]], tools: list[Any] | None, where: str) -> str | None:
        """Rendered messages; None if the template refuses the messages. Raises EndlessTemplate, since the next chat
        would take as long."""
        try:
            return self._apply(messages, False, tools, where)
        except EndlessTemplate:
            raise
        except ValueError:
            return None

    # -- prompts ------------------------------------------------------------------------------------------------

    def render(
        self, messages: Sequence[dict[str, Any]], *, prompt: bool, tools: list[Any] | None = None, where: str = "chat"
    ) -> str:
        """Renders the messages to text; with `prompt`, followed by the generation prompt of the assistant's turn. Tool
        calls and reasoning are passed on in the form that the template expects.

        Raises ValueError, naming `where`, if the tokenizer has no template or the template raises an exception, and
        EndlessTemplate if rendering uses more than RENDER_SECONDS of CPU time.
        """
        return self._apply(prepared(messages, self._fields(where)), prompt, tools, where)

    def _apply(self, messages: list[dict[str, Any]], prompt: bool, tools: list[Any] | None, where: str) -> str:
        """Renders messages as they are. Raises ValueError as `render`."""
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{where} is a conversation, but the tokenizer has no chat template; use an instruction-tuned target, "
                "or data with plain `text`"
            )
        try:
            with limit_compute_time(RENDER_SECONDS):
                return self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt, tools=tools, **self.kwargs
                )
        except ComputeTimeout as e:
            raise EndlessTemplate(
                f"{where}: the tokenizer's chat template does not terminate: it was stopped after {RENDER_SECONDS:g} s "
                f"of CPU time{_template_line(e)}; fix it, or use a tokenizer with another template"
            ) from e
        except Exception as e:  # templates raise jinja errors, and any exception type on unexpected contents
            roles = " ".join(m.get("role", "?") for m in messages)
            reason = str(e) or type(e).__name__
            raise ValueError(f"{where}: the chat template refuses this conversation ({roles}): {reason}") from e

    def prompt_ids(
        self, prompt: str | Sequence[dict[str, Any]], *, tools: list[Any] | None = None, where: str = "chat"
    ) -> list[int]:
        """The token ids of a text prompt, or of messages rendered with the assistant's generation prompt.

        Raises ValueError, naming `where`, for messages whose contents are not text (see `check_messages`), and for
        conversations that the template refuses.
        """
        if isinstance(prompt, str):
            coded, doubled = self._plain(check_text(prompt, where))
            if doubled:
                shown = self.tokenizer.decode(doubled)
                message = f"a prompt writes out {shown}, which the tokenizer adds too; one of the two is dropped"
                warnings.warn(message, TemplateWarning, stacklevel=1)
            return coded["input_ids"]
        return self.rendered_ids(self.prompt_text(prompt, tools=tools, where=where))

    def prompt_text(
        self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None = None, where: str = "chat"
    ) -> str:
        """Messages rendered with the assistant's generation prompt. Raises ValueError as `prompt_ids`."""
        return self.render(check_messages(messages, where), prompt=True, tools=tools, where=where)

    def rendered_ids(self, text: str) -> list[int]:
        """The token ids of a rendered text, whose special tokens are written out."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _plain(self, text: str, **options: Any) -> tuple[dict[str, list[Any]], list[int]]:
        """The fields of a tokenized plain text, and the tokens left out: a special token that the text writes out and
        the tokenizer adds too, such as BOS, is kept once. `options` are arguments of the tokenizer."""
        # verbose=False: no warning for texts longer than the model's context, which are split into windows
        coded, doubled = self.tokenizer(text, verbose=False, **options), []
        (before, after), ids = self._added, coded["input_ids"]
        first, end = 0, len(ids)
        if before and ids[len(before) : 2 * len(before)] == before:
            first, doubled = len(before), before
        if after and ids[first : -len(after)][-len(after) :] == after:
            end, doubled = end - len(after), doubled + after
        return {name: values[first:end] for name, values in coded.items()}, doubled

    @functools.cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer adds before and after a text."""
        coded = self.tokenizer("a", return_special_tokens_mask=True)
        pairs = list(zip(coded["input_ids"], coded["special_tokens_mask"], strict=True))
        before, after = (list(takewhile(lambda pair: pair[1], each)) for each in (pairs, reversed(pairs)))
        return [token for token, _ in before], [token for token, _ in reversed(after)]

    # -- training documents -------------------------------------------------------------------------------------

    def documents(self, record: Record) -> list[Document]:
        """Tokenizes a record and marks the assistant's spans.

        Returns one document if the template renders each turn independently of the messages after the turn. Some
        templates rewrite earlier turns, for example drop the reasoning. The decoder generated a rewritten turn from a
        different text, so each turn that is rewritten later becomes a document of its own, rendered up to the end of
        the turn. The record's prompt, an assistant message that opens the conversation, and a message that is empty
        because the template drops the message's calls, are context and not supervised. Raises ValueError, quoting the
        conversation, if no token or every token belongs to the assistant, and if a rendered turn does not start with
        the turn's generation prompt.
        """
        if record.template_kwargs:
            return self.of(record.template_kwargs).documents(replace(record, template_kwargs=None))
        if record.turns:
            raise ValueError(
                f"{record.where} has user turns but no answers to train on; fledge regenerate generates them"
            )
        if record.text is not None:
            return [self._text_document(record)]
        messages = record.messages or []
        answers = [i for i, m in enumerate(messages) if i >= max(record.prompt_length, 1) and m["role"] == "assistant"]
        turns = [i for i in answers if not (messages[i].get("tool_calls") and is_left_empty(messages[i], self.fields))]
        if not turns:
            excerpt = "; ".join(f"{m['role']}: {str(m.get('content'))[:60]}" for m in messages[:4])
            cure = "; this chat template drops its tool calls, which leaves nothing" if answers else ""
            if messages and messages[0]["role"] == "assistant":
                cure = "; its first message answers nothing, so it is not trained on"
            elif messages and messages[-1]["role"] == "user":
                cure = "; fledge regenerate generates answers"
            raise ValueError(f"{record.where} has no assistant message to train on ({excerpt}){cure}")
        full = self._render(record, len(messages), prompt=False)
        if len(turns) >= MANY_TURNS and (ranges := self._find_turns(record, turns, full)):
            return [self._document(record, full, ranges)]
        unchanged, documents = [], []  # turns that later messages do not rewrite; a document for each rewritten turn
        for i in turns:
            before = self._render(record, i, prompt=True)
            after = full if i + 1 == len(messages) else self._render(record, i + 1, prompt=False)
            after = self._generated(record, i, before, after)
            end = len(after) if full.startswith(after) else _common_prefix_length(full, after)
            if end == len(after) or self._has_stop_token(full[len(before) : end]):
                unchanged.append((len(before), end))
            else:
                documents.append(self._document(record, after, [(len(before), len(after))]))
        return [self._document(record, full, unchanged), *documents] if unchanged else documents

    def turn(self, record: Record, before: str) -> str:
        """A conversation that ends with an assistant message, rendered as by `documents`. `before` is the prompt after
        which the message was generated. Raises ValueError if the rendered text does not start with `before`."""
        n = len(record.messages or [])
        return self._generated(record, n - 1, before, self._render(record, n, prompt=False))

    def turn_document(self, text: str, start: int, where: str) -> Document:
        """A text of `turn`, tokenized as in training; the only span is the turn, from character `start` on. Raises
        ValueError if no token or every token belongs to the turn."""
        return self._document(Record(where), text, [(start, len(text))])

    def _generated(self, record: Record, i: int, before: str, after: str) -> str:
        """The rendered messages up to message i, `after`, as a text that starts with the message's prompt, `before`.
        Raises ValueError if `after` can't be changed into a text that starts with `before`."""
        if not after.startswith(before):
            after = self._after_its_prompt(record, i, before, after) or after
        if not after.startswith(before):
            opened = OPENED.search(before)
            if opened and not opened[3] and not has_reasoning((record.messages or [])[i], opened[1]):
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

    def _after_its_prompt(self, record: Record, i: int, before: str, after: str) -> str | None:
        """The prompt of message i, `before`, followed by the turn of message i, for templates that rewrite the turn or
        the earlier messages once message i is present; None if the turn is not found.

        DeepSeek-R1's template opens the reasoning in the prompt, and drops the reasoning from the turn (see
        `continued`). gpt-oss's template drops the reasoning before a tool call as soon as the final answer follows. The
        decoder saw the dropped reasoning when it generated the answer, so the turn is cut out of `after` and appended
        to `before`. The turn begins at the last turn opening before the first difference between `after` and the same
        chat rendered with a different answer.
        """
        plain = self._render(record, i, prompt=False)
        opening = before.removeprefix(plain)
        if not before.startswith(plain) or not opening:
            return None
        if after.startswith(plain):
            opened = OPENED.search(opening)
            header = plain + opening[: opened.start()] if opened else ""
            if not opened or not after.startswith(header):
                return None
            turn = continued(opening, after[len(header) :], (record.messages or [])[i])
            return None if turn is None else before + turn
        other = [*(record.messages or [])[:i], {"role": "assistant", "content": "fledge looks for this turn"}]
        end = _common_prefix_length(after, self.render(other, prompt=False, tools=record.tools, where=record.where))
        start = after.rfind(opening, 0, end) + len(opening)
        if start < len(opening) or self._has_stop_token(after[start:end]):
            return None
        return before + after[start:]

    def losses(self, record: Record, documents: Sequence[Document]) -> tuple[str, ...]:
        """The parts of a record, with the documents `documents`, that the template drops, as keys of LOSSES."""
        messages = record.messages or []
        if (text := record.text) is not None:
            ends = text if len(text) < 200 else text[:100] + text[-100:]  # where special tokens may be written out
            return ("added",) if any(self._added) and self._plain(ends)[1] else ()
        if not record.tools and not has_fields(messages):
            return ()
        supervised = messages[max(record.prompt_length, 1) :]
        fields = self.of(record.template_kwargs).fields

        def texts() -> str:
            return "\n".join(self.tokenizer.decode(d.tokens.tolist()) for d in documents)

        return find_losses(supervised, record.tools, fields, texts)

    def _find_turns(self, record: Record, turns: list[int], full: str) -> list[tuple[int, int]] | None:
        """The [start, end) character ranges of a chat's turns in its full text, in time linear in the number of turns.

        Rendering the chat up to every turn, as `documents` does otherwise, takes quadratic time. Here each turn, with
        the messages since the previous turn, is rendered directly after the opening exchange, as the last turn, as when
        the decoder generated the turn. If the concatenation of the rendered pieces is a prefix of the full text, the
        template renders every turn independently of the surrounding messages. Otherwise returns None: the caller must
        render the chat up to every turn.
        """
        messages, first = record.messages or [], turns[0] + 1
        try:
            prompt, opening = self._render(record, turns[0], prompt=True), self._render(record, first, prompt=False)
            if not (opening.startswith(prompt) and full.startswith(opening)):
                return None
            ranges, at = [(len(prompt), len(opening))], len(opening)
            for last, i in pairwise(turns):
                exchange = [*messages[:first], *messages[last + 1 : i + 1]]
                before = self.render(exchange[:-1], prompt=True, tools=record.tools)
                after = self.render(exchange, prompt=False, tools=record.tools)
                new = after.removeprefix(opening)
                if not (before.startswith(opening) and after.startswith(before) and full.startswith(new, at)):
                    return None
                ranges.append((at + len(before) - len(opening), at + len(new)))
                at += len(new)
        except ValueError:  # a template may require the omitted messages, such as the tool call before a tool's answer
            return None
        return ranges

    def _has_stop_token(self, text: str) -> bool:
        """Whether a turn that starts with `text` ends within `text`."""
        return not self.stop_ids.isdisjoint(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, record: Record, n: int, *, prompt: bool) -> str:
        return self.render((record.messages or [])[:n], prompt=prompt, tools=record.tools, where=record.where)

    def _document(self, record: Record, text: str, turns: list[tuple[int, int]]) -> Document:
        """Tokenizes `text`; `turns` are the [start, end) character ranges of the assistant's turns.

        Raises ValueError if no token or every token belongs to the assistant.
        """
        coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, starts = coded["input_ids"], [a for a, _ in coded["offset_mapping"]]
        spans = np.full(len(ids), -1, dtype=np.int32)
        for span, (start, end) in enumerate(turns):
            a, b = self._first_token(ids, starts, start, text), bisect_left(starts, end)
            # b + 1: some templates (GLM) end a turn with the next role's token, which is a stop token
            stops = [j for j in range(a, min(b + 1, len(ids))) if ids[j] in self.stop_ids]
            spans[a : stops[0] + 1 if stops else b] = span
        supervised = int((spans >= 0).sum())
        if supervised in (0, len(ids)):
            raise ValueError(
                f"{record.where}: {supervised} of {len(ids)} tokens are the assistant's with this template; the "
                f"conversation starts with {text[:120]!r}"
            )
        return Document(np.array(ids, dtype=np.int32), spans)

    def _text_document(self, record: Record) -> Document:
        """A plain text without a template, supervised from the second token. With a prompt, only the completion and the
        end token are supervised; the tokenizer's end token is added if the completion lacks an end token."""
        coded, _ = self._plain(record.text, return_offsets_mapping=True)
        ids, starts = coded["input_ids"], [a for a, _ in coded["offset_mapping"]]
        eos = self.tokenizer.eos_token_id
        ended = not record.prompt_length or eos is None or not {eos, *self.stop_ids}.isdisjoint(ids[-1:])
        end = [] if ended else [eos]
        if len(ids) + len(end) < 3:
            raise ValueError(f"{record.where}: a text of {len(ids)} tokens is too short; at least 3 are needed")
        starts = list(accumulate(starts, max))  # a special token after the text has offset 0
        first = max(self._first_token(ids, starts, record.prompt_length, record.text), 1)
        if first == len(ids):
            raise ValueError(
                f"{record.where} has a prompt but no completion to train on; fledge regenerate generates one"
            )
        spans = np.zeros(len(ids) + len(end), dtype=np.int32)
        spans[:first] = -1
        return Document(np.array(ids + end, dtype=np.int32), spans)

    def _first_token(self, ids: list[int], starts: list[int], start: int, text: str) -> int:
        """The index of the first token that starts at or after character `start`.

        A token that straddles `start` belongs to the prompt.
        """
        a = bisect_left(starts, start)
        return a + (a < len(ids) and starts[a] - self._hidden_spaces(ids[a], starts[a], text) < start)

    def _hidden_spaces(self, token: int, start: int, text: str) -> int:
        """The number of a byte-level token's leading spaces outside the token's offsets (Llama-3, GPT-2)."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        spaces = len(name) - len(name.lstrip("\u0120"))  # U+0120 represents a space in byte-level vocabularies
        return spaces if text[start - spaces : start] == " " * spaces and not text.startswith(" ", start) else 0


@contextmanager
def limit_compute_time(seconds: float) -> Iterator[None]:
    """Context manager: raises ComputeTimeout inside the block once the block has used `seconds` of CPU time.

    The timer counts only the process's user CPU time, so a suspended or busy machine does not trigger the timeout.
    Python delivers signals to the main thread, and Windows lacks the timer: other threads and Windows have no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    _install_handler()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, min(seconds, 1.0))  # repeats, in case the block catches the error
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache  # installing a handler takes ten times as long as setting the timer
def _install_handler() -> None:
    def stop(*_: Any) -> None:
        raise ComputeTimeout

    signal.signal(signal.SIGVTALRM, stop)


def _common_prefix_length(a: str, b: str) -> int:
    """The length of the common prefix of two strings, by bisection."""
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda n: not b.startswith(a[:n]))


def _template_line(error: Exception) -> str:
    """The template line that raised an error, as a phrase for messages; empty if other code raised the error.

    jinja compiles templates under the file name "<template>".
    """
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    return f" in line {lines[-1]} of the template" if lines else ""


def _unread(template: Any, names: Collection[str]) -> str:
    """A message about the variables `names` that a chat template does not read. `template` is a text or several texts
    by name. Empty if the template reads all variables, or is not text."""
    texts = [*template.values()] if isinstance(template, dict) else [template]
    if not all(isinstance(text, str) for text in texts):
        return ""
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    unread = [name for name in names if name not in words]
    if not unread:
        return ""
    alike = difflib.get_close_matches(unread[0], sorted(words), n=1, cutoff=0.85)
    meant = f"; did you mean {alike[0]}?" if alike else ""
    return f"the chat template reads no variable {' and no '.join(unread)}, which has no effect{meant}"
