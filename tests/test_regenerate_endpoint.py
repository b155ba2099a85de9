"""`fledge regenerate --endpoint` against a server that answers, fails, and outlives the jobs that use it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fledge.data import template as template_module
from fledge.data.template import ChatTemplate
from fledge.io.http import Http
from support.chats import tiny_chats
from support.commands import TESTS, Ran
from support.files import rows_of, write_rows
from support.openai_server import FakeServer
from support.targets import CHATML, tiny_target, tiny_target_directory, tiny_tokenizer

ASKED = {"role": "user", "content": "the young bird"}
TOLD = {"role": "assistant", "content": "tries its wings"}
REASONS = CHATML.replace("+ m['content']", "+ m.get('reasoning_content', '') + m['content']")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, and chats of two turns."""
    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    tiny_chats(root / "chats.jsonl", 40)
    return root


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fledge.io.http.FIRST_DELAY", 0.001)


Regenerate = Callable[..., Ran]


@pytest.fixture
def regenerate(fledge: Callable[..., Ran], made: Path, tmp_path: Path) -> Regenerate:
    def run(server: FakeServer, *words: Any, data: Path = made / "chats.jsonl", out: str = "own.jsonl") -> Ran:
        return fledge("regenerate", "--endpoint", server.url, "--data", data, "--out", tmp_path / out, *words)

    return run


def test_answers_come_in_the_order_of_the_data_and_follow_each_other(regenerate, made, tmp_path):
    with FakeServer(latency=0.005).started() as server:
        went = regenerate(server, "--concurrency", 8)
        assert went.code == 0 and f"wrote 40 records to {tmp_path / 'own.jsonl'}" in went.err.replace("\n", " ")
        assert 1 < server.most_in_flight <= 8 and len(server.asked) == 80
        rows, data = rows_of(tmp_path / "own.jsonl"), rows_of(made / "chats.jsonl")
        for i, (row, given) in enumerate(zip(rows, data, strict=True), 1):
            a, b, c, d = row["messages"]
            assert row["source"].endswith(f"chats.jsonl, line {i}") and list(row)[:2] == ["source", "asked"]
            assert [a, c] == [given["messages"][0], given["messages"][2]]
            assert b["content"] == server.answer_to([a], 512) and d["content"] == server.answer_to([a, b, c], 512)
        again = regenerate(server, "--concurrency", 3)
        assert again.code == 0 and "is complete: 40 records" in again.err and len(server.asked) == 80


def test_the_requests_are_always_in_flight(regenerate, tmp_path):
    """While a conversation waits for its next turn, others are asked: the server answers no request before it has
    eight, except at the end of the data."""
    data = write_rows(tmp_path / "d.jsonl", [{"turns": ["the bird"] * (1 + 2 * (i % 2))} for i in range(40)])
    with FakeServer().started() as server:
        eight = threading.Barrier(8, timeout=20)
        server.on_request = lambda n: eight.wait() if n <= 56 else None
        assert regenerate(server, "--concurrency", 8, data=data).code == 0
        assert len(server.asked) == 80 and server.most_in_flight == 8 and not eight.broken


def test_failures_are_repeated_and_reported(regenerate, tmp_path):
    failures = [429, None, 500, "drop", "malformed", None, 503, 429]
    with FakeServer(failures=failures).started() as server:
        went = regenerate(server, "--concurrency", 2)
        said = went.err.replace("\n", " ")
        assert (
            went.code == 0 and "6 requests were repeated: status 429 (2)" in said and "a dropped connection (1)" in said
        )
        assert len(rows_of(tmp_path / "own.jsonl")) == 40 and len(server.asked) == 86


