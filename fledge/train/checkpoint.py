"""A run's directory: `draft/` to serve, `checkpoint/` to resume from, `recipe.yaml`, `metrics.jsonl`, `summary.json`.

torch.distributed.checkpoint (DCP) writes a checkpoint in the background; each rank writes a part of the state. Another
number of ranks can read the checkpoint. All files are safetensors and JSON, which run no code when read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fledge.drafts.draft import Draft
from fledge.drafts.weights import RECIPE, draft_files, write_files
from fledge.io import files
from fledge.io.fields import parse_json, read_json
from fledge.train.ranks import ALONE, RankError, Ranks

STATE, PROGRESS = "state", "progress.json"  # the directory with DCP's files, and the file of other values
SUMS = "SHA256SUMS"  # hashes of a checkpoint's files, in the format of the program sha256sum


class RunDirectory:
    """The directory of a training run. Every file and directory in it is replaced atomically.

    `recipe` is the file with the run's options. `summary` says what the run was started with, for reports.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.draft, self.checkpoint = self.path / "draft", self.path / "checkpoint"
        self.recipe = self.path / RECIPE
        self.metrics, self.summary = self.path / "metrics.jsonl", self.path / "summary.json"
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def check_free(self) -> None:
        """Raises ValueError if the directory holds a run, or another file that a run would replace."""
        if self.recipe.is_file():
            raise ValueError(
                f"{self.path} holds a training run; continue it with --resume {self.path}, or choose another --out"
            )
        for taken in (self.recipe, self.draft, self.checkpoint, self.metrics, self.summary):
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
            with files.exclusive_lock(self.path / ".fledge-lock", str(self.path), say):
                files.restore_interrupted(self.draft)
                files.restore_interrupted(self.checkpoint)
                files.remove_temporary_files(self.path)
                yield
        finally:
            if created:
                with contextlib.suppress(OSError):  # not empty: a run was started
                    self.path.rmdir()

    def _check_own(self) -> None:
        """Raises ValueError if one of the run's paths is a symbolic link or not of the expected type."""
        for directory in (self.draft, self.checkpoint):
            for path in (directory, files.sibling_path(directory, "old"), files.sibling_path(directory, "new")):
                _check_kind(path, Path.is_dir, "directory")
        for file in (self.recipe, self.metrics, self.summary):
            _check_kind(file, Path.is_file, "file")

    def start(self, recipe: str, summary: Mapping[str, Any] | None = None) -> None:
        """Creates the directory of a new run and writes `recipe`, the text of recipe.yaml, and the summary. Raises
        ValueError if the directory holds a run."""
        self.check_free()
        self.path.mkdir(parents=True, exist_ok=True)
        files.replace_text(self.recipe, recipe)  # first: with it, the directory holds a run, which can be resumed
        if summary is not None:
            self.write_summary(summary)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json: the run's data, command and machine, for reports."""
        files.replace_text(self.summary, json.dumps(summary, indent=2) + "\n")

    def options_file(self) -> Path:
        """The file with the run's options. Raises ValueError if there is no run."""
        if not self.recipe.is_file():
            raise ValueError(f"{self.path} holds no training run to resume (no {self.recipe.name})")
        return self.recipe

    def save_checkpoint(
        self, draft: Draft, dtype: torch.dtype, tensors: dict[str, Tensor], progress: dict[str, Any],
        ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        """Starts to write a checkpoint: `tensors` (each rank writes a part), `progress` as JSON, and the current draft
        in `dtype`, as files to load a draft from. Copies everything to host memory before returning.

        Waits for the previous checkpoint first (`finish_saving`). The last complete checkpoint stays until the new
        checkpoint is complete.
        """
        self.finish_saving()
        stager = DefaultStager(StagingOptions(False, False, False, False))  # into plain memory, in this thread
        staged = stager.stage(tensors)
        stager.close()
        contents = draft_files(draft, dtype) | {PROGRESS: json.dumps(progress).encode()} if ranks.leads else {}
        self._saving = self._writer.submit(self._write, staged, contents, ranks)

    def finish_saving(self) -> None:
        """Waits until the last checkpoint is complete. Raises DiskFullError, with a remedy, if the disk is full."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _write(self, tensors: dict[str, Tensor], contents: dict[str, bytes], ranks: Ranks) -> None:
        """Writes a checkpoint together with the other ranks. Rank 0 replaces the last complete checkpoint by the new
        checkpoint. If the disk is full for one rank, all ranks raise DiskFullError with the same message."""
        full, failure = None, None
        try:
            self._write_part(tensors, contents, ranks)
        except Exception as e:  # the meeting reports the error to all ranks
            full, failure = files.disk_full_errno(e), e
        told = ranks.meet("while a checkpoint was saved", full, None if full else failure, group=ranks.saving)
        if full := next(filter(None, told), None):
            raise files.DiskFullError(
                full,
                f"no space to save {self.checkpoint} ({os.strerror(full)}); the previous content is unchanged. Free "
                f"some disk space; fledge train --resume {self.path} then continues the training",
            ) from failure

    def _write_part(self, tensors: dict[str, Tensor], contents: dict[str, bytes], ranks: Ranks) -> None:
        """Writes this rank's part of a checkpoint; rank 0 also makes the directory."""
        where = "while a checkpoint was begun"
        if not ranks.leads:
            if ranks.meet(where, True, group=ranks.saving)[0]:
                self._write_tensors(tensors, files.sibling_path(self.checkpoint, "new"), ranks)
            return
        with contextlib.ExitStack() as replacing:
            failure = None
            try:
                new = replacing.enter_context(files.replace_directory(self.checkpoint))
                write_files(contents, new)
            except OSError as e:
                failure = e
            ranks.meet(where, failure is None, group=ranks.saving)  # before others write into the new directory
            if failure is not None:
                raise failure
            self._write_tensors(tensors, new, ranks)
            names = [*(f"{STATE}/{name}" for name in sorted(os.listdir(new / STATE))), *contents]
            (new / SUMS).write_text("".join(f"{files.sha256_of(new / name)}  {name}\n" for name in names))

    def _write_tensors(self, tensors: dict[str, Tensor], new: Path, ranks: Ranks) -> None:
        writer = HuggingFaceStorageWriter(str(new / STATE), save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is in a single process
            try:
                with ranks.collective("while a checkpoint was saved"):
                    dcp.save(tensors, storage_writer=writer, process_group=ranks.saving, no_dist=ranks.size == 1)
            except CheckpointException as e:  # not a subclass of Exception
                raise OSError(f"a checkpoint could not be saved: {_first_failure(e)}") from e

    def load_progress(self) -> dict[str, Any] | None:
        """The `progress` of the last complete checkpoint; None if there is none yet.

        Raises ValueError if a file is missing or its hash is wrong, and if there are no hashes.
        """
        return files.read_consistent(self.checkpoint, self._progress)

    def load_tensors(self, tensors: dict[str, Tensor], ranks: Ranks = ALONE) -> None:
        """Reads the tensors of the checkpoint into `tensors`, in a locked directory. The placement on ranks may differ
        from the placement when saved. Raises ValueError if a tensor is missing, or has another shape."""
        reader = HuggingFaceStorageReader(str(self.checkpoint / STATE))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            try:
                with ranks.collective("while a checkpoint was read"):
                    dcp.load(tensors, storage_reader=reader, process_group=ranks.saving, no_dist=ranks.size == 1)
            except RankError:
                raise
            except CheckpointException as e:
                raise self.damage_error(_first_failure(e)) from e
            except (RuntimeError, ValueError, KeyError, OSError) as e:
                raise self.damage_error(f"{type(e).__name__}: {e}") from e

    def _progress(self, checkpoint: Path) -> dict[str, Any] | None:
        if not checkpoint.exists():
            return None
        self._check_sums(checkpoint)
        return read_json(checkpoint / PROGRESS)

    def _check_sums(self, checkpoint: Path) -> None:
        if not (checkpoint / SUMS).is_file():
            raise self.damage_error("it is missing", SUMS)
        recorded = [line.split("  ") for line in (checkpoint / SUMS).read_text(errors="replace").splitlines()]
        if not recorded or not all(len(line) == 2 and re.fullmatch("[0-9a-f]{64}", line[0]) for line in recorded):
            raise self.damage_error("it holds no hashes", SUMS)
        for known, name in recorded:
            if not (checkpoint / name).is_file():
                raise self.damage_error("it is missing", name)
            if files.sha256_of(checkpoint / name) != known:
                raise self.damage_error("its SHA-256 differs from the recorded one", name)

    def damage_error(self, why: str, name: str = STATE) -> ValueError:
        """The error to raise for a file of the checkpoint from which training cannot continue."""
        state = name.startswith(STATE) or name in (PROGRESS, SUMS)
        remedy = f"; --init-from {self.checkpoint} starts it with the saved weights" if state else ""
        return ValueError(f"{self.checkpoint / name} cannot be read ({why}); it is damaged, start a new run{remedy}")

    def truncate_metrics(self, step: int) -> None:
        """Removes the metrics of steps after `step`, which a resumed run writes again, and an incomplete last line.

        Raises ValueError for a line without a step.
        """
        if not self.metrics.exists():
            return
        *lines, last = self.metrics.read_bytes().split(b"\n")
        with contextlib.suppress(ValueError):  # of a line that was cut
            parse_json(last)
            lines.append(last)
        files.replace_file(
            self.metrics, [line + b"\n" for i, line in enumerate(lines, 1) if self._step_of(line, i) <= step]
        )

    def _step_of(self, line: bytes, number: int) -> int:
        try:
            step = parse_json(line)["step"]
        except (ValueError, TypeError, KeyError):
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


def _first_failure(error: CheckpointException) -> str:
    """The first rank that could not write or read a part of a checkpoint, and the rank's error."""
    rank, (reason, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(reason).__name__}: {reason}"
