"""`fledge regenerate --endpoint`: a server answers the prompts of the data, many at a time."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fledge.data.answering import (
    answered_conversation,
    count_answers,
    reasoning_field,
    split_conversation,
    text_prompt,
)
from fledge.data.chat_fields import as_sent
from fledge.data.limit import EndlessTemplate
from fledge.data.record import Record
from fledge.engines.client import Answer, Client, Decoding, Prompt, run_together
from fledge.http import BadRequest, ServerProblem, key_in
from fledge.jobs.answer_check import ENOUGH, REWRITTEN, UNKNOWN, AnswerCheck, Turn, chat_turn, compare
from fledge.jobs.answers_file import AnswersFile
from fledge.jobs.options import default_new_tokens, parse_template_kwargs
from fledge.jobs.regenerate import NEW_TOKENS, RegenerateOptions

if TYPE_CHECKING:
    from fledge.data.template import ChatTemplate

T = TypeVar("T")

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
    """One run of the job: its options, and counts of what happened.

    Workers ask the server and put its answers into a queue: a Turn for each answer that is compared with the target's
    template, then the row of the record. One writer takes them out again. The comparison, and everything else for which
    the tokenizer is needed, runs in one thread beside the event loop, so that no request waits for it.
    """

    def __init__(
        self, options: RegenerateOptions, records: list[Record], refused: list[str], out: Path,
        say: Callable[[str], None], progress: Any,
    ):  # fmt: skip
        self.options, self.records, self.refused, self.out = options, records, refused, out
        self.say, self.progress = say, progress
        self.template = _template_of(options)
        chat = next((r for r in records if r.text is None), None)
        if chat is not None and self.template is not None and not self._renders_chats():
            raise ValueError(
                f"{options.target} has no chat template, and {chat.where} is a conversation; give as --target the "
                "instruction-tuned model that the server has"
            )
        self.reasoning = reasoning_field(self.template) if self._renders_chats() else "reasoning_content"
        self.check = AnswerCheck()
        self.truncated = 0
        self.warned_of_tools = False

    async def run(self) -> None:
        options = self.options
        key = key_in(options.api_key_env)
        async with Client(
            options.endpoint, api_key=key, connections=options.concurrency, timeout=options.request_timeout
        ) as self.client:
            server = await self.client.connect(options.model)
            context = server.context or LONGEST
            self.decoding = Decoding(
                options.max_new_tokens or default_new_tokens(NEW_TOKENS, context), options.temperature, options.top_p,
                options.top_k, template_kwargs=parse_template_kwargs(options.template_kwargs),
            )  # fmt: skip
            headers = _headers(self.records, options, server.model, self.decoding.max_new_tokens)
            self.file = AnswersFile(self.out, headers)
            if len(self.file.done) == len(self.records):
                self.file.sort()
                self.say(f"{self.out} is complete: {len(self.records):,} records")
                return
            self.written_before = len(self.file.done)
            if self.written_before:
                self.say(f"continuing {self.out} after {self.written_before:,} of {len(self.records):,} records")
            await self._answer_all()
        self._report()

    async def _answer_all(self) -> None:
        """Answers all remaining records, and writes them."""
        answers = [count_answers(r) for r in self.records]
        done = sum(answers[i] for i in self.file.done)
        remaining = iter([i for i in range(len(self.records)) if i not in self.file.done])
        self.answered: asyncio.Queue[Turn | dict[int, dict[str, Any]] | None] = asyncio.Queue()
        with (
            ThreadPoolExecutor(1) as self.thread, self.file,
            self.progress.count("answers", sum(answers), done, unit="answers") as self.advance,
        ):  # fmt: skip
            asking, writing = asyncio.create_task(self._ask_all(remaining)), asyncio.create_task(self._write_all())
            try:
                await asyncio.gather(asking, asyncio.shield(writing))
            except ServerProblem as e:
                raise ValueError(f"{e}; run the same command again to continue {self.out}") from e
            finally:
                asking.cancel()
                await asyncio.gather(asking, writing, return_exceptions=True)  # what was answered is written
        self.file.sort()

    async def _ask_all(self, remaining: Iterator[int]) -> None:
        """As many workers as requests are allowed take one conversation after the other, so that the server always has
        that many requests."""
        try:
            await run_together(self._work(remaining) for _ in range(self.options.concurrency))
        finally:
            self.answered.put_nowait(None)

    async def _work(self, remaining: Iterator[int]) -> None:
        for index in remaining:
            record = self.records[index]
            try:
                row = await self._answer(index, record)
            except (BadRequest, _BadRecord) as e:
                if not self.options.skip_bad:
                    cure = "change the record, lower --max-new-tokens, or skip such records by --skip-bad"
                    raise ValueError(f"{record.where}: {e}; {cure}") from e
                self.refused.append(f"{record.where}: {e}")
            else:
                self.answered.put_nowait({index: row})

    async def _write_all(self) -> None:
        """Compares answers and writes rows. While most of the answers are not what the server generated, rows are held
        back: if the job ends because of that, the same command can be given again with another server."""
        held: dict[int, dict[str, Any]] = {}
        while (item := await self.answered.get()) is not None:
            if isinstance(item, Turn):
                await self._compare(item)
                continue
            held |= item
            if not self.check.mostly_rewritten:
                self.file.append(held)
                held = {}
        if held:
            self._explain_answers()

    async def _compare(self, turn: Turn) -> None:
        """Compares an answer with the target's template. Raises ServerProblem for another prompt, and if most answers
        have another text than the server generated."""
        found = await self._beside(lambda: compare(self.template, turn))
        if found.prompt:
            self._explain_prompt(turn.record, found.prompt)
        self.check.add(turn, found)
        if found.answer == UNKNOWN and self.check.counts[UNKNOWN] == 1:
            self.say(
                "the answers of this server cannot be compared with what the target's template gives, as it returns "
                "neither their token ids nor a number of tokens that can be compared; vLLM returns the ids"
            )
        if self.check.compared >= ENOUGH and self.check.mostly_rewritten:
            self._explain_answers()

    async def _beside(self, function: Callable[[], T]) -> T:
        """The result of a function that runs in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, function)

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
            messages.append(await self._next_message(index, messages, turn))
        return answered_conversation(record, messages)

    async def _next_message(self, index: int, messages: list[dict[str, Any]], turn: int) -> dict[str, Any]:
        """The answer to messages, as a message."""
        record = self.records[index]
        template = self.template and self.template.of(record.template_kwargs)
        if template is not None:
            with _refusing(record):
                before = template.prompt_text(messages, tools=record.tools, where=record.where)
        answer = await self._ask(index, [as_sent(m) for m in messages], turn)
        message = self._message(answer)
        if template is not None:
            self.answered.put_nowait(chat_turn(template, record, [*messages, message], turn, before, answer))
        return message

    async def _continue_text(self, index: int, record: Record) -> dict[str, Any]:
        length, text = record.prompt_length, record.text or ""
        template = self.template
        if template is None and not length:
            raise ValueError(
                f"{record.where}: of a plain text, the first --prompt-tokens are kept, as --target's tokenizer counts "
                "them; give --target MODEL, or the data as `prompt` and `completion`"
            )
        if template is None:
            return {"prompt": text[:length], "completion": (await self._ask(index, text[:length], 0)).text}
        with _refusing(record):
            ids, prompt = await self._beside(lambda: self._text_prompt(template, text, length))
        answer = await self._ask(index, ids, 0)
        self.answered.put_nowait(Turn(record, 1, ids, answer, prompt + answer.text))
        return {"prompt": prompt, "completion": answer.text} if length else {"text": prompt + answer.text}

    def _text_prompt(self, template: ChatTemplate, text: str, length: int) -> tuple[list[int], str]:
        """The prompt of a plain text, as token ids and as text: its first `length` characters, or --prompt-tokens."""
        if length:
            return template.prompt_ids(text[:length]), text[:length]
        return text_prompt(template, text, self.options.prompt_tokens)

    async def _ask(self, index: int, prompt: Prompt, turn: int) -> Answer:
        """The server's answer to a prompt. `turn` is the number of the answer in its record."""
        record, seed = self.records[index], None
        if self.options.was_given("seed") and self.options.temperature > 0:
            seed = _seed(self.options.seed, index, turn)
        answer = await self.client.ask(
            prompt, self.decoding.of(record.template_kwargs), tools=record.tools, seed=seed,
            token_ids=self.template is not None,
        )  # fmt: skip
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

    def _explain_answers(self) -> None:
        """Raises ServerProblem for answers whose text is not what the server generated."""
        target, kept = self.options.target, len(self.file.done)
        written = f" (remove its {kept:,} records first, if they are of this server)" * bool(kept)
        raise ServerProblem(
            f"{self.check.counts[REWRITTEN]:,} of {self.check.compared:,} answers are not what the server generated, "
            f"the first: {self.check.first[REWRITTEN]}. A draft would be trained on another text than it will see. The "
            f"server strips special tokens, its reasoning or tool call parser rewrites answers, or the template of "
            f"{target} renders them otherwise: start the server without parsers, give --template-kwargs as the answers "
            f"need them, or leave --target out to keep such answers{written}"
        )

    def _renders_chats(self) -> bool:
        return self.template is not None and self.template.tokenizer.chat_template is not None

    def _report(self) -> None:
        """Says what was written, cut, skipped and repeated."""
        if self.refused and not self.file.done:
            raise ValueError(f"every record was refused, the first because: {self.refused[0]}")
        self.say(f"wrote {len(self.file.done):,} records to {self.out}")
        for line in self.check.report(" of this run" if self.written_before else ""):
            self.say(line)
        if self.truncated:
            limit = self.decoding.max_new_tokens
            self.say(f"{self.truncated:,} answers reached --max-new-tokens {limit}; they are kept, cut at that length")
        if self.refused:
            self.say(f"{len(self.refused):,} records were refused (--skip-bad), the first because: {self.refused[0]}")
        if repeated := self.client.repeated:
            self.say(f"{repeated.total():,} requests were repeated: {describe_repeated(repeated)}")


