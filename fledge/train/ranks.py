"""The processes of a data-parallel run (ranks), over torch.distributed, and how the rows of a step are shared."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

PATIENCE = timedelta(seconds=5)  # for another rank to answer, or to say what it found, once a communication has failed
REAPING_SECONDS = 1.0  # until the process that started a rank notices that it ended
POLL_SECONDS = 0.05
SENTENCE = "what was lost"  # the key of the store; the first sentence stays


@dataclass(frozen=True)
class Process:
    """Where a rank runs. `parent` tells its siblings apart from processes of another container with the same host."""

    host: str
    parent: int
    id: int

    @classmethod
    def current(cls) -> Process:
        return cls(socket.gethostname(), os.getppid(), os.getpid())

    def has_ended(self) -> bool:
        """Whether it has ended; False if it cannot be known, as for those of another host."""
        ours = Process.current()
        if (self.host, self.parent) != (ours.host, ours.parent):
            return False
        with contextlib.suppress(OSError):  # a process that has ended is a zombie until its parent asks for its status
            return Path(f"/proc/{self.id}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        try:
            os.kill(self.id, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False


def is_communication_error(error: BaseException) -> bool:
    """Whether torch.distributed raised an error because of another rank. gloo raises a plain RuntimeError."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def lost_sentence(
    error: BaseException, where: str, seconds: float, rank: int, processes: Sequence[Process], host: Any, store: Any,
    awaited: int | None = None,
) -> str:  # fmt: skip
    """What to say of a communication of this `rank` that failed after `seconds` seconds: which ranks ended, or did not
    answer. All ranks get the sentence of the first of them, through the `store`, if it still answers.

    `host` is the gloo group of all ranks. `awaited` is the rank that was communicated with, if it was one. Takes up to
    twice PATIENCE.
    """
    total = len(processes)
    with contextlib.suppress(RuntimeError):  # the process that had the store has ended
        if store.check([SENTENCE]):  # this rank comes late, and others may have ended because of that
            return str(store.get(SENTENCE).decode())
    if ended := _ended(processes):
        found = f"{_named(ended, total)} ended {where}; see {'its' if len(ended) == 1 else 'their'} log"
        return _agreed(store, found)
    missing = _missing(error) if awaited is None else [awaited]
    if missing is None:
        try:
            dist.monitored_barrier(host, PATIENCE, wait_all_ranks=True)
        except RuntimeError as e:
            missing = _missing(e)
    if not missing and rank:  # rank 0 alone hears of the others
        with contextlib.suppress(RuntimeError):
            store.wait([SENTENCE], PATIENCE)
            return str(store.get(SENTENCE).decode())
        missing = [0]
    subject = _named(missing, total) if missing else "another rank"
    return _agreed(store, f"{subject} did not answer for {duration(seconds)} {where}; see the log")


def duration(seconds: float) -> str:
    """A time in seconds, or from two minutes on in minutes."""
    count, unit = (round(seconds), "second") if seconds < 120 else (round(seconds / 60), "minute")
    return f"{count:,} {unit}{'s' * (count != 1)}"


def _ended(processes: Sequence[Process]) -> list[int]:
    """The ranks that have ended; waits a little for one, as its connection is closed before it has ended."""
    until = time.monotonic() + REAPING_SECONDS
    while True:
        ended = [rank for rank, process in enumerate(processes) if process.has_ended()]
        if ended or time.monotonic() > until:
            return ended
        time.sleep(POLL_SECONDS)


def _missing(error: BaseException) -> list[int] | None:
    """The ranks that a monitored barrier names on rank 0; None for other errors."""
    match = re.search(r"Ranks ([\d, ]+) failed to pass", str(error))
    return [int(rank) for rank in match[1].split(",")] if match else None


def _named(ranks: Sequence[int], total: int) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {total}"


def _agreed(store: Any, sentence: str) -> str:
    """The sentence, or that of another rank, if one was first."""
    try:
        return str(store.compare_set(SENTENCE, "", sentence).decode()) or sentence
    except RuntimeError:
        return sentence


T = TypeVar("T")

PLACEMENTS = ("shard", "replicate")
STORE_TIMEOUT = timedelta(seconds=5)  # for torchrun's store to answer, after an error
RELEASE_SECONDS = 0.1  # for gloo's threads to release the tensors of the last collective


class RankError(ConnectionError):
    """Another rank failed, ended or did not answer within the time limit. The message names it."""


