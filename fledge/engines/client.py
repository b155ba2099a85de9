"""A client of OpenAI-compatible servers: vLLM, SGLang and others.

The client uses /v1/chat/completions for conversations, /v1/completions for texts and token ids, and SGLang's /generate,
whose answers count the acceptance of each request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx2

from fledge.io.fields import shortened
from fledge.io.http import MOST_BYTES, Http, ServerProblem, TransientFailure, UnusableAnswer, json_objects

MOST_TOKENS = 2**20  # most tokens of an answer
MOST_NAME = 200  # most characters of a model's name
FINISHED = {"stop": "stop", "length": "length", "eos": "stop", "end_turn": "stop", "tool_calls": "tool_calls"}
ENGINES = ("vllm", "sglang")  # the engines that name themselves in /v1/models

Prompt = str | list[int] | list[dict[str, Any]]  # a text, token ids, or messages


async def run_together(workers: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs workers until all are done. If a worker raises an error, cancels all workers before raising the error."""
    tasks = [asyncio.create_task(worker) for worker in workers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Server:
    """A server as described by /v1/models: the engine ("vllm", "sglang", or "" for any other), the model's name, and
    the context in tokens (None: unknown)."""

    engine: str
    model: str
    context: int | None


@dataclass(frozen=True)
class Decoding:
    """The decoding options of answers. `top_k` 0 and `top_p` 1 keep all tokens; `template_kwargs` are variables of the
    chat template."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    template_kwargs: dict[str, Any] | None = None

    def of(self, template_kwargs: dict[str, Any] | None) -> Decoding:
        """The options for a chat with the template variables `template_kwargs`, which take precedence."""
        own = {**(self.template_kwargs or {}), **(template_kwargs or {})}
        return replace(self, template_kwargs=own or None)

    def fields(self, engine: str) -> dict[str, Any]:
        """The fields of a request to an engine.

        Requests to vLLM and SGLang set every field that changes the text, since both engines take missing fields from
        generation_config.json. All other servers get only standard fields, and top_k and repetition_penalty if set.
        """
        standard = {"temperature": self.temperature, "top_p": self.top_p}
        own = {"top_k": self.top_k or -1, "min_p": 0.0, "repetition_penalty": self.repetition_penalty}
        if engine in ENGINES:
            return standard | own
        given = {"top_k": self.top_k != 0, "repetition_penalty": self.repetition_penalty != 1.0}
        return standard | {name: own[name] for name in given if given[name]}


@dataclass
class Answer:
    """A server's answer, built from parts in the order of arrival.

    `finish` is "stop", "length" or "tool_calls". `prompt_tokens` and `tokens` are the server's counts of the prompt and
    of the answer; None without counts. `prompt_ids` and `token_ids` are the tokens of the prompt and of the answer;
    None if the engine returns no tokens. `meta` is SGLang's meta_info. `started`, `first` and `last` are the times
    (`time.perf_counter`) of the request, of the first token and of the end; without streaming, `first` equals `last`.
    """

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def prompt_difference(self, ids: list[int]) -> str:
        """The difference between the server's prompt and the token ids `ids`: the numbers of tokens, or the first
        different token. Empty for equal prompts, and if the server returns neither tokens nor a count."""
        theirs = self.prompt_tokens if self.prompt_ids is None else len(self.prompt_ids)
        if theirs is not None and theirs != len(ids):
            return f"{theirs} tokens on the server, {len(ids)} by the target's template"
        if self.prompt_ids is None or self.prompt_ids == ids:
            return ""
        at = next(i for i, pair in enumerate(zip(self.prompt_ids, ids, strict=True)) if pair[0] != pair[1])
        return (
            f"token {at + 1} of {len(ids)} is {self.prompt_ids[at]} on the server, {ids[at]} by the target's template"
        )

    def add(self, choice: dict[str, Any]) -> None:
        """Adds a choice of a response, or of a streamed chunk, and notes the time of the first content."""
        message = choice.get("message") or choice.get("delta") or choice
        text = message.get("content") if message is not choice else choice.get("text")
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        ids = choice.get("token_ids")
        self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids  # answers of /v1/completions
        self.text, self.reasoning = self.text + (text or ""), self.reasoning + reasoning
        if ids is not None:
            self.token_ids = (self.token_ids or []) + list(ids)
        if len(self.text) + len(self.reasoning) > MOST_BYTES or len(self.token_ids or ()) > MOST_TOKENS:
            raise UnusableAnswer("its answer to one request does not end")
        self.finish = choice.get("finish_reason") or self.finish
        if message.get("tool_calls"):
            self.finish = "tool_calls"
        if not self.first and (text or reasoning or ids):
            self.first = time.perf_counter()

    def count(self, usage: dict[str, Any]) -> None:
        """Reads the server's counts of tokens."""
        self.prompt_tokens, self.tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")

    def ended(self) -> Answer:
        """The whole answer. Raises `TransientFailure` for an answer without an end, and TypeError for a field with a
        wrong type or out of range."""
        counts = [n for n in (self.prompt_tokens, self.tokens) if n is not None]
        if not all(map(is_count, (*counts, *(self.token_ids or ()), *(self.prompt_ids or ())))):
            raise TypeError("counts and token ids are integers")
        if not (isinstance(self.meta, dict) and isinstance(self.finish, str | None)):
            raise TypeError("meta_info is an object and finish_reason a string")
        if self.finish not in FINISHED:
            ended = f"an answer ended with {shortened(repr(self.finish))}"
            raise TransientFailure(ended if self.finish else "an answer broke off")
        self.text, self.reasoning, self.finish = _paired(self.text), _paired(self.reasoning), FINISHED[self.finish]
        self.last = time.perf_counter()
        self.first = self.first or self.last
        return self


class Client(Http):
    """A client of one OpenAI-compatible server: `connect` first."""

    server: Server | None = None

    async def connect(self, model: str | None = None) -> Server:
        """Asks the server for its engine and models. `model` is the name of the model to use (None: the only model).
        Raises ServerProblem for an unreachable server, a missing model, and several models if `model` is None."""
        found = await self.json("/v1/models")
        cards = found.get("data") if isinstance(found, dict) else None
        if not isinstance(cards, list) or not all(map(_is_card, cards)):
            raise ServerProblem(f"{self.root} answers, but not as an OpenAI-compatible server; check --endpoint")
        names = [card["id"] for card in cards]
        if model is None and len(names) != 1:
            raise ServerProblem(
                f"{self.root} serves {len(names)} models; name one by --model"
                + f": {', '.join(names[:20])}" * bool(names)
            )
        if model is not None and names and model not in names:
            raise ServerProblem(f"{self.root} has no model {model}; it serves {', '.join(names[:20])}")
        card = next((c for c in cards if c["id"] == model or model is None), {})
        owner, context = card.get("owned_by"), card.get("max_model_len")
        self.server = Server(
            owner if owner in ENGINES else "", model or names[0], context if is_count(context) and context else None
        )
        return self.server

    async def version(self) -> str | None:
        """The engine's version; None if unknown."""
        path = {"vllm": "/version", "sglang": "/server_info"}.get(self.server.engine if self.server else "")
        try:
            found = await self.json(path) if path else None
        except ServerProblem:
            return None
        version = found.get("version") if isinstance(found, dict) else None
        return shortened(version) if isinstance(version, str) else None

    async def ask(
        self, prompt: Prompt, decoding: Decoding, *, tools: list[Any] | None = None, seed: int | None = None,
        stream: bool = False, token_ids: bool = False,
    ) -> Answer:  # fmt: skip
        """The answer to a prompt. With `token_ids`, vLLM also returns the token ids of the prompt and of the answer.

        Raises as `Http.post`.
        """
        server = self.server
        chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
        body = {"model": server.model, "messages" if chat else "prompt": prompt, "max_tokens": decoding.max_new_tokens}
        body |= decoding.fields(server.engine)
        if chat and decoding.template_kwargs:
            body["chat_template_kwargs"] = decoding.template_kwargs
        if tools:
            body["tools"] = tools
            if server.engine == "vllm":  # "auto" needs a tool parser; "none" keeps the tools in the prompt
                body["tool_choice"] = "none"
        if seed is not None:
            body["seed"] = seed
        if token_ids and server.engine == "vllm":
            body["return_token_ids"] = True
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return await self.post(path, body, partial(_read_openai, stream))

    async def generate(self, ids: list[int], decoding: Decoding, *, seed: int | None = None) -> Answer:
        """The answer to a prompt of token ids by SGLang's /generate, streamed. The answer's `meta` counts the
        acceptance of the request. Raises as `ask`."""
        parameters = decoding.fields("sglang") | {"max_new_tokens": decoding.max_new_tokens}
        parameters |= {} if seed is None else {"sampling_seed": seed}
        body = {"input_ids": ids, "sampling_params": parameters, "stream": True}
        return await self.post("/generate", body, _read_sglang)


async def _read_openai(stream: bool, started: float, response: httpx2.Response) -> Answer:
    answer = Answer(started=started)
    async for chunk in json_objects(response, stream):
        if usage := chunk.get("usage"):
            answer.count(usage)
        answer.prompt_ids = chunk.get("prompt_token_ids") or answer.prompt_ids  # answers of /v1/chat/completions
        for choice in chunk.get("choices") or ():
            answer.add(choice)
    return answer.ended()


async def _read_sglang(started: float, response: httpx2.Response) -> Answer:
    """Reads the chunks of /generate: all text and ids so far, or by the server's setting only new text and ids."""
    answer = Answer(started=started)
    text, ids, number = "", [], 0
    joined, joined_ids = "", []
    async for chunk in json_objects(response, stream=True):
        meta = answer.meta = chunk.get("meta_info") or answer.meta
        text, ids, number = chunk.get("text") or "", list(chunk.get("output_ids") or ()), number + 1
        if len(joined) <= MOST_BYTES and len(joined_ids) <= MOST_TOKENS:  # cumulative chunks may exceed the limits
            joined, joined_ids = joined + text, joined_ids + ids
        if not answer.first and (ids or text):
            answer.first = time.perf_counter()
        finish = meta.get("finish_reason")
        answer.finish = finish.get("type") if isinstance(finish, dict) else finish
    answer.count(answer.meta)
    cumulative = number == 1 or len(ids) == answer.tokens
    answer.text = text if cumulative else joined
    ids = ids if cumulative else joined_ids
    answer.token_ids = ids if len(ids) == answer.tokens else None
    return answer.ended()


def _paired(text: str) -> str:
    """The text with unpaired surrogates, which no file can hold, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_count(value: Any) -> bool:
    """Whether a value of a server's JSON can be a number of tokens, or a token id."""
    return isinstance(value, int) and 0 <= value < 2**31


def _is_card(value: Any) -> bool:
    """Whether a value can be a model in /v1/models."""
    name = value.get("id") if isinstance(value, dict) else None
    return isinstance(name, str) and len(name) <= MOST_NAME
