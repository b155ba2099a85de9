"""The data of a training run: training documents packed into rows, and records held out to measure τ. Also the
content of the run's summary.json (docs/measuring.md), which describes the data for reports."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fledge import __version__
from fledge.data.documents import Document, lengths_of, supervised_of
from fledge.data.pack import Rows
from fledge.data.record import Record
from fledge.data.sources import shadowed_presets
from fledge.data.template import ChatTemplate
from fledge.data.token_cache import DataRequest, data_files, load_data
from fledge.drafts.draft import Draft
from fledge.io.fields import read_json
from fledge.io.files import cache_directory
from fledge.io.machine import command, environment
from fledge.train.checkpoint import RunDirectory
from fledge.train.ranks import Ranks
from fledge.train.setup.draft import missing_from
from fledge.train.setup.recipe import DataRecipe, Recipe
from fledge.train.setup.target import PreparedTarget

EVAL_RECORDS = 16  # records held out to measure τ
ROW_BYTES = 4 * 8  # bytes per token of a packed row: token id, span, position and document
MISSING = 50  # tokens that the draft vocabulary lacks, the most frequent ones
UNREADABLE = "\ufffd"  # a tokenizer's text for bytes that are no whole character

Say = Callable[[str], None]


def training_data(
    recipe: Recipe, prepared: PreparedTarget, say: Say, progress: Any
) -> tuple[Sequence[Document], list[Record]]:
    """The documents to train on, and the records held out to measure τ, from the features on disk or from the data
    sources (`read_data`). No record is held out if --eval-prompts is given or if τ cannot be measured."""
    measures = prepared.decodes and not recipe.options.eval_prompts
    if cache := recipe.features:
        known = cache.manifest
        say(
            f"{cache.path} has features of {known.documents:,} documents, {known.tokens:,} tokens, in {known.precision}"
        )
        return cache.documents, cache.held_out() if measures else []
    return read_data(
        recipe.data, recipe.options.seed, prepared.template, prepared.max_length, say, progress, hold_out=measures
    )  # fmt: skip


def read_data(
    data: DataRecipe, seed: int, template: ChatTemplate, max_length: int, say: Say, progress: Any, *, hold_out: bool
) -> tuple[Sequence[Document], list[Record]]:
    """The documents of the data sources, of at most `max_length` tokens, and the records held out to measure τ.

    No record is held out without `hold_out`, or if the data is too small (see `select`).
    """
    for message in shadowed_presets(data.sources):
        say(message)
    request = DataRequest(
        sources=data.sources, seed=seed, template=template, max_length=max_length, skip_bad=data.options.skip_bad,
        hold_out=EVAL_RECORDS if hold_out else 0,
    )  # fmt: skip
    count = functools.partial(progress.count, unit="records")
    found = load_data(request, cache_directory(data.options.data_cache), data.options.data_workers, say, count)
    if found.held_out:
        more = f", and {found.copies:,} more with the same content are not trained on" if found.copies else ""
        say(f"{len(found.held_out)} of {found.records:,} records are held out to measure τ{more}")
    say(str(found.report))
    return found.documents, found.held_out


def check_files(data: DataRecipe, directory: RunDirectory) -> None:
    """Raises ValueError, naming a file, if the data files differ from the files in the run's summary. Tokenizes
    nothing. Without a readable summary, checks nothing: `check_settled` compares the data after tokenization."""
    try:
        known = read_json(directory.summary)["data"]["files"]
        hashes = set(known.values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    now = data_files(data.sources)
    others = [file for file in now if now[file] not in hashes]
    others += [file for file in known if known[file] not in now.values()]
    if others:
        file = others[0]
        how = "was changed" if file in known and file in now else "was added" if file in now else "is not there"
        raise ValueError(
            f"the data differs from that of the run in {directory.path}: {file} {how}; restore the file, or start a "
            f"new run, with the weights so far by --init-from {directory.checkpoint}"
        )


def make_rows(recipe: Recipe, prepared: PreparedTarget, documents: Sequence[Document], say: Say) -> Rows:
    """`pack_rows`. Raises ValueError if the target's hidden states for one row do not fit in memory."""
    rows, target = pack_rows(recipe, prepared, documents, say), prepared.target
    row, states, width = rows.row_length, len(prepared.layers) + 1, target.embedding.shape[1]
    needed, total = row * (ROW_BYTES + states * width * target.dtype.itemsize), total_memory(target.device)
    if needed > total:
        raise ValueError(
            f"--row-length {row:,}: the target's hidden states alone take {needed / 2**30:,.1f} GiB, and the device "
            f"has {total / 2**30:,.1f} GiB; lower it to about {total * row // (4 * needed):,} or less"
        )
    return rows


def pack_rows(recipe: Recipe, prepared: PreparedTarget, documents: Sequence[Document], say: Say) -> Rows:
    """The documents packed into rows. A row is no longer than the data."""
    asked = recipe.options.row_length or 2 * prepared.max_length
    tokens = int(lengths_of(documents).sum())
    if asked > tokens and recipe.options.row_length:
        say(f"--row-length {asked:,} is more than the {tokens:,} tokens of the data; rows have {tokens:,} tokens")
    row = min(asked, tokens)
    return Rows(documents, row, recipe.options.seed)


def total_memory(device: torch.device) -> int:
    """Total memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def summarize(
    recipe: Recipe, prepared: PreparedTarget, draft: Draft, documents: Sequence[Document], ranks: Ranks
) -> dict[str, Any]:
    """The summary of a run on `documents`, which have the number of occurrences of each token."""
    machine = environment(draft.device.type, str(prepared.target.dtype))
    size = prepared.target.embedding.shape[0]
    missing = missing_from(draft.target_ids().cpu(), documents, size, MISSING)
    return {
        "command": command(),
        "versions": {"fledge": __version__} | {name: machine[name] for name in ("python", "torch", "transformers")},
        "environment": machine,
        "ranks": ranks.total,
        "target": prepared.target.name,
        "method": recipe.method.name,
        "data": {
            "sources": list(recipe.features.manifest.data if recipe.features else recipe.data.sources),
            "files": data_files(recipe.data.sources),
            "documents": len(documents),
            "tokens": int(lengths_of(documents).sum()),
            "supervised": int(supervised_of(documents).sum()),
        },
        "vocabulary": {
            "size": draft.config.draft_vocab_size,
            "target_size": size,
            "coverage": draft.config.provenance.coverage,
            "missing": [{"token": i, "text": _text(prepared.target.tokenizer, i), "count": n} for i, n in missing],
        },
    }


def _text(tokenizer: Any, token: int) -> str:
    """The token's text, or the token's name in the tokenizer if the token is a part of a character."""
    text = tokenizer.decode([token])
    return str(tokenizer.convert_ids_to_tokens(token)) if UNREADABLE in text or not text else text
