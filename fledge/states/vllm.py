"""Features from hidden states that vLLM computed, as a source for training, and a client of the server that writes
them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.data.documents import Document
from fledge.io.fields import format_value
from fledge.io.http import BadRequest, Http, background_loop, json_object
from fledge.states.layout import needed_tokens
from fledge.states.source import rows_ahead
from fledge.states.vllm_files import UNCHECKED, Captured, StatesFolder, layers_of, lock_state, read_states, remove
from fledge.targets.parts import TargetParts
from fledge.targets.source import RowIterator
from fledge.types import Features, Packed

CONNECTIONS = 32  # requests in flight
MOST_NAME = 200  # characters of a file's name; file systems allow 255, and the lock's name is longer
RETRIES = 4  # repetitions of a request after a temporary failure
ROWS_AHEAD = 3  # rows whose states are requested in advance
# maximum difference, in nats, between the server's log-probability of the next token and the log-probability by the
# final state here: rounding to bfloat16 and quantized heads stay far below, states of another position or layer are far
# above
TOLERANCE = 1.0


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


class VllmFeatures:
    """A `FeatureSource` of the given layers, from states that vLLM computed.

    `captured` are the ids of the layers in the states, ascending; the last one is the state before the final norm, id
    `num_layers`. Of `target`, the embedding, the head and the final norm have to be loaded. Raises ValueError for
    layers that are not captured, and for layer 0: vLLM 0.26 keeps a reference to the embedding, into whose memory its
    fused norms write, and with --enforce-eager it stored the last layer's state.

    The final norm is applied here. Tokens whose states are not in a file get zeros; the loss reads no state of such a
    token.
    """

    def __init__(
        self, states: VllmServer | StatesFolder, target: TargetParts, layers: tuple[int, ...], captured: tuple[int, ...]
    ):  # fmt: skip
        self.states, self.target, self.layers, self.captured = states, target, layers, captured
        if 0 in layers:
            raise ValueError(
                "layer 0, the embedding, cannot be had from vLLM, which may store the last layer in its place; choose "
                "other layers by --aux-layers, or leave --features-from out"
            )
        if missing := [i for i in (*layers, target.num_layers) if i not in captured]:
            raise ValueError(
                f"vLLM captures the layers {list(captured)}, and training also needs {missing} ({target.num_layers} is "
                "the state before the final norm); start vLLM with these layers, or choose others by --aux-layers"
            )
        self.columns = [captured.index(i) for i in layers]
        self._asked: dict[int, tuple[Packed, list[Future[Captured]]]] = {}  # by the id of the row
        self._closed = threading.Event()  # set when asking ahead ends, so that no thread waits for a file any more

    def check(self, documents: Sequence[Document]) -> None:
        """Raises ValueError if the states of a document are known to be unavailable."""
        self.states.check(documents)

    def logits(self, last_ND: Tensor) -> Tensor:
        """The target's logits [N, V] from final hidden states [N, D]."""
        return self.target.logits(last_ND)

    def ahead(self, rows: RowIterator) -> RowIterator:
        """Yields the same rows. Requests the documents of the next ROWS_AHEAD rows in advance, many at a time."""
        self._closed.clear()
        with ThreadPoolExecutor(CONNECTIONS) as executor:

            def ask(row: Packed) -> None:
                self._asked[id(row)] = row, self._ask(row, executor)

            try:
                yield from rows_ahead(rows, ROWS_AHEAD, ask)
            finally:
                self._closed.set()
                self._asked.clear()
                executor.shutdown(wait=True, cancel_futures=True)

    @torch.no_grad()
    def features(self, row: Packed) -> Features:
        """The features of a packed row. A row without sources (a trial row, to measure the memory of a training step)
        gets zeros. Raises ValueError if the states do not belong to this target and these layers."""
        target, T = self.target, row.token_T.numel()
        kind = dict(dtype=target.dtype, device=target.device)
        D = target.embedding.shape[1]
        features = Features(torch.zeros(T, len(self.columns), D, **kind), torch.zeros(T, D, **kind))
        if not row.sources:
            return features
        captured = self._captured(row)
        for (start, _), one in zip(row.without_filler(), captured, strict=True):
            states_TLD = one.states_TLD
            if one.layers not in (None, self.captured):
                raise ValueError(
                    f"vLLM captures the layers {list(one.layers)}, as the name of its directory says, not "
                    f"{list(self.captured)}; name all that it captures by --features-layers, or start it with these "
                    "layers"
                )
            if states_TLD.shape[1:] != (len(self.captured), D):
                raise ValueError(
                    f"vLLM gives {states_TLD.shape[1]} states of width {states_TLD.shape[2]} for each token, not those "
                    f"of the {len(self.captured)} layers {list(self.captured)} of width {D}; start it with these "
                    "layers, or name all that it captures by --features-layers"
                )
            end = start + states_TLD.shape[0]
            states_TLD = states_TLD.to(target.device).to(target.dtype)
            features.aux_TAD[start:end] = states_TLD[:, self.columns]
            features.last_TD[start:end] = target.norm(states_TLD[:, self.captured.index(target.num_layers)])
        self._check_next(row, captured, features)
        return features

    def _captured(self, row: Packed) -> list[Captured]:
        """The states of a row's documents."""
        _, asked = self._asked.pop(id(row), (None, None))
        if asked is not None:
            return [future.result() for future in asked]
        self._closed.clear()
        with ThreadPoolExecutor(CONNECTIONS) as executor:
            return [future.result() for future in self._ask(row, executor)]

    def _ask(self, row: Packed, executor: ThreadPoolExecutor) -> list[Future[Captured]]:
        documents = [Document(row.token_T[a:b].numpy(), row.span_T[a:b].numpy()) for a, b in row.without_filler()]
        return [executor.submit(self.states.get, d.tokens.tolist(), needed_tokens(d), self._closed) for d in documents]

    def _check_next(self, row: Packed, captured: Sequence[Captured], features: Features) -> None:
        """Raises ValueError unless each document's last state gives about the server's probability to the server's next
        token. States of other weights, of another layer or of another token give another probability."""
        known = [
            (end - 1, *one.next_token)
            for (_, end), one in zip(row.without_filler(), captured, strict=True)
            if one.next_token is not None
        ]
        if not known:
            return
        last, tokens, theirs = zip(*known, strict=True)
        log_probabilities = self.target.logits(features.last_TD[list(last)]).float().log_softmax(-1)
        if odd := [token for token in tokens if not 0 <= token < log_probabilities.shape[1]]:
            raise ValueError(
                f"vLLM's hidden states are not those of {self.target.name}, which has no token {format_value(odd[0])}: "
                "that is the server's next token after a document, so it serves another model"
            )
        ours = log_probabilities[range(len(tokens)), list(tokens)].tolist()
        apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        worst = max(range(len(ours)), key=lambda i: apart[i] if apart[i] == apart[i] else float("inf"))
        if not apart[worst] <= TOLERANCE:
            raise ValueError(
                f"vLLM's hidden states are not those of {self.target.name}: its next token after a document has the "
                f"log-probability {theirs[worst]:.2f} there and {ours[worst]:.2f} by the state that it gives. It may "
                "serve another model, capture other layers than --features-layers says, or serve longer requests of "
                "others at the same time"
            )