def test_a_server_that_fails_for_good_leaves_what_was_answered(regenerate, tmp_path, monkeypatch):
    monkeypatch.setattr(Http.__init__, "__kwdefaults__", Http.__init__.__kwdefaults__ | {"retries": 1})
    with FakeServer(failures=[None] * 20 + [500] * 200).started() as server:
        went = regenerate(server, "--concurrency", 1)
        said = went.err.replace("\n", " ")
        assert went.code == 2 and "2 attempts" in said and "run the same command again to continue" in said
        assert len(rows_of(tmp_path / "own.jsonl")) == 10
        server.failures.clear()
        went = regenerate(server, "--concurrency", 4)
        assert went.code == 0 and "after 10 of 40 records" in went.err and len(rows_of(tmp_path / "own.jsonl")) == 40
    went = regenerate(server, out="other.jsonl")
    assert went.code == 2 and "no server answers at" in went.err and not (tmp_path / "other.jsonl").exists()


def test_a_refused_prompt_ends_the_job_or_is_skipped(regenerate, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", [{"messages": [{**ASKED, "content": c}]} for c in ("a", "ENDLESS", "b")])
    with data.open("a") as f:
        f.write(json.dumps({"messages": [{**ASKED, "content": 5}]}) + "\n")
    with FakeServer(refuse="ENDLESS").started() as server:
        went = regenerate(server, data=data)
        assert went.code == 2 and "line 4, message 1: its content is 5" in went.err
        write_rows(data, rows_of(data)[:3])
        went = regenerate(server, "--concurrency", 1, data=data)
        said = went.err.replace("\n", " ")
        assert went.code == 2 and "line 2: the server answers with status 400: the prompt is longer" in said, said
        assert "skip such records by --skip-bad" in said and len(rows_of(tmp_path / "own.jsonl")) == 1
        went = regenerate(server, "--skip-bad", data=data)
        said = went.err.replace("\n", " ")
        assert (
            went.code == 0 and "1 records were refused (--skip-bad), the first because:" in said and "wrote 2" in said
        )
        assert [r["messages"][0]["content"] for r in rows_of(tmp_path / "own.jsonl")] == ["a", "b"]
        server.refuse = "content"
        went = regenerate(server, "--skip-bad", data=data, out="none.jsonl")
        assert went.code == 2 and "every record was refused, the first because" in went.err


def test_every_layout_is_answered(regenerate, made, tmp_path):
    rows = [
        {"turns": ["the bird", "again"]},
        {"messages": [TOLD, ASKED]},
        {"prompt": "the young bird", "completion": " tries"},
        {"prompt": [ASKED, TOLD, ASKED], "completion": [TOLD]},
        {"text": "the young bird tries its wings, falls, and tries again"},
    ]
    data = write_rows(tmp_path / "d.jsonl", rows)
    with FakeServer(tokenizer=tiny_tokenizer()).started() as server:
        went = regenerate(server, data=data)
        assert went.code == 2 and "line 5: of a plain text" in went.err and "give --target" in went.err
        words = ["--target", made / "target", "--prompt-tokens", 5, "--max-new-tokens", 40]
        went = regenerate(server, *words, data=data, out="two.jsonl")
        assert went.code == 0, went.err
        turns, opened, text, chat, plain = rows_of(tmp_path / "two.jsonl")
        assert [m["role"] for m in turns["messages"]] == ["user", "assistant"] * 2
        assert opened["messages"][:2] == [TOLD, ASKED] and opened["messages"][2]["content"]
        ids = tiny_tokenizer()("the young bird")["input_ids"]
        assert text["prompt"] == "the young bird" and text["completion"] == server.answer_to(ids, 40)
        assert chat["prompt"] == [ASKED, TOLD, ASKED] and [m["role"] for m in chat["completion"]] == ["assistant"]
        first = tiny_tokenizer()(rows[4]["text"])["input_ids"][:5]
        assert plain["text"] == tiny_tokenizer().decode(first) + server.answer_to(first, 40)


def test_a_template_that_is_not_the_targets_is_noticed(regenerate, made, tmp_path):
    other = tiny_tokenizer(CHATML.replace("assistant\n' }}{% endif", "assistant\nit can fly' }}{% endif"))
    with FakeServer(tokenizer=other).started() as server:
        went = regenerate(server, "--target", made / "target")
        said = went.err.replace("\n", " ")
        assert went.code == 2 and "another template or thinking mode" in said and "line" in said, said
        assert not (tmp_path / "own.jsonl").exists() or not rows_of(tmp_path / "own.jsonl")
        assert regenerate(server, out="unchecked.jsonl").code == 0
    with FakeServer(tokenizer=tiny_tokenizer()).started() as server:
        assert regenerate(server, "--target", made / "target", out="right.jsonl").code == 0


def test_a_prompt_of_as_many_other_tokens_is_noticed(regenerate, tmp_path):
    """vLLM returns the tokens of the prompt; of other servers, their number is compared."""
    said, other = (
        tiny_tokenizer(CHATML.replace("{% if add", f"{{{{ '{word}' }}}}{{% if add", 1)) for word in ("x", "y")
    )
    target = tmp_path / "target"
    tiny_target().model.save_pretrained(target)
    said.save_pretrained(target)
    with FakeServer(tokenizer=other).started() as server:
        went = regenerate(server, "--target", target)
        text = went.err.replace("\n", " ")
        assert went.code == 2 and "on the server" in text and "adds a system prompt" in text, text
    with FakeServer(tokenizer=said).started() as server:
        assert regenerate(server, "--target", target, out="right.jsonl").code == 0
        assert all(body["return_token_ids"] for body in server.asked)
    with FakeServer(engine="other", tokenizer=other).started() as server:
        assert regenerate(server, "--target", target, out="counted.jsonl").code == 0
        assert not any("return_token_ids" in body for body in server.asked)


def test_template_arguments_reach_the_server_and_the_check(regenerate, made, tmp_path):
    thinks = CHATML.replace("{% if add", "{% if think %}it can fly{% endif %}{% if add")
    target = tmp_path / "target"
    tokenizer = tiny_tokenizer(thinks)
    tiny_target().model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    with FakeServer(tokenizer=tokenizer, template_kwargs={"think": True}).started() as server:
        assert "thinking mode" in regenerate(server, "--target", target).err.replace("\n", " ")
        words = ["--target", target, "--template-kwargs", '{"think": false}']
        assert regenerate(server, *words, out="right.jsonl").code == 0
        assert server.asked[-1]["chat_template_kwargs"] == {"think": False}
        row = {"messages": [ASKED, {"role": "assistant", "content": "x"}], "chat_template_kwargs": {"think": True}}
        own = write_rows(tmp_path / "d.jsonl", [row])
        assert regenerate(server, *words, data=own, out="rows.jsonl").code == 0
        assert server.asked[-1]["chat_template_kwargs"] == {"think": True}
        assert rows_of(tmp_path / "rows.jsonl")[0]["chat_template_kwargs"] == {"think": True}


def test_reasoning_is_kept_in_the_field_that_the_template_renders(regenerate, made, tmp_path):
    assert ChatTemplate(tiny_tokenizer(REASONS), [1]).fields.reasoning == "reasoning_content"
    assert ChatTemplate(tiny_tokenizer(), [1]).fields.reasoning is None
    with FakeServer(tokenizer=tiny_tokenizer(), reasoning="it falls").started() as server:
        went = regenerate(server, "--target", made / "target")
        assert went.code == 2 and "start the server without its reasoning parser" in went.err.replace("\n", " ")
        assert regenerate(server, "--limit", 2, out="kept.jsonl").code == 0
        for row in rows_of(tmp_path / "kept.jsonl"):
            assert [m.get("reasoning_content") for m in row["messages"]] == [None, "it falls"] * 2
        assert server.asked[-1]["messages"][1]["reasoning"] == "it falls"


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


def one_by_one(text: str) -> list[int]:
    """A text as one token for each byte, as a target may generate it and its tokenizer would not."""
    pieces = tiny_tokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return tiny_tokenizer().convert_tokens_to_ids([byte for piece, _ in pieces for byte in piece])


def with_special(text: str) -> list[int]:
    """A special token before the text, which the server's text lacks."""
    return [*ids_of("<|im_start|>"), *ids_of(text)]


def said(ran: Ran) -> str:
    return ran.err.replace("\n", " ")


def saved(target: Path, template: str) -> Path:
    """A target with this chat template."""
    tiny_target().model.save_pretrained(target)
    tiny_tokenizer(template).save_pretrained(target)
    return target


def test_answers_are_the_tokens_that_the_template_gives(regenerate, made):
    with FakeServer(tokenizer=tiny_tokenizer()).started() as server:
        went = regenerate(server, "--target", made / "target")
        assert went.code == 0 and (
            "80 answers compared with what the target's template gives: 80 are the same tokens, 0 the same text in "
            "other tokens, 0 another text"
        ) in said(went)
        assert "the first" not in said(went) and "of this run" not in said(went)
        assert "compared" not in said(regenerate(server, out="unchecked.jsonl"))


def test_answers_of_the_same_text_in_other_tokens_are_kept_and_counted(regenerate, made, tmp_path):
    with FakeServer(tokenizer=tiny_tokenizer(), generates=one_by_one).started() as server:
        went = regenerate(server, "--target", made / "target", "--concurrency", 1)
        assert went.code == 0 and "0 are the same tokens, 80 the same text in other tokens, 0 another" in said(went)
        first = server.answer_to(server.asked[0]["messages"], 512)
        shown = [
            " ".join(repr(tiny_tokenizer().decode([token])) for token in ids[:4])
            for ids in (one_by_one(first), ids_of(first))
        ]
        place = f"line 1, answer 1, token 1: {shown[0]} generated, {shown[1]} by the target's template"
        assert f"the first in other tokens: {made / 'chats.jsonl'}, {place}" in said(went)
        assert len(rows_of(tmp_path / "own.jsonl")) == 40


def test_a_server_that_rewrites_answers_ends_the_job(regenerate, made, tmp_path):
    with FakeServer(tokenizer=tiny_tokenizer(), generates=with_special, latency=0.002).started() as server:
        went = regenerate(server, "--target", made / "target", "--concurrency", 2)
        assert went.code == 2 and "16 of 16 answers are not what the server generated, the first: " in said(went)
        assert "answer 1, token 1: '<|im_start|>' " in said(went) and "strips special tokens" in said(went)
        assert "start the server without parsers" in said(went) and "remove its" not in said(went)
        assert len(server.asked) < 60 and not rows_of(tmp_path / "own.jsonl"), "nothing of it is written"
        few = regenerate(server, "--target", made / "target", "--limit", 2, out="few.jsonl")
        assert few.code == 2 and "4 of 4 answers are not what" in said(few) and not rows_of(tmp_path / "few.jsonl")
        assert regenerate(server, out="unchecked.jsonl").code == 0
        server.generates = None
        went = regenerate(server, "--target", made / "target")
        assert went.code == 0 and "80 are the same tokens" in said(went)


@pytest.mark.parametrize("number", [1, 61])
def test_a_rewritten_answer_among_others_is_counted(number, regenerate, made, tmp_path):
    """If it is the first one, its row waits for the next answers."""
    with FakeServer(tokenizer=tiny_tokenizer()).started() as server:
        server.generates = lambda text: with_special(text) if len(server.asked) == number else ids_of(text)
        went = regenerate(server, "--target", made / "target", "--concurrency", 1)
        assert went.code == 0 and "79 are the same tokens, 0 the same text in other tokens, 1 another" in said(went)
        place = f"line {(number + 1) // 2}, answer 1, token 1: '<|im_start|>' "
        assert f"the first with another text: {made / 'chats.jsonl'}, {place}" in said(went)
        assert len(rows_of(tmp_path / "own.jsonl")) == 40


def test_more_than_half_of_the_answers_rewritten_end_the_job_later(regenerate, made, tmp_path):
    """The rows before stay, and the message says so."""
    with FakeServer(tokenizer=tiny_tokenizer()).started() as server:
        server.generates = lambda text: with_special(text) if len(server.asked) > 20 else ids_of(text)
        went = regenerate(server, "--target", made / "target", "--concurrency", 1)
        assert went.code == 2 and "21 of 41 answers are not what the server generated" in said(went)
        written = len(rows_of(tmp_path / "own.jsonl"))
        assert written == 20 and f"remove its {written} records first" in said(went)


def test_the_answers_of_a_conversation_are_compared_one_by_one(regenerate, made):
    """Only the second answers are rewritten, half of all."""
    with FakeServer(tokenizer=tiny_tokenizer()).started() as server:
        server.generates = lambda text: (with_special if len(server.asked[-1]["messages"]) > 1 else ids_of)(text)
        went = regenerate(server, "--target", made / "target", "--concurrency", 1)
        assert went.code == 0 and "40 are the same tokens, 0 the same text in other tokens, 40 another" in said(went)
        assert "line 1, answer 2, token 1: '<|im_start|>' " in said(went)


@pytest.mark.parametrize("engine", ["sglang", "other"])
def test_without_token_ids_answers_are_compared_by_their_number(engine, regenerate, made):
    with FakeServer(engine=engine, tokenizer=tiny_tokenizer()).started() as server:
        for more in ([], ["--max-new-tokens", 4]):
            went = regenerate(server, "--target", made / "target", *more, out=f"{len(more)}.jsonl")
            assert went.code == 0 and "returns no token ids: 80 have that of the target's template, 0" in said(went)
        server.generates = one_by_one
        went = regenerate(server, "--target", made / "target", out="others.jsonl")
        assert went.code == 0 and "0 have that of the target's template, 80 another one" in said(went)
        assert "the first of another number: " in said(went) and "tokens on the server, " in said(went)


def test_without_token_ids_and_their_number_the_job_says_that_answers_are_not_compared(regenerate, made):
    with FakeServer(engine="other", tokenizer=tiny_tokenizer(), counts=False).started() as server:
        went = regenerate(server, "--target", made / "target")
        assert went.code == 0 and said(went).count("the answers of this server cannot be compared") == 1
        assert "80 answers not compared with what the target's template gives" in said(went)


def test_cut_answers_have_no_stop_token(regenerate, made):
    with FakeServer(tokenizer=tiny_tokenizer()).started() as server:
        went = regenerate(server, "--target", made / "target", "--max-new-tokens", 4)
        assert went.code == 0 and "80 answers reached --max-new-tokens 4" in said(went)
        assert "80 are the same tokens" in said(went)
        server.generates = lambda text: one_by_one("\u00e9\u00e9\u00e9")  # of two bytes each: the second one is cut
        went = regenerate(server, "--target", made / "target", "--max-new-tokens", 3, out="within.jsonl")
        assert went.code == 0 and "80 the same text in other tokens, 0 another text" in said(went)


def test_reasoning_is_compared_with_the_answer(regenerate, tmp_path):
    target = saved(tmp_path / "target", REASONS)
    with FakeServer(tokenizer=tiny_tokenizer(REASONS), reasoning="it falls again").started() as server:
        went = regenerate(server, "--target", target)
        assert went.code == 0 and "80 are the same tokens" in said(went)
        assert rows_of(tmp_path / "own.jsonl")[0]["messages"][1]["reasoning_content"] == "it falls again"
        server.generates = lambda text: ids_of(text.replace("again", "again\n", 1))  # the parser trimmed the reasoning
        went = regenerate(server, "--target", target, out="trimmed.jsonl")
        assert went.code == 2 and "are not what the server generated" in said(went)


def test_plain_texts_are_compared_as_training_tokenizes_them(regenerate, made, tmp_path):
    rows = [{"prompt": "the young bird", "completion": "-"}, {"text": "the young bird tries its wings, and falls"}]
    data = write_rows(tmp_path / "d.jsonl", rows * 10)
    words = "--target", made / "target", "--prompt-tokens", 5, "--concurrency", 1
    with FakeServer(tokenizer=tiny_tokenizer()).started() as server:
        went = regenerate(server, *words, data=data)
        assert went.code == 0 and "20 answers compared" in said(went) and "0 another text" in said(went)
        server.generates = with_special
        went = regenerate(server, *words, data=data, out="stripped.jsonl")
        assert went.code == 2 and "16 of 16 answers are not" in said(went)
        assert "line 1, answer 1, token 1: '<|im_start|>' " in said(went)
    with FakeServer(engine="other", tokenizer=tiny_tokenizer()).started() as server:
        went = regenerate(server, *words, data=data, out="counted.jsonl")
        assert went.code == 0 and "20 answers compared by their number of tokens" in said(went)


def test_a_continued_job_counts_its_own_answers(regenerate, made, tmp_path, monkeypatch):
    monkeypatch.setattr(Http.__init__, "__kwdefaults__", Http.__init__.__kwdefaults__ | {"retries": 0})
    with FakeServer(tokenizer=tiny_tokenizer(), failures=[None] * 20 + [500]).started() as server:
        went = regenerate(server, "--target", made / "target", "--concurrency", 1)
        assert went.code == 2 and len(rows_of(tmp_path / "own.jsonl")) == 10, "what was answered is written"
        went = regenerate(server, "--target", made / "target")
        assert went.code == 0 and "60 answers of this run compared with what the target's template" in said(went)
        assert len(rows_of(tmp_path / "own.jsonl")) == 40


def test_a_template_that_changes_or_refuses_answers_is_named(regenerate, tmp_path):
    spaced = CHATML.replace("+ m['content']", "+ (' ' if m['role'] == 'assistant' else '') + m['content']")
    refuses = "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('no answers') }}{% endif %}" + CHATML
    other = CHATML.replace("+ m['role']", "+ m['role'].replace('assistant', 'tool')")
    found = {spaced: "token 1: ", refuses: "the chat template refuses", other: "does not start with the template's"}
    for i, (template, reason) in enumerate(found.items()):
        target = saved(tmp_path / str(i), template)
        with FakeServer(tokenizer=tiny_tokenizer(template)).started() as server:
            went = regenerate(server, "--target", target, "--limit", 5, out=f"{i}.jsonl")
            assert went.code == 2 and "are not what the server generated" in said(went) and reason in said(went)


def test_a_template_without_stop_tokens_is_compared_up_to_the_answers_end(regenerate, tmp_path):
    template = CHATML.replace("<|im_end|>", "")
    target = saved(tmp_path / "target", template)
    with FakeServer(tokenizer=tiny_tokenizer(template)).started() as server:
        went = regenerate(server, "--target", target)
        assert went.code == 0 and "80 are the same tokens" in said(went)
        server.generates = one_by_one
        went = regenerate(server, "--target", target, out="others.jsonl")
        assert went.code == 0 and "80 the same text in other tokens, 0 another text" in said(went)
    with FakeServer(engine="other", tokenizer=tiny_tokenizer(template)).started() as server:
        went = regenerate(server, "--target", target, out="counted.jsonl")
        assert went.code == 0 and "80 answers not compared" in said(went)


def test_cut_answers_are_counted_and_tool_calls_are_refused(regenerate, tmp_path):
    with FakeServer(words=9).started() as server:
        went = regenerate(server, "--max-new-tokens", 4, "--limit", 3)
        assert went.code == 0 and "6 answers reached --max-new-tokens 4; they are kept" in went.err
    with FakeServer(tool_calls=True).started() as server:
        went = regenerate(server, out="tools.jsonl")
        assert went.code == 2 and "start the server without its tool call parser" in went.err.replace("\n", " ")


def test_a_seed_makes_requests_repeatable_and_different(regenerate, made, tmp_path):
    with FakeServer().started() as server:
        assert regenerate(server, "--temperature", 0.7, "--limit", 3).code == 0
        assert all("seed" not in body and body["temperature"] == 0.7 for body in server.asked)
        server.asked.clear()
        words = ["--temperature", 1, "--seed", 7, "--limit", 3]
        assert regenerate(server, *words, out="a.jsonl").code == regenerate(server, *words, out="b.jsonl").code == 0
        seeds = [body["seed"] for body in server.asked]
        assert len(set(seeds)) == 6 and sorted(seeds[:6]) == sorted(seeds[6:]) and max(seeds) < 2**63


def test_another_job_does_not_continue_the_file(regenerate, tmp_path):
    with FakeServer().started() as server:
        assert regenerate(server, "--limit", 3).code == 0
        for more in (["--max-new-tokens", 5], ["--temperature", 1]):
            went = regenerate(server, "--limit", 3, *more)
            assert went.code == 2 and "was not made from this --data with these options" in went.err
        server.context = 64  # so that answers would be shorter
        assert "was not made from this" in regenerate(server, "--limit", 3).err
        server.context = 512
        server.models = ("other",)
        assert "was not made from this" in regenerate(server, "--limit", 3).err
        assert "1 of 2" not in regenerate(server, "--limit", 3, "--model", "bird").err


def test_a_target_without_a_chat_template_is_at_fault_not_the_record(regenerate, made, tmp_path):
    directory = shutil.copytree(made / "target", tmp_path / "base")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if "chat" not in k}))
    with FakeServer().started() as server:
        went = regenerate(server, "--target", directory, "--skip-bad")
        said = " ".join(went.err.split())
        assert went.code == 2 and "has no chat template, and" in said and "the instruction-tuned model" in said, said
        assert not server.asked


