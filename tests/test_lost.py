"""What is said of a rank that ended or does not answer."""

from __future__ import annotations

import os
import signal

import pytest

from fledge.train.hooks import Signals
from fledge.train.ranks import ALONE, LostRankError, Ranks, is_communication_error

GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4317")


def test_other_errors_stay_as_they_are() -> None:
    """An error of a block that is not one of communication, and any in a single process."""
    assert is_communication_error(GLOO) and not is_communication_error(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"), Ranks(size=2).collective("here"):
        raise RuntimeError("shapes differ")
    with pytest.raises(RuntimeError) as caught, ALONE.collective("here"):
        raise GLOO
    assert not isinstance(caught.value, LostRankError)


def test_sigterm_does_not_end_a_rank_before_it_has_told_of_the_lost_rank() -> None:
    """torchrun sends SIGTERM to the ranks that are left, at any moment after the loss: in a communication, and in
    training, where a thread that saves a checkpoint may have found the loss."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    ranks = Ranks(size=2)
    try:
        with pytest.raises(LostRankError, match="another of 2 ranks ended or did not"), ranks.collective("here"):
            raise GLOO
        with pytest.raises(LostRankError, match="rank 1 of 2 ended or"), ranks.collective("here", 1):
            raise GLOO
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with pytest.raises(LostRankError, match="while a checkpoint was saved"), Signals(print).around(None):
            raise LostRankError("another of 2 ranks ended while a checkpoint was saved")
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with pytest.raises(ValueError, match="damaged"), Signals(print).around(None):
            raise ValueError("row 3 is damaged")
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler, "after another error"
    finally:
        signal.signal(signal.SIGTERM, before)
