"""`fledge regenerate --endpoint`: a server answers the prompts of the data, many at a time."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.data.answering import answered_conversation, count_answers, reasoning_field, split_conversation
from fledge.data.chat_fields import as_sent
from fledge.engines.client import Answer, BadPrompt, Client, Decoding, Prompt, ServerProblem
from fledge.jobs.answers_file import AnswersFile
from fledge.jobs.options import default_new_tokens, parse_template_kwargs
from fledge.jobs.regenerate import NEW_TOKENS, RegenerateOptions

if TYPE_CHECKING:
    from fledge.data.record import Record
    from fledge.data.template import ChatTemplate

LONGEST = 2**62  # the context of a server that does not say how long it is


def answer_remaining(
    options: RegenerateOptions, records: list[Record], refused: list[str], out: Path, say: Callable[[str], None],
    progress: Any,
) -> None:  # fmt: skip
    """Answers the records that have no line in the output file yet. The caller holds the lock of the file. `refused`
    are the reasons for which records of the data were skipped.

    Raises ValueError for a record that cannot be answered (unless --skip-bad), for answers that are not those of the
    target's template, and if the server does not answer.
    """
    asyncio.run(_Regeneration(options, records, refused, out, say, progress).run())


class _Regeneration:
    """One run of the job: its options, and counts of what happened."""

    def __init__(
        self, options: RegenerateOptions, records: list[Record], refused: list[str], out: Path,
        say: Callable[[str], None], progress: Any,
    ):  # fmt: skip
        self.options, self.records, self.refused, self.out = options, records, refused, out
        self.say, self.progress = say, progress
        self.template = _template_of(options)
        self.reasoning = reasoning_field(self.template) if self._renders_chats() else "reasoning_content"
        self.truncated = 0
        self.warned_of_tools = False

    async def run(self) -> None:
        options = self.options
        key = os.environ.get(options.api_key_env)
        async with Client(
            options.endpoint, api_key=key, connections=options.concurrency, timeout=options.request_timeout
        ) as self.client:
            server = await self.client.connect(options.model)
            context = server.context or LONGEST
            self.decoding = Decoding(
                options.max_new_tokens or default_new_tokens(NEW_TOKENS, context), options.temperature, options.top_p,
                options.top_k, template_kwargs=parse_template_kwargs(options.template_kwargs),
            )  # fmt: skip
            self.file = AnswersFile(self.out, _headers(self.records, options, server.model))
            if len(self.file.done) == len(self.records):
                self.file.sort()
                self.say(f"{self.out} is complete: {len(self.records):,} records")
                return
            if self.file.done:
                self.say(f"continuing {self.out} after {len(self.file.done):,} of {len(self.records):,} records")
            await self._answer_all()
        self._report()

    async def _answer_all(self) -> None:
        """Answers all remaining records: as many workers as requests are allowed take one conversation after the other,
        so that the server always has that many requests."""
        answers = [count_answers(r) for r in self.records]
        done = sum(answers[i] for i in self.file.done)
        remaining = iter([i for i in range(len(self.records)) if i not in self.file.done])
        with self.file, self.progress.count("answers", sum(answers), done, unit="answers") as self.advance:
            workers = [asyncio.create_task(self._work(remaining)) for _ in range(self.options.concurrency)]
            try:
                await asyncio.gather(*workers)
            except ServerProblem as e:
                raise ValueError(f"{e}; run the same command again to continue {self.out}") from e
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        self.file.sort()

    async def _work(self, remaining: Iterator[int]) -> None:
        for index in remaining:
            record = self.records[index]
            try:
                row = await self._answer(index, record)
            except (BadPrompt, _BadRecord) as e:
                if not self.options.skip_bad:
                    cure = "change the record, lower --max-new-tokens, or skip such records by --skip-bad"
                    raise ValueError(f"{record.where}: {e}; {cure}") from e
                self.refused.append(f"{record.where}: {e}")
            else:
                self.file.append({index: row})

    async def _answer(self, index: int, record: Record) -> dict[str, Any]:
        """The fields of the answered record."""
        if record.text is not None:
            return await self._continue_text(index, record)
        messages, rest = split_conversation(record)
        messages, turn = list(messages), 0
        while any(m["role"] == "assistant" for m in rest):
            while rest[0]["role"] != "assistant":
                messages.append(rest.pop(0))
            rest.pop(0)
            turn += 1
            messages.append(self._message(await self._ask(index, messages, turn)))
        return answered_conversation(record, messages)

    async def _continue_text(self, index: int, record: Record) -> dict[str, Any]:
        length, text = record.prompt_length, record.text or ""
        if self.template is None and not length:
            raise ValueError(
                f"{record.where}: of a plain text, the first --prompt-tokens are kept, as --target's tokenizer counts "
                "them; give --target MODEL, or the data as `prompt` and `completion`"
            )
        if self.template is None:
            return {"prompt": text[:length], "completion": (await self._ask(index, text[:length], 0)).text}
        ids = self._prompt_ids(text[: length or None], record)
        if length:
            return {"prompt": text[:length], "completion": (await self._ask(index, ids, 0)).text}
        ids = ids[: self.options.prompt_tokens]
        answer = await self._ask(index, ids, 0)
        return {"text": self.template.tokenizer.decode(ids, skip_special_tokens=True) + answer.text}

    async def _ask(self, index: int, prompt: Prompt, turn: int) -> Answer:
        """The server's answer to a prompt, after checks. `turn` is the number of the answer in its record."""
        record, seed = self.records[index], None
        if self.options.was_given("seed") and self.options.temperature > 0:
            seed = _seed(self.options.seed, index, turn)
        ours = None
        if self.template is not None and not isinstance(prompt, str):
            ids = isinstance(prompt[0], int)
            ours = prompt if ids else self._prompt_ids(prompt, record)
        sent = prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else [as_sent(m) for m in prompt]
        compared = ours is not None
        answer = await self.client.ask(sent, self.decoding, tools=record.tools, seed=seed, token_ids=compared)
        if ours is not None and (difference := answer.prompt_difference(ours)):
            self._explain_prompt(record, difference)
        if answer.finish == "tool_calls":
            raise _BadRecord(
                "the server made a tool call of the answer, so its text is lost; start the server without its tool "
                "call parser"
            )
        self.truncated += answer.finish == "length"
        self.advance()
        return answer

    def _message(self, answer: Answer) -> dict[str, Any]:
        """The answer as a message of the data. Raises ServerProblem for reasoning that the template would leave out."""
        message = {"role": "assistant", "content": answer.text}
        if not answer.reasoning:
            return message
        if self.reasoning is None:
            raise ServerProblem(
                f"the server separates the reasoning from the answer, and the chat template of {self.options.target} "
                "does not render reasoning, so a draft would not be trained on it; start the server without its "
                "reasoning parser"
            )
        return message | {self.reasoning: answer.reasoning}

    def _explain_prompt(self, record: Record, difference: str) -> None:
        """Raises ServerProblem for a prompt that is other tokens on the server; with tools, only says so once, since
        servers rewrite their JSON."""
        found = f"{record.where}: the prompt is not that of {self.options.target} ({difference})"
        if not record.tools:
            raise ServerProblem(
                f"{found}: the server has another template or thinking mode, adds a system prompt, or serves another "
                "model. Give --template-kwargs as the server needs them, or leave --target out to keep such answers"
            )
        if not self.warned_of_tools:
            self.warned_of_tools = True
            self.say(f"{found}: the server renders tools in another way")

    def _prompt_ids(self, prompt: str | list[dict[str, Any]], record: Record) -> list[int]:
        try:
            return self.template.prompt_ids(prompt, tools=record.tools, where=record.where)
        except ValueError as e:
            raise _BadRecord(str(e).removeprefix(f"{record.where}: ")) from e

    def _renders_chats(self) -> bool:
        return self.template is not None and self.template.tokenizer.chat_template is not None

    def _report(self) -> None:
        """Says what was written, cut, skipped and repeated."""
        if self.refused and not self.file.done:
            raise ValueError(f"every record was refused, the first because: {self.refused[0]}")
        self.say(f"wrote {len(self.file.done):,} records to {self.out}")
        if self.truncated:
            limit = self.decoding.max_new_tokens
            self.say(f"{self.truncated:,} answers reached --max-new-tokens {limit}; they are kept, cut at that length")
        if self.refused:
            self.say(f"{len(self.refused):,} records were refused (--skip-bad), the first because: {self.refused[0]}")
        if repeated := self.client.repeated:
            self.say(f"{repeated.total():,} requests were repeated: {describe_repeated(repeated)}")


