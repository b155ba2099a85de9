"""Named sets of prompts, read from rows in the columns of the hub's data sets."""

from __future__ import annotations

from typing import Any

import pytest

from fledge.data.read import SourceReader
from fledge.data.record import Record
from fledge.measure.prompts import DEFAULT_PROMPTS, PROMPT_SETS, prompt_set_name, read_prompts
from support.files import write_rows

# (arguments of load_dataset, a row in the layout of the hub, what is asked)
ROWS: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {
    "mt_bench": (
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
        {"category": "writing", "prompt": ["Compose.", "Rewrite."], "reference": [], "prompt_id": 81},
        ("Compose.", "Rewrite."),
    ),
    "gsm8k": (
        ("openai/gsm8k", "main", "test"), {"question": "How many?", "answer": "#### 3"}, ("How many?",)
    ),
    "humaneval": (
        ("openai/openai_humaneval", None, "test"),
        {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "s", "test": "t", "entry_point": "f"},
        ("def f():",),
    ),
    "math500": (
        ("HuggingFaceH4/MATH-500", None, "test"),
        {"problem": "Find x.", "solution": "s", "answer": "1", "subject": "Algebra", "level": 2, "unique_id": "u"},
        ("Find x.",),
    ),
    "alpaca": (
        ("tatsu-lab/alpaca", None, "train"),
        {"instruction": "Sort.", "input": "b, a", "output": "a, b", "text": "Below is .. Sort. .. b, a .. a, b"},
        "Sort.\nb, a",
    ),
    "sum": (
        ("abisee/cnn_dailymail", "3.0.0", "test"),
        {"article": "A bird flew.", "highlights": "It flew.", "id": "i"}, ("Summarize: A bird flew.",)
    ),
    "qa": (
        ("google-research-datasets/nq_open", None, "validation"),
        {"question": "who can fly", "answer": ["birds"]}, ("who can fly",)
    ),
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The data sets that were loaded; each has 1,000 rows, whose texts begin with their number."""
    import datasets

    loaded: list[tuple[Any, ...]] = []

    def load(name: str, config: str | None = None, *, split: str, **more: Any) -> list[dict[str, Any]]:
        loaded.append((name, config, split))
        assert not more["trust_remote_code"]
        row = next(row for arguments, row, _ in ROWS.values() if arguments == (name, config, split))
        return [{**row, "question": f"{i} {row['question']}"} if "question" in row else row for i in range(1000)]

    monkeypatch.setattr(datasets, "load_dataset", load)
    return loaded


def test_every_set_is_tested() -> None:
    assert ROWS.keys() == PROMPT_SETS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_the_prompts_of_a_set(name: str, hub: list[tuple[Any, ...]]) -> None:
    arguments, _, asked = ROWS[name]
    prompts = read_prompts(name, 3)
    assert hub == [arguments] and len(prompts) == 3
    said = prompts[0].messages[0]["content"] if prompts[0].messages else prompts[0].turns
    assert said in (asked, ("0 " + asked[0],)) and prompts[0].where == f"{name}, row 1"
    assert len(prompts[0].messages or []) == (name == "alpaca"), "the data set's answers are not part of the prompt"


def test_the_choice_of_prompts_is_always_the_same(hub: list[tuple[Any, ...]]) -> None:
    assert [p.turns[0].split()[0] for p in read_prompts("gsm8k", 4)] == ["0", "250", "500", "750"]
    assert len(read_prompts("gsm8k")) == DEFAULT_PROMPTS and len(read_prompts("gsm8k", 5000)) == 1000


def test_a_file_of_that_name_is_read_instead(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    write_rows(tmp_path / "gsm8k" / "a.jsonl", [{"prompt": "own"}])
    assert read_prompts("gsm8k") == [Record("gsm8k/a.jsonl, line 1", text="own")] and not hub


def test_without_the_hub_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*given: Any, **options: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub (LocalEntryNotFoundError)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        ValueError,
        match=r"^gsm8k is openai/gsm8k on the hub and cannot be loaded from the hub: Couldn't reach .* load it once",
    ):
        read_prompts("gsm8k")
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **options: [{"Question": "q"}])
    with pytest.raises(ValueError, match=r"row 1: openai/gsm8k has other columns than fledge reads \(Question\)"):
        read_prompts("gsm8k")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("gsm8k", "gsm8k"),
        ("sets/chats.jsonl", "chats"),
        ("sets/chats.jsonl.zst", "chats"),
        ("chats.jsonl@0.5", "chats"),
        ('{"source": "sets/chats.jsonl", "columns": {"messages": "a/b.c"}}', "chats"),
    ],
)
def test_the_name_of_a_set_in_tables(source: str, name: str) -> None:
    assert prompt_set_name(source) == name


def test_a_preset_is_recognized_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default its test split is read, and 80 prompts of it, not the rows that drafts are trained on."""
    read: list[tuple[str, int]] = []
    monkeypatch.setattr(SourceReader, "spread", lambda self, count: read.append((self.hub.split, count)) or [])
    for source in ("ultrachat", '{"source": "ultrachat"}'):
        read_prompts(source)
    assert read == [("test_sft", DEFAULT_PROMPTS)] * 2
    with pytest.raises(ValueError, match="give --limit, not a share"):
        read_prompts("ultrachat@0.1")
