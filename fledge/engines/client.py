"""A client of OpenAI-compatible servers: vLLM, SGLang and others, with retries, time limits and streaming.

It speaks /v1/chat/completions for conversations, /v1/completions for texts and token ids, and SGLang's own /generate,
whose answers count the acceptance of each request.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import httpx2

from fledge.fields import shortened
from fledge.http import MOST_BYTES, Http, UnusableAnswer, content, lines
from fledge.json_text import parse_json

RETRIES = 8  # attempts after the first one; with the delays below they span some two minutes
FIRST_DELAY, LAST_DELAY = 0.5, 60.0  # seconds before the first repetition, which double, and their maximum
MOST_TOKENS = 2**20  # of an answer
MOST_NAME = 200  # characters of a model's name
BAD_PROMPT = (400, 413, 422)  # statuses that concern one request, e.g. a prompt that is too long
PASSING = (408, 425, 429)  # statuses that are worth another attempt, as are all of 500 and above
FINISHED = {"stop": "stop", "length": "length", "eos": "stop", "end_turn": "stop", "tool_calls": "tool_calls"}
ENGINES = ("vllm", "sglang")  # the servers that say in /v1/models who they are

Prompt = str | list[int] | list[dict[str, Any]]  # a text, token ids, or messages


class BadPrompt(ValueError):
    """The server refuses a prompt; other prompts may be fine."""


class ServerProblem(ValueError):
    """The server cannot be used, or has not answered in spite of repetitions."""


async def run_together(workers: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs workers until all are done, or one raises an error: the others are then cancelled first."""
    tasks = [asyncio.create_task(worker) for worker in workers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Passing(Exception):
    """A failure that another attempt may not have. `delay` is the number of seconds that the server asked to wait."""

    def __init__(self, reason: str, delay: float | None = None):
        super().__init__(reason)
        self.delay = delay


@dataclass(frozen=True)
class Server:
    """What /v1/models says: the engine ("vllm", "sglang" or "" for others), the model's name, and the context in
    tokens, if it is known."""

    engine: str
    model: str
    context: int | None


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded. `top_k` 0 and `top_p` 1 keep all tokens; `template_kwargs` are variables of the chat
    template."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    template_kwargs: dict[str, Any] | None = None

    def of(self, template_kwargs: dict[str, Any] | None) -> Decoding:
        """The settings for a chat whose own template variables take precedence."""
        own = {**(self.template_kwargs or {}), **(template_kwargs or {})}
        return replace(self, template_kwargs=own or None)

    def fields(self, engine: str) -> dict[str, Any]:
        """The fields of a request to an engine.

        vLLM and SGLang take what a request does not set from the model's generation_config.json, so every field that
        changes the text is sent to them. Other servers get only standard fields, unless an option asks for more.
        """
        standard = {"temperature": self.temperature, "top_p": self.top_p}
        own = {"top_k": self.top_k or -1, "min_p": 0.0, "repetition_penalty": self.repetition_penalty}
        if engine in ENGINES:
            return standard | own
        given = {"top_k": self.top_k != 0, "repetition_penalty": self.repetition_penalty != 1.0}
        return standard | {name: own[name] for name in given if given[name]}


@dataclass(frozen=True)
class Answer:
    """A server's answer.

    `finish` is "stop", "length" or "tool_calls". `prompt_tokens` and `tokens` are the server's counts of the prompt and
    of the answer; None if it does not say. `prompt_ids` and `token_ids` are the tokens of the prompt and of the answer,
    where the engine returns them. `meta` is SGLang's meta_info. `started`, `first` and `last` are the times
    (`time.perf_counter`) of the request, of its first token and of its end; without streaming, `first` is the end too.
    """

    text: str
    reasoning: str
    finish: str
    prompt_tokens: int | None
    tokens: int | None
    prompt_ids: list[int] | None
    token_ids: list[int] | None
    meta: dict[str, Any]
    started: float
    first: float
    last: float

    def prompt_difference(self, ids: list[int]) -> str:
        """How the server's prompt differs from these token ids: by its tokens where the server returns them, otherwise
        by their number. Empty if it does not, or where neither is known."""
        theirs = self.prompt_tokens if self.prompt_ids is None else len(self.prompt_ids)
        if theirs is not None and theirs != len(ids):
            return f"{theirs} tokens on the server, {len(ids)} by the target's template"
        if self.prompt_ids is None or self.prompt_ids == ids:
            return ""
        at = next(i for i, pair in enumerate(zip(self.prompt_ids, ids, strict=True)) if pair[0] != pair[1])
        return (
            f"token {at + 1} of {len(ids)} is {self.prompt_ids[at]} on the server, {ids[at]} by the target's template"
        )


@dataclass
class _Parts:
    """The parts of an answer, as they arrive."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0
    first: float = 0.0

    def add(self, choice: dict[str, Any]) -> None:
        """Adds a choice of a response, or of a streamed chunk, and notes the time of the first content."""
        message = choice.get("message") or choice.get("delta") or choice
        text = message.get("content") if message is not choice else choice.get("text")
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        ids = choice.get("token_ids")
        self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids  # of /v1/completions
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

    def check(self) -> None:
        """Raises TypeError for values of other types, or out of the range, of those of an answer."""
        counts = [self.usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        counts = [n for n in counts if n is not None]
        if not all(map(is_count, (*counts, *(self.token_ids or ()), *(self.prompt_ids or ())))):
            raise TypeError("counts and token ids are integers")
        if not (isinstance(self.meta, dict) and isinstance(self.finish, str | None)):
            raise TypeError("meta_info is an object and finish_reason a string")

    def answer(self) -> Answer:
        """The answer. Raises `_Passing` if it has no end."""
        if self.finish not in FINISHED:
            ended = f"an answer ended with {shortened(repr(self.finish))}"
            raise _Passing(ended if self.finish else "an answer broke off")
        last = time.perf_counter()
        return Answer(
            _paired(self.text), _paired(self.reasoning), FINISHED[self.finish], self.usage.get("prompt_tokens"),
            self.usage.get("completion_tokens"), self.prompt_ids, self.token_ids, self.meta, self.started,
            self.first or last, last,
        )  # fmt: skip


class Client:
    """A client of one server, used as an asynchronous context manager.

    `url` is the server's address, with or without /v1. `connections` is the maximum number of requests in flight, and
    `timeout` the maximum seconds of one attempt, from sending to the last byte. A request that fails in a passing way
    (status 408, 425, 429 or 500 and above, no connection, a dropped connection, a timeout, an answer that is no JSON)
    is repeated `retries` times, after a growing, random delay or the one that the server asks for; `repeated` counts
    these by reason. Raises ValueError for an address that is not http or https.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, connections: int = 1, timeout: float = 600.0,
        retries: int = RETRIES,
    ):  # fmt: skip
        self._http = Http(url, api_key=api_key, connections=connections)
        self.root = self._http.root
        self.timeout, self.retries = timeout, retries
        self.repeated: Counter[str] = Counter()
        self.server: Server | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    # -- the server ---------------------------------------------------------------------------------------------

    async def connect(self, model: str | None = None) -> Server:
        """Asks the server who it is and which models it has. `model` is the name to use; it may be None if there is
        one only. Raises ServerProblem if the server cannot be reached or has no such model."""
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
        """The engine's version, if it tells."""
        path = {"vllm": "/version", "sglang": "/server_info"}.get(self.server.engine if self.server else "")
        try:
            found = await self.json(path) if path else None
        except ServerProblem:
            return None
        version = found.get("version") if isinstance(found, dict) else None
        return shortened(version) if isinstance(version, str) else None

    async def text(self, path: str) -> str:
        """The body of a GET request. Raises ServerProblem if there is none, without a second attempt."""
        try:
            status, text = await self._http.fetch("GET", path, seconds=min(self.timeout, 60.0))
        except UnusableAnswer as e:
            raise ServerProblem(f"{self.root}{path} cannot be read: {e}") from e
        except (httpx2.HTTPError, TimeoutError) as e:
            raise ServerProblem(
                f"{self.root} cannot be reached ({_reason(e)}); check the address, and that the server has started"
            ) from e
        if status != 200:
            raise ServerProblem(f"{self.root}{path} {_status(status, text)}")
        return text

    async def json(self, path: str) -> Any:
        """The JSON of a GET request. Raises ServerProblem as `text`, and for anything but JSON."""
        body = await self.text(path)
        try:
            return parse_json(body)
        except ValueError as e:
            raise ServerProblem(f"{self.root}{path} is not JSON; is this an OpenAI-compatible server?") from e

    # -- answers ------------------------------------------------------------------------------------------------

    async def ask(
        self, prompt: Prompt, decoding: Decoding, *, tools: list[Any] | None = None, seed: int | None = None,
        stream: bool = False, token_ids: bool = False,
    ) -> Answer:  # fmt: skip
        """The answer to a prompt. With `token_ids`, vLLM is asked for those of the prompt and of the answer.

        Raises BadPrompt if the server refuses this prompt, and ServerProblem if it refuses every request, or if no
        attempt succeeds.
        """
        server = self._connected()
        chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
        body = {"model": server.model, "messages" if chat else "prompt": prompt, "max_tokens": decoding.max_new_tokens}
        body |= decoding.fields(server.engine)
        if chat and decoding.template_kwargs:
            body["chat_template_kwargs"] = decoding.template_kwargs
        if tools:
            body["tools"] = tools
            if server.engine == "vllm":  # with "auto" it needs a tool parser; with "none" the tools are in the prompt
                body["tool_choice"] = "none"
        if seed is not None:
            body["seed"] = seed
        if token_ids and server.engine == "vllm":
            body["return_token_ids"] = True
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return await self._repeat("/v1/chat/completions" if chat else "/v1/completions", body, _read_openai)

    async def generate(self, ids: list[int], decoding: Decoding, *, seed: int | None = None) -> Answer:
        """The answer to a prompt of token ids by SGLang's /generate, streamed. Its `meta` counts the acceptance of the
        request. Raises as `ask`."""
        parameters = decoding.fields("sglang") | {"max_new_tokens": decoding.max_new_tokens}
        parameters |= {} if seed is None else {"sampling_seed": seed}
        body = {"input_ids": ids, "sampling_params": parameters, "stream": True}
        return await self._repeat("/generate", body, _read_sglang)

    def _connected(self) -> Server:
        assert self.server is not None, "connect first"
        return self.server

    async def _repeat(self, path: str, body: dict[str, Any], read: Callable[..., Any]) -> Answer:
        """Posts a request until it is answered, or as often as allowed."""
        for attempt in range(self.retries + 1):
            try:
                return await self._post(path, body, read)
            except _Passing as e:
                if attempt == self.retries:
                    times = f"{attempt + 1} attempt{'s' * bool(attempt)}"
                    raise ServerProblem(
                        f"{self.root} has not answered a request in {times}, the last time because: {e}"
                    ) from e
                self.repeated[str(e)] += 1
                delay = min(FIRST_DELAY * 2**attempt, LAST_DELAY) * random.uniform(0.5, 1.0)
                await asyncio.sleep(delay if e.delay is None else min(e.delay, LAST_DELAY))
        raise AssertionError

    async def _post(self, path: str, body: dict[str, Any], read: Callable[..., Any]) -> Answer:
        """One attempt. Raises `_Passing` if another one may succeed."""
        parts = _Parts(started=time.perf_counter())
        try:
            async with self._http.stream("POST", path, seconds=self.timeout, body=body) as response:
                if response.status_code != 200:
                    raise self._refusal(path, response, (await content(response)).decode(errors="replace"))
                await self._read(read, response, bool(body.get("stream")), parts)
        except TimeoutError as e:
            raise _Passing(f"no answer within {self.timeout:g} s") from e
        except UnusableAnswer as e:
            raise ServerProblem(f"{self.root}{path} cannot be read: {e}") from e
        except httpx2.TransportError as e:
            raise _Passing(_reason(e)) from e
        except httpx2.HTTPError as e:
            raise ServerProblem(f"{self.root}{path}: {_reason(e)}") from e
        return parts.answer()

    async def _read(self, read: Callable[..., Any], response: httpx2.Response, stream: bool, parts: _Parts) -> None:
        """Reads an answer. One that is JSON of another form counts as a passing failure, e.g. of a proxy."""
        try:
            await read(response, stream, parts)
            parts.check()
        except (AttributeError, TypeError, KeyError, IndexError) as e:
            raise _Passing("an answer in another form than that of OpenAI's servers") from e

    def _refusal(self, path: str, response: httpx2.Response, text: str) -> Exception:
        """The exception for a response of another status than 200."""
        code = response.status_code
        if code in PASSING or code >= 500:
            after = response.headers.get("retry-after", "")
            return _Passing(f"status {code}", float(after) if after.isdecimal() else None)
        if code in BAD_PROMPT:
            return BadPrompt(f"the server {_status(code, text)}")
        cure = {
            401: "; set the environment variable of --api-key-env",
            403: "; set the environment variable of --api-key-env",
        }
        return ServerProblem(f"{self.root}{path} {_status(code, text)}{cure.get(code, '')}")


