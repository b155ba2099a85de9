"""Random settings of decoding change no token: target, draft, drafting, sampling options of each request, and batch.

`make lossless` runs 1,000 settings (LOSSLESS_CASES); the tests run the first few.
"""

from __future__ import annotations

import functools
import os
import random
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fledge.config import Provenance
from fledge.decode import batch as batches
from fledge.decode.draft_size import ChanceWarning
from fledge.decode.engine import Completion
from fledge.decode.load import load
from fledge.drafts.draft import Draft
from fledge.targets.loading import target_of
from fledge.targets.transformers import TransformersTarget
from fledge.types import Sampling, TreeShape
from support.decoding import differ_at_a_tie, prompts
from support.sizes import RandomSizes
from support.targets import DFLASH, P_EAGLE, SLIDING, tiny_draft, tiny_target

CASES = int(os.environ.get("LOSSLESS_CASES", 60))
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": dict(family="qwen3"), "phi3": dict(family="phi3"), "sliding": SLIDING["mistral"],
}  # fmt: skip
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle3": {}, "small vocabulary": dict(draft_vocab_size=150), "eagle1": dict(method="eagle1"),
    "peagle": dict(P_EAGLE, num_hidden_layers=2), "eagle3.1": dict(fc_norm=True, norm_output=True),
    "dflash": dict(DFLASH, windows=(24, None), provenance=Provenance(depth=10)),
    "dflash, causal": dict(DFLASH, block_causal=True, windows=(16, 16), provenance=Provenance(depth=10)),
}  # fmt: skip
ONE_PASS = "peagle", "dflash", "dflash, causal"


@dataclass(frozen=True)
class Setting:
    """One random setting."""

    target: str
    native: bool
    draft: str
    drafting: dict[str, Any]
    samplings: list[Sampling]
    prompts: list[list[int]]
    options: dict[str, Any]


def random_setting(case: int) -> Setting:
    """Setting number `case`."""
    draw = random.Random(case)
    draft = draw.choice(list(DRAFTS))
    drafting: dict[str, Any] = {}
    if draw.random() < 0.5:
        drafting["depth"] = draw.randint(1, 7)
    kind = draw.choice(["chain", "dynamic", "fixed", "confident"])
    if kind == "dynamic":
        drafting |= dict(mode="tree", nodes=draw.randint(2, 20), width=draw.randint(1, 6))
        if draft in ONE_PASS:  # whose trees have no width
            drafting["nodes"] = draw.choice([drafting["nodes"], 60, 256])
            del drafting["width"]
    elif kind == "fixed":
        drafting = dict(mode="tree", shape=random_tree(draw))
    elif kind == "confident":
        drafting["confidence"] = draw.choice([0.02, 0.2, 0.6])
    if draft not in ONE_PASS and draw.random() < 0.3:
        drafting["stable"] = False
    if kind not in ("fixed", "confident") and drafting.get("stable", True) and draw.random() < 0.3:
        drafting["depth"] = "auto"
    count = draw.randint(1, 6)
    asked = prompts(count, longest=draw.choice([3, 24, 60]), seed=case)
    return Setting(
        draw.choice(list(TARGETS)), draw.random() < 0.7, draft, drafting, [random_sampling(draw) for _ in range(count)],
        asked, dict(batch=draw.randint(1, 6), max_new_tokens=draw.randint(1, 30), request=draw.randint(0, 9)),
    )  # fmt: skip


def random_tree(draw: random.Random) -> TreeShape:
    parents, ranks, children = [-1], [0], [0]
    for _ in range(draw.randint(1, 10)):
        parent = draw.randrange(len(parents))
        parents.append(parent)
        ranks.append(children[parent])
        children[parent] += 1
        children.append(0)
    return TreeShape(tuple(parents), tuple(ranks))


def random_sampling(draw: random.Random) -> Sampling:
    penalty = draw.choice([1.0, 1.0, 1.3])
    if draw.random() < 0.3:
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        temperature=draw.choice([0.3, 1.0, 1.4]), top_k=draw.choice([0, 0, 5]), top_p=draw.choice([1.0, 0.8]),
        repetition_penalty=penalty, seed=draw.randrange(100),
    )  # fmt: skip


@functools.cache
def pair(target: str, native: bool, draft: str, dtype: torch.dtype, device: str) -> tuple[TransformersTarget, Draft]:
    made = tiny_target(dtype=dtype, **TARGETS[target])
    made.model.to(device)
    implementation = "native" if native else "transformers"
    of_model = target_of(made.model, made.tokenizer, implementation=implementation)
    return of_model, tiny_draft(of_model, **DRAFTS[draft])


def decode(setting: Setting, dtype: torch.dtype, device: str) -> tuple[list[Completion], list[Completion]]:
    """The completions with and without the draft."""
    engine = load(*pair(setting.target, setting.native, setting.draft, dtype, device), **setting.drafting)
    if engine.chooser is not None:
        RandomSizes(engine, seed=setting.options["request"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ChanceWarning)  # the drafts are random
        return tuple(
            engine.generate_all(setting.prompts, sampling=setting.samplings, speculate=speculate, **setting.options)
            for speculate in (True, False)
        )


@pytest.mark.parametrize("part", range(6))
def test_random_settings_change_no_token(part: int) -> None:
    """Token for token in float64."""
    for case in range(part, CASES, 6):
        setting = random_setting(case)
        fast, plain = decode(setting, torch.float64, "cpu")
        assert [c.tokens for c in fast] == [c.tokens for c in plain], (case, setting)
        assert [c.text for c in fast] == [c.text for c in plain], case


@pytest.mark.parametrize(
    ("device", "captured"),
    [
        pytest.param("cpu", False, id="cpu"),
        pytest.param("cuda", True, marks=pytest.mark.gpu, id="captured"),
        pytest.param("cuda", False, marks=pytest.mark.gpu, id="direct"),
    ],
)
def test_random_settings_in_float32(device: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's tokens are those of decoding without a draft up to a near tie, if any: in float32, a row of a
    product may depend on the number of rows, on a CPU by its maker and its vector registers."""
    if not captured:
        monkeypatch.setattr(batches, "can_capture", lambda *given: False)
    cases, ties = CASES // 3 if device == "cpu" else CASES, 0
    for case in range(cases):
        setting = random_setting(case)
        fast, plain = decode(setting, torch.float32, device)
        exact, _ = pair(setting.target, setting.native, setting.draft, torch.float64, "cpu")
        for i, (a, b) in enumerate(zip(fast, plain, strict=True)):
            if a.tokens != b.tokens:
                ties += 1
                number = setting.options["request"] + i
                assert differ_at_a_tie(exact, setting.prompts[i], setting.samplings[i], number, a, b), (case, i)
    assert ties <= cases / 20
