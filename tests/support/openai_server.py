"""A small OpenAI-compatible server on a free port, with deterministic answers and failures on request.

It answers as vLLM does, or as SGLang, or as neither: /v1/models, /v1/chat/completions and /v1/completions (also
streamed), /metrics, /version, /server_info and SGLang's /generate. Answers are words of the tiny tokenizer, drawn by a
hash of the prompt. Verification rounds are simulated: each drafts `depth` tokens, and the accepted ones are counted as
the engine would.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = "the young bird tries its wings falls and again until it can fly".split()


@dataclass
class FakeServer:
    """The server's behaviour, which tests may change while it runs, and what it has counted.

    `engine` is "vllm", "sglang" or anything else. `port` 0 is a free one; `url` is set when it has started. `tokenizer`
    counts and renders prompts, and tokenizes answers; without one, both have as many tokens as words. `generates` gives
    the tokens that an answer's text was made of, by default those of the tokenizer; a stop token follows. `counts` says
    whether answers have counts of tokens. `failures` are taken one by one, each
    for one request: a status, "drop" (the connection is closed without an answer), "hang" (no answer for `hang`
    seconds), "malformed" (no JSON), an object or list (this JSON), "broken" (a stream ends early), or None for none.
    `raw` are the status, headers and body of the response to every request of a path, in place of the usual one.
    `refuse` is a word: prompts with it are refused with status 400. `asked` are the bodies of all requests for answers,
    and `on_request` is called with their number. `accepts` gives the accepted tokens of the rounds in turn.
    """

    engine: str = "vllm"
    tokenizer: Any = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    generates: Callable[[str], list[int]] | None = None
    counts: bool = True
    models: tuple[str, ...] = ("bird",)
    context: int | None = 512
    latency: float = 0.0
    words: int = 6
    finish: str = "stop"
    reasoning: str = ""
    tool_calls: bool = False
    failures: list[Any] = field(default_factory=list)
    hang: float = 5.0
    refuse: str | None = None
    key: str | None = None
    raw: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    depth: int = 3
    accepts: tuple[int, ...] = (0, 1, 2, 3)
    speculates: bool = True
    metrics: bool = True
    histogram: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    on_request: Callable[[int], None] = lambda n: None
    in_flight: int = 0
    most_in_flight: int = 0
    rounds: int = 0
    accepted: list[int] = field(default_factory=list)
    tokens: int = 0
    requests: int = 0
    port: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def started(self) -> Iterator[FakeServer]:
        """Runs the server in a thread while the block runs."""
        server = _Http(("127.0.0.1", self.port), type("Handler", (_Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def answer_to(self, prompt: Any, n: int) -> str:
        """The answer to a prompt, at most n words."""
        digest = hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()
        return " ".join(random.Random(digest).choices(WORDS, k=min(self.words, n)))

    def generated(self, prompt: Any, limit: int) -> tuple[str, list[int], str]:
        """The answer to a prompt: its text, at most `limit` tokens with the stop token, and how it ends."""
        text = self.answer_to(prompt, limit)
        if self.tokenizer is None:
            ids = [WORDS.index(word) for word in text.split()]
            return text, ids, "length" if len(ids) == limit else self.finish
        whole = self.reasoning + text
        ids = self.generates(whole) if self.generates else self.tokenizer(whole)["input_ids"]
        if len(ids) >= limit:
            text = self.tokenizer.decode(ids[:limit], skip_special_tokens=True)
            return text.rstrip("\ufffd"), ids[:limit], "length"  # without the bytes of a cut character, as vLLM
        return text, [*ids, self.tokenizer.eos_token_id], self.finish

    def tokens_of(self, body: dict[str, Any]) -> list[int]:
        """The tokens of a request's prompt."""
        prompt = body.get("input_ids") or body.get("prompt") or body["messages"]
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            if self.tokenizer is None:
                return [0] * sum(len(str(m["content"]).split()) for m in prompt)
            kwargs = self.template_kwargs | body.get("chat_template_kwargs", {})
            text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **kwargs)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if isinstance(prompt, str):
            return self.tokenizer(prompt)["input_ids"] if self.tokenizer else [0] * len(prompt.split())
        return prompt

    def speculate(self, tokens: int) -> tuple[int, list[int]]:
        """Simulates the rounds of an answer: their number, and the accepted tokens of each. The first token is the
        prefill's, and the last round may have more tokens than are left."""
        done, accepted = 1, []
        with self.lock:
            while self.speculates and done < tokens:
                accepted.append(self.accepts[self.rounds % len(self.accepts)])
                self.rounds += 1
                done += accepted[-1] + 1
            self.accepted += accepted
            self.tokens += tokens
            self.requests += 1
        return len(accepted), accepted

    def metrics_text(self) -> str:
        """The text of /metrics."""
        if self.engine == "vllm":
            values = {"vllm:generation_tokens_total": self.tokens, "vllm:num_requests_running": self.in_flight}
            if self.speculates:
                values["vllm:spec_decode_num_drafts_total"] = self.rounds
                values["vllm:spec_decode_num_draft_tokens_total"] = self.rounds * self.depth
                values["vllm:spec_decode_num_accepted_tokens_total"] = sum(self.accepted)
                values["vllm:spec_decode_num_drafts_created"] = 1.7e9
            lines = [f'{name}{{engine="0",model_name="bird"}} {float(value)}' for name, value in values.items()]
            for k in range(self.depth if self.speculates else 0):
                name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                more = float(sum(a > k for a in self.accepted))
                lines.append(f'{name}{{engine="0",model_name="bird",position="{k}"}} {more}')
            return "# HELP a counter\n" + "\n".join(lines) + "\n"
        values = {
            "sglang:spec_verify_calls_total": self.rounds, "sglang:generation_tokens_total": self.tokens,
            "sglang:num_requests_total": self.requests, "sglang:num_running_reqs": self.in_flight,
        }  # fmt: skip
        return "\n".join(f'{name}{{model_name="bird"}} {float(value)}' for name, value in values.items())


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that were killed or timed out


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *given: Any) -> None:
        pass

    def do_GET(self) -> None:
        fake = self.fake
        if self.path in fake.raw:
            self._raw()
        elif self.path == "/v1/models":
            card = {"object": "model", "owned_by": fake.engine} | (
                {"max_model_len": fake.context} if fake.context else {}
            )
            self._json({"object": "list", "data": [card | {"id": name} for name in fake.models]})
        elif self.path == "/metrics" and fake.metrics and fake.engine in ("vllm", "sglang"):
            self._send(200, fake.metrics_text().encode(), "text/plain")
        elif self.path == "/version" and fake.engine == "vllm":
            self._json({"version": "0.26.0"})
        elif self.path == "/server_info" and fake.engine == "sglang":
            mean = {"avg_spec_accept_length": (fake.rounds + sum(fake.accepted)) / fake.rounds} if fake.rounds else {}
            self._json({"version": "0.5.17", "internal_states": [mean]})
        elif self.path == "/health":
            self._send(200, b"", "text/plain")
        else:
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        fake, body = self.fake, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake.lock:
            fake.asked.append(body)
            number = len(fake.asked)
            failure = fake.failures.pop(0) if fake.failures else None
            fake.in_flight += 1
            fake.most_in_flight = max(fake.most_in_flight, fake.in_flight)
        released = False
        try:
            if self.path in fake.raw:
                self._raw()
                return
            fake.on_request(number)
            if fake.latency:
                time.sleep(fake.latency)
            if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
                self._json({"error": {"message": "no such key"}}, 401)
            elif failure == "hang":
                time.sleep(fake.hang)
                self._drop()
            elif failure == "drop":
                self._drop()
            elif isinstance(failure, dict | list):
                self._json(failure)
            elif failure == "malformed":
                self._send(200, b"<html>", "text/html")
            elif isinstance(failure, int):
                self._json({"error": {"message": "failed as told"}}, failure, {"Retry-After": "0"})
            elif fake.refuse and fake.refuse in json.dumps(body):
                self._json({"error": {"message": "the prompt is longer than the context", "code": 400}}, 400)
            else:
                finished = self._answer(body, failure == "broken")
                with fake.lock:  # before the last byte, so that a client that has it sees the request ended
                    fake.in_flight -= 1
                    released = True
                finished()
        finally:
            if not released:
                with fake.lock:
                    fake.in_flight -= 1

    def _answer(self, body: dict[str, Any], broken: bool) -> Callable[[], None]:
        """Makes an answer, and sends all but the end of it, which the returned function sends."""
        fake, native = self.fake, self.path == "/generate"
        limit = body["sampling_params"]["max_new_tokens"] if native else body["max_tokens"]
        prompt = body.get("input_ids") or body.get("prompt") or body["messages"]
        text, ids, finish = fake.generated(prompt, limit)
        pieces = [(" " if i else "") + word for i, word in enumerate(text.split(" "))]
        rounds, accepted = fake.speculate(len(ids))
        asked = fake.tokens_of(body)
        usage = {"prompt_tokens": len(asked), "completion_tokens": len(ids)} if fake.counts else {}
        if native:
            meta = {**usage, "finish_reason": {"type": finish}, "spec_verify_ct": rounds}
            meta |= {"spec_num_correct_drafts": sum(accepted), "spec_num_proposed_drafts": rounds * fake.depth}
            if fake.histogram:
                counts = [accepted.count(k) for k in range(fake.depth + 1)]
                meta |= {"spec_correct_drafts_histogram": counts}
            chunks = [
                {"text": "".join(pieces[:n]), "output_ids": ids[:n], "meta_info": {"finish_reason": None}}
                for n in range(1, len(pieces))
            ]
            return self._stream([*chunks, {"text": text, "output_ids": ids, "meta_info": meta}], broken)
        chat, token_ids = self.path == "/v1/chat/completions", body.get("return_token_ids") and fake.engine == "vllm"
        # vLLM returns the prompt's beside a chat's choices, and within those of /v1/completions
        beside = {"prompt_token_ids": asked} if token_ids and chat else {}
        within = {"prompt_token_ids": asked} if token_ids and not chat else {}
        if body.get("stream"):
            chunks = [{"choices": [{"delta": {"role": "assistant", "content": ""}}], **beside}] if chat else []
            for i, piece in enumerate(pieces):  # a token with each word, and all others with the last one
                new = ids[i : i + 1 if i + 1 < len(pieces) else None]
                choice = {"delta": {"content": piece}} if chat else {"text": piece}
                chunks.append({"choices": [choice | ({"token_ids": new} if token_ids else {})]})
            chunks[0]["choices"][0].update(within)
            chunks.append({"choices": [{"delta": {}, "finish_reason": finish}]})
            return self._stream([*chunks, {"choices": [], "usage": usage}], broken)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if fake.reasoning:
            message |= {"reasoning_content": fake.reasoning}
        if fake.tool_calls:
            message |= {"content": None, "tool_calls": [{"function": {"name": "fly", "arguments": "{}"}}]}
        choice = {"finish_reason": finish} | ({"message": message} if chat else {"text": text})
        choice |= {"token_ids": ids, **within} if token_ids else {}
        return lambda: self._json({"choices": [choice], "usage": usage, **beside})

    def _stream(self, chunks: list[dict[str, Any]], broken: bool) -> Callable[[], None]:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode() for chunk in chunks]
        for line in lines[:-1]:
            self.wfile.write(line)
        return lambda: None if broken else self.wfile.write(lines[-1] + b"data: [DONE]\n\n") and None

    def _raw(self) -> None:
        status, headers, body = self.fake.raw[self.path]
        self._send(status, body, "application/json", headers)

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", headers)

    def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _drop(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.close()
