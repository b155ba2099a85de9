"""The name and the maker of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from fledge.io import machine
from fledge.io.machine import is_intel, processor_name

LINES = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: 6\nmodel name\t: {}\n\n"


@pytest.mark.parametrize(
    ("vendor", "name", "intel"),
    [("GenuineIntel", "Intel(R) Xeon(R) Processor", True), ("AuthenticAMD", "AMD EPYC", False)],
)
def test_linux(vendor: str, name: str, intel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "INFO", tmp_path / "cpuinfo")
    machine.INFO.write_text(LINES.format(vendor, name) * 200)
    assert processor_name() == name and is_intel() is intel


@pytest.mark.parametrize(
    ("text", "intel"),
    [
        ("Intel64 Family 6 Model 158 Stepping 10, GenuineIntel", True),
        ("AMD64 Family 23 Model 113 Stepping 0, AuthenticAMD", False), ("arm", False),
    ],
)  # fmt: skip
def test_other_systems(text: str, intel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "INFO", tmp_path / "none")
    monkeypatch.setattr("platform.processor", lambda: text)
    assert processor_name() == text and is_intel() is intel
