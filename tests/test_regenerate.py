"""`fledge regenerate` with a target of its own, where some records cannot be answered."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from fledge.data.spans import text_prompt
from fledge.data.template import ChatTemplate
from fledge.io.files import TEMPORARY
from support.commands import Ran
from support.files import rows_of
from support.targets import (
    ASKED,
    CHANNEL,
    CHANNEL_TOKENS,
    CHATML,
    IN_CHANNEL,
    scripted_target_directory,
    tiny_target,
    tiny_target_directory,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_directory(tmp_path_factory.mktemp("models"), max_position_embeddings=64)


def chats(file: Path, *, bad: Any = None) -> Path:
    """Seven conversations, of which the fourth has another first message, if one is given."""
    users = [f"say {i}" for i in range(7)]
    if bad:
        users[3] = bad
    answer = {"role": "assistant", "content": "x"}
    rows = [
        {"messages": [{"role": "user", "content": user}, answer, {"role": "user", "content": "more"}, answer]}
        for user in users
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("batch", [1, 2])
def test_a_record_that_exceeds_the_context(
    batch: int, target: Path, tmp_path: Path, fledge: Callable[..., Ran]
) -> None:
    """Those before it are written, and with --skip-bad all others too, with the answers that they have without it."""
    data, whole = chats(tmp_path / "chats.jsonl"), tmp_path / "whole.jsonl"
    words = [
        "regenerate",
        "--target",
        target,
        "--data",
        data,
        "--max-new-tokens",
        3,
        "--temperature",
        1,
        "--batch",
        batch,
    ]
    assert fledge(*words, "--out", whole).code == 0
    expected = [row["messages"] for row in rows_of(whole)]
    chats(data, bad="word " * 90)
    ran = fledge(*words, "--out", tmp_path / "out.jsonl")
    assert (
        ran.code == 2 and "chats.jsonl, line 4: a prompt of" in ran.err and "skip such records by --skip-bad" in ran.err
    )
    assert [row["messages"] for row in rows_of(tmp_path / "out.jsonl")] == expected[:3]
    for _ in range(2):  # the refused record is tried again
        ran = fledge(*words, "--skip-bad", "--out", tmp_path / "out.jsonl")
        assert ran.code == 0 and "wrote 6 records" in ran.err and "1 records were refused" in ran.err
        assert [row["messages"] for row in rows_of(tmp_path / "out.jsonl")] == expected[:3] + expected[4:]


def test_records_without_a_line_are_answered(target: Path, tmp_path: Path, fledge: Callable[..., Ran]) -> None:
    """Also those before others that have one, as of data that were added in front; the file is in the order of all."""
    first, second = chats(tmp_path / "a.jsonl"), chats(tmp_path / "b.jsonl")
    words = ["regenerate", "--target", target, "--max-new-tokens", 3, "--out", tmp_path / "out.jsonl", "--data"]
    assert fledge(*words, second).code == 0
    assert fledge(*words, first, "--data", second).code == 0
    sources = [row["source"] for row in rows_of(tmp_path / "out.jsonl")]
    assert [Path(source).name for source in sources] == [
        f"{name}.jsonl, line {i}" for name in "ab" for i in range(1, 8)
    ]
    assert "is complete: 14 records" in fledge(*words, first, "--data", second).err


def test_only_a_row_of_its_own_is_cut(target: Path, tmp_path: Path, fledge: Callable[..., Ran]) -> None:
    """An unfinished line is cut if it begins with a whole header, or follows rows of the same job."""
    data, out = chats(tmp_path / "chats.jsonl"), tmp_path / "out.jsonl"
    words = ["regenerate", "--target", target, "--data", data, "--max-new-tokens", 3, "--out", out]
    assert fledge(*words).code == 0
    whole = out.read_text()
    rows = whole.splitlines(keepends=True)
    header = rows[0][: rows[0].index(', "messages"')]
    for foreign in ('{"source": "my notes', "{", header[:-1], header.replace("line 1", "line 9"), f"{rows[0]}mine"):
        out.write_text(foreign)
        ran = fledge(*words)
        said = " ".join(ran.err.split())
        assert ran.code == 2 and "choose another --out. If" in said and "remove its last line" in said, said
        assert out.read_text() == foreign
    for own in (header, rows[0][:-1], f'{rows[0]}{{"sour', f"{rows[1]}{rows[0][:-9]}"):
        out.write_text(own)
        assert fledge(*words).code == 0 and out.read_text() == whole


@pytest.mark.parametrize("name", [".out.jsonl.fledge-sorted", TEMPORARY + sha256(b"out.jsonl").hexdigest()[:16]])
def test_no_link_is_written_through(name: str, target: Path, tmp_path: Path, fledge: Callable[..., Ran]) -> None:
    """The rows are put into the order of the data in a file that nobody else can have made."""
    first, second = chats(tmp_path / "a.jsonl"), chats(tmp_path / "b.jsonl")
    words = ["regenerate", "--target", target, "--max-new-tokens", 3, "--out", tmp_path / "out.jsonl", "--data"]
    assert fledge(*words, second).code == 0
    (tmp_path / "mine").write_text("mine")
    (tmp_path / name).symlink_to(tmp_path / "mine")
    assert fledge(*words, first, "--data", second).code == 0
    assert (tmp_path / "mine").read_text() == "mine" and len(rows_of(tmp_path / "out.jsonl")) == 14


def test_records_that_cannot_be_read(target: Path, tmp_path: Path, fledge: Callable[..., Ran]) -> None:
    data = chats(tmp_path / "chats.jsonl")
    with data.open("a") as file:
        file.write('{"messages": []}\n{"text": " "}\n')
    words = ["regenerate", "--target", target, "--data", data, "--max-new-tokens", 3, "--out", tmp_path / "out.jsonl"]
    assert fledge(*words).code == 2
    ran = fledge(*words, "--skip-bad")
    assert ran.code == 0 and "2 records were refused (--skip-bad), the first because: " in ran.err
    assert len(rows_of(tmp_path / "out.jsonl")) == 7


def test_all_records_are_refused(target: Path, tmp_path: Path, fledge: Callable[..., Ran]) -> None:
    data = tmp_path / "bad.jsonl"
    words = ["regenerate", "--target", target, "--data", data, "--max-new-tokens", 3, "--skip-bad"]
    for row in ({"prompt": "word " * 90, "completion": "x"}, {"text": " "}):
        data.write_text(json.dumps(row) + "\n")
        ran = fledge(*words, "--out", tmp_path / "out.jsonl")
        assert ran.code == 2 and "every record was refused, the first because: " in ran.err


# -- special tokens of answers and prompts ------------------------------------------------------------------------

QUESTIONS = {"turns": ["Which bird?", "And that one?"]}
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m['role'] }}:{{ m['content'] }}<|im_end|>\n{% endfor %}"
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m.reasoning_content %}<t>{{ m.reasoning_content }}</t>"
    "{% endif %}{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMAS = {  # of transformers up to 5.x, and of later versions
    "response_schema": {
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": {"type": "string", "x-regex": r"</t>(.*?)<\|im_end\|>"},
            "reasoning_content": {"type": "string", "x-regex": r"<t>(.*?)</t>"},
        },
    },
    "response_template": {
        "defaults": {"role": "assistant"},
        "start_anchor": "assistant\n",
        "fields": {
            "reasoning_content": {"open": "<t>", "close": "</t>", "content": "text"},
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    },
}


@pytest.fixture
def answers(tmp_path: Path, fledge: Callable[..., Ran]) -> Callable[..., tuple[list[dict[str, Any]], Ran]]:
    """A function that answers rows by a scripted target, and returns the rows written and the command's result."""

    def regenerated(
        template: str, answer: str, special: Any, *rows: dict[str, Any], new: int = 24, **settings: Any
    ) -> Any:  # fmt: skip
        target, data = scripted_target_directory(tmp_path, template, answer, special), tmp_path / "data.jsonl"
        if settings:
            config = target / "tokenizer_config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | settings))
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["--target", target, "--data", data, "--out", tmp_path / "out.jsonl", "--max-new-tokens", new]
        ran = fledge("regenerate", *words, "--prompt-tokens", 8)
        written = rows_of(tmp_path / "out.jsonl") if (tmp_path / "out.jsonl").exists() else []
        return written, ran

    return regenerated


