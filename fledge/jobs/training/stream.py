"""Training on a stream of features: a single pass over shards that are deleted after their use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fledge.data.dataset import StreamedRows
from fledge.features.budget import document_bytes, format_bytes
from fledge.features.cache import FeatureCache
from fledge.features.layout import HEADER_BYTES
from fledge.features.source import ROWS_AHEAD
from fledge.train.checkpoint import RunDirectory
from fledge.train.trainer import Schedule

OPEN_SHARDS = 3  # the shards of the first and last row that are in use, and one that is being written
# of a rank: those that are read ahead, the one that is trained on and the next one, if prefetched
ROWS_IN_USE = ROWS_AHEAD + 2


class StreamingRun(RunDirectory):
    """A run's directory that deletes the shards that a saved checkpoint does not need any more.

    A checkpoint is saved by all ranks, after a step that all of them have done, so that none of them reads a row before
    it again.
    """

    def __init__(self, path: Path, cache: FeatureCache, rows: StreamedRows):
        super().__init__(path)
        self.cache, self.rows = cache, rows
        self.last_step: int | None = None  # of a pass over all shards

    def completed(self, progress: dict[str, Any]) -> None:
        if progress["step"] == self.last_step:  # rows that are left out may be in shards that are not written yet
            for shard in self.cache.shards:
                self.cache.release(shard)
        for shard in range(self.rows.finished_parts(progress["address"])):
            if self.cache.file(shard).exists():
                self.cache.release(shard)

    def limit(self, schedule: Schedule, ranks: int, *, resumed: bool, say: Callable[[str], None]) -> Schedule:
        """The schedule for a single pass of a number of ranks, with checkpoints before the writer has to wait for the
        deletion of shards.

        Raises ValueError for a schedule of more than one pass, for a new run if shards are deleted already, and if the
        disk budget is too small.
        """
        rows, per_step = len(self.rows.epoch(0)), schedule.rows_per_step
        if schedule.steps > max(-(-rows // per_step), 1):
            raise ValueError(
                f"{self.cache.path} is a stream of {rows:,} rows, which is trained on once; give --epochs 1 or fewer "
                "--steps"
            )
        if not resumed and any(self.cache.used(i).exists() for i in self.cache.shards):
            raise ValueError(
                f"{self.cache.path} is a stream, and another run has trained on its first shards, which are deleted; "
                "continue that run, or write the features anew in another directory"
            )
        if rows < per_step:
            raise ValueError(f"{self.cache.path} has {rows:,} rows; lower --rows-per-step or --row-length")
        whole_steps, left_out, known = rows // per_step, rows % per_step, self.cache.manifest
        steps = min(schedule.steps, whole_steps)
        if schedule.steps >= whole_steps:
            self.last_step = whole_steps
        if schedule.steps > whole_steps:
            one, they = ("row is", "it does") if left_out == 1 else (f"{left_out:,} rows are", "they do")
            say(f"the last {one} left out, of {rows:,}: {they} not fill a step of {per_step:,} rows")
        room = known.budget - document_bytes(self.cache) - OPEN_SHARDS * max(map(self.cache.bytes, self.cache.shards))
        row_bytes = HEADER_BYTES + self.cache.layout.bytes(self.rows.row_length, self.rows.row_length)
        steps_in_use = math.ceil(ROWS_IN_USE / max(per_step // ranks, 1))  # a rank may have that few rows of a step
        between = room // row_bytes // per_step - steps_in_use
        if between < 1:
            raise ValueError(
                f"the disk budget of the stream, {format_bytes(known.budget)}, is too small for steps of {per_step:,} "
                "rows; lower --rows-per-step or --row-length, or raise the budget (fledge features --disk-budget)"
            )
        if between < schedule.save_every:
            say(f"a checkpoint is saved every {between:,} steps, so that used shards can be deleted in time")
        return replace(schedule, steps=steps, save_every=min(schedule.save_every, between))
