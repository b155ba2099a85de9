"""Prompts, sampling options, a logits processor with state, and comparisons with decoding without a draft."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.data.documents import Document
from fledge.decode.engine import Completion, Engine
from fledge.drafts.draft import Draft
from fledge.measure.run import ranking_of
from fledge.targets.interface import DecodingTarget
from fledge.targets.transformers import TransformersTarget
from fledge.train.row_pass import Objective, row_pass
from fledge.types import Prompt, Sampling
from support.rows import row_of
from support.targets import features_for


def prompts(count: int, longest: int = 24, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` random token ids, without special tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 400) for _ in range(draw.randint(1, longest))] for _ in range(count)]


SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": dict(temperature=1.0),
    "cool": dict(temperature=0.6, seed=3),
    "top_k": dict(temperature=1.2, top_k=7),
    "top_p": dict(temperature=1.0, top_p=0.8),
    "repetition": dict(temperature=0.9, repetition_penalty=1.4),
    "greedy repetition": dict(repetition_penalty=1.3),
    "everything": dict(temperature=1.3, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=11),
}


class Remembers:
    """A logits processor with state: it records every prefix, and excludes the token that was chosen last."""

    def __init__(self) -> None:
        self.prefixes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(tuple(input_ids[0].tolist()))
        scores = scores.clone()
        scores[0, input_ids[0, -1]] = -float("inf")
        scores[0, len(self.prefixes) % 400] += 1.0
        return scores


def both(engine: Engine, prompt: list[int], **options: Any) -> tuple[Completion, Completion]:
    fast = engine.generate(prompt, **options)
    return fast, engine.generate(prompt, speculate=False, **options)


def assert_same(fast: Completion, plain: Completion) -> None:
    assert fast.tokens == plain.tokens
    assert (fast.text, fast.finish) == (plain.text, plain.finish)


def spoken(engine: Engine, prompt: list[int], n: int) -> tuple[Document, Completion]:
    """A document of the prompt and its answer, and the completion. The answer is the document's supervised span."""
    done = engine.generate(prompt, max_new_tokens=n)
    tokens = np.array(prompt + done.tokens, dtype=np.int32)
    spans = np.full_like(tokens, -1)
    spans[len(prompt) :] = 0
    return Document(tokens, spans), done


def fit_head(target: TransformersTarget, draft: Draft, documents: list[Document], steps: int) -> None:
    """Fits the draft's head by least squares to the target's logits on the live slots of `documents`. If they are few,
    the draft then predicts them well."""
    row = row_of(documents)
    features = features_for(draft, target, row)
    live = row.live(steps)
    with torch.no_grad():
        passes = row_pass(draft, row, features, Objective(depth=steps))
        hidden = torch.cat(passes.chunk(passes.trained).head_inputs)
        wanted = torch.cat([target.logits(features.last_TD[t + 1 + k]) for k, t in enumerate(live)])
        draft.lm_head.weight.copy_(torch.linalg.lstsq(hidden, wanted[:, draft.target_ids()]).solution.T)


def differ_at_a_tie(
    exact: DecodingTarget, prompt: Sequence[int], sampling: Sampling, number: int, a: Completion, b: Completion
) -> bool:
    """Whether two different answers to request `number` part where the two highest scores of an exact target are nearly
    equal: in float32, a row of a product may depend on the number of rows."""
    agreed = next(j for j, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
    prefix = [*prompt, *a.tokens[:agreed]]
    logits_1V, _ = exact.prefill([Prompt(prefix)], exact.new_cache([len(prefix)]))
    first, second = ranking_of(sampling, number, prefix, logits_1V[0]).topk(2).values.tolist()
    return first - second < 1e-3
