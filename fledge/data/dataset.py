"""The training set. Documents are tokenized once; each epoch packs them into rows in an order drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from fledge.data.chat_fields import LOSSES
from fledge.data.documents import Document, DocumentTable, lengths_of, supervised_of
from fledge.data.pack import make_row, pack
from fledge.data.record import Record
from fledge.data.template import ChatTemplate
from fledge.data.token_store import TokenStore
from fledge.data.tokenize import Settings, TokenizedBatch, batches, tokenizing
from fledge.types import Packed


@dataclass(frozen=True)
class DataReport:
    """Statistics of `make_documents`, shown before training.

    `windowed` documents were longer than a window, `refused` records could not be used, and `first_refusal` is the
    reason for the first of them. `tokens` and `supervised` count the tokens of all documents. `losses` are the numbers
    of records of which the chat template drops something, by the keys of LOSSES.
    """

    records: int
    documents: int
    windowed: int
    refused: int
    first_refusal: str
    tokens: int
    supervised: int
    losses: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        text = (
            f"{self.records:,} records, {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.supervised / max(self.tokens, 1):.0%} supervised"
        )
        text += f"; {self.windowed:,} longer than a window were split" if self.windowed else ""
        text += "".join(f"; {n:,} records {LOSSES[kind]}" for kind, n in self.losses.items())
        return text + (
            f"; {self.refused:,} refused (--skip-bad), the first because: {self.first_refusal}" if self.refused else ""
        )


def make_documents(
    records: Iterable[Record],
    template: ChatTemplate,
    max_length: int,
    *,
    skip_bad: bool = False,
    skipped: Sequence[str] = (),
    advance: Callable[[], None] = lambda: None,
    order: np.ndarray | None = None,
    store: TokenStore | None = None,
    workers: int = 1,
) -> tuple[DocumentTable, DataReport]:
    """Tokenizes records, marks the assistant's spans, and splits documents into windows of `max_length` tokens.

    A record that the template refuses raises ValueError; with `skip_bad` it is counted as refused instead. `skipped`
    are the error messages of records that could not be read, and are counted as refused as well. `advance` is called
    after each record. `order` are the indices of the records, int64, in the order of their documents; an index may
    occur several times, and by default each occurs once. The tokens are put into `store` (default: memory) and made by
    `workers` processes (see `tokenizing`). Raises ValueError if no record is usable.
    """
    store = store or TokenStore()
    done: list[TokenizedBatch] = []
    with tokenizing(Settings(template, max_length, skip_bad), workers) as tokenize:
        for batch in tokenize(batches(records)):
            store.append(batch.tokens, batch.spans)
            done.append(batch.without_tokens())
            for _ in range(len(batch.documents)):
                advance()
    made = TokenizedBatch.joined(done)
    if order is None:
        order = np.arange(len(made.documents))
    times = np.bincount(order, minlength=len(made.documents))  # how often each record occurs
    refused = [*skipped, *(reason for i, reason in made.refused.items() for _ in range(times[i]))]
    count = len(order) + len(skipped)
    of = _documents_of(order, made.documents)
    if not len(of) and len(refused) == count:
        raise ValueError(f"every record was refused, the first because: {refused[0]}")
    if not len(of):
        raise ValueError("no record has an assistant turn of two or more tokens, so there is nothing to train on")
    ends = np.cumsum(made.lengths, dtype=np.int64)
    documents = DocumentTable(
        *store.finish(), starts=(ends - made.lengths)[of], lengths=made.lengths[of], supervised=made.supervised[of]
    )
    return documents, DataReport(
        records=count,
        documents=len(documents),
        windowed=int((times * made.windowed).sum()),
        refused=len(refused),
        first_refusal=refused[0] if refused else "",
        tokens=int(documents.lengths.sum(dtype=np.int64)),
        supervised=int(documents.supervised.sum(dtype=np.int64)),
        losses={kind: n for kind in LOSSES if (n := sum(int(times[i]) for i, k in made.losses.items() if kind in k))},
    )


def _documents_of(order: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The indices of the documents of records, one record after the other, int64. `counts` is the number of documents
    of each record; those of record 0 come first."""
    repeats = counts[order].astype(np.int64)
    first = (np.cumsum(counts, dtype=np.int64) - counts)[order]
    return np.arange(repeats.sum()) + np.repeat(first - (np.cumsum(repeats) - repeats), repeats)


class EpochRows(Sequence[list[int]]):
    """The document indices of each row of an epoch, held as two arrays."""

    def __init__(self, rows: Sequence[Sequence[int]]):
        self.ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        self.documents = np.fromiter(chain.from_iterable(rows), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> list[int]:
        end = self.ends[i]  # raises IndexError after the last row
        return self.documents[self.ends[i - 1] if i % len(self) else 0 : end].tolist()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpochRows) and list(self) == list(other)


class Rows:
    """The packed rows of all epochs, addressed by (epoch, index of the row within the epoch)."""

    def __init__(self, documents: Sequence[Document], row_length: int, seed: int):
        self.documents, self.row_length, self.seed = documents, row_length, seed
        self._lengths, self._supervised = lengths_of(documents), supervised_of(documents)
        self._epochs: dict[int, EpochRows] = {}  # the latest epoch and the one before it

    def epoch(self, epoch: int) -> EpochRows:
        """The document indices of each row of an epoch."""
        if epoch not in self._epochs:
            previous = {e: rows for e, rows in self._epochs.items() if e == epoch - 1}
            packed = pack(self.documents, self.row_length, seed=self.seed * 1_000_003 + epoch)
            self._epochs = previous | {epoch: EpochRows(packed)}
        return self._epochs[epoch]

    def __getitem__(self, address: tuple[int, int]) -> Packed:
        epoch, i = address
        indices = self.epoch(epoch)[i]
        return make_row([self.documents[j] for j in indices], self.row_length, sources=indices)

    def tokens(self, address: tuple[int, int]) -> int:
        """The number of tokens in a row, without filler."""
        epoch, i = address
        return int(self._lengths[self.epoch(epoch)[i]].sum())

    def supervised(self, address: tuple[int, int]) -> int:
        """The number of supervised tokens in a row, which its training step's time grows with."""
        epoch, i = address
        return int(self._supervised[self.epoch(epoch)[i]].sum())

    def next(self, address: tuple[int, int]) -> tuple[int, int]:
        """The address of the next row: in the same epoch, or the first of the next epoch."""
        epoch, i = address
        return (epoch, i + 1) if i + 1 < len(self.epoch(epoch)) else (epoch + 1, 0)

    def longest(self) -> int:
        """The number of tokens of the longest document."""
        return int(self._lengths.max())

    def heaviest(self) -> list[Packed]:
        """The rows of the first epoch that need the most memory in a training step: one or two rows.

        They are the row with the most supervised tokens, and the row with the longest document if it is a different
        one. Later epochs are packed differently, and one of their rows may need more.
        """
        epoch = self.epoch(0)
        starts = epoch.ends - np.diff(epoch.ends, prepend=0)
        supervised = np.add.reduceat(self._supervised[epoch.documents], starts)
        longest = np.maximum.reduceat(self._lengths[epoch.documents], starts)
        most = int(supervised.argmax())
        indices = [most] if longest[most] == longest.max() else [most, int(longest.argmax())]
        return [self[0, i] for i in indices]