# -- responses ----------------------------------------------------------------------------------------------------


async def _read_openai(response: httpx2.Response, stream: bool, parts: _Parts) -> None:
    async for chunk in _chunks(response, stream):
        if isinstance(chunk.get("error"), dict):
            raise _Passing(f"an error in the answer: {str(chunk['error'].get('message'))[:200]}")
        parts.usage = chunk.get("usage") or parts.usage
        parts.prompt_ids = chunk.get("prompt_token_ids") or parts.prompt_ids  # of /v1/chat/completions
        for choice in chunk.get("choices") or ():
            parts.add(choice)


async def _read_sglang(response: httpx2.Response, stream: bool, parts: _Parts) -> None:
    """Reads the chunks of /generate, each with the text and ids so far or, if the server is set so, the new ones."""
    text, ids, number = "", [], 0
    joined, joined_ids = "", []
    async for chunk in _chunks(response, stream):
        if isinstance(chunk.get("error"), dict):
            raise _Passing(f"an error in the answer: {str(chunk['error'].get('message'))[:200]}")
        meta = parts.meta = chunk.get("meta_info") or parts.meta
        text, ids, number = chunk.get("text") or "", list(chunk.get("output_ids") or ()), number + 1
        if len(joined) <= MOST_BYTES and len(joined_ids) <= MOST_TOKENS:  # more is of chunks with all so far
            joined, joined_ids = joined + text, joined_ids + ids
        if not parts.first and (ids or text):
            parts.first = time.perf_counter()
        finish = meta.get("finish_reason")
        parts.finish = finish.get("type") if isinstance(finish, dict) else finish
    if not number:
        return
    parts.usage, total = parts.meta, parts.meta.get("completion_tokens")
    cumulative = number == 1 or len(ids) == total
    parts.text = text if cumulative else joined
    ids = ids if cumulative else joined_ids
    parts.token_ids = ids if len(ids) == total else None


