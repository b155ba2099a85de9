"""Acceptance by definition: each round is drafted with an empty cache and compared with the target's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fledge.decode.engine import Engine
from fledge.measure import evaluator
from fledge.measure.prompts import first_prompt
from fledge.types import Trace
from support.mutations import replace_function
from support.targets import read_alone
from support.trees import paths_of, propose_one


@torch.no_grad()
def rounds_by_definition(engine: Engine, prompt: Sequence[int], new: int) -> list[int]:
    """The number of accepted tokens of each round of greedy decoding, up to `new` tokens: the length of the longest
    drafted path that the target generates too. No cache is kept between rounds, in the draft or in the target."""
    target, text = engine.target, list(prompt)

    def up_to(length: int) -> list[int]:
        while len(text) < length:
            text.append(int(target.model(torch.tensor([text])).logits[0, -1].argmax()))
        return text[:length]

    rounds, end = [], len(prompt) + 1  # the first round follows the first token of the answer
    while end < len(prompt) + new and not target.stop_ids & set(up_to(end)[len(prompt) :]):
        _, features = read_alone(target, up_to(end)[:-1], engine.layers)
        proposer, states = engine.drafting.proposer(engine.draft), engine.draft.select_states(features)
        paths = paths_of(propose_one(proposer, torch.tensor(up_to(end)[1:]), states, end + proposer.scratch))
        said = tuple(up_to(end + max(map(len, paths)))[end:])
        rounds.append(max((len(path) for path in paths if path == said[: len(path)]), default=0))
        end += rounds[-1] + 1
    return rounds


def tau_by_definition(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> float:
    """The mean number of tokens committed per round, over the rounds of all prompts."""
    rounds = [r for prompt in prompts for r in rounds_by_definition(engine, prompt, new)]
    return sum(r + 1 for r in rounds) / len(rounds)


def tau_of_alpha(alpha: Sequence[float | None]) -> float:
    """τ of a chain whose tokens have acceptance rates α_k: 1 + α_0 + α_0 α_1 + .."""
    reached = torch.tensor([a or 0.0 for a in alpha], dtype=torch.float64).cumprod(0)
    return 1 + float(reached.sum())


def define_measurements(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns a list to which every later acceptance measurement of training adds its τ by definition."""
    found: list[float] = []

    def measured(traces: Any, engine: Engine, prompts: Sequence[Any], new: int) -> list[Trace]:
        asked = [list(engine.reader.template.prompt_ids(first_prompt(prompt))) for prompt in prompts]
        measurement = traces(engine, prompts, new)
        found.append(tau_by_definition(engine, asked, new))
        return measurement

    replace_function(monkeypatch, evaluator, "greedy_traces", measured)
    return found
