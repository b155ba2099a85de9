"""The data of a training run: training documents packed into rows, and records held out to measure τ."""

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
from fledge.jobs.training.target import PlannedTarget
from fledge.types import Document

EVAL_RECORDS = 16  # records held out to measure τ
ROW_BYTES = 4 * 8  # bytes per token of a packed row: token id, span, position and document

Say = Callable[[str], None]


def read_data(recipe: Recipe, prepared: PlannedTarget, say: Say, progress: Any) -> tuple[list[Document], list[Record]]:
    """The documents to train on, and the records held out to measure τ.

    No record is held out if --eval-prompts is given, if τ cannot be measured for this target, or if the data has fewer
    than 10 * EVAL_RECORDS records.
    """
    data, skipped = recipe.data, []
    records = read_records(list(data.sources), recipe.seed, skip=skipped.append if data.skip_bad else None)
    held_out: list[Record] = []
    if prepared.decodes and not recipe.evaluation.prompts and len(records) >= 10 * EVAL_RECORDS:
        records, held_out = _hold_out(records, recipe.seed, say)
    with progress.count("reading chats", len(records)) as advance:
        documents, report = make_documents(
            records, prepared.template, prepared.max_length, skip_bad=data.skip_bad, skipped=skipped, advance=advance
        )
    say(str(report))
    return documents, held_out


def _hold_out(records: list[Record], seed: int, say: Say) -> tuple[list[Record], list[Record]]:
    """The records to train on, and the held-out records. Records with the same content as a held-out record are not
    trained on either. If no record would be left to train on, none is held out."""
    chosen = set(random.Random(seed).sample(range(len(records)), EVAL_RECORDS))
    held_out = [r for i, r in enumerate(records) if i in chosen]
    excluded = {r.content_key() for r in held_out}
    others = [r for r in records if r.content_key() not in excluded]
    if not others:
        return records, []
    copies = len(records) - len(others) - len(held_out)
    more = f", and {copies:,} more with the same content are not trained on" if copies else ""
    say(f"{len(held_out)} of {len(records):,} records are held out to measure τ{more}")
    return others, held_out


def make_rows(recipe: Recipe, prepared: PlannedTarget, documents: list[Document], say: Say) -> Rows:
    """`pack_rows`. Raises ValueError if the target's hidden states for one row do not fit in memory."""
    rows = pack_rows(recipe, prepared, documents, say)
    _check_memory(rows.row_length, prepared)
    return rows


def pack_rows(recipe: Recipe, prepared: PlannedTarget, documents: list[Document], say: Say) -> Rows:
    """The documents packed into rows. A row is no longer than the data."""
    asked = recipe.data.row_length or 2 * prepared.max_length
    tokens = sum(d.tokens.numel() for d in documents)
    if asked > tokens and recipe.data.row_length:
        say(f"--row-length {asked:,} is more than the {tokens:,} tokens of the data; rows have {tokens:,} tokens")
    return Rows(documents, min(asked, tokens), recipe.seed)


def _check_memory(row: int, prepared: PlannedTarget) -> None:
    target = prepared.target
    states, width = len(prepared.layers) + 1, target.embedding.shape[1]
    needed, total = row * (ROW_BYTES + states * width * target.dtype.itemsize), total_memory(target.device)
    if needed > total:
        raise ValueError(
            f"--row-length {row:,}: the target's hidden states alone take {needed / 2**30:,.1f} GiB, and the device "
            f"has {total / 2**30:,.1f} GiB; lower it to about {total * row // (4 * needed):,} or less"
        )


def total_memory(device: torch.device) -> int:
    """Total memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fingerprint(documents: Sequence[Document]) -> str:
    """SHA-256 of the tokens and spans of all documents, in hexadecimal."""
    digest = hashlib.sha256()
    for d in documents:
        digest.update(d.tokens.numpy().tobytes() + d.spans.numpy().tobytes())
    return digest.hexdigest()
