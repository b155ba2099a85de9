"""A server that behaves as `vllm serve` with its connector for hidden states does, for a tiny transformers model."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fledge.states.vllm_files import STATES, TOKENS
from fledge.targets.transformers import TransformersTarget


@torch.no_grad()
def states_of(
    target: TransformersTarget, tokens: Sequence[int], layers: Sequence[int]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The inputs of the decoder layers, or of the final norm (id n), of a text, [T, L, D], and the logits after it."""
    before_norm: list[Tensor] = []  # transformers' last hidden state is after the final norm
    hook = target.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
    out = target.model(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True)
    hook.remove()
    found = (*out.hidden_states[:-1], *before_norm)
    return torch.stack([found[i][0] for i in sorted(layers)], 1).contiguous(), out.logits[0, -1]


def write_states(file: Path, target: TransformersTarget, tokens: Sequence[int], layers: Sequence[int]) -> None:
    """Writes the file of a text, without a lock, as offline batches of vLLM may."""
    tensors = {STATES: states_of(target, tokens, layers)[0], TOKENS: torch.tensor(list(tokens))}
    file.write_bytes(save(tensors))


@dataclass
class FakeVllm:
    """The server. `layers` are those that it captures, `dtype` that of its files; `max_model_len` is as vLLM's.

    `delay` is the time from the answer until the file is written, during which its lock is held. With `stuck`, files
    are written only when the next request arrives. `change` alters the tensors of a file before they are written; if it
    returns None, the file is never written, but its lock is released. `alter` changes the JSON of an answer, of which a
    byte is sent every `drip` seconds, if that is not 0; `redirect` is where all requests are sent. `status` replaces
    that of requests, and those without the `key` are refused.
    """

    target: TransformersTarget
    directory: Path
    layers: Sequence[int]
    dtype: torch.dtype = torch.float32
    max_model_len: int = 513
    delay: float = 0.0
    stuck: bool = False
    locks: bool = True
    connector: bool = True
    change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None] = lambda tensors: tensors
    alter: Callable[[dict[str, Any]], Any] = lambda answer: answer
    drip: float = 0.0
    redirect: str = ""
    status: int = 200
    key: str | None = None
    seen_path: str | None = None  # the directory as the server names it
    failures: int = 0  # requests that are dropped before the first that is answered
    requests: list[list[int]] = field(default_factory=list)
    at_once: int = 0  # most requests that were computed at the same time

    def __enter__(self) -> FakeVllm:
        self.directory.mkdir(exist_ok=True)
        self.target = copy.deepcopy(self.target)  # the hooks of `states_of` would see the test's own passes
        self._count, self._computing = itertools.count(), 0
        self._lock, self._model = threading.Lock(), threading.Lock()
        self._waiting: list[Callable[[], None]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a completion of one token; its file follows."""
        tokens = body["prompt"]
        with self._lock:
            self.requests.append(tokens)
            self._computing += 1
            self.at_once = max(self.at_once, self._computing)
            name, due = f"cmpl-{next(self._count)}-0.safetensors", list(self._waiting)
            self._waiting.clear()
        for write in due:
            write()
        file, lock = self.directory / name, None
        if self.connector and self.locks:
            lock = (self.directory / f"{name}.lock").open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with self._model:  # its hooks would see the passes of other threads
            states, logits = states_of(self.target, tokens, self.layers)
        logits = logits.log_softmax(-1)
        likeliest = int(logits.argmax())

        def write() -> None:
            tensors = self.change({STATES: states.to(self.dtype), TOKENS: torch.tensor(tokens)})
            if tensors is not None:
                file.write_bytes(save(tensors))
            if lock is not None:
                lock.close()

        if self.connector:
            if self.stuck:
                self._waiting.append(write)
            elif self.delay:
                threading.Timer(self.delay, write).start()
            else:
                write()
        time.sleep(0.002)
        with self._lock:
            self._computing -= 1
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "length",
            "token_ids": [likeliest],
            "logprobs": {"tokens": [f"token_id:{likeliest}"], "token_logprobs": [float(logits[likeliest])]},
        }
        path = str(file) if self.seen_path is None else f"{self.seen_path}/{name}"
        found = {"hidden_states_path": path} if self.connector else None
        return {"id": f"cmpl-{name}", "object": "text_completion", "choices": [choice], "kv_transfer_params": found}


def _handler(server: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _refused(self) -> bool:
            refused = server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}"
            if refused:
                self._reply(401, {"error": "Unauthorized"})
            return refused

        def do_GET(self) -> None:
            if self._refused():
                return
            card = {"id": "tiny", "object": "model", "owned_by": "vllm", "max_model_len": server.max_model_len}
            self._reply(200, {"object": "list", "data": [card]} if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if server.failures:
                server.failures -= 1
                self.close_connection = True
                self.connection.close()
            elif self._refused():
                pass
            elif self.path != "/v1/completions" or body["max_tokens"] != 1:
                self._reply(400, {"error": {"message": "only completions of one token"}})
            elif server.status != 200:
                self._reply(server.status, {"error": {"message": "the engine is dead"}})
            else:
                self._reply(200, server.alter(server.complete(body)), server.drip)

        def _reply(self, status: int, content: Any, drip: float = 0.0) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(307 if server.redirect else status)
            self.send_header("Location", server.redirect + self.path)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):  # of a client that waits no longer
                for i in range(len(data) if drip else 0):
                    self.wfile.write(data[i : i + 1])
                    time.sleep(drip)
                self.wfile.write(b"" if drip else data)

        def log_message(self, *words: object) -> None:
            pass

    return Handler
