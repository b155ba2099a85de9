"""summary.json: what a run was started with, and the words that its draft vocabulary lacks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fledge import __version__
from fledge.data.documents import Document
from fledge.drafts.weights import load_draft
from fledge.states.cache import FeatureCache
from fledge.train.setup.draft import missing_from
from support.chats import tiny_chats
from support.files import metrics_of
from support.targets import tiny_target_directory, tiny_tokenizer

SMALL = "--max-length 64 --row-length 128 --steps 2 --depth 2 --device cpu --eval-tokens 1".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    tiny_chats(root / "chats.jsonl", 40)
    return root


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_missing_tokens_are_the_most_frequent_ones() -> None:
    tokens = np.array([5, 5, 5, 7, 7, 3, 3, 9, 8, 8, 8, 8], dtype=np.int32)
    spans = np.array([0] * 8 + [-1] * 4, dtype=np.int32)
    documents = [Document(tokens, spans)] * 2
    assert missing_from(torch.tensor([7]), documents, 12, 50) == [(5, 6), (3, 4), (9, 2)]  # 8 is never supervised
    assert missing_from(torch.tensor([7]), documents, 12, 1) == [(5, 6)]
    assert missing_from(torch.arange(12), documents, 12, 50) == []


def test_a_run_says_what_it_was_started_with(made: Path, fledge: Any, tmp_path: Path) -> None:
    words = ["train", "--target", made / "target", "--data", made / "chats.jsonl", "--out", tmp_path / "run", *SMALL]
    went = fledge(*words, "--draft-vocab", 12)
    assert went.code == 0, went.err
    summary = summary_of(tmp_path / "run")
    assert summary["command"] == ["fledge", *map(str, words), "--draft-vocab", "12"]
    assert summary["versions"]["fledge"] == __version__ and summary["versions"]["torch"] == torch.__version__
    assert summary["environment"]["dtype"] == "float32" and summary["ranks"] == 1
    assert (summary["target"], summary["method"]) == (str(made / "target"), "eagle3")
    data, vocabulary = summary["data"], summary["vocabulary"]
    assert data["sources"] == [str(made / "chats.jsonl")] and f"{data['documents']:,} documents" in went.err
    assert f"{data['tokens']:,} tokens, {data['supervised'] / data['tokens']:.0%} supervised" in went.err
    assert (vocabulary["size"], vocabulary["target_size"]) == (12, 400)
    counts, covered = [m["count"] for m in vocabulary["missing"]], vocabulary["coverage"]
    assert f"covers {covered:.2%} of the assistant's tokens" in went.err
    assert len(counts) < 50 and sum(counts) == pytest.approx((1 - covered) * data["supervised"])
    assert counts == sorted(counts, reverse=True)
    known = set(load_draft(tmp_path / "run" / "draft").target_ids().tolist())
    tokenizer = tiny_tokenizer()
    for m in vocabulary["missing"]:
        assert m["token"] not in known and m["text"] == tokenizer.decode([m["token"]])


def test_a_resumed_run_keeps_its_summary_or_gets_one(made: Path, fledge: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", "--target", made / "target", "--data", made / "chats.jsonl", "--out", run, *SMALL]
    assert fledge(*words, "--save-every", 1).code == 0
    before = (run / "summary.json").read_bytes()
    assert fledge("train", "--resume", run).code == 0
    assert (run / "summary.json").read_bytes() == before
    (run / "summary.json").unlink()  # as if the run was killed as it started
    assert fledge("train", "--resume", run).code == 0
    assert set(json.loads((run / "summary.json").read_text())) == set(json.loads(before))
    assert [m["step"] for m in metrics_of(run)] == [1, 2]


def test_stored_features_and_an_existing_draft(made: Path, fledge: Any, tmp_path: Path) -> None:
    """The documents of stored features are counted; with --init-from, the vocabulary is that of the draft."""
    target, words = ["--target", made / "target"], "--max-length 64 --draft-vocab 12 --steps 1 --depth 2 --device cpu"
    first = ["train", *target, "--data", made / "chats.jsonl", "--out", tmp_path / "a", *words.split()]
    assert fledge(*first, "--eval-tokens", 1).code == 0
    features = ["features", *target, "--data", made / "chats.jsonl", "--out", tmp_path / "f", "--max-length", 64]
    went = fledge(*features, "--device", "cpu")
    assert went.code == 0, went.err
    second = ["train", "--features", tmp_path / "f", "--out", tmp_path / "b", "--init-from", tmp_path / "a" / "draft"]
    went = fledge(*second, "--steps", 1, "--device", "cpu", "--eval-tokens", 1)
    assert went.code == 0, went.err
    summary = summary_of(tmp_path / "b")
    documents = FeatureCache.open(tmp_path / "f").documents
    counts = Counter(t for d in documents for t in d.tokens[d.spans >= 0].tolist())
    known = set(load_draft(tmp_path / "a" / "draft").target_ids().tolist())
    lacking = sorted(((-n, t) for t, n in counts.items() if t not in known))[:50]
    assert [(m["token"], m["count"]) for m in summary["vocabulary"]["missing"]] == [(t, -n) for n, t in lacking]
    assert summary["data"]["sources"] == [str(made / "chats.jsonl")]
    assert summary["data"]["supervised"] == counts.total() and summary["vocabulary"]["size"] == 12
