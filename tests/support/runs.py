"""Files of a run's directory: recipe.yaml and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from fledge.drafts.draft import Draft
from fledge.train.checkpoint import RunDirectory


def recipe_of(run: Path) -> dict[str, Any]:
    """Reads a run's recipe with a plain YAML reader."""
    return yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))


def write_recipe(run: Path, recipe: dict[str, Any]) -> None:
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def save_checkpoint(
    run: RunDirectory, draft: Draft, dtype: torch.dtype, progress: dict[str, Any], **tensors: Tensor
) -> None:
    """Saves a checkpoint and waits for it."""
    run.save_checkpoint(draft, dtype, tensors or {"x": torch.zeros(3)}, progress)
    run.finish_saving()


def state_file(run: Path) -> Path:
    """The file with the tensors of a checkpoint that one process wrote."""
    (file,) = (run / "checkpoint" / "state").iterdir()
    return file
