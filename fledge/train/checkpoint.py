"""A run's directory: `draft/` to serve, `checkpoint/` to resume from, `recipe.yaml` and `metrics.jsonl`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fledge.files import (
    exclusive_lock,
    read_consistent,
    remove_temporary_files,
    replace_directory,
    replace_text,
    restore_interrupted,
    sibling_path,
)
from fledge.models.draft import Draft
from fledge.models.weights import CONFIG, WEIGHTS, save_draft, write_draft

STATE = "state.pt"
SUMS = "SHA256SUMS"  # hashes of a checkpoint's files, in the format of the program sha256sum


class RunDirectory:
    """The directory of a training run. Every file and directory in it is replaced atomically.

    `recipe` is the file with the run's options; `old_config` is the file that earlier versions wrote instead.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.draft, self.checkpoint = self.path / "draft", self.path / "checkpoint"
        self.recipe, self.old_config = self.path / "recipe.yaml", self.path / "train.json"
        self.metrics = self.path / "metrics.jsonl"

    def check_free(self) -> None:
        """Raises ValueError if the directory holds a run, or another file that a run would replace."""
        if self.recipe.is_file() or self.old_config.is_file():
            raise ValueError(
                f"{self.path} holds a training run; continue it with --resume {self.path}, or choose another --out"
            )
        for taken in (self.recipe, self.old_config, self.draft, self.checkpoint, self.metrics):
            if os.path.lexists(taken):
                raise ValueError(f"{taken} exists, and a run in {self.path} would replace it; choose another --out")

    @contextlib.contextmanager
    def locked(self, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
        """A context manager that holds the directory's lock, and first completes or reverts a replacement that a killed
        process left unfinished. Creates the directory, and removes it again if nothing was written.

        Raises ValueError if another process holds the lock, or if a file is in the way that a run cannot replace. `say`
        is passed to `files.exclusive_lock`.
        """
        self._check_own()
        created = not self.path.exists()
        try:
            with exclusive_lock(self.path / ".fledge-lock", str(self.path), say):
                restore_interrupted(self.draft)
                restore_interrupted(self.checkpoint)
                remove_temporary_files(self.path)
                yield
        finally:
            if created:
                with contextlib.suppress(OSError):  # not empty: a run was started
                    self.path.rmdir()

    def _check_own(self) -> None:
        """Raises ValueError if one of the run's paths is a symbolic link or not of the expected type."""
        for directory in (self.draft, self.checkpoint):
            for path in (directory, sibling_path(directory, "old"), sibling_path(directory, "new")):
                _check_kind(path, Path.is_dir, "directory")
        for file in (self.recipe, self.old_config, self.metrics):
            _check_kind(file, Path.is_file, "file")

    def start(self, recipe: str) -> None:
        """Creates the directory of a new run and writes `recipe`, the text of recipe.yaml. Raises ValueError if the
        directory holds a run."""
        self.check_free()
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self.recipe, recipe)

    def options_file(self) -> Path:
        """The file with the run's options: recipe.yaml, or train.json if an earlier version started the run. Raises
        ValueError if there is no run."""
        found = next((file for file in (self.recipe, self.old_config) if file.is_file()), None)
        if found is None:
            raise ValueError(f"{self.path} holds no training run to resume (no {self.recipe.name})")
        return found

    def save_checkpoint(self, draft: Draft, dtype: torch.dtype, state: dict[str, Any]) -> None:
        """Writes the training state, and the current draft as one that can be loaded."""
        with replace_directory(self.checkpoint) as new:
            write_draft(draft, new, dtype)
            with (new / STATE).open("wb") as f:
                torch.save(state, f)
            sums = "".join(f"{_sha256(new / name)}  {name}\n" for name in (STATE, WEIGHTS, CONFIG))
            (new / SUMS).write_text(sums)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The state of the last complete checkpoint; None if there is none yet.

        Raises ValueError if a file's hash is wrong (checkpoints of earlier versions have no hashes), or if the state is
        not a dict.
        """
        return read_consistent(self.checkpoint, self._state)

    def _state(self, checkpoint: Path) -> dict[str, Any] | None:
        if not checkpoint.exists():
            return None
        self._check_sums(checkpoint)
        try:
            state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
        except Exception as e:
            raise self.damage_error(type(e).__name__) from e
        if not isinstance(state, dict):
            raise self.damage_error(f"it holds a {type(state).__name__}")
        return state

    def _check_sums(self, checkpoint: Path) -> None:
        if not (checkpoint / SUMS).exists():
            return
        recorded = [line.split("  ") for line in (checkpoint / SUMS).read_text(errors="replace").splitlines()]
        if [name for _, *name in recorded] != [[STATE], [WEIGHTS], [CONFIG]]:
            raise ValueError(f"{checkpoint / SUMS} is damaged; start a new run")
        for known, name in recorded:
            if not (checkpoint / name).is_file():
                raise self.damage_error("it is missing", name)
            if _sha256(checkpoint / name) != known:
                raise self.damage_error("its SHA-256 differs from the recorded one", name)

    def damage_error(self, why: str, name: str = STATE) -> ValueError:
        """The error to raise for a file of the checkpoint from which training cannot continue."""
        remedy = f"; --init-from {self.checkpoint} starts it with the saved weights" if name == STATE else ""
        return ValueError(f"{self.checkpoint / name} cannot be read ({why}); it is damaged, start a new run{remedy}")

    def publish(self, draft: Draft, dtype: torch.dtype) -> None:
        """Writes the run's result, `draft/`."""
        save_draft(draft, self.draft, dtype)

    def truncate_metrics(self, step: int) -> None:
        """Removes the metrics of steps after `step`, which a resumed run writes again, and an incomplete last line.

        Raises ValueError for a line without a step.
        """
        if not self.metrics.exists():
            return
        lines = [(i, line) for i, line in enumerate(self.metrics.read_bytes().split(b"\n"), 1) if line.endswith(b"}")]
        kept = [line.decode() for i, line in lines if self._step_of(line, i) <= step]
        replace_text(self.metrics, "".join(line + "\n" for line in kept))

    def _step_of(self, line: bytes, number: int) -> int:
        try:
            step = json.loads(line.decode())["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            step = None
        if not isinstance(step, int):
            raise ValueError(f"{self.metrics}, line {number} was not written by training; remove it to continue")
        return step


def _check_kind(path: Path, kind: Callable[[Path], bool], name: str) -> None:
    if path.is_symlink():
        raise ValueError(
            f"{path} is a symbolic link, and a run would replace the link itself by its {name}; move the link's target "
            "here, or keep the whole run elsewhere and link its directory"
        )
    if path.exists() and not kind(path):
        raise ValueError(f"{path} is not a {name}, so a run cannot replace it; move it away")


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
