"""Settings and fixtures of all tests. What they share otherwise is in `support`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which the following do
pytest.register_assert_rewrite("support")  # so that its asserts say what they compared

from fledge.models.target import Target
from support.commands import Ran
from support.targets import tiny_target

torch.set_num_threads(1)  # models this small only lose time to threads

requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(requires_gpu)


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target()


@pytest.fixture
def fledge(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs a fledge command in this process, as its console script would."""
    from fledge.cli import main

    def run(*words: Any) -> Ran:
        monkeypatch.setattr(sys, "argv", ["fledge", *map(str, words)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return run
