"""Data sets by name, read from rows in the columns of the hub's data sets; only the download is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fledge.commands.features import FeaturesOptions
from fledge.data.read import check_source, read_records, with_columns
from fledge.data.sources import PRESETS, shadowed_presets
from fledge.measure.options import EvalOptions
from fledge.measure.prompts import DEFAULT_PROMPTS, PROMPT_SETS, read_prompts
from fledge.options import option_fields
from fledge.regenerate.options import RegenerateOptions
from fledge.train.setup.options import TrainOptions
from support.files import write_rows


def shared(*turns: tuple[str, str], **fields: Any) -> list[dict[str, Any]]:
    return [{"from": speaker, "value": text, **fields} for speaker, text in turns]


ASKED = [("human", "Can it fly?"), ("gpt", "Soon.")]
# (arguments of load_dataset, split, a row in the layout of the hub, the roles and contents of its conversation)
SETS: dict[str, tuple[tuple[str, ...], str, dict[str, Any], list[tuple[str, str]]]] = {
    "sharegpt": (
        ("Aeala/ShareGPT_Vicuna_unfiltered",), "train", {"id": "a_0", "conversations": shared(*ASKED)},
        [("user", "Can it fly?"), ("assistant", "Soon.")],
    ),
    "ultrachat": (
        ("HuggingFaceH4/ultrachat_200k",), "train_sft",
        {
            "prompt": "Can it fly?", "prompt_id": "f0",
            "messages": [{"content": "Can it fly?", "role": "user"}, {"content": "Soon.", "role": "assistant"}],
        },
        [("user", "Can it fly?"), ("assistant", "Soon.")],
    ),
    "perfectblend": (
        ("mlabonne/open-perfectblend",), "train", {"conversations": shared(*ASKED), "source": "orca"},
        [("user", "Can it fly?"), ("assistant", "Soon.")],
    ),
    "magpie": (
        ("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",), "train",
        {
            "uuid": "u", "model": "m", "conversations": shared(*ASKED), "instruction": "Can it fly?",
            "response": "Soon.", "intent": "to know", "difficulty": "easy", "instruct_reward": 1.5,
        },
        [("user", "Can it fly?"), ("assistant", "Soon.")],
    ),
    "openhermes": (
        ("teknium/OpenHermes-2.5",), "train",
        {
            "conversations": shared(("system", "Be brief."), *ASKED, weight=None), "source": "airoboros", "id": None,
            "system_prompt": None, "title": None, "topic": None, "language": None,
        },
        [("system", "Be brief."), ("user", "Can it fly?"), ("assistant", "Soon.")],
    ),
    "nemotron": (
        ("nvidia/Llama-Nemotron-Post-Training-Dataset", "SFT"), "chat",
        {
            "input": [{"role": "user", "content": "Can it fly?"}], "output": "<think>\nhm\n</think>\nSoon.",
            "category": "chat", "license": "cc-by-4.0", "reasoning": "on", "generator": "DeepSeek-R1",
            "used_in_training": ["Ultra"], "version": "v1.1", "system_prompt": "detailed thinking on",
        },
        [("system", "detailed thinking on"), ("user", "Can it fly?"), ("assistant", "<think>\nhm\n</think>\nSoon.")],
    ),
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch, tmp_path) -> list[tuple[Any, ...]]:
    """What was asked of the hub; each data set has 100 rows, in a parquet file as on the hub."""
    import datasets

    asked: list[tuple[Any, ...]] = []
    real = datasets.load_dataset

    def load(*name: str, split: str, revision: str | None, trust_remote_code: bool) -> Any:
        asked.append((name, split, revision))
        assert not trust_remote_code
        row = next(row for known, _, row, _ in SETS.values() if known == name)
        pq.write_table(pa.Table.from_pylist([row] * 100), tmp_path / "rows.parquet")
        return real("parquet", data_files=str(tmp_path / "rows.parquet"), split="train")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_every_preset_is_tested() -> None:
    assert SETS.keys() == PRESETS.keys()
    assert not SETS.keys() & PROMPT_SETS.keys(), "a name stands for one data set"


@pytest.mark.parametrize("name", SETS)
def test_rows_of_a_preset_are_conversations(name, hub, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    known, split, _, said = SETS[name]
    check_source(name, "--data")
    records = read_records(with_columns([f"{name}@0.5"], "messages=of_other_sources"))
    assert hub == [(known, split, None)] and len(records) == 50
    assert [(m["role"], m["content"]) for m in records[0].messages] == said
    assert records[0].where.startswith(f"{name}, row ")


def test_a_preset_has_revisions_and_splits(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(read_records(["ultrachat@refs/pr/1:test_sft[:10]@2"])) == 200
    read_records(["nemotron:math"])
    assert [(split, revision) for _, split, revision in hub] == [("test_sft[:10]", "refs/pr/1"), ("math", None)]


def test_prompts_of_a_preset(hub, tmp_path, monkeypatch) -> None:
    """As of the named sets of prompts, 80 are taken; those of UltraChat are from its test split."""
    monkeypatch.chdir(tmp_path)
    prompts = read_prompts("ultrachat")
    assert len(prompts) == DEFAULT_PROMPTS and hub == [(("HuggingFaceH4/ultrachat_200k",), "test_sft", None)]
    assert (
        prompts[0].messages == [{"role": "user", "content": "Can it fly?"}] and prompts[0].where == "ultrachat, row 1"
    )
    assert len(read_prompts("nemotron", 3)) == 3 and hub[-1][1] == "chat"


def test_a_file_of_that_name_is_read_instead(hub, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "magpie").mkdir()
    write_rows(tmp_path / "magpie" / "a.jsonl", [{"text": "a bird"}])
    assert [r.text for r in read_records(["magpie@2"])] == ["a bird"] * 2 and not hub
    assert shadowed_presets(["magpie@2", "ultrachat"]) == [
        "magpie is read from the disk; the data set of that name is Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered"
    ]


def test_without_the_hub_there_is_one_sentence(monkeypatch, tmp_path) -> None:
    import datasets

    def offline(*name: str, **options: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub (LocalEntryNotFoundError)\nmore")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", offline)
    for name in ("ultrachat", "sharegpt@0.1"):
        with pytest.raises(
            ValueError, match=r"is .* on the hub and cannot be loaded from the hub: Couldn't reach"
        ) as e:
            read_records([name])
        assert "\n" not in str(e.value)


def test_other_columns_than_expected_are_listed(monkeypatch, tmp_path) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, **options: [{"question": "a"}])
    with pytest.raises(ValueError, match=r"nemotron, row 1 has no column input.*its columns are question"):
        read_records(["nemotron"])


def test_the_documentation_lists_every_preset() -> None:
    page = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8").replace("`", "")
    for name, preset in PRESETS.items():
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} | {preset.hub_id}"))
        assert preset.split in line and preset.terms in line and (preset.prompt_split or "") in line


def test_help_lists_the_names() -> None:
    for options, name in ((TrainOptions, "data"), (FeaturesOptions, "data"), (RegenerateOptions, "data")):
        help = next(f for f in option_fields(options) if f.name == name).metadata["help"]
        assert all(preset in help for preset in PRESETS), options
    assert "ultrachat" in next(f for f in option_fields(EvalOptions) if f.name == "prompts").metadata["help"]
