"""Settings and fixtures for all tests. Other shared code is in `support`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, as the next imports do
pytest.register_assert_rewrite("support")  # so that failed asserts in support show the compared values

from fledge.targets.transformers import TransformersTarget
from support.commands import Ran
from support.targets import tiny_target

torch.set_num_threads(1)  # more threads make models of this size slower

requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(requires_gpu)


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
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return run
