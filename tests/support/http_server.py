"""An HTTP server on `Engine.add`, `step` and `abort`: each request gets its answer in lines, while it is decoded.

POST / with a JSON object: `prompt` (token ids), and the options of `Engine.add`. The answer is a line of JSON for each
piece: {"text": .., "tokens": [..]}. A client that leaves aborts its request.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fledge.decode.engine import Engine
from fledge.decode.request import Request

END = None


class EngineThread(threading.Thread):
    """Runs the engine's steps while there are requests, and hands each request's new text and tokens to its queue."""

    def __init__(self, engine: Engine):
        super().__init__(daemon=True)
        self.engine, self.pieces = engine, dict[Request, queue.Queue[Any]]()
        self.changed, self.stopped, self.failure = threading.Condition(), False, None

    def add(self, **options: Any) -> tuple[Request, queue.Queue[Any]]:
        pieces: queue.Queue[Any] = queue.Queue()
        with self.changed:
            request = self.engine.add(**options)
            self.pieces[request] = pieces
            self.changed.notify()
        return request, pieces

    def abort(self, request: Request) -> None:
        self.engine.abort(request)
        with self.changed:
            self.pieces.pop(request, None)

    def run(self) -> None:
        given: dict[Request, int] = {}
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.pieces or self.stopped)
                if self.stopped:
                    return
            for request in self.engine.step():
                with self.changed:
                    pieces = self.pieces.get(request)
                    if request.over:
                        self.pieces.pop(request, None)
                if pieces is not None:
                    new = request.done.tokens[given.get(request, 0) :]
                    given[request] = len(request.done.tokens)
                    pieces.put({"text": request.take(), "tokens": new})
                    if request.over:
                        pieces.put(END)

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify()
        self.join(60)


@contextmanager
def serving(engine: Engine) -> Iterator[tuple[str, int]]:
    """Serves an engine on a port of this machine. Yields the address."""
    thread = EngineThread(engine)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                request, pieces = thread.add(**asked)
            except (TypeError, ValueError) as e:
                self.send_error(400, str(e))
                return
            self.send_response(200)
            self.end_headers()
            try:
                while (piece := pieces.get(timeout=60)) is not END:
                    self.wfile.write(json.dumps(piece).encode() + b"\n")
                    self.wfile.flush()
            except OSError:  # the client has left
                thread.abort(request)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    thread.start()
    try:
        yield server.server_address[:2]
    finally:
        server.shutdown()
        server.server_close()
        thread.stop()


def ask(address: tuple[str, int], leave_after: int | None = None, **asked: Any) -> list[dict[str, Any]]:
    """The pieces of an answer; the first ones, if the client leaves after so many."""
    body = json.dumps(asked).encode()
    found: list[dict[str, Any]] = []
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        lines = connection.makefile("rb")
        status = lines.readline()
        while lines.readline().strip():
            pass
        if b" 200 " not in status:
            raise ValueError(status.decode())
        for line in lines:
            found.append(json.loads(line))
            if len(found) == leave_after:
                break
    return found