class LostRankError(RankError):
    """Another rank ended, or did not answer: the run can be continued. From then on SIGTERM is ignored, since torchrun
    may send SIGTERM before this rank has named the lost rank."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one draft together. The defaults are a run of a single process, which communicates nothing.

    Each rank computes the gradient of its own rows, a sum over slots. `reduced` adds these sums up and gives each rank
    the part that it updates, and `whole` collects the updated weights. With `placement` "shard", every rank keeps and
    updates an equal part of the float32 weights and of the optimizer's moments; with "replicate", each rank keeps all.

    `target_ranks` more ranks, numbered from `size` on, hold only the target and send hidden states to those that train
    (`fledge.train.feed`). Of this class, they use the part on agreement alone.

    `mesh` is the device mesh of the ranks that train; in a rank that holds only the target, that of these ranks.
    `training` is the group of the ranks that train, for tensors on the device and in host memory (None: of all ranks).
    `host` and `saving` are gloo groups for objects in host memory: one of all ranks for the training loop, and one of
    the ranks that train for checkpoints, which are written meanwhile. `feeds` has a group for each rank that holds only
    the target, of it and those that train. `limit` is the longest that one rank waits for another. `processes` are
    those of all ranks, and `store` is what they agree through when one is lost.
    """

    rank: int = 0
    size: int = 1
    placement: str = "replicate"
    mesh: DeviceMesh | None = None
    host: Any = None
    saving: Any = None
    limit: timedelta = timedelta(minutes=30)
    target_ranks: int = 0
    training: Any = None
    feeds: tuple[Any, ...] = ()
    processes: tuple[Process, ...] = ()
    store: Any = None

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
        """Whether this rank trains the draft; else it holds only the target."""
        return self.rank < self.size

    @property
    def shards(self) -> bool:
        """Whether each rank keeps a part of the optimizer's state."""
        return self.size > 1 and self.placement == "shard"

    # -- rows -------------------------------------------------------------------------------------------------------

    def shares(self, weights: Sequence[float]) -> list[list[int]]:
        """The indices of a step's rows that each rank computes, ascending, given the work of each row.

        Every rank gets as many rows as the others, or one less; among these ways, the heaviest rows are given first,
        each to the rank with the least work so far.
        """
        room = -(-len(weights) // self.size)
        work, own = [0.0] * self.size, [[] for _ in range(self.size)]
        for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
            lightest = min((r for r in range(self.size) if len(own[r]) < room), key=lambda r: (work[r], len(own[r]), r))
            own[lightest].append(i)
            work[lightest] += weights[i]
        return [sorted(indices) for indices in own]

    # -- gradients and weights --------------------------------------------------------------------------------------

    def distribute(self, whole: Tensor) -> Tensor:
        """What this rank keeps of a tensor that every rank has: a DTensor with its part, or the tensor itself."""
        return distribute_tensor(whole, self.mesh, [Shard(0)]) if self.shards and whole.dim() else whole

    def reduced(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks of tensors that each rank has its own values of, placed as `distribute` places them.
        Without shards, the tensors are overwritten."""
        if self.size == 1:
            return list(sums)
        if not self.shards:
            for waiting in [dist.all_reduce(x, group=self.training, async_op=True) for x in sums]:
                waiting.wait()
            return list(sums)
        parts = [DTensor.from_local(x, self.mesh, [Partial()], run_check=False) for x in sums]
        return [x.redistribute(placements=[Shard(0) if x.dim() else Replicate()]) for x in parts]

    def whole(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole tensor of which `distribute` gave each rank a part, in a dtype, on every rank."""
        kept = kept.to(dtype)
        return kept.full_tensor() if isinstance(kept, DTensor) else kept

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the ranks that train, in place, on its device or in host memory."""
        if self.size > 1:
            dist.all_reduce(x, group=self.training)
        return x

    # -- agreement --------------------------------------------------------------------------------------------------

    def meet(self, where: str, told: T, failure: BaseException | None = None, *, group: Any = None) -> list[T]:
        """Waits for every rank, and returns what each of them told, by rank.

        Called before the ranks communicate on the device, where a rank that does not come would leave the others
        waiting. If a rank came with a `failure`, that rank raises it, and all others a RankError that names the rank
        and the failure; if not all failed alike, the failure has a note that does so too (`error_sentence`). Raises
        LostRankError, naming the rank, if one has ended or does not come within `limit`. `group` is `host` or `saving`,
        which has only the ranks that train.
        """
        group = group or self.host
        size = self.size if group is self.saving else self.total
        if size == 1:
            if failure is not None:
                raise failure
            return [told]
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        named = f"rank {{}} of {self.total} failed {where}: {{}}"
        began = time.monotonic()
        try:
            dist.monitored_barrier(group, self.limit, wait_all_ranks=True)
            answers: list[Any] = [None] * size
            dist.all_gather_object(answers, (message, told), group=group)
        except RuntimeError as e:
            if failure is not None:
                if not isinstance(failure, RankError):  # which names a rank already
                    failure.add_note(named.format(self.rank, message))
                raise failure from e
            raise self._lost(e, where, began) from e
        if failure is not None:
            if not isinstance(failure, RankError) and {problem for problem, _ in answers} != {message}:
                failure.add_note(named.format(self.rank, message))
            raise failure
        for rank, (problem, _) in enumerate(answers):
            if problem is not None:
                raise RankError(named.format(rank, problem))
        return [told for _, told in answers]

    @contextmanager
    def collective(self, where: str, awaited: int | None = None) -> Iterator[None]:
        """Context manager: a block in which the ranks communicate, or this one with the rank `awaited`. Raises
        LostRankError, naming the rank, if one ends or does not answer meanwhile."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as e:
            if self.total == 1 or not is_communication_error(e):
                raise
            raise self._lost(e, where, began, awaited) from e

    def _lost(self, error: RuntimeError, where: str, began: float, awaited: int | None = None) -> LostRankError:
        seconds = time.monotonic() - began
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun would end this rank before it names the lost rank
        return LostRankError(
            lost_sentence(error, where, seconds, self.rank, self.processes, self.host, self.store, awaited)
        )

    @contextmanager
    def together(self, where: str) -> Iterator[None]:
        """Context manager: a block that all ranks run, after which they meet, so that an error in one ends all. The
        ranks must not communicate in the block."""
        failure = None
        try:
            yield
        except Exception as e:
            failure = e
        self.meet(where, None, failure)

    def from_first(self, value: T) -> T:
        """The value that rank 0 has, on all ranks."""
        if self.total == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    @torch.no_grad()
    def copy_from_first(self, tensors: Sequence[Tensor], *, to_all: bool = False) -> None:
        """Overwrites tensors on the device by those of rank 0, in the ranks that train; with `to_all`, in all ranks."""
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
    """What to print of an error: its message, or the note that `Ranks.meet` made of it."""
    return next((n for n in getattr(error, "__notes__", []) if n.endswith(str(error))), str(error))


def first_to_say(message: str) -> bool:
    """Whether this process is the first of all ranks to say this, so that an error of all of them is printed once.

    torchrun's store counts, which is there before the ranks are connected and after an error. True if it is not there.
    """
    if not started_by_torchrun():
        return True
    key = f"said {restart_count()} {hashlib.sha256(message.encode(errors='replace')).hexdigest()}"
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT)
        return store.add(key, 1) == 1
    except (KeyError, ValueError, RuntimeError):  # a process that torchrun did not start, or torchrun has ended
        return True


def local_rank() -> int:
    """The number of this process among those on its host; its GPU has the same number."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def connected(device: torch.device, placement: str, limit: timedelta, target_ranks: int = 0) -> Iterator[Ranks]:
    """Context manager: joins the ranks that torchrun has started, or yields the ranks of a single process.

    `device` is this rank's device: ranks on GPUs communicate through NCCL, those on CPUs through gloo. The last
    `target_ranks` of them hold only the target.
    """
    if not started_by_torchrun():
        yield ALONE
        return
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    store, rank, total = next(dist.rendezvous("env://", timeout=limit))
    # torchrun's store outlives a restart; without a prefix, ranks would read the addresses of those that have ended
    store = dist.PrefixStore(f"restart {restart_count()}", store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=total, timeout=limit,
        device_id=device if gpu else None,
    )  # fmt: skip
    try:
        ranks = _grouped(device, placement, limit, rank, total - target_ranks, target_ranks)
        processes: list[Any] = [None] * total
        dist.all_gather_object(processes, Process.current(), group=ranks.host)
        yield replace(ranks, processes=tuple(processes), store=store)
    finally:
        dist.destroy_process_group()
        # After a collective, gloo's threads still have to release its tensors, for which they need Python's GIL. A
        # thread that waits for the GIL when the interpreter ends aborts the process (pytorch issue 190489).
        time.sleep(RELEASE_SECONDS)


def _grouped(device: torch.device, placement: str, limit: timedelta, rank: int, size: int, target_ranks: int) -> Ranks:
    """The ranks, with their groups. All ranks make each group, in the same order, except `saving`, which only the ranks
    that train make; it is None on the others."""
    host = dist.new_group(backend="gloo", timeout=limit)
    if not target_ranks:
        mesh = init_device_mesh(device.type, (size,))
        return Ranks(rank, size, placement, mesh, host, dist.new_group(backend="gloo", timeout=limit), limit)
    first, others = list(range(size)), list(range(size, size + target_ranks))
    # made by its members alone: otherwise, ranks outside a group split the NCCL communicator for it, members of a gloo
    # group do not, and each waits for the other
    saving = dist.new_group(first, backend="gloo", timeout=limit, use_local_synchronization=True)
    training, targets = (dist.new_group(members, timeout=limit) for members in (first, others))
    # a group for each sender, since a group's sends wait for each other
    feeds = tuple(dist.new_group([*first, sender], timeout=limit) for sender in others)
    mesh = DeviceMesh.from_group(training if rank < size else targets, device.type)
    return Ranks(rank, size, placement, mesh, host, saving, limit, target_ranks, training, feeds)
