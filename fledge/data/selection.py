"""Which records are trained on, in which order, and which are held out: decided by reading the sources once.

Records are read one at a time and not kept; they are read a second time to be tokenized.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fledge.data.read import SourceReader
from fledge.data.record import Record

MIN_RECORDS_PER_HELD_OUT = 10  # data with fewer records for each record to hold out is used for training only


@dataclass(frozen=True)
class Selection:
    """The records to train on and those held out, as indices of the readable records of all sources, in order.

    `order` are the records to train on, int64; with a share above 1, a record occurs several times. `held_out` are the
    others, int64. `records` is their number before records were held out, `copies` that of the records with the same
    content as a held-out record, which are not trained on either. `refused` are the reasons of unreadable records.
    """

    sources: Sequence[SourceReader]
    order: np.ndarray
    held_out: np.ndarray
    records: int
    copies: int
    refused: list[str] = field(default_factory=list)

    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """The records to train on, each once and ascending, and the positions of `order` among them; both int64."""
        return np.unique(self.order, return_inverse=True)

    def read(self, held_out: dict[int, Record]) -> Iterator[Record]:
        """Reads the sources again and yields each record of `distinct`. Puts the held-out records into `held_out`, by
        their indices."""
        wanted = np.concatenate([self.order, self.held_out])
        trained, kept = np.zeros(wanted.max() + 1, dtype=bool), set(self.held_out.tolist())
        trained[self.order] = True
        records = (record for source in self.sources for record in source.records(self._skip))
        for record, (i, used) in zip(records, enumerate(trained), strict=False):
            if i in kept:
                held_out[i] = record
            if used:
                yield record

    @property
    def _skip(self) -> Callable[[str], None] | None:
        return (lambda reason: None) if self.refused else None


def select(
    sources: Sequence[SourceReader],
    seed: int,
    *,
    skip_bad: bool,
    hold_out: int,
    advance: Callable[[], None] = lambda: None,
) -> Selection:
    """Reads all sources and decides which records are trained on. `advance` is called after each record.

    With at least MIN_RECORDS_PER_HELD_OUT * `hold_out` records, `hold_out` of them are drawn by `seed` and held out,
    unless no record would be left to train on. Raises ValueError as `read_records` does.
    """
    refused: list[str] = []
    orders, contents, first = [], bytearray(), 0
    for source in sources:
        reasons: list[str] = []
        count = 0
        for record in source.records(reasons.append if skip_bad else None):
            count += 1
            if hold_out:
                contents += hashlib.blake2b(record.content_key().encode(), digest_size=16).digest()
            advance()
        orders.append(first + source.order(count, reasons, seed))
        refused += reasons
        first += count
    order = np.concatenate(orders)
    everything = Selection(sources, order, order[:0], len(order), 0, refused)
    if not hold_out or len(order) < MIN_RECORDS_PER_HELD_OUT * hold_out:
        return everything
    chosen = sorted(random.Random(seed).sample(range(len(order)), hold_out))
    held_out = order[chosen]
    content = np.frombuffer(contents, dtype=np.int64).reshape(-1, 2)  # a row of two numbers for each record
    same = np.zeros(first, dtype=bool)
    for i in held_out:
        same |= (content == content[i]).all(1)
    others = order[~same[order]]
    if not len(others):
        return everything
    return Selection(sources, others, held_out, len(order), len(order) - len(others) - len(held_out), refused)