class _BadRecord(ValueError):
    """A record that cannot be answered; others may be fine."""


@contextmanager
def _refusing(record: Record) -> Iterator[None]:
    """Context manager: a ValueError of the block is the reason for which the record cannot be answered."""
    try:
        yield
    except EndlessTemplate:
        raise
    except ValueError as e:
        raise _BadRecord(str(e).removeprefix(f"{record.where}: ")) from e


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


def _headers(
    records: list[Record], options: RegenerateOptions, model: str, max_new_tokens: int
) -> list[dict[str, str]]:  # fmt: skip
    """The first fields of the rows, by what is asked; the default of `max_new_tokens` depends on the server. Records of
    the same content and location (`@2`) are told apart by their number."""
    asked = [model, max_new_tokens, options.prompt_tokens, options.temperature, options.top_p]
    asked += [options.top_k, options.seed if options.was_given("seed") else None, options.template_kwargs]
    seen: Counter[str] = Counter()
    headers = []
    for r in records:
        parts = [asked, r.where, r.messages, r.text, r.tools, r.turns, r.prompt_length]
        content = json.dumps(parts + ([r.template_kwargs] if r.template_kwargs else []))
        key = hashlib.sha256(f"{content}{seen[content] or ''}".encode()).hexdigest()[:16]
        seen[content] += 1
        headers.append({"source": r.where, "asked": key})
    return headers


def _seed(seed: int, index: int, turn: int) -> int:
    """The seed of one request, below 2**63, as servers take it."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
