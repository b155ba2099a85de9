"""The data of a training run: documents to train on, records held out to measure τ, and rows."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fledge.data.dataset import Rows, make_documents
from fledge.data.read import read_records
from fledge.data.record import Record
from fledge.jobs.training.recipe import Recipe
from fledge.jobs.training.target import Prepared
from fledge.types import Document

EVAL_RECORDS = 16
ROW_BYTES = 4 * 8  # a packed row's token: its id, span, position and document

Say = Callable[[str], None]


def read_data(recipe: Recipe, prepared: Prepared, say: Say, progress: Any) -> tuple[list[Document], list[Record]]:
    """The documents to train on, and the records that are held out for measuring τ: none where prompts are given, τ
    cannot be decoded, or the records are few."""
    data, skipped = recipe.data, []
    records = read_records(list(data.sources), recipe.seed, skip=skipped.append if data.skip_bad else None)
    held_out: list[Record] = []
    if prepared.decodes and not recipe.evaluation.prompts and len(records) >= 10 * EVAL_RECORDS:
        records, held_out = _hold_out(records, recipe.seed, say)
    with progress.counting("reading chats", len(records)) as advance:
        documents, report = make_documents(
            records, prepared.template, prepared.max_length, skip_bad=data.skip_bad, skipped=skipped, advance=advance
        )
    say(str(report))
    return documents, held_out


def _hold_out(records: list[Record], seed: int, say: Say) -> tuple[list[Record], list[Record]]:
    """The records to train on, and those to decode τ on. Copies of the latter are not trained on; where nothing would
    be left to train on, all records are trained on."""
    chosen = set(random.Random(seed).sample(range(len(records)), EVAL_RECORDS))
    held_out = [r for i, r in enumerate(records) if i in chosen]
    kept_out = {r.content_key() for r in held_out}
    others = [r for r in records if r.content_key() not in kept_out]
    if not others:
        return records, []
    copies = len(records) - len(others) - len(held_out)
    more = f", and {copies:,} more that say the same" if copies else ""
    say(f"{len(held_out)} of {len(records):,} records are held out, to decode τ on{more}")
    return others, held_out


def make_rows(recipe: Recipe, prepared: Prepared, documents: list[Document], say: Say) -> Rows:
    """The documents packed into rows, at most as long as the data. Raises ValueError where the features of a row alone
    do not fit in memory."""
    asked = recipe.data.row_length or 2 * prepared.max_length
    tokens = sum(d.tokens.numel() for d in documents)
    if asked > tokens and recipe.data.row_length:
        say(f"a row of {asked:,} tokens would hold more than the data's {tokens:,}: rows are as long as that")
    row = min(asked, tokens)
    _check_memory(row, prepared)
    return Rows(documents, row, recipe.seed)


def _check_memory(row: int, prepared: Prepared) -> None:
    target = prepared.target
    states, width = len(prepared.layers) + 1, target.embedding.shape[1]
    least, there = row * (ROW_BYTES + states * width * target.dtype.itemsize), memory_of(target.device)
    if least > there:
        raise ValueError(
            f"--row-length {row:,}: the target's hidden states alone take {least / 2**30:,.1f} GiB of the "
            f"{there / 2**30:,.1f} GiB that there are; shorten it to some {there * row // (4 * least):,} or less"
        )


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fingerprint(documents: Sequence[Document]) -> str:
    """SHA-256 of all tokens and spans, in hexadecimal."""
    found = hashlib.sha256()
    for d in documents:
        found.update(d.tokens.numpy().tobytes() + d.spans.numpy().tobytes())
    return found.hexdigest()
