"""A run's directory: `draft/` to serve, `checkpoint/` to resume from, `train.json` and `metrics.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fledge.models.draft import Draft
from fledge.models.weights import disk_full, recover, replacing, save_draft, write_draft


class RunDirectory:
    """Where a training run keeps what it makes. Every piece is replaced whole or left as it was."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.draft, self.checkpoint = self.path / "draft", self.path / "checkpoint"
        self.config, self.metrics = self.path / "train.json", self.path / "metrics.jsonl"

    def check_free(self) -> None:
        """Raises ValueError where a run has already been, or something else that a run would replace."""
        if self.config.exists():
            raise ValueError(
                f"{self.path} holds a training run; go on with --resume {self.path}, or choose another --out"
            )
        for taken in (self.draft, self.checkpoint, self.metrics):
            if taken.exists():
                raise ValueError(f"{taken} is there, and a run in {self.path} would replace it; choose another --out")

    def start(self, config: dict[str, Any]) -> None:
        """Makes the directory for a new run. Raises ValueError where one has already been."""
        self.check_free()
        self.path.mkdir(parents=True, exist_ok=True)
        _replace_text(self.config, json.dumps(config, indent=2) + "\n")

    def read_config(self) -> dict[str, Any]:
        if not self.config.is_file():
            raise ValueError(f"{self.path} holds no training run to resume (no {self.config.name})")
        try:
            return json.loads(self.config.read_text())
        except ValueError as e:
            raise ValueError(f"{self.config} is not JSON ({e}); it is damaged, start a new run") from e

    def save_checkpoint(self, draft: Draft, dtype: torch.dtype, state: dict[str, Any]) -> None:
        """Everything needed to go on as if never stopped; the draft beside it is what serving would load."""
        with replacing(self.checkpoint) as new:
            write_draft(draft, new, dtype)
            with (new / "state.pt").open("wb") as f:
                torch.save(state, f)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last whole checkpoint's state, or None if the run was stopped before its first."""
        recover(self.checkpoint)
        file = self.checkpoint / "state.pt"
        if not self.checkpoint.exists():
            return None
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as e:
            raise ValueError(
                f"{file} cannot be read ({type(e).__name__}); it is damaged, start a new run, which may go on from the "
                f"weights with --init-from {self.checkpoint}"
            ) from e

    def publish(self, draft: Draft, dtype: torch.dtype) -> None:
        """Makes this the draft to serve."""
        save_draft(draft, self.draft, dtype)

    def truncate_metrics(self, step: int) -> None:
        """Drops metrics of steps after `step`, which a resumed run will write again."""
        if self.metrics.exists():
            lines = self.metrics.read_text().splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            _replace_text(self.metrics, "".join(line + "\n" for line in kept))


def _replace_text(file: Path, text: str) -> None:
    """Writes a small file whole, or leaves it as it was."""
    temporary = file.with_name(file.name + ".new")
    try:
        temporary.write_text(text)
        temporary.replace(file)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        if disk_full(e) is None:
            raise
        raise OSError(e.errno, f"no room to write {file} ({e.strerror}); free some space") from e