@pytest.mark.parametrize(
    "template, answer, special, content",
    [
        (CHANNEL, IN_CHANNEL, CHANNEL_TOKENS, "A heron."),
        (CHATML, "<call>fly</call><|im_end|>", ("<call>", "</call>"), "<call>fly</call>"),
        (NO_PROMPT, "<|im_start|>assistant:A heron.<|im_end|>", (), "A heron."),
        (THINKS, "A heron.\t<|im_end|>", (), "A heron.\t"),
    ],
    ids=["what the template writes", "special tokens", "no generation prompt", "trimmed"],
)
def test_answers_render_as_they_were_generated(
    template: str, answer: str, special: tuple[str, ...], content: str, answers: Callable[..., Any]
) -> None:
    [row], ran = answers(template, answer, special, QUESTIONS)
    assert ran.code == 0 and [m["content"] for m in row["messages"][1::2]] == [content, content], ran.err
    assert ("2 the same text in other tokens or white space" in ran.err) == (template == THINKS), ran.err


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_response_schema_reads_answers(name: str, answers: Callable[..., Any]) -> None:
    if not hasattr(tiny_target().tokenizer, name):
        pytest.skip(f"this version of transformers has no {name}")
    [row], ran = answers(THINKS, "<t>Grey</t>A heron.<|im_end|>", ("<t>", "</t>"), QUESTIONS, **{name: SCHEMAS[name]})
    answer = {"role": "assistant", "content": "A heron.", "reasoning_content": "Grey"}
    assert ran.code == 0 and row["messages"][1::2] == [answer, answer], (row, ran.err)


