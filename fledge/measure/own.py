"""fledge's own decoder on the prompts that a server was asked, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fledge.decode.engine import Engine
from fledge.measure.metrics import alpha, tau
from fledge.types import Sampling


def decode_own(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    batch: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Decodes prompts of token ids with an engine's draft.

    Returns the prompts (`ids`), the `completions` in their order, and the `figures`: tau, alpha, rounds and what
    computed them. `advance` is called after each answer.
    """
    done = engine.generate_all(
        list(prompts), batch=batch, max_new_tokens=max_new_tokens, sampling=sampling, answered=lambda index: advance()
    )
    traces = [c.trace for c in done]
    figures = {
        "tau": tau(traces), "alpha": alpha(traces), "rounds": sum(len(t.rounds) for t in traces), "batch": batch,
        "device": str(engine.target.device), "dtype": str(engine.target.dtype).removeprefix("torch."),
        **engine.drafting.record(),
    }  # fmt: skip
    return {"ids": list(prompts), "completions": done, "figures": figures}
