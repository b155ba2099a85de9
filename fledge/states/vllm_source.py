"""Features from hidden states that vLLM computed, as a source for training."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fledge.data.documents import Document
from fledge.io.fields import format_value
from fledge.states.layout import needed_tokens
from fledge.states.source import rows_ahead
from fledge.states.vllm_files import Captured, StatesFolder
from fledge.states.vllm_server import CONNECTIONS, VllmServer
from fledge.targets.parts import TargetParts
from fledge.targets.source import RowIterator
from fledge.types import Features, Packed

ROWS_AHEAD = 3  # rows whose states are requested in advance
# maximum difference, in nats, between the server's log-probability of the next token and the log-probability by the
# final state here: rounding to bfloat16 and quantized heads stay far below, states of another position or layer are far
# above
TOLERANCE = 1.0


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
