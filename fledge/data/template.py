"""Chat templates: from a conversation to tokens and the spans that the assistant wrote."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any

import torch

from fledge.data.read import Record
from fledge.fields import check_template_kwargs
from fledge.types import Document


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
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=prompt, tools=tools, **self.kwargs
            )
        except Exception as e:  # templates raise what they like: jinja errors, TypeErrors on odd contents
            roles = " ".join(m.get("role", "?") for m in messages)
            raise ValueError(f"{where}: the chat template refuses this conversation ({roles}): {e}") from e

    def prompt_ids(
        self, prompt: str | Sequence[dict[str, Any]], *, tools: list[Any] | None = None, where: str = "chat"
    ) -> list[int]:
        """Token ids of a raw text prompt, or of messages rendered up to the assistant's turn."""
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"]
        text = self.render(prompt, prompt=True, tools=tools, where=where)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    # -- training documents -------------------------------------------------------------------------------------

    def documents(self, record: Record) -> list[Document]:
        """Tokens with the assistant's spans.

        One document where the template renders each turn the same whatever follows it. A template that rewrites
        history (drops earlier reasoning, say) shows the decoder another text at every turn, so there each turn whose
        prompt or words it rewrites becomes a document of its own, rendered as the decoder would see it. An assistant's
        message that opens the conversation answers no prompt and is only read. Raises ValueError with an example where
        nobody, or everybody, is the assistant, or no turn's start can be found.
        """
        if record.text is not None:
            return [self._plain(record)]
        messages = record.messages or []
        turns = [i for i, m in enumerate(messages) if i > 0 and m["role"] == "assistant"]
        if not turns:
            shown = "; ".join(f"{m['role']}: {str(m.get('content'))[:60]}" for m in messages[:4])
            raise ValueError(f"{record.where} has no assistant message to learn from ({shown})")
        full = self._render(record, len(messages), prompt=False)
        whole, documents = [], []
        for i in turns:
            before, after = self._render(record, i, prompt=True), self._render(record, i + 1, prompt=False)
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
            a, b = bisect_left(starts, start), bisect_left(starts, end)
            if a < b and starts[a] - self._hidden_spaces(ids[a], starts[a], text) < start:
                a += 1  # a token that straddles the start belongs to the prompt
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

    def _hidden_spaces(self, token: int, start: int, text: str) -> int:
        """Spaces a byte-level token begins with and its offsets leave out (Llama-3 and GPT-2 trim them)."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        spaces = len(name) - len(name.lstrip("\u0120"))  # how byte-level vocabularies write a space
        return spaces if text[start - spaces : start] == " " * spaces and not text.startswith(" ", start) else 0

    def _plain(self, record: Record) -> Document:
        # not verbose: it would warn of texts longer than the model reads, which are cut into windows
        ids = torch.tensor(self.tokenizer(record.text, verbose=False)["input_ids"], dtype=torch.int32)
        if ids.numel() < 3:
            raise ValueError(f"{record.where}: a text of {ids.numel()} tokens has nothing to draft")
        spans = torch.zeros_like(ids)
        spans[0] = -1
        return Document(ids, spans)


def _common(a: str, b: str) -> int:
    """Length of the text that two renderings begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
