"""Makes the probe of a draft, which is written with the draft and which `fledge check` computes again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fledge.check import probe
from fledge.data.documents import Document
from fledge.data.pack import Rows, make_row
from fledge.drafts.draft import Draft
from fledge.measure.prompts import spread
from fledge.options import default_new_tokens
from fledge.states.layout import PRECISIONS
from fledge.train.hooks import Attach
from fledge.train.setup.recipe import Recipe
from fledge.train.setup.target import PreparedTarget, target_fingerprint
from fledge.train.trainer import Run

PROMPTS = 8  # most decoded prompts
NEW_TOKENS = 32  # most tokens of each answer
SHORT_PROMPT = 16  # with fewer tokens before the first supervised token, half of a document is the prompt
FEWEST_DOCUMENTS = 256  # the document of the excerpt is chosen among so many documents


def make_probe(recipe: Recipe, prepared: PreparedTarget, run: Run, say: Callable[[str], None]) -> Attach:
    """A function that makes the files of a draft's probe, in the dtype of the run's drafts.

    The probe's hidden states, of one training document, are computed, or read from the disk, now. The prompts are the
    beginnings of several documents. Only rank 0 needs the states, but the ranks of a sharded target compute together.
    """
    ranks, rows, dtype = run.ranks, run.rows, run.save_dtype
    if ranks.target_ranks and ranks.leads:
        say("the draft is written without a probe for fledge check, as its ranks do not hold the target")
    if ranks.target_ranks or not (ranks.leads or prepared.target.sharded):
        return lambda draft, metrics: {}
    index = _document(rows)
    document = rows.documents[index]
    start, end, steps = probe.excerpt_range(document)
    length = len(document.tokens)
    features = prepared.source.features(make_row([document], length, sources=[index]))
    states_TAD = run.draft.select_states(features)[start:end].to("cpu", torch.bfloat16)
    excerpt = probe.Excerpt(torch.from_numpy(document.tokens[:end]).long(), states_TAD, steps)
    record = probe.ProbeRecord(
        layers=list(prepared.layers),
        precision=_precision(recipe, prepared),
        steps=steps,
        spacings=probe.spacings(excerpt, prepared.max_length),
        # if vLLM runs the target, this process has no quantized weights to hash
        target_sha256="" if recipe.served else target_fingerprint(prepared.target),
        chats=probe.render_chats(prepared.template),
    )
    measure = _decoder(recipe, prepared, rows.documents) if prepared.decodes else None

    def attach(draft: Draft, metrics: dict[str, Any]) -> Mapping[str, bytes]:
        try:
            decoding = measure(draft, dtype) if measure else None
            if not ranks.leads:
                return {}
            known = replace(record, step=metrics["step"], eval_tau=metrics.get("eval_tau"), decoding=decoding)
            return probe.probe_files(draft, dtype, excerpt, known)
        except Exception as e:  # e.g. no memory is left; the draft must be saved all the same
            say(f"the draft is written without a probe for fledge check: {type(e).__name__}: {e}")
            return {}

    return attach


def _document(rows: Rows) -> int:
    """The index of the document for the excerpt: the lowest index in the first row whose document fills an excerpt,
    else the longest document of the row."""
    longest = probe.SLOTS + 1 + probe.STEPS  # tokens of an excerpt
    indices = rows.epoch(0)[0][:FEWEST_DOCUMENTS]
    return max(indices, key=lambda i: (min(len(rows.documents[i].tokens), longest), -i))


def _precision(recipe: Recipe, prepared: PreparedTarget) -> str:
    """The precision of the hidden states that the draft reads: a name in PRECISIONS, or the name of a dtype."""
    if recipe.served:
        return "bfloat16"  # as vLLM computes most targets; here, the target's dtype is only the head's dtype
    if not recipe.features:
        return str(prepared.target.dtype).removeprefix("torch.")
    name = recipe.features.manifest.precision
    return name if recipe.method.reads_layers else str(PRECISIONS[name].last).removeprefix("torch.")


def _decoder(
    recipe: Recipe, prepared: PreparedTarget, documents: Sequence[Document]
) -> Callable[[Draft, torch.dtype], probe.ProbeDecoding] | None:
    """A function that decodes some prompts with a draft rounded to a dtype. None if the target's context is too
    short."""
    target, depth = prepared.target, recipe.depth
    new_tokens = default_new_tokens(NEW_TOKENS, target.context)
    room = min(probe.CONTEXT, target.context - new_tokens - depth)
    if room < 1 or new_tokens < 2:
        return None
    prompts = [_prompt(documents[i], room) for i in spread(list(range(len(documents))), PROMPTS)]

    def decoded(draft: Draft, dtype: torch.dtype) -> probe.ProbeDecoding:
        if draft.dtype != dtype:
            draft = probe.rounded_copy(draft, dtype).to(target.device, target.dtype)
        return probe.decode(target, draft, prompts, new_tokens, depth)

    return decoded


def _prompt(document: Document, longest: int) -> list[int]:
    """The tokens of a document before the first supervised token, or if too few, the document's first half."""
    before = probe.first_supervised(document)
    if before < SHORT_PROMPT:
        before = max(len(document.tokens) // 2, 1)
    return document.tokens[: min(before, longest)].tolist()