async def _chunks(response: httpx2.Response, stream: bool) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a response: its body, or the `data:` lines of a stream up to [DONE]. Raises `_Passing` for
    anything but JSON, and for a stream without its end."""
    if not stream:
        yield _parsed(await content(response))
        return
    async for line in lines(response):
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data:") and data:
            yield _parsed(data)
    raise _Passing("an answer broke off")


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = parse_json(data)
    except ValueError as e:
        raise _Passing("an answer that is no JSON") from e
    if not isinstance(value, dict):
        raise _Passing("an answer that is no JSON object")
    return value


def _paired(text: str) -> str:
    """The text with unpaired surrogates, which no file can hold, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_count(value: Any) -> bool:
    """Whether a value of a server's JSON can be a number of tokens, or a token's id."""
    return isinstance(value, int) and 0 <= value < 2**31


def _is_card(value: Any) -> bool:
    """Whether a value can be a model in /v1/models."""
    name = value.get("id") if isinstance(value, dict) else None
    return isinstance(name, str) and len(name) <= MOST_NAME


def _status(code: int, text: str) -> str:
    """The status of a response and the server's message, as the end of a sentence."""
    try:
        body = parse_json(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        message = error.get("message") if isinstance(error, dict) else error
    except ValueError:
        message = None
    said = " ".join((message if isinstance(message, str) else text).split())[:400]
    return f"answers with status {code}" + (f": {said}" if said else "")


def _reason(error: BaseException) -> str:
    """A short text for a failure of the connection, the same for every connection."""
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return "no connection"
    if isinstance(error, httpx2.TimeoutException | TimeoutError):
        return "a timeout"
    if isinstance(error, httpx2.RemoteProtocolError | httpx2.NetworkError):
        return "a dropped connection"
    return f"{type(error).__name__}: {error}"