class _BadRecord(ValueError):
    """A record that cannot be answered; others may be fine."""


def describe_repeated(repeated: Counter[str]) -> str:
    """The reasons for which requests were repeated, with their numbers."""
    return ", ".join(f"{reason} ({n:,})" for reason, n in repeated.most_common())


def _template_of(options: RegenerateOptions) -> ChatTemplate | None:
    """The chat template of --target, if it is given."""
    if not options.target:
        return None
    from fledge.data.template import ChatTemplate
    from fledge.targets.loading import load_target

    target = load_target(options.target, weights=False, trust_remote_code=options.trust_remote_code)
    return ChatTemplate(target.tokenizer, target.stop_ids, parse_template_kwargs(options.template_kwargs))


def _headers(records: list[Record], options: RegenerateOptions, model: str) -> list[dict[str, str]]:
    """The first fields of the rows. Records of the same content and location (`@2`) are told apart by their number."""
    asked = [model, options.max_new_tokens or NEW_TOKENS, options.prompt_tokens, options.temperature, options.top_p]
    asked += [options.top_k, options.seed if options.was_given("seed") else None, options.template_kwargs]
    seen: Counter[str] = Counter()
    headers = []
    for r in records:
        content = json.dumps([asked, r.where, r.messages, r.text, r.tools, r.turns, r.prompt_length])
        key = hashlib.sha256(f"{content}{seen[content] or ''}".encode()).hexdigest()[:16]
        seen[content] += 1
        headers.append({"source": r.where, "asked": key})
    return headers


def _seed(seed: int, index: int, turn: int) -> int:
    """The seed of one request, below 2**63, as servers take it."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
