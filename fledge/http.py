"""Requests to servers that need not be trusted: their answers are bounded in size and time, and no redirect leads to
another server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from fledge.address import root_of

CONNECT_SECONDS = 10.0
MOST_BYTES = 2**26  # of an answer, and of a line of a stream, decompressed
LINE_END = re.compile(rb"[\r\n]")  # of an event stream; CRLF gives an empty line more


class UnusableAnswer(ValueError):
    """An answer that is not read: it is too large, or redirects to another server."""


class Http:
    """Requests to the server at an address, with or without /v1, of which `connections` may be in flight. Raises
    ValueError for an address that `root_of` refuses."""

    def __init__(self, url: str, *, api_key: str | None = None, connections: int = 1):
        self.root = root_of(url)
        self._origin = _origin(httpx2.URL(self.root))
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),  # `stream` limits the total
            follow_redirects=True, event_hooks={"request": [self._check_origin]},
        )  # fmt: skip

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, *, seconds: float, body: Any = None
    ) -> AsyncIterator[httpx2.Response]:
        """The response to a request, whose content is to be read by `content` or `lines`.

        Raises TimeoutError if it is not read within `seconds` of sending the request, httpx2.HTTPError if there is
        none, and UnusableAnswer for a redirect to another server.
        """
        async with asyncio.timeout(seconds), self._client.stream(method, self.root + path, json=body) as response:
            yield response

    async def fetch(self, method: str, path: str, *, seconds: float, body: Any = None) -> tuple[int, str]:
        """The status and the text of the response to a request. Raises as `stream` and `content`."""
        async with self.stream(method, path, seconds=seconds, body=body) as response:
            return response.status_code, (await content(response)).decode(errors="replace")

    async def _check_origin(self, request: httpx2.Request) -> None:
        if (origin := _origin(request.url)) != self._origin:
            raise UnusableAnswer(f"it redirects to {origin}; give the address of the server that is to be asked")


def _origin(url: httpx2.URL) -> str:
    """Scheme, host and port of an address."""
    return str(httpx2.URL(scheme=url.scheme, host=url.host, port=url.port))


async def content(response: httpx2.Response) -> bytes:
    """The whole content of a response. Raises UnusableAnswer for more than MOST_BYTES."""
    found = bytearray()
    async for chunk in response.aiter_bytes():
        found += chunk
        _check_size(found)
    return bytes(found)


async def lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The lines of an event stream. Raises UnusableAnswer for one of more than MOST_BYTES."""
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
