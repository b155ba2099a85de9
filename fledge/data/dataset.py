"""The training set. Documents are tokenized once; each epoch packs them into rows in an order drawn from a seed."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fledge.data.pack import make_row, pack, windows
from fledge.data.record import Record
from fledge.data.template import ChatTemplate
from fledge.types import Document, Packed


@dataclass(frozen=True)
class DataReport:
    """Statistics of `make_documents`, shown before training.

    `windowed` documents were longer than a window, `refused` records could not be used, and `first_refusal` is the
    reason for the first of them. `tokens` and `supervised` count the tokens of all documents.
    """

    records: int
    documents: int
    windowed: int
    refused: int
    first_refusal: str
    tokens: int
    supervised: int

    def __str__(self) -> str:
        text = (
            f"{self.records:,} records, {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.supervised / max(self.tokens, 1):.0%} supervised"
        )
        text += f"; {self.windowed:,} longer than a window were split" if self.windowed else ""
        return text + (
            f"; {self.refused:,} refused (--skip-bad), the first because: {self.first_refusal}" if self.refused else ""
        )


def make_documents(
    records: list[Record],
    template: ChatTemplate,
    max_length: int,
    *,
    skip_bad: bool = False,
    skipped: Sequence[str] = (),
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[Document], DataReport]:
    """Tokenizes records, marks the assistant's spans, and splits documents into windows of `max_length` tokens.

    A record that the template refuses raises ValueError; with `skip_bad` it is counted as refused instead. `skipped`
    are the error messages of records that could not be read, and are counted as refused as well. `advance` is called
    after each record. Raises ValueError if no record is usable.
    """
    documents: list[Document] = []
    refused, windowed = list(skipped), 0
    for record in records:
        try:
            found = template.documents(record)
        except ValueError as e:
            if not skip_bad:
                raise
            refused.append(str(e))
            found = []
        for document in found:
            windowed += document.tokens.numel() > max_length
            documents += windows(document, max_length)
        advance()
    count = len(records) + len(skipped)
    if not documents and len(refused) == count:
        raise ValueError(f"every record was refused, the first because: {refused[0]}")
    if not documents:
        raise ValueError("no record has an assistant turn of two or more tokens, so there is nothing to train on")
    tokens = sum(d.tokens.numel() for d in documents)
    supervised = sum(int((d.spans >= 0).sum()) for d in documents)
    first_refusal = refused[0] if refused else ""
    return documents, DataReport(count, len(documents), windowed, len(refused), first_refusal, tokens, supervised)


def fingerprint(documents: Sequence[Document]) -> str:
    """SHA-256 of the tokens and spans of all documents, in hexadecimal."""
    digest = hashlib.sha256()
    for d in documents:
        digest.update(d.tokens.numpy().tobytes() + d.spans.numpy().tobytes())
    return digest.hexdigest()


class Rows:
    """The packed rows of all epochs, addressed by (epoch, index of the row within the epoch)."""

    def __init__(self, documents: list[Document], row_length: int, seed: int):
        self.documents, self.row_length, self.seed = documents, row_length, seed
        self._epochs: dict[int, list[list[int]]] = {}  # the latest epoch and the one before it

    def epoch(self, epoch: int) -> list[list[int]]:
        """The document indices of each row of an epoch."""
        if epoch not in self._epochs:
            previous = {e: rows for e, rows in self._epochs.items() if e == epoch - 1}
            packed = pack(self.documents, self.row_length, seed=self.seed * 1_000_003 + epoch)
            self._epochs = previous | {epoch: packed}
        return self._epochs[epoch]

    def __getitem__(self, address: tuple[int, int]) -> Packed:
        epoch, i = address
        indices = self.epoch(epoch)[i]
        return make_row([self.documents[j] for j in indices], self.row_length, sources=indices)

    def tokens(self, address: tuple[int, int]) -> int:
        """The number of tokens in a row, without filler."""
        epoch, i = address
        return sum(self.documents[j].tokens.numel() for j in self.epoch(epoch)[i])

    def next(self, address: tuple[int, int]) -> tuple[int, int]:
        """The address of the next row: in the same epoch, or the first of the next epoch."""
        epoch, i = address
        return (epoch, i + 1) if i + 1 < len(self.epoch(epoch)) else (epoch + 1, 0)

    def heaviest(self) -> list[Packed]:
        """The rows of the first epoch that need the most memory in a training step: one or two rows.

        They are the row with the most supervised tokens, and the row with the longest document if it is a different
        one. Later epochs are packed differently, and one of their rows may need more.
        """
        epoch = self.epoch(0)
        supervised = [sum(int((self.documents[j].spans >= 0).sum()) for j in row) for row in epoch]
        longest = [max(self.documents[j].tokens.numel() for j in row) for row in epoch]
        most = supervised.index(max(supervised))
        indices = [most] if longest[most] == max(longest) else [most, longest.index(max(longest))]
        return [self[0, i] for i in indices]


class StreamedRows(Rows):
    """Rows of a single epoch in which one part of the documents comes after the other; `parts` are [first, end).

    No row has documents of two parts, so that a part is not needed any more after its last row. The rows are those of
    one epoch whatever epoch is asked for.
    """

    def __init__(self, documents: list[Document], row_length: int, seed: int, parts: Sequence[tuple[int, int]]):
        super().__init__(documents, row_length, seed)
        self._rows, self.last_rows = [], []  # the rows, and the number of rows up to the end of each part
        for i, (first, end) in enumerate(parts):
            packed = pack(documents[first:end], row_length, seed=seed * 1_000_003 + i)
            self._rows += [[first + j for j in row] for row in packed]
            self.last_rows.append(len(self._rows))

    def epoch(self, epoch: int) -> list[list[int]]:
        return self._rows

    def finished_parts(self, address: tuple[int, int]) -> int:
        """The number of parts all of whose rows are before an address."""
        epoch, i = address
        return len(self.last_rows) if epoch else bisect.bisect_right(self.last_rows, i)
