"""The processes of a data-parallel run (ranks), over torch.distributed, and how the rows of a step are shared."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def is_communication_error(error: BaseException) -> bool:
    """Whether torch.distributed raised an error because of another rank. gloo raises a plain RuntimeError."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


T = TypeVar("T")

RELEASE_SECONDS = 0.1  # for gloo's threads to release the tensors of the last collective


class RankError(ConnectionError):
    """Another rank failed, ended or did not answer within the time limit. The message names a rank that failed."""


class LostRankError(RankError):
    """Another rank ended, or did not answer: the run can be continued. Once raised, SIGTERM is ignored, since torchrun
    may send SIGTERM before this rank has printed the message."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one draft together. The defaults are a run of a single process, without communication.

    Each training rank computes the gradient of its own rows, a sum over slots. `reduced` adds the ranks' sums and gives
    each rank the part to update, and `whole` collects the updated weights. Every rank keeps and updates an equal part
    of the float32 weights and of the optimizer's moments.

    The ranks below `size` are training ranks. `target_ranks` more ranks are target ranks, which hold only the target
    and send hidden states to the training ranks (`fledge.train.feed`). Target ranks use only the methods from `meet`
    on.

    `mesh` is the device mesh of the training ranks; in a target rank, the device mesh of the target ranks. `training`
    is the group of the training ranks, for tensors on the device and in host memory (None: all ranks). `host` and
    `saving` are gloo groups for objects in host memory. `host` has all ranks, and serves the training loop. `saving`
    has the training ranks, and serves checkpoints, which are written during the training loop. `feeds` has a group for
    each target rank, of the target rank and all training ranks. `limit` is the longest wait of a rank for another rank.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    host: Any = None
    saving: Any = None
    limit: timedelta = timedelta(minutes=30)
    target_ranks: int = 0
    training: Any = None
    feeds: tuple[Any, ...] = ()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone prints messages and writes the run's directory."""
        return self.rank == 0

    @property
    def total(self) -> int:
        """The number of all ranks."""
        return self.size + self.target_ranks

    @property
    def trains(self) -> bool:
        """Whether this is a training rank; False: a target rank, which holds only the target."""
        return self.rank < self.size

    @property
    def shards(self) -> bool:
        """Whether each rank keeps a part of the optimizer's state."""
        return self.size > 1

    def shares(self, weights: Sequence[float]) -> list[list[int]]:
        """The indices of a step's rows that each rank computes, ascending, given the work of each row.

        A rank gets at most ceil(rows / ranks) rows, so all ranks get as many rows if the number of rows is a multiple
        of the number of ranks. The heaviest rows are given first, each to the rank with the least work so far.
        """
        room = -(-len(weights) // self.size)
        work, own = [0.0] * self.size, [[] for _ in range(self.size)]
        for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
            lightest = min((r for r in range(self.size) if len(own[r]) < room), key=lambda r: (work[r], len(own[r]), r))
            own[lightest].append(i)
            work[lightest] += weights[i]
        return [sorted(indices) for indices in own]

    def distribute(self, whole: Tensor) -> Tensor:
        """This rank's share of `whole`, a tensor that every rank has: a DTensor split along axis 0, or without shards
        `whole` itself."""
        return distribute_tensor(whole, self.mesh, [Shard(0)]) if self.shards and whole.dim() else whole

    def reduced(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Sums tensors over the training ranks whose parameters are sharded. Returns this rank's shard of each sum, as
        `distribute` places parameters; without shards, the tensors themselves."""
        if not self.shards:
            return list(sums)
        parts = [DTensor.from_local(x, self.mesh, [Partial()], run_check=False) for x in sums]
        return [x.redistribute(placements=[Shard(0) if x.dim() else Replicate()]) for x in parts]

    def whole(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """The reverse of `distribute`: the whole tensor in a dtype, on every rank."""
        kept = kept.to(dtype)
        return kept.full_tensor() if isinstance(kept, DTensor) else kept

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the training ranks, in place, on the tensor's device or in host memory."""
        if self.size > 1:
            dist.all_reduce(x, group=self.training)
        return x

    def meet(self, where: str, told: T, failure: BaseException | None = None, *, group: Any = None) -> list[T]:
        """Waits for every rank, and returns the values `told` by all ranks, by rank.

        Called before the ranks communicate on the device, where a missing rank would leave the others waiting. A rank
        with a `failure` raises the failure, and all other ranks raise a RankError that names the rank and the failure.
        Unless all ranks failed alike, the failure also gets a note with the rank (`error_sentence`). Raises
        LostRankError if a rank has ended or does not come within `limit`. `group` is `host` (None) or
        `saving`, which has only the training ranks.
        """
        group = group or self.host
        size = self.size if group is self.saving else self.total
        if size == 1:
            if failure is not None:
                raise failure
            return [told]
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        named = f"rank {{}} of {self.total} failed {where}: {{}}"
        try:
            dist.monitored_barrier(group, self.limit, wait_all_ranks=True)
            answers: list[Any] = [None] * size
            dist.all_gather_object(answers, (message, told), group=group)
        except RuntimeError as e:
            if failure is None:
                raise self._lost(e, where) from e
            answers = []
        if failure is not None:
            # a RankError already names the failed rank
            if not isinstance(failure, RankError) and {problem for problem, _ in answers} != {message}:
                failure.add_note(named.format(self.rank, message))
            raise failure
        for rank, (problem, _) in enumerate(answers):
            if problem is not None:
                raise RankError(named.format(rank, problem))
        return [told for _, told in answers]

    @contextmanager
    def collective(self, where: str, awaited: int | None = None) -> Iterator[None]:
        """Context manager: a block in which all ranks communicate, or this rank with the rank `awaited`. Raises
        LostRankError if a rank ends or does not answer during the block."""
        try:
            yield
        except RuntimeError as e:
            if self.total == 1 or not is_communication_error(e):
                raise
            raise self._lost(e, where, awaited) from e

    def _lost(self, error: RuntimeError, where: str, awaited: int | None = None) -> LostRankError:
        """Names the lost rank if this rank was waiting for a single rank, or if a barrier on rank 0 names ranks."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun would end this rank before the error message
        missing = re.search(r"Ranks ([\d, ]+) failed to pass", str(error))
        names = str(awaited) if awaited is not None else missing[1] if missing else ""
        subject = f"rank{'s' * (',' in names)} {names} of {self.total}" if names else f"another of {self.total} ranks"
        return LostRankError(f"{subject} ended or did not answer {where}; see the log of torchrun")

    @contextmanager
    def together(self, where: str) -> Iterator[None]:
        """Context manager: a block that all ranks run. The ranks meet after the block, where an error in one rank ends
        all ranks. The ranks must not communicate in the block."""
        failure = None
        try:
            yield
        except Exception as e:
            failure = e
        self.meet(where, None, failure)

    def from_first(self, value: T) -> T:
        """Rank 0's value, on all ranks."""
        if self.total == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    @torch.no_grad()
    def copy_from_first(self, tensors: Sequence[Tensor], *, to_all: bool = False) -> None:
        """Overwrites tensors on the device by rank 0's tensors, in the training ranks; with `to_all`, in all ranks."""
        if (self.total if to_all else self.size) > 1:
            for x in tensors:
                dist.broadcast(x.detach(), src=0, group=None if to_all else self.training)


ALONE = Ranks()


def started_by_torchrun() -> bool:
    """Whether this process was started as one of several ranks (by torchrun, or by `fledge train --gpus`)."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def restart_count() -> int:
    """How many times torchrun has started this process again (`--max-restarts`), after a rank had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def error_sentence(error: object) -> str:
    """The text to print for an error: the note of `Ranks.meet` if there is a note, or else the error's message."""
    return next((n for n in getattr(error, "__notes__", []) if n.endswith(str(error))), str(error))


def local_rank() -> int:
    """The number of this process among the ranks of this host, which is also the number of the process's GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def connected(device: torch.device, limit: timedelta, target_ranks: int = 0) -> Iterator[Ranks]:
    """Context manager: joins the ranks that torchrun has started, or yields the ranks of a single process.

    `device` is this rank's device: ranks on GPUs communicate through NCCL, ranks on CPUs through gloo. The last
    `target_ranks` ranks hold only the target.
    """
    if not started_by_torchrun():
        yield ALONE
        return
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    store, rank, total = next(dist.rendezvous("env://", timeout=limit))
    # torchrun's store outlives a restart; without a prefix, ranks would read the addresses of ended ranks
    store = dist.PrefixStore(f"restart {restart_count()}", store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=total, timeout=limit,
        device_id=device if gpu else None,
    )  # fmt: skip
    try:
        yield _grouped(device, limit, rank, total - target_ranks, target_ranks)
    finally:
        dist.destroy_process_group()
        # After a collective, gloo's threads take Python's GIL to release the collective's tensors. A thread that waits
        # for the GIL when the interpreter ends aborts the process (pytorch issue 190489).
        time.sleep(RELEASE_SECONDS)


def _grouped(device: torch.device, limit: timedelta, rank: int, size: int, target_ranks: int) -> Ranks:
    """The ranks, with their process groups. All ranks make the groups, in the same order, except `saving`: only the
    training ranks make `saving`, which is None on target ranks."""
    host = dist.new_group(backend="gloo", timeout=limit)
    if not target_ranks:
        mesh = init_device_mesh(device.type, (size,))
        return Ranks(rank, size, mesh, host, dist.new_group(backend="gloo", timeout=limit), limit)
    first, others = list(range(size)), list(range(size, size + target_ranks))
    # made by the members alone: otherwise, ranks outside the group split the NCCL communicator, members of a gloo group
    # do not, and both wait for each other
    saving = dist.new_group(first, backend="gloo", timeout=limit, use_local_synchronization=True)
    training, targets = (dist.new_group(members, timeout=limit) for members in (first, others))
    # a group for each sender, since a group's sends wait for each other
    feeds = tuple(dist.new_group([*first, sender], timeout=limit) for sender in others)
    mesh = DeviceMesh.from_group(training if rank < size else targets, device.type)
    return Ranks(rank, size, mesh, host, saving, limit, target_ranks, training, feeds)
