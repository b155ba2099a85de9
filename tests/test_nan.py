"""Error messages about NaN name the cause and a remedy: the target, the initial draft, or the learning rate."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.decode.load import load
from fledge.drafts.eagle import EagleDraft
from fledge.drafts.weights import save_draft
from fledge.targets.native import NativeTarget
from fledge.types import Features
from support.chats import tiny_chats
from support.mutations import replace_function
from support.targets import tiny_draft, tiny_target, tiny_target_directory

TRAIN = "--max-length 64 --row-length 128 --steps 4 --depth 2 --draft-vocab 200 --eval-tokens 4 --device cpu".split()
NAMED = r"computes NaN or infinite values in float32: its weights are damaged, or the dtype is too narrow"


@pytest.fixture
def made(tmp_path):
    """A directory with a target, a draft of it, chats and prompts."""
    tiny_target_directory(tmp_path)
    tiny_chats(tmp_path / "chats.jsonl", 20)
    save_draft(tiny_draft(tiny_target()), tmp_path / "draft", torch.float32)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "it can fly"}\n')
    return tmp_path


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("job", ["alone", "draft", "eval", "regenerate", "train"])
def test_a_target_that_computes_nan_is_named(made, fledge, job, value):
    weights = made / "target" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.3.mlp.down_proj.weight"].fill_(value)
    save_file(tensors, weights, metadata={"format": "pt"})
    one, chats = ["--target", made / "target"], ["--data", made / "chats.jsonl"]
    words = {
        "alone": ["generate", *one, "--prompt", "the bird"],
        "draft": ["generate", *one, "--prompt", "the bird", "--draft", made / "draft"],
        "eval": ["eval", *one, "--prompts", made / "prompts.jsonl", "--draft", made / "draft"],
        "regenerate": ["regenerate", *one, *chats, "--out", made / "own.jsonl", "--batch", 4],
        "train": ["train", *one, *chats, "--out", made / "run", *TRAIN],
    }
    went = fledge(*words[job])
    assert went.code == 2 and re.search(NAMED, went.err), went.err


def test_logits_of_minus_infinity_are_allowed(target, monkeypatch):
    """Logits of -inf are valid, since some models exclude their padding tokens this way."""
    engine, forward = load(target), target.head.forward
    free = engine.generate([5, 6, 7], max_new_tokens=5).tokens

    def forbidding(x):
        return forward(x).index_fill(-1, torch.tensor(free), float("-inf"))

    monkeypatch.setattr(target.head, "forward", forbidding)
    others = engine.generate([5, 6, 7], max_new_tokens=5).tokens
    assert len(others) == len(free) == 5 and not set(others) & set(free)


def train(made, fledge, *more: object) -> str:
    went = fledge("train", "--target", made / "target", "--data", made / "chats.jsonl", "--out", made / "run", *TRAIN,
                  *more)  # fmt: skip
    assert went.code == 2, went.err
    return went.err


def test_nan_in_hidden_states_while_training_names_the_target(made, fledge, monkeypatch):
    """If the target's hidden states become NaN at a later step, as from a text that overflows, the message names the
    target."""
    features, rows = NativeTarget.features, []

    def failing(self, row, layers):
        found = features(self, row, layers)
        rows.append(row)
        if len(rows) <= 2:  # the probe's, and that of the first step
            return found
        return Features(found.aux_TAD * float("nan"), found.last_TD)

    monkeypatch.setattr(NativeTarget, "features", failing)
    said = train(made, fledge)
    assert "the gradient of step 2 is nan: the target's hidden states overflow in float32" in said


def test_a_draft_that_overflows_at_once_does_not_blame_the_learning_rate(made, fledge, monkeypatch):
    def huge(started, draft, *of_target):
        started(draft, *of_target)
        draft.norm.weight.data.fill_(1e38)

    replace_function(monkeypatch, EagleDraft, "initialize", huge)
    said = train(made, fledge)
    assert "overflow in float32, or the initial draft does" in said and "--lr" not in said


def test_a_later_overflow_blames_the_learning_rate(made, fledge):
    said = train(made, fledge, "--lr", 1e30, "--warmup", 0, "--clip", 1e30)
    assert "the gradient of step 2 is nan: " in said and "or the learning rate is too high; train again with" in said
