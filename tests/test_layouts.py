"""How train, regenerate and eval handle rows of every layout."""

from __future__ import annotations

import json

import pytest

from fledge.data.read import read_records
from fledge.data.template import ChatTemplate
from fledge.data.tokenize import make_documents
from fledge.measure.prompts import read_prompts
from fledge.targets.loading import load_target
from support.chats import tiny_chats
from support.files import write_rows
from support.targets import tiny_target_directory

ASKED = {"role": "user", "content": "the young bird"}
TOLD = {"role": "assistant", "content": "tries its wings"}
ROWS = {
    "turns": {"turns": ["the young bird", "tries again"]},
    "messages": {"messages": [ASKED, TOLD, ASKED]},
    "unanswered": {"messages": [ASKED]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "the young bird"}]}, TOLD]},
    "opened": {"messages": [TOLD, ASKED, TOLD]},
    "conversations": {"conversations": [{"from": "human", "value": "it can"}, {"from": "gpt", "value": "fly"}]},
    "prompt": {"prompt": "the young bird tries"},
    "completion": {"prompt": "the young bird", "completion": " tries its wings"},
    "chat prompt": {"prompt": [ASKED, TOLD, ASKED]},
    "chat completion": {"prompt": [ASKED, TOLD, ASKED], "completion": [TOLD]},
    "instruction": {"instruction": "the young bird", "input": "tries", "output": "again"},
    "text": {"text": "the young bird tries its wings, falls, and tries again"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with a target and a file with a row of every layout."""
    root = tmp_path_factory.mktemp("layouts")
    tiny_target_directory(root)
    write_rows(root / "rows.jsonl", ROWS.values())
    return root


@pytest.fixture(scope="module")
def chats(made):
    target = load_target(made / "target")
    return ChatTemplate(target.tokenizer, target.stop_ids)


def test_regenerate_answers_every_layout_in_rows_that_train_reads(made, chats, fledge, tmp_path):
    words = ["regenerate", "--target", made / "target", "--data", made / "rows.jsonl", "--max-new-tokens", 8]
    went = fledge(*words, "--prompt-tokens", 5, "--out", tmp_path / "own.jsonl")
    assert went.code == 0, went.err
    whole = (tmp_path / "own.jsonl").read_text()
    rows = dict(zip(ROWS, map(json.loads, whole.splitlines()), strict=True))
    u, a = "user", "assistant"
    for kind, roles in {
        "turns": [u, a, u, a], "messages": [u, a], "unanswered": [u, a], "parts": [u, a], "opened": [a, u, a],
        "conversations": [u, a], "instruction": [u, a],
    }.items():  # fmt: skip
        assert [m["role"] for m in rows[kind]["messages"]] == roles, kind
    assert rows["turns"]["messages"][2]["content"] == "tries again"
    assert rows["parts"]["messages"] == rows["unanswered"]["messages"] == rows["messages"]["messages"]
    assert rows["opened"]["messages"][0] == TOLD != rows["opened"]["messages"][2]
    for kind in ("prompt", "completion"):
        assert rows[kind]["prompt"] == ROWS[kind]["prompt"] and rows[kind]["completion"]
    for kind in ("chat prompt", "chat completion"):
        assert rows[kind]["prompt"] == [ASKED, TOLD, ASKED] and [m["role"] for m in rows[kind]["completion"]] == [a]
    assert rows["chat prompt"]["completion"] == rows["chat completion"]["completion"]
    (tmp_path / "own.jsonl").write_text(whole[: len(whole) // 2])
    assert fledge(*words, "--prompt-tokens", 5, "--out", tmp_path / "own.jsonl").code == 0
    assert (tmp_path / "own.jsonl").read_text() == whole
    _, report = make_documents(read_records([str(tmp_path / "own.jsonl")]), chats, 512)
    assert (report.documents, report.refused) == (len(ROWS), 0)


def test_eval_reads_what_regenerate_reads(made, chats):
    prompts = dict(zip(ROWS, read_prompts(made / "rows.jsonl"), strict=True))
    assert prompts["turns"].turns == ("the young bird", "tries again")
    for kind in ("messages", "unanswered", "parts", "instruction", "conversations"):
        assert [m["role"] for m in prompts[kind].messages] == ["user"], kind
    assert prompts["opened"].messages == [TOLD, ASKED]
    for kind in ("chat prompt", "chat completion"):
        assert prompts[kind].messages == [ASKED, TOLD, ASKED]
    assert prompts["prompt"].text == "the young bird tries" and prompts["completion"].text == "the young bird"
    text = ROWS["text"]["text"]
    assert prompts["text"].text == text[: len(text) // 2].rpartition(" ")[0], "whole words"
    assert [p.where.split(", ")[-1] for p in prompts.values()] == [f"line {i + 1}" for i in range(len(ROWS))]


def test_train_and_eval_accept_every_layout(made, fledge, tmp_path, monkeypatch):
    """With --skip-bad, train leaves out rows without answers and rows that are not text; prompts come from a hub id."""
    import datasets

    hub = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **k: hub.append((name, k)) or list(ROWS.values()))
    tiny_chats(tmp_path / "chats.jsonl", 20)
    bad = [{"messages": [{**ASKED, "content": 5}, TOLD]}, {"text": "a \ud83d"}]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad) + '{"text": "the bird can fly"}')
    shape = "--max-length 64 --row-length 128 --steps 2 --depth 3 --device cpu --draft-vocab 200".split()
    words = [
        "train", "--target", made / "target", "--data", tmp_path / "chats.jsonl", "--data", made / "rows.jsonl",
        "--data", tmp_path / "bad.jsonl", "--eval-prompts", "owner/name@main:test", "--eval-tokens", 4,
        "--out", tmp_path / "run", *shape,
    ]  # fmt: skip
    refused = fledge(*words)
    assert refused.code == 2 and "bad.jsonl, line 1, message 1: its content is 5" in refused.err, refused.err
    went = fledge(*words, "--skip-bad")
    assert went.code == 0, went.err
    said = " ".join(went.err.split())
    # refused are two rows of bad.jsonl, and four of ROWS: turns, unanswered, prompt and chat prompt
    assert "35 records" in said and "6 refused (--skip-bad), the first because" in said, said
    assert hub == [("owner/name", {"split": "test", "revision": "main", "trust_remote_code": False})]
    eval_words = ["eval", "--target", made / "target", "--draft", tmp_path / "run" / "draft", "--max-new-tokens", 8]
    record = json.loads(fledge(*eval_words, "--prompts", "owner/name@0.5", "--json").out)
    assert record["identical"] == record["prompts"] >= 6


def test_a_missing_prompt_file_is_refused_before_the_target_is_loaded(fledge, tmp_path):
    words = ["train", "--target", tmp_path / "none", "--data", "x.jsonl", "--out", tmp_path / "run", "--eval-prompts"]
    for prompts in ("nowhere.jsonl", "nowhere*.jsonl"):
        went = fledge(*words, tmp_path / prompts)
        assert went.code == 2 and f"--eval-prompts {tmp_path / prompts} does not exist" in went.err, went.err
