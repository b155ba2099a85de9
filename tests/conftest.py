"""Settings and fixtures for all tests. Other shared code is in `support`."""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch

# the same examples in every run, so that no property test fails by chance; `make properties` tries others
hypothesis.settings.register_profile("seeded", derandomize=True)
hypothesis.settings.load_profile("seeded")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: see torch.set_num_threads below
# otherwise each look for a hub that no test stands in for (`support/hub.py`) is tried again for half a minute
os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, as the next imports do
pytest.register_assert_rewrite("support")  # so that failed asserts in support show the compared values

from fledge.report import page
from fledge.targets.transformers import TransformersTarget
from support.commands import Ran
from support.targets import tiny_target

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell does for what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests interrupt processes, which would inherit it
torch.set_num_threads(1)  # more threads make models of this size slower

write_page = page.write_page


@functools.wraps(write_page)
def note_report(out: Any, sections: Any) -> None:
    """Writes an empty report. Drawing one takes a second, and most commands of most tests would draw one."""
    page.check_report_path(out, "the report").write_text(page.MARK)


page.write_page = note_report


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands draw their reports."""
    monkeypatch.setattr(page, "write_page", write_page)


requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(requires_gpu)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test, with its fixtures, draws the same random numbers, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenized data is kept in a directory of the tests, also by the processes that they start."""
    os.environ["FLEDGE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def target() -> TransformersTarget:
    return tiny_target()


@pytest.fixture
def fledge(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """A function that runs a fledge command in this process, as the console script would."""
    from fledge.cli import main

    def run(*words: Any) -> Ran:
        monkeypatch.setattr(sys, "argv", ["fledge", *map(str, words)])
        capsys.readouterr()
        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return run


@pytest.fixture
def uninitialized_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fills uninitialized memory with NaN, or with the largest integer, so that an output that a kernel does not write
    is noticed. This needs torch's deterministic algorithms, which training itself does not use."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1, device=device).isnan() and torch.empty_like(torch.ones(1, device=device)).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
