"""The number of threads for compiled layers: one while other programs use the cores.

The threads wait for each other several times in each layer. If another program runs on the core of one thread, the
other threads wait until the system gives the core back. Then one thread is faster than several.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

LOOK = 0.2  # seconds of computing after which the preemptions in them are looked at
PREEMPTED = 70  # preemptions of a thread a second; on idle cores there are about 20, on busy ones about 100
HOLD, LONGEST = 4.0, 60.0  # seconds with one thread before several are tried again: at first, and after failed trials


def preemptions() -> int:
    """How often the system has taken a core from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class Threads:
    """Chooses between one thread and all. `clock` is in seconds."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, preemptions: Callable[[], int] = preemptions
    ) -> None:
        self.clock, self.preemptions = clock, preemptions
        self.seconds, self.seen = 0.0, 0  # of computing since the last look, and the preemptions in them
        self.alone_until, self.hold = 0.0, HOLD

    @contextmanager
    def computing(self) -> Iterator[int]:
        """The number of threads for what is computed in this context."""
        most = torch.get_num_threads()
        if most == 1:
            yield 1
            return
        began, before = self.clock(), self.preemptions()
        alone = began < self.alone_until
        yield 1 if alone else most
        now = self.clock()
        self.seconds, self.seen = self.seconds + now - began, self.seen + self.preemptions() - before
        if self.seconds >= LOOK:
            if self.seen > PREEMPTED * self.seconds * (1 if alone else most):
                if not alone:  # soon after the last time, several threads were tried in vain
                    self.hold = min(2 * self.hold, LONGEST) if now - self.alone_until < LONGEST else HOLD
                self.alone_until = now + self.hold
            self.seconds, self.seen = 0.0, 0


THREADS = Threads()
