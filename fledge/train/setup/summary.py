"""What a run was started with, for reports: the content of its summary.json (docs/measuring.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fledge import __version__
from fledge.data.documents import Document, lengths_of, supervised_of
from fledge.data.token_cache import data_files
from fledge.data.vocab import missing_from
from fledge.drafts.draft import Draft
from fledge.io.files import cache_directory
from fledge.io.machine import command, environment
from fledge.train.ranks import Ranks
from fledge.train.setup.recipe import Recipe
from fledge.train.setup.target import PlannedTarget

MISSING = 50  # tokens that the draft vocabulary lacks, the most frequent ones
UNREADABLE = "\ufffd"  # what a tokenizer decodes bytes to that are no whole character


def summarize(
    recipe: Recipe, prepared: PlannedTarget, draft: Draft, documents: Sequence[Document], ranks: Ranks
) -> dict[str, Any]:
    """The summary of a run on `documents`, which have the number of occurrences of each token."""
    machine = environment(draft.device.type, str(prepared.target.dtype))
    return {
        "command": command(),
        "versions": {"fledge": __version__} | {name: machine[name] for name in ("python", "torch", "transformers")},
        "environment": machine,
        "ranks": ranks.total,
        "target": prepared.target.name,
        "method": recipe.method.name,
        "data": {
            "sources": list(recipe.features.manifest.data if recipe.features else recipe.data.sources),
            "files": data_files(recipe.data.sources, cache_directory(recipe.data.cache)),
            "documents": len(documents),
            "tokens": int(lengths_of(documents).sum()),
            "supervised": int(supervised_of(documents).sum()),
        },
        "vocabulary": _vocabulary(prepared, draft, documents),
    }


def _vocabulary(prepared: PlannedTarget, draft: Draft, documents: Sequence[Document]) -> dict[str, Any]:
    """The draft vocabulary, and what the documents have that it lacks."""
    size = prepared.target.embedding.shape[0]
    missing = missing_from(draft.target_ids().cpu(), documents, size, MISSING)
    return {
        "size": draft.config.draft_vocab_size,
        "target_size": size,
        "coverage": draft.config.provenance.coverage,
        "missing": [{"token": i, "text": _text(prepared.target.tokenizer, i), "count": n} for i, n in missing],
    }


def _text(tokenizer: Any, token: int) -> str:
    """The token's text, or its name in the tokenizer if it is a part of a character."""
    text = tokenizer.decode([token])
    return str(tokenizer.convert_ids_to_tokens(token)) if UNREADABLE in text or not text else text
