"""What is said of a rank that ended or does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch.distributed as dist

from fledge.train.hooks import Interruption
from fledge.train.ranks import ALONE, LostRankError, Process, Ranks, duration, is_communication_error, lost_sentence

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4317")
BARRIER = RuntimeError("[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 1800000 ms")


def ended_process() -> Process:
    """A sibling of this process, as far as `Process` knows, that has ended and was not waited for: a zombie."""
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    child.stdout.read()
    CHILDREN.append(child)
    return replace(Process.current(), id=child.pid)


CHILDREN: list[subprocess.Popen] = []


def test_a_process_that_ended_is_told_from_others() -> None:
    ours = Process.current()
    assert not ours.has_ended()
    gone = ended_process()
    store = dist.HashStore()
    said = lost_sentence(GLOO, "in step 3", 0.1, 0, [ours, gone], None, store)
    assert said == "rank 1 of 2 ended in step 3; see its log"
    assert gone.has_ended()
    for child in CHILDREN:
        child.wait()
    assert gone.has_ended(), "when it was waited for, too"
    assert not replace(gone, host="another").has_ended() and not replace(gone, parent=1).has_ended()


def test_all_ranks_say_the_sentence_of_the_first() -> None:
    ours, store = replace(Process.current(), host="another"), dist.HashStore()
    first = lost_sentence(BARRIER, "in step 3", 1800.4, 0, [ours] * 4, None, store)
    assert first == "ranks 1, 3 of 4 did not answer for 30 minutes in step 3; see the log"
    assert lost_sentence(BARRIER, "in step 4", 5.0, 0, [ours] * 4, None, store) == first
    late = lost_sentence(GLOO, "in step 3", 9.0, 1, [ended_process(), ours, ours, ours], None, store)
    assert late == first, "the rank that was waited for, after the others have ended"
    known = lost_sentence(GLOO, "while it sent", 2.0, 0, [ours] * 3, None, dist.HashStore(), awaited=2)
    assert known == "rank 2 of 3 did not answer for 2 seconds while it sent; see the log"


def test_measured_times() -> None:
    assert [duration(x) for x in (0.2, 1, 119, 121, 1800, 7200)] == [
        "0 seconds", "1 second", "119 seconds", "2 minutes", "30 minutes", "120 minutes",
    ]  # fmt: skip


def test_other_errors_stay_as_they_are() -> None:
    """An error of a block that is not one of communication, and any in a single process."""
    assert is_communication_error(GLOO) and not is_communication_error(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"), Ranks(size=2).collective("here"):
        raise RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as caught, ALONE.collective("here"):
        raise GLOO
    assert not isinstance(caught.value, LostRankError)


def test_sigterm_does_not_end_a_rank_before_it_has_named_the_lost_rank() -> None:
    """torchrun sends SIGTERM to the ranks that are left, at any moment after the loss: in a communication, and in
    training, where a thread that saves a checkpoint may have found the loss."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    ranks = Ranks(size=2, processes=(Process.current(), ended_process()), store=dist.HashStore())
    try:
        with pytest.raises(LostRankError, match="rank 1 of 2 ended here"), ranks.collective("here"):
            raise GLOO
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with pytest.raises(LostRankError, match="while a checkpoint was saved"), Interruption(print, lambda: None):
            raise LostRankError("rank 1 of 2 ended while a checkpoint was saved")
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with pytest.raises(ValueError, match="damaged"), Interruption(print, lambda: None):
            raise ValueError("row 3 is damaged")
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler, "after another error"
    finally:
        signal.signal(signal.SIGTERM, before)
