from __future__ import annotations

import pytest

from fledge.io.machine import environment


def test_the_commit_of_copied_sources_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_COMMIT", "0123456789ab")
    assert environment("cpu", "float32")["commit"] == "0123456789ab"
