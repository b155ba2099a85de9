"""Detects a draft whose tokens are accepted no more often than by chance. Verification keeps the output right with any
draft, so a useless draft would otherwise be noticed by its cost in time only."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fledge.config import DraftConfig
from fledge.types import Sampling, Trace

ROUNDS = 100  # the fewest rounds to judge by
AT_CHANCE = 0.08  # share of accepted first tokens; common tokens reach a few percent, a trained draft over 20 percent


class ChanceWarning(UserWarning):
    """The first drafted token of a round is accepted no more often than by chance."""


class ChanceWatch:
    """Counts how often the first drafted token of a round is accepted, over all that an engine decodes."""

    def __init__(self) -> None:
        self.rounds = self.accepted = 0
        self.warned = False

    def add(self, traces: Sequence[Trace], samplings: Sequence[Sampling], config: DraftConfig, target: str) -> None:
        """Counts finished requests, and warns once if the draft for `target` turns out to be at chance. Requests with a
        temperature above 1 or with logits processors are not counted, since even a good draft may fail there."""
        counted = [t for t, s in zip(traces, samplings, strict=True) if s.temperature <= 1 and not s.processors]
        rounds = [r for t in counted for r in t.rounds if r.drafted]
        self.rounds += len(rounds)
        self.accepted += sum(r.accepted > 0 for r in rounds)
        if not self.warned and rounds and self.rounds >= ROUNDS and self.accepted < AT_CHANCE * self.rounds:
            self.warned = True
            warnings.warn(_message(self.accepted, self.rounds, config, target), ChanceWarning, stacklevel=4)


def _message(accepted: int, rounds: int, config: DraftConfig, target: str) -> str:
    known = config.provenance.target
    causes = []
    if not known or known != target:
        causes.append(f"it was trained for another target of the same size (its config names {known or 'none'})")
    if config.family.reads_layers:
        causes.append(f"its config's norm_before_residual ({str(config.norm_before_residual).lower()}) is wrong")
        layers = f"{', '.join(map(str, config.aux_layers))}" if config.aux_layers else "the default ones"
        causes.append(f"it was trained on other layers than its config names ({layers})")
    others = "; ".join(causes) + "; or " * bool(causes)
    return (
        f"the first drafted token was accepted in only {accepted} of {rounds} rounds, about as often as by chance, so "
        f"the draft only makes {target or 'the target'} slower. Likely causes: {others}it was "
        "trained on too little text of this kind"
    )
