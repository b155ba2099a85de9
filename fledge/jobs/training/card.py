"""Writes the model card that is published together with each draft."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fledge import __version__
from fledge.data.dataset import Rows
from fledge.data.documents import lengths_of
from fledge.data.presets import HubData
from fledge.data.read import SourceReader
from fledge.data.sources import Source
from fledge.engines.export import needs_export
from fledge.eval.environment import environment
from fledge.formats.tensors import WEIGHTS
from fledge.hub import cached_commit
from fledge.jobs.model_card import CARD, Measurement, Training, card_text, code
from fledge.jobs.training.probe import Attach
from fledge.jobs.training.recipe import ExistingDraft, Recipe
from fledge.jobs.training.target import PreparedTarget
from fledge.models.draft import Draft
from fledge.models.weights import DraftFiles, config_json, portable_tensors
from fledge.train.ranks import Ranks
from fledge.train.trainer import Schedule


def with_card(
    attach: Attach, recipe: Recipe, prepared: PreparedTarget, rows: Rows, schedule: Schedule, dtype: torch.dtype,
    ranks: Ranks, say: Callable[[str], None],
) -> Attach:  # fmt: skip
    """A function that makes the files of `attach` and the draft's card, for `trainer.train`, which saves drafts in
    `dtype`. Only rank 0 writes a card."""
    if not ranks.leads:
        return attach
    machine = environment(prepared.target.device.type, str(prepared.target.dtype))
    facts = _facts(recipe, prepared, rows, schedule, machine, ranks)
    commit = cached_commit(recipe.target.name)

    def attach_card(draft: Draft, metrics: dict[str, Any]) -> Mapping[str, bytes]:
        files = attach(draft, metrics)
        try:
            step = (("Steps", f"{metrics['step']:,} of {schedule.steps:,}"),)
            text = card_text(
                draft.config,
                exports=lambda engine: needs_export(_files(draft, dtype), engine),
                training=Training(_datasets(recipe), step + facts),
                measurements=_measurements(recipe, prepared, metrics, machine),
                revision=commit,
            )
            return {**files, CARD: text.encode()}
        except Exception as e:  # the draft must be saved all the same
            say(f"the draft is written without a model card: {type(e).__name__}: {e}")
            return files

    return attach_card


def _files(draft: Draft, dtype: torch.dtype) -> DraftFiles:
    """The draft's files as they are saved, without the values of the weights."""
    tensors = {
        n: x.detach().to("meta", dtype) if x.is_floating_point() else x.cpu() for n, x in draft.state_dict().items()
    }
    names = portable_tensors(draft.config, tensors).keys()
    return DraftFiles(draft.config, tensors, config_json(draft, dtype), frozenset(names), WEIGHTS)


def _facts(
    recipe: Recipe, prepared: PreparedTarget, rows: Rows, schedule: Schedule, machine: dict[str, Any], ranks: Ranks
) -> tuple[tuple[str, str], ...]:
    """The rows of the card's table on training, apart from the step."""
    lengths, objective = lengths_of(rows.documents), recipe.objective
    loss = f"{code(objective.loss)} over {objective.depth} drafted token{'s' * (objective.depth > 1)}"
    loss += f", γ {objective.gamma:g}" if objective.gamma != 1 else ""
    begun = recipe.draft.name if isinstance(recipe.draft, ExistingDraft) else None
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "transformers"))
    commit = f" ({machine['commit']})" if machine["commit"] else ""
    facts = {
        "Rows": f"{schedule.rows_per_step:,} a step, of {rows.row_length:,} tokens",
        "Data": ", ".join(map(code, map(shown_source, _sources(recipe)))),
        "Documents": f"{len(rows.documents):,} of up to {prepared.max_length:,} tokens, {int(lengths.sum()):,} in all",
        "Hidden states": _hidden_states(recipe),
        "Started from": code(shown_source(begun)) if begun else "",
        "Loss": loss,
        "Optimizer": {"adamw": "AdamW", "muon": "Muon"}[schedule.optimizer],
        "Learning rate": f"{schedule.lr:.3g}, warm-up {schedule.warmup:g}, weight decay {schedule.weight_decay:g}",
        "Seed": str(recipe.seed),
        "Hardware": f"{ranks.size} x {machine['device']}, {machine['dtype']}",
        "Software": f"fledge {__version__}{commit}, {versions}",
    }
    return tuple((label, text) for label, text in facts.items() if text)


def _hidden_states(recipe: Recipe) -> str:
    if recipe.served:
        return "computed by vLLM"
    return f"from a disk, in {recipe.features.manifest.precision}" if recipe.features else ""


def _sources(recipe: Recipe) -> Sequence[str]:
    return recipe.features.manifest.data if recipe.features else recipe.data.sources


def _datasets(recipe: Recipe) -> tuple[str, ...]:
    """The hub ids of the data sources."""
    return tuple(dict.fromkeys(data.hub_id for data in map(_hub_data, _sources(recipe)) if data))


def _hub_data(source: str) -> HubData | None:
    """A data source of the hub; None for a local one, also if it is not there any more."""
    try:
        return SourceReader(source).hub
    except ValueError:
        return None


def shown_source(source: str) -> str:
    """A data source or draft as others may read it: the name of a data set of the hub, or the last part of a path."""
    if data := _hub_data(source):
        return data.name
    path = Source.parse(source).path if source.startswith("{") else source
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _measurements(
    recipe: Recipe, prepared: PreparedTarget, metrics: dict[str, Any], machine: dict[str, Any]
) -> list[Measurement]:
    if "eval_tau" not in metrics:
        return []
    prompts = recipe.evaluation.prompts
    mode = "one pass" if recipe.method.one_pass else "chain"
    return [
        Measurement(
            shown_source(prompts) if prompts else "records held out from the training data",
            f"greedy, {mode}, depth {recipe.depth}, {prepared.eval_tokens} new tokens",
            metrics["eval_tau"], tuple(metrics["eval_alpha"]), None, machine["device"],
        )
    ]  # fmt: skip
