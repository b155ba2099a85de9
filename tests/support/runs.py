"""Files of a run's directory: recipe.yaml and checkpoints, and what earlier versions wrote instead of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from fledge.models.draft import Draft
from fledge.train.checkpoint import RunDirectory

# Written by fledge at commit 2b7d3d5 for: --method eagle3 --keep-unseen --draft-vocab 200 --max-length 64
# --row-length 128 --steps 6 --depth 3 --rows-per-step 2 --eval-every 2 --eval-tokens 4 --seed 3 --device cpu
TRAIN_JSON = """\
{
  "options": {
    "target": "TARGET",
    "trust_remote_code": false,
    "data": [
      "DATA"
    ],
    "out": "OUT",
    "resume": null,
    "init_from": null,
    "method": "eagle3",
    "epochs": 1.0,
    "steps": 6,
    "depth": 3,
    "draft_vocab": 200,
    "max_length": 64,
    "row_length": 128,
    "rows_per_step": 2,
    "lr": null,
    "warmup": 0.05,
    "weight_decay": 0.01,
    "clip": 1.0,
    "gamma": 0.8,
    "loss": "ce",
    "keep_unseen": true,
    "fc_norm": false,
    "norm_output": false,
    "norm_before_fc": false,
    "norm_before_residual": false,
    "qk_norm": false,
    "aux_layers": null,
    "layers": 1,
    "train_embeddings": false,
    "fc_bias": false,
    "cod_rate": null,
    "cod_least": null,
    "feature_noise": 0.0,
    "template_kwargs": null,
    "skip_bad": false,
    "eval_prompts": null,
    "eval_every": 2,
    "eval_tokens": 4,
    "save_every": 200,
    "log": null,
    "seed": 3,
    "impl": "eager",
    "slots": 256,
    "activations": "keep",
    "longest_row": false,
    "compile_target": false,
    "device": "cpu",
    "dtype": null
  },
  "data_sha256": "SHA256"
}
"""
FORMER = {"keep_out_of_vocab": "keep_unseen", "cod_min_rate": "cod_least"}
CHOSEN = ("depth", "max_length", "eval_tokens", "impl", "slots", "activations")  # values that a run chose itself
OPTIONAL = ("steps", "row_length", "draft_vocab")  # a recipe omits these if they were not given


def recipe_of(run: Path) -> dict[str, Any]:
    """Reads a run's recipe with a plain YAML reader."""
    return yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))


def write_recipe(run: Path, recipe: dict[str, Any]) -> None:
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def as_before(run: Path, **options: Any) -> None:
    """Replaces a run's recipe by the train.json that an earlier version would have written; `options` override its
    values."""
    recipe, content = recipe_of(run), json.loads(TRAIN_JSON)
    chosen = {name: recipe["settled"][name] for name in CHOSEN}
    given = {FORMER.get(name, name): value for name, value in (recipe | chosen).items()}
    if kwargs := given.get("template_kwargs"):
        given["template_kwargs"] = json.dumps(kwargs)
    known = content["options"] | dict.fromkeys(OPTIONAL)
    known |= {name: value for name, value in given.items() if name in known}
    content["options"] = known | {"out": str(run)} | options
    content["data_sha256"] = recipe["settled"]["data_sha256"]
    (run / "train.json").write_text(json.dumps(content, indent=2) + "\n")
    (run / "recipe.yaml").unlink()


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