@pytest.mark.parametrize("when", ["if true", "if messages|length > 2"])
def test_a_template_that_does_not_end_is_named_after_its_time(when, fledge, regenerate, tmp_path, monkeypatch):
    """A template that ends for no chat, or not for the second chat, ends each command, whatever may be skipped."""
    monkeypatch.setattr(template_module, "RENDER_SECONDS", 0.2)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    target = tiny_target_directory(tmp_path)
    (target / "chat_template.jinja").write_text(CHATML + "{% " + when + " %}" + endless + "{% endif %}")
    chats = [[ASKED, TOLD], [ASKED, TOLD] * 2, [ASKED, TOLD]]
    data = write_rows(tmp_path / "chats.jsonl", [{"messages": messages} for messages in chats])
    words = ["--target", target, "--data", data, "--skip-bad"]
    here = "--max-new-tokens", 3, "--batch", 1, "--device", "cpu"
    began = time.process_time()
    with FakeServer(engine="other", counts=False).started() as server:
        for went in (
            regenerate(server, *words[:2], "--skip-bad", "--concurrency", 1, data=data),
            fledge("regenerate", *words, "--out", tmp_path / "here.jsonl", *here),
            fledge("train", *words, "--out", tmp_path / "run", "--device", "cpu"),
        ):
            said = " ".join(went.err.split())
            assert went.code == 2 and "does not terminate: it was stopped after 0.2 s of CPU time" in said, said
            assert "every record" not in said
    assert time.process_time() - began < 20


