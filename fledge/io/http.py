"""The HTTP client: addresses and API keys of servers, and requests with repetitions.

Servers need not be trusted: answers are bounded in size and time, and no redirect leads to another server.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx2

from fledge.io.fields import parse_json

T = TypeVar("T")

ENDPOINTS = ("/chat/completions", "/completions", "/models")  # behind /v1
CONNECT_SECONDS, GET_SECONDS = 10.0, 60.0
RETRIES = 8  # attempts after the first attempt; with the delays below, all attempts span some two minutes
FIRST_DELAY, LAST_DELAY = 0.5, 60.0  # the first delay in seconds, which doubles each time, and the longest delay
MOST_BYTES = 2**26  # largest answer, and largest line of a stream, decompressed
LINE_END = re.compile(rb"[\r\n]")  # line end of an event stream; CRLF gives an additional empty line
BAD_REQUEST = (400, 413, 422)  # statuses that concern a single request, e.g. too long a prompt
PASSING = (408, 425, 429)  # statuses after which a request is repeated, as after all statuses from 500 on


class ServerProblem(ValueError):
    """The server cannot be used, or has not answered in spite of repetitions."""


class BadRequest(ValueError):
    """The server refuses a request; other requests may be fine."""


class UnusableAnswer(ValueError):
    """An answer is too large, or redirects to a different server, and is not read."""


class TransientFailure(Exception):
    """A failure after which a repeated attempt may succeed. `delay` is the server's requested delay in s, or None."""

    def __init__(self, reason: str, delay: float | None = None):
        super().__init__(reason)
        self.delay = delay


def root_of(url: str) -> str:
    """The address of a server, cut before /v1. Raises ValueError for an address that is not http or https, has an
    invalid port, or is refused by `refuse_credentials`."""
    refuse_credentials(url)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        httpx2.URL(parts.geturl())
    except (ValueError, httpx2.InvalidURL):  # invalid brackets, port or host name
        usable = False
    if not usable:
        raise ValueError(f"{url} is not the address of a server; write it as http://localhost:8000")
    path = parts.path.rstrip("/")
    for ending in ENDPOINTS:
        path = path.removesuffix(ending)
    return parts._replace(path=path.removesuffix("/v1")).geturl()


def refuse_credentials(url: str) -> None:
    """Raises ValueError, without quoting the address, if the address may contain a user, password or key: records and
    messages name addresses."""
    if not {"@", "?", "#"}.isdisjoint(url):
        raise ValueError(
            "the address of a server must not have @, ? or #, behind which a user, password or key would be written "
            "into records and messages; give the address alone, such as http://localhost:8000, and the key in the "
            "environment variable of --api-key-env"
        )


