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

from fledge.files import beside, held, mend, reading, remove_abandoned, replace_text, replacing
from fledge.models.draft import Draft
from fledge.models.weights import CONFIG, WEIGHTS, save_draft, write_draft

STATE = "state.pt"
SUMS = "SHA256SUMS"  # of a checkpoint's files, as the program sha256sum writes and checks them


class RunDirectory:
    """Where a training run keeps what it makes. Every piece is replaced whole or left as it was.

    `recipe` says what the run does; `old_config` is the file that earlier versions wrote instead.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.draft, self.checkpoint = self.path / "draft", self.path / "checkpoint"
        self.recipe, self.old_config = self.path / "recipe.yaml", self.path / "train.json"
        self.metrics = self.path / "metrics.jsonl"

    def check_free(self) -> None:
        """Raises ValueError where a run has already been, or something else that a run would replace."""
        if self.recipe.is_file() or self.old_config.is_file():
            raise ValueError(
                f"{self.path} holds a training run; go on with --resume {self.path}, or choose another --out"
            )
        for taken in (self.recipe, self.old_config, self.draft, self.checkpoint, self.metrics):
            if os.path.lexists(taken):
                raise ValueError(f"{taken} is there, and a run in {self.path} would replace it; choose another --out")

    @contextlib.contextmanager
    def held(self, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
        """Makes this process the only one that writes here while the block runs, and puts right what a process that
        was killed left half done. The directory is made for it, and removed again if nothing was written.

        Raises ValueError where another process is at it, or something lies here that a run cannot replace; see
        `files.held` for `say`.
        """
        self._check_own()
        made = not self.path.exists()
        try:
            with held(self.path / ".fledge-lock", str(self.path), say):
                mend(self.draft)
                mend(self.checkpoint)
                remove_abandoned(self.path)
                yield
        finally:
            if made:
                with contextlib.suppress(OSError):  # it is not empty: there is a run now
                    self.path.rmdir()

    def _check_own(self) -> None:
        """Raises ValueError for a link or another kind of thing where a run has a directory or a file."""
        for directory in (self.draft, self.checkpoint):
            for path in (directory, beside(directory, "old"), beside(directory, "new")):
                _check_kind(path, Path.is_dir, "directory")
        for file in (self.recipe, self.old_config, self.metrics):
            _check_kind(file, Path.is_file, "file")

    def start(self, recipe: str) -> None:
        """Makes the directory of a new run and writes its recipe (the text of recipe.yaml). Raises ValueError where a
        run has already been."""
        self.check_free()
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self.recipe, recipe)

    def started(self) -> Path:
        """The file that says what the run does: recipe.yaml, or train.json of a run that an earlier version started.
        Raises ValueError where there is no run."""
        found = next((file for file in (self.recipe, self.old_config) if file.is_file()), None)
        if found is None:
            raise ValueError(f"{self.path} holds no training run to resume (no {self.recipe.name})")
        return found

    def save_checkpoint(self, draft: Draft, dtype: torch.dtype, state: dict[str, Any]) -> None:
        """Everything needed to go on as if never stopped; the draft beside it is what serving would load."""
        with replacing(self.checkpoint) as new:
            write_draft(draft, new, dtype)
            with (new / STATE).open("wb") as f:
                torch.save(state, f)
            sums = "".join(f"{_sha256(new / name)}  {name}\n" for name in (STATE, WEIGHTS, CONFIG))
            (new / SUMS).write_text(sums)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last whole checkpoint's state, or None if the run was stopped before its first.

        Raises ValueError where a file is not as it was written (checkpoints of before there were hashes are taken as
        they are), or the state is no dict.
        """
        return reading(self.checkpoint, self._state)

    def _state(self, checkpoint: Path) -> dict[str, Any] | None:
        if not checkpoint.exists():
            return None
        self._check_sums(checkpoint)
        try:
            state = torch.load(checkpoint / STATE, map_location="cpu", weights_only=True)
        except Exception as e:
            raise self.damaged(type(e).__name__) from e
        if not isinstance(state, dict):
            raise self.damaged(f"it holds a {type(state).__name__}")
        return state

    def _check_sums(self, checkpoint: Path) -> None:
        if not (checkpoint / SUMS).exists():
            return
        recorded = [line.split("  ") for line in (checkpoint / SUMS).read_text(errors="replace").splitlines()]
        if [name for _, *name in recorded] != [[STATE], [WEIGHTS], [CONFIG]]:
            raise ValueError(f"{checkpoint / SUMS} is damaged; start a new run")
        for known, name in recorded:
            if not (checkpoint / name).is_file():
                raise self.damaged("it is missing", name)
            if _sha256(checkpoint / name) != known:
                raise self.damaged("its SHA-256 is not the one it was written with", name)

    def damaged(self, why: str, name: str = STATE) -> ValueError:
        """What to raise where a checkpoint's file cannot be gone on with."""
        cure = f", which may go on from the weights with --init-from {self.checkpoint}" if name == STATE else ""
        return ValueError(f"{self.checkpoint / name} cannot be read ({why}); it is damaged, start a new run{cure}")

    def publish(self, draft: Draft, dtype: torch.dtype) -> None:
        """Makes this the draft to serve."""
        save_draft(draft, self.draft, dtype)

    def truncate_metrics(self, step: int) -> None:
        """Drops metrics of steps after `step`, which a resumed run will write again, and a line cut short.

        Raises ValueError for a line that training did not write.
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
            raise ValueError(f"{self.metrics}, line {number} is none that training wrote; remove it to go on")
        return step


def _check_kind(path: Path, kind: Callable[[Path], bool], name: str) -> None:
    if path.is_symlink():
        raise ValueError(
            f"{path} is a symbolic link, and a run replaces its {name}, which would cut the link; move what it leads "
            "to in its place, or keep the whole run elsewhere and link its directory"
        )
    if path.exists() and not kind(path):
        raise ValueError(f"{path} is no {name}, so a run cannot replace it; move it away")


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
