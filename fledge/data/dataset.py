"""A training set: documents made once, rows packed anew each epoch from a seed, so any row can be made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fledge.data.pack import make_row, pack, windows
from fledge.data.record import Record
from fledge.data.template import ChatTemplate
from fledge.types import Document, Packed


@dataclass(frozen=True)
class DataReport:
    """What became of the records, to be shown before training."""

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
        text += f"; {self.windowed:,} longer than a window were cut into several" if self.windowed else ""
        return text + (
            f"; {self.refused:,} refused (--skip-bad), the first for this: {self.first_refusal}" if self.refused else ""
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
    """Tokenizes, marks spans and cuts windows. A bad record raises, or is counted with `skip_bad`. `skipped` says of
    records that are not among these, since they could not be read, why not: they are counted too."""
    documents: list[Document] = []
    refused, windowed = list(skipped), 0
    for record in records:
        try:
            made = template.documents(record)
        except ValueError as e:
            if not skip_bad:
                raise
            refused.append(str(e))
            made = []
        for document in made:
            windowed += document.tokens.numel() > max_length
            documents += windows(document, max_length)
        advance()
    count = len(records) + len(skipped)
    if not documents and len(refused) == count:
        raise ValueError(f"every record was refused, the first for this: {refused[0]}")
    if not documents:
        raise ValueError("no record has an assistant turn of two tokens or more, so there is nothing to draft")
    tokens = sum(d.tokens.numel() for d in documents)
    supervised = sum(int((d.spans >= 0).sum()) for d in documents)
    first_refusal = refused[0] if refused else ""
    return documents, DataReport(count, len(documents), windowed, len(refused), first_refusal, tokens, supervised)


class Rows:
    """Packed rows of documents, addressed by a running number that goes on through the epochs."""

    def __init__(self, documents: list[Document], row_length: int, seed: int):
        self.documents, self.row_length, self.seed = documents, row_length, seed
        self._epochs: dict[int, list[list[int]]] = {}  # the last, and the one before while it is asked for too

    def epoch(self, epoch: int) -> list[list[int]]:
        """The documents of each row of an epoch."""
        if epoch not in self._epochs:
            before = {e: rows for e, rows in self._epochs.items() if e == epoch - 1}
            packed = pack(self.documents, self.row_length, seed=self.seed * 1_000_003 + epoch)
            self._epochs = before | {epoch: packed}
        return self._epochs[epoch]

    def __getitem__(self, place: tuple[int, int]) -> Packed:
        epoch, i = place
        return make_row([self.documents[j] for j in self.epoch(epoch)[i]], self.row_length)

    def tokens(self, place: tuple[int, int]) -> int:
        """Tokens of the row at a place, its filler not counted."""
        epoch, i = place
        return sum(self.documents[j].tokens.numel() for j in self.epoch(epoch)[i])

    def next(self, place: tuple[int, int]) -> tuple[int, int]:
        """The place after this one."""
        epoch, i = place
        return (epoch, i + 1) if i + 1 < len(self.epoch(epoch)) else (epoch + 1, 0)

    def heaviest(self) -> list[Packed]:
        """The first epoch's rows that ask most of a step: that with the most supervised tokens and, if it is another,
        that with the longest document. A later epoch may have one that asks for more."""
        epoch = self.epoch(0)
        supervised = [sum(int((self.documents[j].spans >= 0).sum()) for j in row) for row in epoch]
        longest = [max(self.documents[j].tokens.numel() for j in row) for row in epoch]
        most = supervised.index(max(supervised))
        places = [most] if longest[most] == max(longest) else [most, longest.index(max(longest))]
        return [self[0, i] for i in places]
