"""Chat templates: from a conversation to tokens and the spans that the assistant wrote."""

from __future__ import annotations

import traceback
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from fledge.data.limit import Unending, at_most
from fledge.data.record import Record, check_messages, check_text
from fledge.fields import check_template_kwargs
from fledge.types import Document

RENDER_SECONDS = 10.0  # of computing, for one rendering; the longest chats take a few hundredths
MANY_TURNS = 16  # from here on the turns of a chat are first looked for in linear time


class ChatTemplate:
    """A tokenizer's own chat template with fixed keyword arguments, such as enable_thinking=False.

    Raises ValueError for arguments that are no variables of a template (`check_template_kwargs`).
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int], kwargs: dict[str, Any] | None = None):
        self.tokenizer, self.stop_ids = tokenizer, frozenset(stop_ids)
        self.kwargs = dict(check_template_kwargs(kwargs or {}, "the template's arguments"))
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{type(tokenizer).__name__} gives no character offsets; fledge needs a fast tokenizer")

    # -- prompts ------------------------------------------------------------------------------------------------

    def render(
        self, messages: Sequence[dict[str, Any]], *, prompt: bool, tools: list[Any] | None = None, where: str = "chat"
    ) -> str:
        """The conversation as text; with `prompt`, up to where the assistant begins to write."""
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{where} is a conversation, but the tokenizer has no chat template; use an instruction-tuned target, "
                "or data with plain `text`"
            )
        try:
            with at_most(RENDER_SECONDS):
                return self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=prompt, tools=tools, **self.kwargs
                )
        except Unending as e:
            raise ValueError(
                f"{where}: the tokenizer's chat template does not end: it was stopped after {RENDER_SECONDS:g} s of "
                f"computing{_template_line(e)}; mend it, or use a tokenizer with another"
            ) from e
        except Exception as e:  # templates raise what they like: jinja errors, TypeErrors on odd contents
            roles = " ".join(m.get("role", "?") for m in messages)
            why = str(e) or type(e).__name__
            raise ValueError(f"{where}: the chat template refuses this conversation ({roles}): {why}") from e

    def prompt_ids(
        self, prompt: str | Sequence[dict[str, Any]], *, tools: list[Any] | None = None, where: str = "chat"
    ) -> list[int]:
        """Token ids of a raw text prompt, or of messages rendered up to the assistant's turn. Raises ValueError, naming
        `where`, for messages whose contents are not text (see `check_messages`) or that the template refuses."""
        if isinstance(prompt, str):
            return self.tokenizer(check_text(prompt, where))["input_ids"]
        text = self.render(check_messages(prompt, where), prompt=True, tools=tools, where=where)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    # -- training documents -------------------------------------------------------------------------------------

    def documents(self, record: Record) -> list[Document]:
        """Tokens with the assistant's spans.

        One document where the template renders each turn the same whatever follows it. A template that rewrites
        history (drops earlier reasoning, say) shows the decoder another text at every turn, so there each turn whose
        prompt or words it rewrites becomes a document of its own, rendered as the decoder would see it. An assistant's
        message that opens the conversation answers no prompt and is only read, and so is what the record gives as its
        prompt. Raises ValueError with an example where nobody, or everybody, is the assistant, or no turn's start can
        be found.
        """
        if record.turns:
            raise ValueError(
                f"{record.where} has user turns and no answers to learn from; fledge regenerate has the target answer"
            )
        if record.text is not None:
            return [self._plain(record)]
        messages = record.messages or []
        turns = [i for i, m in enumerate(messages) if i >= max(record.given, 1) and m["role"] == "assistant"]
        if not turns:
            shown = "; ".join(f"{m['role']}: {str(m.get('content'))[:60]}" for m in messages[:4])
            raise ValueError(f"{record.where} has no assistant message to learn from ({shown})")
        full = self._render(record, len(messages), prompt=False)
        if len(turns) >= MANY_TURNS and (places := self._places(record, turns, full)):
            return [self._document(record, full, places)]
        whole, documents = [], []
        for i in turns:
            before = self._render(record, i, prompt=True)
            after = full if i + 1 == len(messages) else self._render(record, i + 1, prompt=False)
            if not after.startswith(before):
                raise ValueError(
                    f"{record.where}, message {i + 1}: the template's prompt for this turn is not how the finished "
                    f"turn begins, so no decoder would ever write it. Prompt ends {before[-60:]!r}, the turn reads "
                    f"{after[max(len(before) - 60, 0) :][:120]!r}. Perhaps --template-kwargs contradict the data"
                )
            end = len(after) if full.startswith(after) else _common(full, after)
            if end == len(after) or self._stops(full[len(before) : end]):
                whole.append((len(before), end))
            else:
                documents.append(self._document(record, after, [(len(before), len(after))]))
        return [self._document(record, full, whole), *documents] if whole else documents

    def _places(self, record: Record, turns: list[int], full: str) -> list[tuple[int, int]] | None:
        """Where the turns of a long chat begin and end in its full text, found without rendering every beginning of the
        chat, which takes time quadratic in its turns. None where only that can tell.

        Each turn, with the messages since the last, is rendered behind the opening exchange alone: there it comes last,
        as when it was written. Where these pieces joined are how the full text begins, the template writes no turn
        otherwise for what stands before or behind it, and each begins where its prompt ends.
        """
        messages, first = record.messages or [], turns[0] + 1
        try:
            prompt, opening = self._render(record, turns[0], prompt=True), self._render(record, first, prompt=False)
            if not (opening.startswith(prompt) and full.startswith(opening)):
                return None
            places, at = [(len(prompt), len(opening))], len(opening)
            for last, i in pairwise(turns):
                exchange = [*messages[:first], *messages[last + 1 : i + 1]]
                asked = self.render(exchange[:-1], prompt=True, tools=record.tools)
                answered = self.render(exchange, prompt=False, tools=record.tools)
                new = answered.removeprefix(opening)
                if not (asked.startswith(opening) and answered.startswith(asked) and full.startswith(new, at)):
                    return None
                places.append((at + len(asked) - len(opening), at + len(new)))
                at += len(new)
        except ValueError:  # a template may ask for the messages in between, such as a tool's call before its answer
            return None
        return places

    def _stops(self, text: str) -> bool:
        """Whether a turn that begins with this text is over within it."""
        return not self.stop_ids.isdisjoint(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, record: Record, n: int, *, prompt: bool) -> str:
        return self.render((record.messages or [])[:n], prompt=prompt, tools=record.tools, where=record.where)

    def _document(self, record: Record, text: str, turns: list[tuple[int, int]]) -> Document:
        """`text` in tokens; `turns` are the [start, end) of the assistant's in characters."""
        coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, starts = coded["input_ids"], [a for a, _ in coded["offset_mapping"]]
        spans = torch.full((len(ids),), -1, dtype=torch.int32)
        for span, (start, end) in enumerate(turns):
            a, b = self._first(ids, starts, start, text), bisect_left(starts, end)
            # the token after the turn too, for templates that end it with the next speaker's name, a stop token (GLM)
            stops = [j for j in range(a, min(b + 1, len(ids))) if ids[j] in self.stop_ids]
            spans[a : stops[0] + 1 if stops else b] = span
        supervised = int((spans >= 0).sum())
        if supervised in (0, len(ids)):
            raise ValueError(
                f"{record.where}: {supervised} of {len(ids)} tokens are the assistant's, by this template; the "
                f"conversation begins {text[:120]!r}"
            )
        return Document(torch.tensor(ids, dtype=torch.int32), spans)

    def _plain(self, record: Record) -> Document:
        """A text without a template, supervised from its second token on, or from where its completion begins."""
        # not verbose: it would warn of texts longer than the model reads, which are cut into windows
        coded = self.tokenizer(record.text, return_offsets_mapping=True, verbose=False)
        ids, starts = coded["input_ids"], [a for a, _ in coded["offset_mapping"]]
        if len(ids) < 3:
            raise ValueError(f"{record.where}: a text of {len(ids)} tokens has nothing to draft")
        starts = list(accumulate(starts, max))  # a special token behind the text says it starts at 0
        first = max(self._first(ids, starts, record.given, record.text), 1)
        if first == len(ids):
            raise ValueError(
                f"{record.where} has a prompt and no completion to learn from; fledge regenerate has the target answer"
            )
        spans = torch.zeros(len(ids), dtype=torch.int32)
        spans[:first] = -1
        return Document(torch.tensor(ids, dtype=torch.int32), spans)

    def _first(self, ids: list[int], starts: list[int], start: int, text: str) -> int:
        """The first token at or behind `start` in the text; one that straddles it belongs to the prompt."""
        a = bisect_left(starts, start)
        return a + (a < len(ids) and starts[a] - self._hidden_spaces(ids[a], starts[a], text) < start)

    def _hidden_spaces(self, token: int, start: int, text: str) -> int:
        """Spaces a byte-level token begins with and its offsets leave out (Llama-3 and GPT-2 trim them)."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        spaces = len(name) - len(name.lstrip("\u0120"))  # how byte-level vocabularies write a space
        return spaces if text[start - spaces : start] == " " * spaces and not text.startswith(" ", start) else 0


def _common(a: str, b: str) -> int:
    """Length of the text that two renderings begin with alike."""
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda n: not b.startswith(a[:n]))


def _template_line(error: Exception) -> str:
    """In which line of a template an error was raised, where it was in one; jinja calls them so."""
    steps = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in steps if frame.f_code.co_filename == "<template>"]
    return f" in its line {lines[-1]}" if lines else ""
