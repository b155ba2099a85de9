"""Notices a draft that guesses no better than chance: the text is the target's own all the same, so nothing else would
tell that it only costs time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fledge.config import DraftConfig
from fledge.types import Sampling, Trace

ROUNDS = 100  # fewer tell nothing
AT_CHANCE = 0.08  # of first tokens accepted: guesses of common words reach some percent, working drafts over 20


class ChanceWarning(UserWarning):
    """A draft's first tokens are accepted no more often than guesses would be."""


class Acceptance:
    """How often the first token that a draft says in a round is accepted, over all that an engine decodes."""

    def __init__(self) -> None:
        self.rounds = self.accepted = 0
        self.told = False

    def add(self, traces: Sequence[Trace], sampling: Sampling, config: DraftConfig, target: str) -> None:
        """Counts finished requests, and warns, once, where a draft for `target` turns out to be at chance. Text that is
        nearly random, or that processors forbid the likely words of, tells nothing of a draft and is not counted."""
        if sampling.temperature > 1 or sampling.processors:
            return
        rounds = [r for t in traces for r in t.rounds if r.drafted]
        self.rounds += len(rounds)
        self.accepted += sum(r.accepted > 0 for r in rounds)
        if not self.told and self.rounds >= ROUNDS and self.accepted < AT_CHANCE * self.rounds:
            self.told = True
            warnings.warn(_message(self.accepted, self.rounds, config, target), ChanceWarning, stacklevel=4)


def _message(accepted: int, rounds: int, config: DraftConfig, target: str) -> str:
    known = config.provenance.target
    causes = [f"it was trained for another target of the same size (its config names {known or 'none'})"]
    if config.family.reads_layers:
        causes.append(f"its config's norm_before_residual ({str(config.norm_before_residual).lower()}) is wrong")
        layers = f"{', '.join(map(str, config.aux_layers))}" if config.aux_layers else "the default ones"
        causes.append(f"it was trained on other layers than its config names ({layers})")
    return (
        f"the first word that the draft guesses was accepted in {accepted} of {rounds} rounds, about as by chance, so "
        f"it only makes {target or 'the target'} slower. Likely causes: {'; '.join(causes)}; or it has learnt "
        "too little of such text"
    )
