"""The answerers of `fledge regenerate`: the target in this process, or a server."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from fledge.data.answering import answer_message, answer_text
from fledge.data.messages import as_sent
from fledge.data.record import Record
from fledge.data.template import ChatTemplate
from fledge.engines.client import Answer, Client, Decoding
from fledge.io.fields import parse_dtype
from fledge.io.http import BadRequest, ServerProblem, background_loop, key_in
from fledge.options import default_new_tokens, parse_template_kwargs

if TYPE_CHECKING:
    from fledge.decode.engine import Engine
    from fledge.regenerate.options import RegenerateOptions

NEW_TOKENS = 512  # default of --max-new-tokens
LONGEST = 2**62  # stands for the unknown context of a server


@dataclass(frozen=True, eq=False)
class Question:
    """The input of a record's next answer: `messages`, rendered by `template` as `prompt`, or the `prompt` of a plain
    text, as token ids, or as text without a template.

    `index` is the record's index in the data. `number` counts the answers of a conversation from 1; the answer of a
    plain text has number 0.
    """

    index: int
    number: int
    record: Record
    template: ChatTemplate | None
    messages: list[dict[str, Any]]
    prompt: str | list[int]


class Answerer:
    """Answers questions, used as a context manager.

    `who` names the answerer in messages. `identity` is the model, the maximum tokens of an answer, and the seed.
    `places` is the number of conversations that are answered together. `keeps_rewritten`: whether answers that the
    template renders as a different text are kept; differences in white space then count. `answers_meanwhile`: whether
    questions are answered while the caller compares answers. `cure` is the advice if most answers are rewritten.
    `repeated` counts the reasons of repeated requests.

    `ask` accepts a question, and raises BadRequest if the question cannot be answered. `answers` waits for at least one
    answer, and yields the index and the answer, or refusal, of every answered question of `wanted` records. `answers`
    calls `advance` for each answer, and raises ServerProblem if no more answers will come. `message` returns an answer
    as a message of the data, and raises BadRequest if the answer cannot be a message.
    """

    who: str
    keeps_rewritten: bool
    answers_meanwhile: bool
    cure: str
    identity: list[Any]
    places: int
    template: ChatTemplate | None
    max_new_tokens: int
    repeated: Counter[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


class OwnEngine(Answerer):
    """The target in this process, which decodes the answers of many conversations together.

    The engine gets several batches at once, so that a new request replaces a finished request. Random draws are keyed
    by record and answer: a continued job generates the same text as an uninterrupted job.
    """

    who, keeps_rewritten, answers_meanwhile = "target", False, False

    def __init__(self, options: RegenerateOptions):
        from fledge.decode.engine import BATCH

        self.options, self.places, self.repeated = options, 4 * (options.batch or BATCH), Counter()
        self.identity = [options.target, options.max_new_tokens or NEW_TOKENS, options.seed]
        self.cure = (
            f"The chat template of {options.target} does not render the answers as they were generated: give "
            "--template-kwargs as the answers need them, or a target with the chat template that it was trained with"
        )
        self._asked: dict[int, tuple[Question, list[int]]] = {}

    @cached_property
    def engine(self) -> Engine:
        """The engine, loaded at the first use."""
        from fledge.decode.load import load

        options = self.options
        engine = load(
            options.target, options.draft, device=options.device, dtype=parse_dtype(options.dtype),
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
        # the engine's own template would have the variables recorded in the draft; prompts must not depend on the draft
        kwargs = parse_template_kwargs(options.template_kwargs)
        engine.reader.template = ChatTemplate(engine.target.tokenizer, engine.target.stop_ids, kwargs)
        return engine

    @property
    def template(self) -> ChatTemplate:
        return self.engine.reader.template

    @property
    def max_new_tokens(self) -> int:
        return self.options.max_new_tokens or default_new_tokens(NEW_TOKENS, self.engine.target.context)

    def ask(self, question: Question) -> None:
        q, ids, new, context = question, question.prompt, self.max_new_tokens, self.engine.target.context
        if isinstance(ids, str):
            self.engine.reader.warn_of_mode(q.messages, q.template, tools=q.record.tools)
            ids = q.template.rendered_ids(ids)
        if len(ids) > context - new:
            raise BadRequest(
                f"a prompt of {len(ids)} tokens and an answer of {new} exceed the target's context of {context} tokens"
            )
        self._asked[q.index] = q, ids

    def answers(self, wanted: Container[int], advance: Callable[[], None]) -> Iterator[tuple[int, Answer | BadRequest]]:
        from fledge.types import Sampling

        sampling = Sampling(self.options.temperature, top_p=self.options.top_p, seed=self.options.seed)
        asked, self._asked = [given for index, given in self._asked.items() if index in wanted], {}
        completions = self.engine.generate_all(
            [ids for _, ids in asked], batch=self.options.batch, max_new_tokens=self.max_new_tokens,
            sampling=sampling, request=[(q.index << 20) + q.number for q, _ in asked],
            answered=lambda place: advance(),
        )  # fmt: skip
        for (q, ids), done in zip(asked, completions, strict=True):
            text = answer_text(q.template, ids, done.tokens)
            yield q.index, Answer(text, "", done.finish, len(ids), len(done.tokens), ids, done.tokens)

    def message(self, question: Question, answer: Answer) -> dict[str, Any]:
        q = question
        return answer_message(q.template, q.messages, answer.prompt_ids, answer.token_ids, q.record.tools)[0]


class ServedModel(Answerer):
    """The model on the server of --endpoint, with --concurrency requests in flight.

    The requests run on an event loop in a thread, while the caller's thread asks questions and compares answers.
    Without --target nothing is compared. Raises ServerProblem, when entered, if the server cannot be used.
    """

    who, keeps_rewritten, answers_meanwhile = "server", True, True

    def __init__(self, options: RegenerateOptions):
        self.options, self.places, self.template = options, options.concurrency, None
        if options.target:
            from fledge.targets.loading import load_target

            target = load_target(options.target, weights=False, trust_remote_code=options.trust_remote_code)
            kwargs = parse_template_kwargs(options.template_kwargs)
            self.template = ChatTemplate(target.tokenizer, target.stop_ids, kwargs)
        self.seed = options.seed if options.was_given("seed") else None
        self.client = Client(
            options.endpoint, api_key=key_in(options.api_key_env), connections=options.concurrency,
            timeout=options.request_timeout,
        )  # fmt: skip
        self.repeated = self.client.repeated
        self.cure = (
            "The server strips special tokens, its reasoning or tool call parser rewrites answers, or the template of "
            f"{options.target} renders them otherwise: start the server without parsers, give --template-kwargs as the "
            "answers need them, or leave --target out to keep such answers"
        )
        renders = self.template is not None and self.template.tokenizer.chat_template is not None
        self.reasoning = self.template.fields.reasoning if renders else "reasoning_content"
        self._loop = background_loop(self)
        self._flying: set[Future[Answer]] = set()
        self._done: SimpleQueue[tuple[int, Future[Answer]]] = SimpleQueue()

    def __enter__(self) -> Self:
        options = self.options
        server = asyncio.run_coroutine_threadsafe(self.client.connect(options.model), self._loop).result()
        self.max_new_tokens = options.max_new_tokens or default_new_tokens(NEW_TOKENS, server.context or LONGEST)
        self.decoding = Decoding(
            self.max_new_tokens, options.temperature, options.top_p, options.top_k,
            template_kwargs=parse_template_kwargs(options.template_kwargs),
        )  # fmt: skip
        self.identity = [server.model, self.max_new_tokens, self.seed]
        return self

    def __exit__(self, *error: object) -> None:
        for future in list(self._flying):
            future.cancel()
        asyncio.run_coroutine_threadsafe(self.client.__aexit__(None, None, None), self._loop).result()

    def ask(self, question: Question) -> None:
        q, record, seed = question, question.record, None
        if self.seed is not None and self.options.temperature > 0:  # servers take seeds below 2**63
            digest = hashlib.sha256(f"{self.seed} {q.index} {q.number}".encode()).digest()
            seed = int.from_bytes(digest[:8], "little") >> 1
        request = self.client.ask(
            [as_sent(m) for m in q.messages] if record.text is None else q.prompt,
            self.decoding.of(record.template_kwargs), tools=record.tools, seed=seed,
            token_ids=self.template is not None,
        )  # fmt: skip
        future = asyncio.run_coroutine_threadsafe(request, self._loop)
        self._flying.add(future)
        future.add_done_callback(lambda ended: self._done.put((q.index, ended)))

    def answers(self, wanted: Container[int], advance: Callable[[], None]) -> Iterator[tuple[int, Answer | BadRequest]]:
        wait = True
        while True:
            try:
                index, future = self._done.get(block=wait)
            except Empty:
                return
            self._flying.discard(future)
            if index in wanted:
                wait = False
                try:
                    answer = future.result()
                except BadRequest as e:
                    yield index, e
                else:
                    advance()
                    yield index, answer

    def message(self, question: Question, answer: Answer) -> dict[str, Any]:
        """Raises ServerProblem for reasoning that the template would leave out."""
        if answer.finish == "tool_calls":
            raise BadRequest(
                "the server made a tool call of the answer, so its text is lost; start the server without its tool "
                "call parser"
            )
        message = {"role": "assistant", "content": answer.text}
        if answer.reasoning and self.reasoning is None:
            raise ServerProblem(
                "the server separates the reasoning from the answer, and the chat template of "
                f"{self.options.target} does not render reasoning, so a draft would not be trained on it; start the "
                "server without its reasoning parser"
            )
        return message | ({self.reasoning: answer.reasoning} if answer.reasoning else {})
