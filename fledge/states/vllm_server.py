"""A client of a vLLM server that writes hidden states."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.data.documents import Document
from fledge.io.http import BadRequest, Http, background_loop, json_object
from fledge.states.vllm_files import UNCHECKED, Captured, layers_of, lock_state, read_states, remove

CONNECTIONS = 32  # requests in flight
MOST_NAME = 200  # characters of a file's name; file systems allow 255, and the lock's name is longer
RETRIES = 4  # repetitions of a request after a temporary failure


@dataclass(frozen=True)
class Patience:
    """Time limits in seconds. `answer`: the answer to a request, repetitions included. `file`: the request's file,
    after the answer. `nudge`: after this wait for the file, another request makes the server go on."""

    answer: float = 600.0
    file: float = 120.0
    nudge: float = 5.0
    poll: float = 0.002  # between two looks at a file; grows to 25 times as much


class VllmServer:
    """A vLLM server at `address`, such as http://localhost:8000. The server writes hidden states to a directory that
    this machine sees. `mapped` is the directory's path on the server and on this machine (None: the same path).

    `start` is the command that starts a server, for messages. Raises ValueError if no server answers.

    vLLM writes a request's file in a scheduler step after the request has ended. If the server makes no step by itself,
    another small request causes a step.
    """

    def __init__(
        self, address: str, start: str, say: Callable[[str], None], *, mapped: tuple[Path, Path] | None = None,
        api_key: str | None = None, patience: Patience = Patience(),
    ):  # fmt: skip
        self.address, self.start, self.say, self.mapped, self.patience = address, start, say, mapped, patience
        self._http = Http(
            address, api_key=api_key, connections=CONNECTIONS + 1, timeout=patience.answer, retries=RETRIES,
            cure=f"start one, wait until it is ready, and run the same command again: {start}",
        )  # fmt: skip
        self.root = self._http.root
        self._loop = background_loop(self)  # only asynchronous requests can have a limit of their total time
        self._nudging, self._nudged = threading.Lock(), 0.0
        self._said: set[str] = set()  # the kinds of messages that were said
        self.model, self.max_model_len = self._describe()

    def get(self, tokens: Sequence[int], needed: int, closed: threading.Event) -> Captured:
        """The states of all tokens of a document. Raises ValueError if the states do not arrive in time, and as soon
        as `closed` is set."""
        answer = self._complete(tokens, closed, self.patience.answer)
        name = self._name_of(answer)
        file, layers = self._file_of(name), layers_of(name.rpartition("/")[0])
        if layers is None:
            self._say_once("layers", f"{file.parent} {UNCHECKED}")
        self._wait(file, closed)
        captured = Captured(read_states(file, tokens, len(tokens)), _next_token(answer), layers)
        self._remove(file)  # only now: a server may have named any file
        return captured

    def check(self, documents: Sequence[Document]) -> None:
        """Raises ValueError if a document is too long for the server: vLLM stores no states of a step in which a text
        reaches its maximum length."""
        longest = max(len(d.tokens) for d in documents)
        if self.max_model_len is not None and longest >= self.max_model_len:
            raise ValueError(
                f"the longest document has {longest:,} tokens, and {self.root} gives the hidden states of up to "
                f"{self.max_model_len - 1:,}; give --max-length {self.max_model_len - 1}, or start it with "
                f"vllm serve --max-model-len {longest + 1}"
            )

    def _describe(self) -> tuple[str, int | None]:
        """The name of the server's model, and the maximum length in tokens (None: not in the answer)."""
        found = asyncio.run_coroutine_threadsafe(self._http.json("/v1/models"), self._loop).result()
        try:
            card = found["data"][0]
            name, length = card["id"], card.get("max_model_len")
        except (LookupError, TypeError, AttributeError):
            name = length = None
        if not isinstance(name, str):
            raise ValueError(f"{self.root} answers, but not as a vLLM server does; start one: {self.start}")
        return name, length if isinstance(length, int) and length > 0 else None

    def _complete(self, tokens: Sequence[int], closed: threading.Event, seconds: float) -> dict[str, Any]:
        """The answer to a prompt of token ids: the most probable next token, and the token's log-probability."""
        body = {
            "model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, "logprobs": 1,
            "return_tokens_as_token_ids": True, "return_token_ids": True,
        }  # fmt: skip
        request = asyncio.wait_for(self._http.post("/v1/completions", body, json_object), seconds)
        future = asyncio.run_coroutine_threadsafe(request, self._loop)
        try:
            while not futures.wait([future], timeout=0.1).done:
                if closed.is_set():
                    raise ValueError(f"{self.root} is not waited for any more")
            return future.result()
        except TimeoutError as e:
            raise ValueError(
                f"{self.root} has not answered a request for hidden states within {seconds:.0f} s; look at its log"
            ) from e
        except BadRequest as e:
            raise ValueError(
                f"{self.root} refuses a request for the hidden states of {len(tokens):,} tokens: {e}"
            ) from e
        finally:
            future.cancel()

    def _name_of(self, answer: dict[str, Any]) -> str:
        """The path of the file that an answer names."""
        named = answer.get("kv_transfer_params")
        name = named.get("hidden_states_path") if isinstance(named, dict) else None
        if not isinstance(name, str):
            raise ValueError(
                f"{self.root} answers, but writes no hidden states, as only vLLM with its connector for them does: "
                f"{self.start}"
            )
        return name

    def _file_of(self, name: str) -> Path:
        """The path on this machine of a file that the server names. Raises ValueError for a name that is no file of
        hidden states, and for a directory that this machine does not see."""
        path = Path(name)
        if path.suffix != ".safetensors" or len(path.name) > MOST_NAME or not path.name.isprintable():
            raise ValueError(f"{self.root} names {name:.200} as a file of hidden states, which ends in .safetensors")
        if self.mapped and path.is_relative_to(self.mapped[0]):
            path = self.mapped[1] / path.relative_to(self.mapped[0])
        try:
            seen = path.parent.is_dir()
        except OSError:  # of a name that is too long
            seen = False
        if not seen:
            parent = f"{path.parent!s:.200}"
            raise ValueError(
                f"{self.root} writes its hidden states to {parent}, which this machine does not see. They need a "
                "directory that both see, as shared_storage_path of the server; if it has another path here, give "
                f"--features-map {parent}=PATH_HERE"
            )
        return path

    def _wait(self, file: Path, closed: threading.Event) -> None:
        """Waits until vLLM has written a file. vLLM holds the file's lock until the file is complete."""
        patience, began, pause = self.patience, time.monotonic(), self.patience.poll
        while True:
            state, there, now = lock_state(file), file.exists(), time.monotonic()
            if state == "free" and there:
                return
            if state == "absent" and there:
                raise ValueError(
                    f"{file} has no lock beside it, so it cannot be known when it is complete; start the server "
                    f"without use_synchronization_lock: {self.start}"
                )
            if now - began > patience.file:
                raise ValueError(
                    f"vLLM has not written {file} within {patience.file:.0f} s of its answer; look at its log (a full "
                    "disk, for example). If it runs on another machine, its directory has to be the same one here"
                )
            if now - began > patience.nudge:
                self._nudge(closed)
            if closed.wait(pause):
                raise ValueError(f"{file} is not waited for any more")
            pause = min(2 * pause, 25 * patience.poll)

    def _nudge(self, closed: threading.Event) -> None:
        """Makes vLLM's scheduler step by a request of one token, at most once in `patience.nudge` seconds. The
        request's own small file stays."""
        with self._nudging:
            if time.monotonic() - self._nudged < self.patience.nudge:
                return
            self._nudged = time.monotonic()
        with contextlib.suppress(ValueError):  # the file that is waited for has a time limit of its own
            self._complete([0], closed, self.patience.nudge)

    def _remove(self, file: Path) -> None:
        try:
            remove(file)
        except OSError as e:
            self._say_once(
                "deleting", f"{file} cannot be deleted after its use ({e.strerror}); such files fill the server's disk"
            )

    def _say_once(self, kind: str, message: str) -> None:
        """Says a message, unless a message of the same kind was said."""
        if kind not in self._said:
            self._said.add(kind)
            self.say(message)


def _next_token(answer: Any) -> tuple[int, float] | None:
    """The decoded token of an answer, and the token's log-probability. None if the answer lacks token or
    log-probability."""
    try:
        choice = answer["choices"][0]
        token, log_probability = choice["token_ids"][0], float(choice["logprobs"]["token_logprobs"][0])
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    return (token, log_probability) if isinstance(token, int) else None
