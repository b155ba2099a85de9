"""What `fledge check` finds out about a draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something wrong with a draft or its target: what it is, what it does where the draft is served, and the cure.
    `check` is the name of the check; the others are sentences without their capital and full stop, since they may begin
    with the name of a tensor or field."""

    check: str
    cause: str
    symptom: str
    cure: str

    def __str__(self) -> str:
        return "; ".join(s for s in (self.cause, self.symptom, f"cure: {self.cure}" if self.cure else "") if s) + "."


@dataclass
class Report:
    """The result of all checks. `passed` are (check, what was compared), `notes` remarks that are no faults, and
    `measured` the figures of the replay and of decoding by name. `files_only` tells that the target computed
    nothing."""

    findings: list[Finding] = field(default_factory=list)
    passed: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    files_only: bool = False

    def add(self, check: str, findings: list[Finding], otherwise: str) -> bool:
        """Adds the findings of a check, or if there are none, what it has shown. Returns whether there are none."""
        self.findings += findings
        if not findings:
            self.passed.append((check, otherwise))
        return not findings

    def failed(self, *checks: str) -> bool:
        """Whether one of these checks has a finding; without names, whether any has."""
        return any(not checks or f.check in checks for f in self.findings)