def key_in(variable: str) -> str | None:
    """The API key in an environment variable; None if the variable is unset or empty. Raises ValueError, without
    quoting the key, for characters that no header can have."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"the environment variable {variable} is to hold an API key, but has characters that are not printable "
            "ASCII; set it to the key alone"
        )
    return key or None


def _origin(url: httpx2.URL) -> str:
    """Scheme, host and port of an address."""
    return str(httpx2.URL(scheme=url.scheme, host=url.host, port=url.port))


class Http:
    """A client of one server, used as an asynchronous context manager.

    `url` is the server's address, with or without /v1. `connections` is the maximum number of requests in flight, and
    `timeout` the maximum seconds of one attempt, from sending to the last byte. A POST request that fails for a
    transient reason (status 408, 425, 429 or 500 and above, no connection, a dropped connection, a timeout, an answer
    that is no JSON) is repeated `retries` times, after a growing, random delay or the delay that the server asks for;
    `repeated` counts the repetitions by reason. `cure` is what to do if no server answers. Raises ValueError for an
    address that `root_of` refuses.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, connections: int = 1, timeout: float = 600.0,
        retries: int = RETRIES, cure: str = "check the address, and that the server has started",
    ):  # fmt: skip
        self.root = root_of(url)
        self.timeout, self.retries, self.cure = timeout, retries, cure
        self.repeated: Counter[str] = Counter()
        self._origin = _origin(httpx2.URL(self.root))
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),  # `_attempt` limits the total
            follow_redirects=True, event_hooks={"request": [self._check_origin]},
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def text(self, path: str) -> str:
        """The body of the answer to a GET request. Raises ServerProblem if the only attempt fails."""
        try:
            return await self._attempt("GET", path, _text, min(self.timeout, GET_SECONDS))
        except TransientFailure as e:
            raise ServerProblem(f"no server answers at {self.root} ({e}); {self.cure}") from e
        except BadRequest as e:
            raise ServerProblem(f"{self.root}{path}: {e}") from e

    async def json(self, path: str) -> Any:
        """The JSON of the answer to a GET request. Raises ServerProblem if the request fails (see
        `text`), or if the answer is not JSON."""
        body = await self.text(path)
        try:
            return parse_json(body)
        except ValueError as e:
            raise ServerProblem(f"{self.root}{path} is not JSON; is this an OpenAI-compatible server?") from e

    async def post(
        self, path: str, body: dict[str, Any], read: Callable[[float, httpx2.Response], Awaitable[T]]
    ) -> T:  # fmt: skip
        """Posts a request, repeated after transient failures at most `retries` times. `read` gets the time of sending
        (`time.perf_counter`) and the response, and returns the answer, or raises `TransientFailure` or UnusableAnswer.

        Raises BadRequest if the server refuses this request, and ServerProblem if the server refuses every request, or
        if no attempt succeeds.
        """
        for attempt in itertools.count(1):
            try:
                return await self._attempt("POST", path, read, self.timeout, body)
            except TransientFailure as e:
                if attempt > self.retries:
                    attempts = f"{attempt} attempt{'s' * (attempt > 1)}"
                    raise ServerProblem(
                        f"{self.root} has not answered a request in {attempts}, the last time because: {e}; look at "
                        "the server's log"
                    ) from e
                self.repeated[str(e)] += 1
                jitter = random.uniform(0.5, 1.0)
                delay = min(FIRST_DELAY * 2 ** (attempt - 1), LAST_DELAY) * jitter
                await asyncio.sleep(delay if e.delay is None else min(e.delay, LAST_DELAY))

    async def _attempt(
        self, method: str, path: str, read: Callable[[float, httpx2.Response], Awaitable[T]], seconds: float,
        body: Any = None,
    ) -> T:  # fmt: skip
        """The result of `read` for the response. Raises `TransientFailure` if a repeated attempt may succeed."""
        started = time.perf_counter()
        try:
            async with (
                asyncio.timeout(seconds),
                self._client.stream(method, self.root + path, json=body) as response,
            ):
                if response.status_code != 200:
                    raise self._refusal(path, response, await _text(started, response))
                try:
                    return await read(started, response)
                except (AttributeError, TypeError, KeyError, IndexError) as e:  # unexpected JSON, e.g. of a proxy
                    raise TransientFailure("an answer in another form than that of OpenAI's servers") from e
        except TimeoutError as e:
            raise TransientFailure(f"no answer within {seconds:g} s") from e
        except UnusableAnswer as e:
            raise ServerProblem(f"{self.root}{path} cannot be read: {e}") from e
        except httpx2.TransportError as e:
            raise TransientFailure(_reason(e)) from e
        except httpx2.HTTPError as e:
            raise ServerProblem(f"{self.root}{path}: {_reason(e)}") from e

    def _refusal(self, path: str, response: httpx2.Response, text: str) -> Exception:
        """The exception for a response with a status other than 200."""
        code, said = response.status_code, _status(response.status_code, text)
        if code in PASSING or code >= 500:
            after = response.headers.get("retry-after", "")
            return TransientFailure(f"status {code}", float(after) if after.isdecimal() else None)
        if code in BAD_REQUEST:
            return BadRequest(f"the server {said}")
        cure = "; set the environment variable of --api-key-env" * (code in (401, 403))
        return ServerProblem(f"{self.root}{path} {said}{cure}")

    async def _check_origin(self, request: httpx2.Request) -> None:
        if (origin := _origin(request.url)) != self._origin:
            raise UnusableAnswer(f"it redirects to {origin}; give the address of the server that is to be asked")


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


def _reason(error: httpx2.HTTPError) -> str:
    """A short text for a failed connection, without the address."""
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return "no connection"
    if isinstance(error, httpx2.TimeoutException):
        return "a timeout"
    if isinstance(error, httpx2.RemoteProtocolError | httpx2.NetworkError):
        return "a dropped connection"
    return f"{type(error).__name__}: {error}"


def background_loop(owner: object) -> asyncio.AbstractEventLoop:
    """An event loop that runs in a thread as long as the object `owner` exists, for requests of synchronous code."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    weakref.finalize(owner, loop.call_soon_threadsafe, loop.stop)
    return loop


async def _content(response: httpx2.Response) -> bytes:
    """The whole content of a response. Raises UnusableAnswer for more than MOST_BYTES."""
    found = bytearray()
    async for chunk in response.aiter_bytes():
        found += chunk
        _check_size(found)
    return bytes(found)


async def _text(started: float, response: httpx2.Response) -> str:
    return (await _content(response)).decode(errors="replace")


async def json_object(started: float, response: httpx2.Response) -> dict[str, Any]:
    """The JSON object of a response, for `Http.post`. Raises `TransientFailure` for other content, or an object with
    `error`."""
    return _parsed(await _content(response))


async def json_objects(response: httpx2.Response, stream: bool) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a response: the body, or the `data:` lines of a stream up to [DONE]. Raises
    `TransientFailure` like `json_object`, and for a stream without [DONE]."""
    if not stream:
        yield _parsed(await _content(response))
        return
    async for line in _lines(response):
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data:") and data:
            yield _parsed(data)
    raise TransientFailure("an answer broke off")


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The lines of an event stream. Raises UnusableAnswer for a line of more than MOST_BYTES."""
    line = bytearray()
    async for chunk in response.aiter_bytes():
        *ends, beginning = LINE_END.split(chunk)
        for end in ends:
            yield bytes(line + end)
            line.clear()
        line += beginning
        _check_size(line)
    yield bytes(line)


def _check_size(found: bytearray) -> None:
    if len(found) > MOST_BYTES:
        raise UnusableAnswer(f"it answers with more than {MOST_BYTES >> 20} MiB")


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = parse_json(data)
    except ValueError as e:
        raise TransientFailure("an answer that is no JSON") from e
    if not isinstance(value, dict):
        raise TransientFailure("an answer that is no JSON object")
    if isinstance(value.get("error"), dict):
        raise TransientFailure(f"an error in the answer: {str(value['error'].get('message'))[:200]}")
    return value
