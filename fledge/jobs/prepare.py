"""What the commands that decode do before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fledge.decode.engine import Engine
    from fledge.jobs.display import ProgressDisplay
    from fledge.types import Sampling


def prepare_rounds(
    arms: Sequence[tuple[Engine, bool]], progress: ProgressDisplay, *, batch: int, tokens: int, sampling: Sampling
) -> None:
    """Captures rounds with `fledge.decode.prepare.prepare`, shows the progress, and says what it took, if anything."""
    from fledge.decode.prepare import prepare

    prepared = prepare(arms, batch, tokens=tokens, sampling=sampling, count=progress.count)
    if prepared.rounds:
        progress.say(str(prepared))