def test_deep_json_in_the_output_is_not_continued(regenerate, tmp_path):
    (tmp_path / "own.jsonl").write_text("[" * 200_000 + "\n")
    with FakeServer().started() as server:
        went = regenerate(server)
    assert went.code == 2 and "was not made from this --data" in " ".join(went.err.split())
    assert (tmp_path / "own.jsonl").stat().st_size == 200_001


def test_neither_target_nor_endpoint(fledge, made, tmp_path):
    went = fledge("regenerate", "--data", made / "chats.jsonl", "--out", tmp_path / "o.jsonl")
    assert went.code == 2 and "give --target MODEL, which answers, or --endpoint URL" in went.err


JOBS = """
import os, sys
from fledge.cli import main
from fledge.regenerate import loop  # imported once, for all jobs
sys.argv = ["fledge", "regenerate", *sys.argv[1:]]
for line in sys.stdin:  # each starts the job in a process of its own
    if not (child := os.fork()):
        main()
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@contextmanager
def jobs(*words: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that starts the job whenever it is told."""
    with subprocess.Popen(
        [sys.executable, "-c", JOBS, *map(str, words)], env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def start(process: subprocess.Popen[str]) -> int:
    """Starts a job, and returns its process id."""
    process.stdin.write("go\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def status(process: subprocess.Popen[str]) -> int:
    """The exit status of the job, or the signal that ended it."""
    return int(process.stdout.readline())


def test_ten_kills_lose_and_double_nothing(made, tmp_path):
    """The job is killed after some answers, ten times, and continued; records that occur twice are answered twice."""
    out, data = tmp_path / "own.jsonl", made / "chats.jsonl"
    with FakeServer(latency=0.001).started() as server:
        words = ["--endpoint", server.url, "--data", f"{data}@2", "--out", out, "--concurrency", 5]
        words += ["--temperature", 1, "--seed", 1]
        answered = 0
        with jobs(*words) as job:
            for _ in range(10):
                reached, before = threading.Event(), len(server.asked)
                server.on_request = lambda n, b=before, r=reached: r.set() if n == b + 14 else None
                child = start(job)
                assert reached.wait(60)
                os.kill(child, signal.SIGKILL)
                assert status(job) == signal.SIGKILL
                lines = out.read_bytes().split(b"\n")[:-1]
                assert len(lines) >= answered, "answers that were written stay"
                answered = len(lines)
                assert len({(r["source"], r["asked"]) for r in map(json.loads, lines)}) == answered
            server.on_request = lambda n: None
            with out.open("ab") as f:
                f.write(b'{"source": "')  # as a line that was cut
            start(job)
            assert status(job) == 0
        rows, given = rows_of(out), rows_of(data) * 2
        assert len(rows) == 80 and len({r["asked"] for r in rows}) == 80 and 0 < answered < 80, answered
        assert [r["messages"][0] for r in rows] == [r["messages"][0] for r in given]
        assert all(r["messages"][1]["content"] == server.answer_to(r["messages"][:1], 512) for r in rows)
        assert not [p for p in tmp_path.iterdir() if p != out], "no other files are left"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_with_what_was_answered(number, regenerate, tmp_path):
    before = signal.getsignal(number)
    try:
        with FakeServer(latency=0.002).started() as server:
            server.on_request = lambda n: os.kill(os.getpid(), number) if n == 30 else None
            went = regenerate(server, "--concurrency", 4)
            said = went.err.replace("\n", " ")
            assert (
                went.code == 130 and "stopped; run the same command again to continue" in said and "Trace" not in said
            ), said
            assert 5 < len(rows_of(tmp_path / "own.jsonl")) < 20
            server.on_request = lambda n: None
            assert regenerate(server, "--concurrency", 4).code == 0 and len(rows_of(tmp_path / "own.jsonl")) == 40
    finally:
        signal.signal(number, before)


def test_a_full_disk_ends_the_job_and_the_same_command_continues(regenerate, tmp_path):
    out = tmp_path / "own.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with FakeServer().started() as server:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[0][1]))
        try:
            went = regenerate(server)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
            signal.signal(signal.SIGXFSZ, before[1])
        assert went.code == 2 and f"{out} cannot be written: File too large; free some disk space" in went.err
        assert out.stat().st_size == 4000
        assert regenerate(server).code == 0 and len(rows_of(out)) == 40


def test_the_prompt_of_a_plain_text_keeps_its_special_tokens(regenerate, made, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", [{"text": "<|im_start|>user\nthe bird<|im_end|>\n<|im_start|>assistant"}])
    with FakeServer(tokenizer=tiny_tokenizer()).started() as server:
        went = regenerate(server, "--target", made / "target", "--prompt-tokens", 4, data=data)
        assert went.code == 0 and "1 are the same tokens" in said(went), said(went)
        asked = server.asked[-1]["prompt"]
        assert rows_of(tmp_path / "own.jsonl")[0]["text"].startswith(tiny_tokenizer().decode(asked))
        assert tiny_tokenizer().decode(asked).startswith("<|im_start|>user")
