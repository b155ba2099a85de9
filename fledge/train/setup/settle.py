"""Collects the values of a run that depend on the target, the data and the device, for its recipe.yaml."""

from __future__ import annotations

from fledge.data.documents import fingerprint
from fledge.data.pack import Rows
from fledge.drafts.draft import Draft
from fledge.train.setup.recipe import Recipe, Settled
from fledge.train.setup.target import PreparedTarget
from fledge.train.trainer import Schedule


def settle(recipe: Recipe, prepared: PreparedTarget, draft: Draft, rows: Rows, schedule: Schedule) -> Settled:
    implementation = schedule.implementation
    return Settled(
        depth=recipe.depth,
        max_length=prepared.max_length,
        row_length=rows.row_length,
        eval_tokens=prepared.eval_tokens,
        draft_vocab=draft.config.draft_vocab_size,
        mask_token=draft.config.mask_token_id,
        steps=schedule.steps,
        rows_per_step=schedule.rows_per_step,
        lr=schedule.lr,
        impl=implementation.attention,
        slots=implementation.slots,
        activations="recompute" if implementation.recompute else "keep",
        data_sha256=fingerprint(rows.documents),
    )
