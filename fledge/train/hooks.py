"""The hooks of `fledge train` (`trainer.Hook`) that write the run's directory, and the signals that end a run.

The order of the hooks matters: `Signals` is the first, what earlier hooks add to a step's metrics is written by
`MetricsFile`, and `Checkpoints` saves after the step's metrics were written.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from fledge.drafts.draft import Draft
from fledge.drafts.weights import save_draft
from fledge.io.machine import is_assembler_error
from fledge.train.ranks import LostRankError
from fledge.train.trainer import Hook, Run, StepResult

Evaluate = Callable[[Draft], dict[str, Any]]  # measures the τ of a draft
# makes files that are written together with a draft, by path, of the draft and its metrics
Attach = Callable[[Draft, dict[str, Any]], Mapping[str, bytes]]

STOPPING = "stopping after this step; a second Ctrl-C stops immediately and loses the steps since the last checkpoint"
SAVING = "a checkpoint is being saved; stopping when it is complete"


class Drafts(Hook):
    """Measures the τ of the draft with `evaluate`, and writes the draft with the best τ to `RunDirectory.draft`, or the
    last draft if no τ was measured. The draft gets the files of each function in `attach`.

    Ranks may share the work of `evaluate`, and all training ranks call `attach`; rank 0 alone writes.
    """

    def __init__(self, evaluate: Evaluate | None = None, attach: Sequence[Attach] = ()):
        self.evaluate, self.attach = evaluate, attach

    def meets_after(self, run: Run, step: int) -> bool:
        return self.evaluate is not None and run.schedule.evaluates_after(step)

    def after(self, run: Run, result: StepResult) -> None:
        if not self.meets_after(run, result.step):
            return
        if run.ranks.target_ranks:
            run.source.receive_sent(result.step)
        run.draft.eval()
        with run.watch.outside("eval"):
            measured = self.evaluate(run.draft)
        result.metrics.update({f"eval_{name}": value for name, value in measured.items()})
        if measured.get("tau", -1.0) > run.progress.best_tau:
            run.progress.best_tau, run.progress.best_step = measured["tau"], result.step
            self._write(run, result.metrics)

    def finished(self, run: Run) -> None:
        if run.progress.best_step == 0:  # τ was never measured
            run.draft.eval()
            self._write(run, {"step": run.progress.step})

    def _write(self, run: Run, metrics: dict[str, Any]) -> None:
        apart = run.ranks.target_ranks  # which do not meet here
        with run.watch.outside("save"), nullcontext() if apart else run.ranks.together("while the draft was written"):
            files: dict[str, bytes] = {}
            for attach in self.attach:
                files |= attach(run.draft, metrics)
            if run.ranks.leads:
                save_draft(run.draft, run.directory.draft, run.save_dtype, files)


class MetricsFile(Hook):
    """Appends each step's metrics to metrics.jsonl, in rank 0, with the seconds between steps since the last line."""

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        with run.directory.metrics.open("a") if run.ranks.leads else nullcontext() as self._file:
            yield

    def after(self, run: Run, result: StepResult) -> None:
        result.metrics["parts"].update(sorted(run.watch.others.items()))
        run.watch.others.clear()
        if self._file:
            try:
                line = json.dumps(result.metrics)
            except TypeError as e:
                raise TypeError(f"a hook added a metric that JSON cannot hold: {e}; add numbers, texts or lists") from e
            self._file.write(line + "\n")
            self._file.flush()


class Signals(Hook):
    """SIGINT (Ctrl-C), SIGTERM and SIGHUP stop the run instead of ending the process. Comes first among the hooks, so
    that the block around the run also covers the ends of the other hooks.

    A second SIGINT raises KeyboardInterrupt, unless it arrives within `saving`. A second SIGTERM or SIGHUP has no
    effect, since process managers often send a signal twice. If the first signal also ended Triton's assembler, the
    block raises KeyboardInterrupt in place of Triton's error. SIGHUP stays ignored if SIGHUP was ignored before, as
    under nohup. After a block that raised LostRankError, SIGTERM is ignored: torchrun sends SIGTERM before this rank
    has printed the error. `say` is called with a message for each handled signal, from a thread: a signal handler may
    run in the middle of a print.
    """

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self._requested = self._saving = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        def handle(number: int, _frame: object) -> None:
            if not self._requested:
                self._requested = True
                run.stop()
                self._lines.put(STOPPING)
            elif number == signal.SIGINT and self._saving:
                self._lines.put(SAVING)
            elif number == signal.SIGINT:
                raise KeyboardInterrupt

        printer = threading.Thread(target=self._print_lines, daemon=True)
        printer.start()
        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            caught.append(signal.SIGHUP)
        previous = {s: signal.signal(s, handle) for s in caught}
        try:
            yield
        except LostRankError:
            previous[signal.SIGTERM] = signal.SIG_IGN
            raise
        except Exception as e:
            if self._requested and is_assembler_error(e):
                raise KeyboardInterrupt from e
            raise
        finally:
            for s, handler in previous.items():
                # None: the handler was not installed from Python, and cannot be put back
                signal.signal(s, signal.SIG_DFL if handler is None else handler)
            self._lines.put(None)
            printer.join()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this block, a second Ctrl-C does not raise."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _print_lines(self) -> None:
        for line in iter(self._lines.get, None):
            self.say(line)


class Checkpoints(Hook):
    """Saves a checkpoint every `Schedule.save_every` steps, after the last step, and after a stop, each within the
    context manager `saving`. Comes last, since a resumed run calls no hook again for the saved step."""

    def __init__(self, saving: Callable[[], AbstractContextManager[None]] = nullcontext):
        self.saving = saving

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        self._saved = run.progress.step
        try:
            yield
            with self.saving():
                if self._saved < run.progress.step:
                    self._save(run)
                run.directory.finish_saving()
        finally:
            run.directory.finish_saving()

    def after(self, run: Run, result: StepResult) -> None:
        if result.step % run.schedule.save_every == 0:
            with self.saving():
                self._save(run)

    def _save(self, run: Run) -> None:
        self._saved = run.progress.step
        state, progress = run.optimizer.state(), vars(run.progress)
        with run.watch.outside("save"):
            run.directory.save_checkpoint(run.draft, run.save_dtype, state, progress, run.ranks)
