"""`fledge regenerate` with a target of its own, where some records cannot be answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fledge.files import TEMPORARY
from support.commands import Ran
from support.files import rows_of
from support.targets import tiny_target_directory


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