def test_a_cut_answer_is_not_completed_by_its_schema(answers: Callable[..., Any]) -> None:
    """The reasoning has no end, and the template would write one, so the answer stays text."""
    [row], ran = answers(
        THINKS, "<t>Grey</t>A heron.<|im_end|>", ("<t>", "</t>"), {"messages": [ASKED]}, new=3, **SCHEMAS
    )  # fmt: skip
    assert ran.code == 0 and row["messages"][1]["content"].startswith("<t>G"), ran.err
    assert "0 another text" in ran.err


def test_answers_that_render_as_other_text(answers: Callable[..., Any]) -> None:
    """They are left out and counted; without any other answer the command fails."""
    _, ran = answers(NO_PROMPT, "<|im_start|>assistant! heron.<|im_end|>", (), QUESTIONS)
    assert ran.code == 2 and "1 of 1 answers are not what the target generated, the first: " in ran.err
    assert "answer 1, token " in ran.err and "--template-kwargs" in ran.err
    rewriting = CHATML.replace("m['content']", "('a' if m['content'] == 'A heron.' and loop.index == 4 else m.content)")
    rows, ran = answers(rewriting, "A heron.<|im_end|>", (), {"messages": [ASKED]}, QUESTIONS)
    assert ran.code == 0 and [row["messages"][1]["content"] for row in rows] == ["A heron."], ran.err
    assert "1 records were left out: " in ran.err and "1 another text" in ran.err, ran.err


def test_prompts_of_plain_text_keep_special_tokens(answers: Callable[..., Any]) -> None:
    chat = "<|im_start|>user\nWhich bird?<|im_end|>\n"
    cut = "fly" + 8 * "\u9dfa"  # the eighth token ends within a character
    completion = {"prompt": chat + "<|im_start|>assistant\n", "completion": "A duck."}
    rows, ran = answers(CHATML, "A heron.<|im_end|>", (), {"text": chat}, {"text": cut}, completion)
    assert ran.code == 0 and rows[0]["text"].startswith("<|im_start|>user\nW"), ran.err
    assert rows[1]["text"].startswith("fly\u9dfa") and "\ufffd" not in rows[1]["text"]
    assert rows[2]["prompt"] == completion["prompt"] and rows[2]["completion"] == "A heron."


def test_a_conversation_ends_at_the_targets_own_call(answers: Callable[..., Any]) -> None:
    """Nobody has the result of the call, so the next question of the data is not asked."""
    if not hasattr(tiny_target().tokenizer, "response_template"):
        pytest.skip("this version of transformers has no response_template")
    call = '{"name": "fly"}'
    calls = "{% for call in m.tool_calls %}<c>{{ call | tojson }}</c>{% endfor %}{{ m['content'] | trim }}"
    fields = {"tool_calls": {"open": "<c>", "close": "</c>", "content": "json", "repeats": True}}
    [row], ran = answers(
        THINKS.replace("{{ m['content'] | trim }}", calls), f"<c>{call}</c><|im_end|>", ("<c>", call, "</c>"),
        QUESTIONS,
        response_template={"defaults": {"role": "assistant"}, "start_anchor": "assistant\n", "fields": fields},
    )  # fmt: skip
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"], ran.err
    assert row["messages"][1]["tool_calls"] == [{"name": "fly"}]
    assert "1 conversations end before the last question of the data" in ran.err


def test_the_text_of_a_prompt_has_no_token_that_the_tokenizer_adds_and_no_part_of_a_character() -> None:
    tokenizer = copy.deepcopy(tiny_target().tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 0)]
    )
    template = ChatTemplate(tokenizer, [1])
    for start in ("", "<|im_start|>"):
        ids, text = text_prompt(template, start + "\u9dfa" * 3, 6)
        assert text == start + "\u9dfa" and ids == tokenizer(text)["input_ids"] and ids[0] == 0
