"""Template variables of single sources: the tokens that are trained on, what the draft records, and the warnings where
a draft is used in a mode in which it was not trained."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers.processors import TemplateProcessing

from fledge import load, train_draft
from fledge.config import Provenance
from fledge.data.read import read_records
from fledge.data.sources import modes_of
from fledge.data.spans import training_documents
from fledge.data.template import ChatTemplate, ModeWarning, shared_variables
from fledge.drafts.weights import read_draft_config
from fledge.io.formats import config_from_hf
from fledge.measure.prompts import prompt_of
from fledge.measure.run import longest_request
from support.chats import tiny_chats
from support.files import rows_of, write_rows
from support.targets import CHATML, tiny_target, tiny_tokenizer
from support.templates import QWEN3

ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
CHAT = [{"role": "user", "content": "can it fly"}]
TRAIN = dict(steps=2, depth=2, max_length=64, row_length=128, eval_tokens=4, device="cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    tiny_target().model.save_pretrained(directory)
    tiny_tokenizer(QWEN3).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chats(tmp_path_factory.mktemp("data") / "chats.jsonl", 200)


@pytest.fixture(scope="module")
def thinking(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that was trained with thinking off."""
    out = tmp_path_factory.mktemp("off") / "run"
    return train_draft(target=target, data=data, out=out, template_kwargs=OFF, **TRAIN).draft


@pytest.fixture(scope="module")
def both(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a draft that was trained in both modes."""
    out = tmp_path_factory.mktemp("both") / "run"
    sources = [
        {"source": str(data), "share": 0.5, "template_kwargs": ON},
        {"source": str(data), "template_kwargs": OFF},
    ]
    train_draft(target=target, data=sources, out=out, template_kwargs={"date": "today"}, **TRAIN)
    return out


def used(target: Path, draft: Path, **options: object) -> list[str]:
    """The mode warnings of a short generation."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = load(target, draft=draft, **options)
        engine.generate(CHAT, max_new_tokens=3)
        engine.generate(CHAT, max_new_tokens=3)
    return [str(w.message) for w in caught if w.category is ModeWarning]


def test_each_source_is_rendered_with_its_own_variables(data: Path) -> None:
    template = ChatTemplate(tiny_tokenizer(QWEN3), {1}, ON)
    written = [json.dumps({"source": str(data), "template_kwargs": OFF}), str(data)]
    off, on = (read_records([source])[0] for source in written)
    rendered = [tiny_tokenizer(QWEN3).decode(training_documents(template, record)[-1].tokens) for record in (off, on)]
    assert "<think>" in rendered[0] and "<think>" not in rendered[1]


def test_the_modes_of_sources() -> None:
    sources = ["a.jsonl", json.dumps({"source": "b.jsonl", "template_kwargs": ON}), "c.jsonl@0.5"]
    assert modes_of(sources, None) == ({}, ON)
    assert modes_of(sources, OFF | {"date": "today"}) == (OFF | {"date": "today"}, ON | {"date": "today"})
    assert shared_variables(modes_of(sources, OFF | {"date": "today"})) == {"date": "today"}


def test_a_draft_records_all_its_modes_and_old_configs_still_load(both: Path, thinking: Path) -> None:
    known = read_draft_config(both / "draft").provenance
    assert known.template_kwargs == {"date": "today"}
    assert known.modes == (ON | {"date": "today"}, OFF | {"date": "today"})
    one = json.loads((thinking / "config.json").read_text())
    assert one["fledge"]["template_kwargs"] == OFF and "template_modes" not in one["fledge"]
    assert config_from_hf(one).provenance.modes == (OFF,)
    assert Provenance().modes == ({},)
    one["fledge"]["template_modes"] = [{"chat_template": "x"}]
    with pytest.raises(ValueError, match="template_modes sets chat_template"):
        config_from_hf(one)


def test_a_recipe_with_sources_of_its_own_options_runs_again(both: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((both / "recipe.yaml").read_text())
    assert [source["template_kwargs"] for source in recipe["data"]] == [ON, OFF]
    again = train_draft(config=both / "recipe.yaml", out=tmp_path / "again")
    settled = yaml.safe_load((tmp_path / "again" / "recipe.yaml").read_text())["settled"]
    assert settled["data_sha256"] == recipe["settled"]["data_sha256"]
    assert read_draft_config(again.draft).provenance.modes == read_draft_config(both / "draft").provenance.modes
    assert train_draft(resume=both).draft == both / "draft"


def test_tokens_of_one_mode_are_not_those_of_another_in_the_cache(target: Path, data: Path, tmp_path: Path) -> None:
    hashes = []
    for i, mode in enumerate((ON, OFF, ON)):
        run = tmp_path / str(i)
        sources = {"source": data.as_posix(), "template_kwargs": mode}
        train_draft(target=target, data=sources, out=run, data_cache=tmp_path / "cache", **TRAIN)
        hashes.append(yaml.safe_load((run / "recipe.yaml").read_text())["settled"]["data_sha256"])
    assert hashes[0] == hashes[2] != hashes[1]
    assert sum(path.is_dir() for path in (tmp_path / "cache" / "tokens").iterdir()) == 2


def test_using_a_draft_in_another_mode_warns_once(target: Path, thinking: Path) -> None:
    assert used(target, thinking) == []  # decodes in the mode of training
    assert used(target, thinking, template_kwargs=OFF | {"unread": 1}) == []  # renders the same text
    (warning,) = used(target, thinking, template_kwargs=ON)
    assert 'trained with template_kwargs {"enable_thinking": false}' in warning
    assert 'rendered with template_kwargs {"enable_thinking": true}' in warning
    assert "acceptance can fall to a third" in warning


def test_a_default_that_is_named_is_no_other_mode(target: Path, both: Path, tmp_path: Path, data: Path) -> None:
    draft = train_draft(target=target, data=data, out=tmp_path / "run", **TRAIN).draft
    assert used(target, draft, template_kwargs=ON) == []
    assert len(used(target, draft, template_kwargs=OFF)) == 1
    assert [used(target, both / "draft", template_kwargs=mode) for mode in (ON, OFF, None)] == [[], [], []]


def test_a_draft_of_unknown_training_and_plain_prompts_do_not_warn(target: Path, thinking: Path) -> None:
    loaded = load(target, draft=thinking, template_kwargs=ON)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModeWarning)
        loaded.generate("it can fly", max_new_tokens=3)
        loaded.reader.trained = replace(loaded.reader.trained, template_sha256=None)
        loaded.generate(CHAT, max_new_tokens=3)


def test_commands_tell_the_modes(target: Path, thinking: Path, both: Path, data: Path, tmp_path: Path, fledge) -> None:
    asked = ["--target", target, "--draft"]
    new = ["--max-new-tokens", 2]
    ran = fledge("generate", *asked, both / "draft", "--prompt", "it", *new)
    assert 'was trained with template_kwargs {"date": "today", "enable_thinking": true} and with' in ran.err
    assert "--template-kwargs chooses another of its modes" in ran.err
    ran = fledge("generate", *asked, both / "draft", "--prompt", "it", *new, "--template-kwargs", json.dumps(OFF))
    assert "modes" not in ran.err and "a third" not in ran.err
    on = ["--template-kwargs", json.dumps(ON)]
    for words in (
        ["generate", "--prompt", "it"],
        ["regenerate", "--data", data, "--out", tmp_path / "o.jsonl", "--limit", 2],
        ["eval", "--prompts", data, "--limit", 2],
    ):
        with pytest.warns(ModeWarning) as found:
            assert fledge(*words, *asked, thinking, *new, *on).code == 0
        assert len(found) == 1
    ran = fledge("inspect", both / "draft")
    assert '"enable_thinking": true} and with template_kwargs' in ran.out


def test_regenerate_answers_each_source_in_its_mode(target: Path, data: Path, tmp_path: Path, fledge) -> None:
    few = tiny_chats(tmp_path / "few.jsonl", 4)
    answers = []
    for name, mode in (("on", ON), ("off", OFF)):
        source = json.dumps({"source": str(few), "template_kwargs": mode})
        by_source, by_flag = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-flag.jsonl"
        words = ["regenerate", "--target", target, "--max-new-tokens", 6]
        assert fledge(*words, "--data", source, "--out", by_source).code == 0
        assert fledge(*words, "--data", few, "--template-kwargs", json.dumps(mode), "--out", by_flag).code == 0
        texts = [[json.loads(line)["messages"] for line in f.read_text().splitlines()] for f in (by_source, by_flag)]
        assert texts[0] == texts[1]
        answers.append(texts[0])
    assert answers[0] != answers[1]


def test_features_record_the_modes_of_their_sources(target: Path, data: Path, tmp_path: Path, fledge) -> None:
    sources = [json.dumps({"source": str(data), "template_kwargs": mode}) for mode in (ON, OFF)]
    words = ["--target", target, "--max-length", 64, "--device", "cpu", "--out", tmp_path / "features"]
    assert fledge("features", "--data", sources[0], "--data", sources[1], *words).code == 0
    run = train_draft(features=tmp_path / "features", out=tmp_path / "run", steps=1, depth=2, device="cpu")
    assert read_draft_config(run.draft).provenance.modes == (ON, OFF)


def test_rows_are_trained_on_and_answered_with_variables_of_their_own(target: Path, tmp_path: Path, fledge) -> None:
    """A row that turns reasoning off, in `train`, `regenerate` and `eval`, and what `regenerate` writes."""
    chat = [*CHAT, {"role": "assistant", "content": "soon"}]
    data = write_rows(
        tmp_path / "rows.jsonl", [{"messages": chat, "chat_template_kwargs": kwargs} for kwargs in (OFF, ON)]
    )
    off, on = read_records([str(data)])
    template = ChatTemplate(tiny_tokenizer(QWEN3), {1})
    assert training_documents(template, off)[0].spans.tolist() != training_documents(template, on)[0].spans.tolist()
    words = ["--target", target, "--data", data, "--device", "cpu"]
    ran = fledge("regenerate", *words, "--out", tmp_path / "own.jsonl", "--max-new-tokens", 3)
    assert ran.code == 0, ran.err
    assert [row["chat_template_kwargs"] for row in rows_of(tmp_path / "own.jsonl")] == [OFF, ON]
    engine = load(target)
    for record, mode in ((off, OFF), (on, ON)):
        asked = longest_request(engine, prompt_of(record), 0)
        assert asked == len(template.with_exactly(mode).prompt_ids(CHAT))
    assert len(template.with_exactly(OFF).prompt_ids(CHAT)) != len(template.with_exactly(ON).prompt_ids(CHAT))


def test_later_turns_follow_answers_as_the_prompt_s_own_variables_render_them(
    thinking: Path, target: Path, tmp_path: Path, fledge, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def message(template: ChatTemplate, said, prompt, *rest) -> dict[str, str]:
        used.append((template.kwargs, template.prompt_ids(said) == list(prompt)))
        return {"role": "assistant", "content": "soon"}

    monkeypatch.setattr("fledge.measure.run.history_message", message)
    turns = {"turns": ["can it fly", "it can fly"]}
    prompts = write_rows(tmp_path / "p.jsonl", [turns | {"chat_template_kwargs": ON}, turns])
    words = ["--target", target, "--draft", thinking, "--prompts", prompts, "--max-new-tokens", 3, "--device", "cpu"]
    ran = fledge("eval", *words)
    assert ran.code == 0, ran.err
    assert used == [(ON, True), (OFF, True)]  # the draft was trained with OFF


def test_training_says_what_it_drops_and_reads_saved_data(tmp_path: Path, fledge) -> None:
    """Through the command line: a prompt that opens reasoning, a dropped call, a written BOS, a saved data set."""
    import datasets

    opens = CHATML.replace("m['content'] +", "m['content'].split('</think>')[-1] +").replace("nt\n'", "nt\n<think>\n'")
    tiny_target().model.save_pretrained(tmp_path / "target")
    tokenizer = copy.deepcopy(tiny_tokenizer(opens))
    bos = ("<|pad|>", 0)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[bos])
    tokenizer.save_pretrained(tmp_path / "target")
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "assistant", "content": "it falls</think>it can fly"}
    rows = [{"messages": [*CHAT, answer]}, {"messages": [*CHAT, called, {"role": "tool", "content": "a"}, answer]}]
    chats = write_rows(tmp_path / "chats.jsonl", rows)
    texts = datasets.Dataset.from_list([{"text": "<|pad|>the young bird tries"}] * 2)
    datasets.DatasetDict({"train": texts, "test": texts}).save_to_disk(tmp_path / "saved")
    words = ["train", "--target", tmp_path / "target", "--steps", 1, "--depth", 1, "--device", "cpu"]
    ran = fledge(*words, "--data", chats, "--data", tmp_path / "saved", "--out", tmp_path / "run")
    said = " ".join(ran.err.split())
    assert ran.code == 0 and "4 records, 4 documents" in said, said
    assert "1 records have tool calls that this chat template drops" in said
    assert "2 records write out special tokens that the tokenizer adds too, such as BOS" in said
    write_rows(chats, [{"messages": [*CHAT, {"role": "assistant", "content": "it can fly"}]}])
    ran = fledge(*words, "--data", chats, "--out", tmp_path / "other")
    assert ran.code == 2 and "chats.jsonl, line 1, message 2: the template's generation prompt opens" in " ".join(
        ran.err.split()
    )


def test_sources_that_cannot_be_used_are_refused(target: Path, data: Path, tmp_path: Path, fledge) -> None:
    train = ["train", "--target", target, "--out", tmp_path / "run", "--data"]
    ran = fledge(*train, json.dumps({"source": str(data), "thinking": True}))
    assert ran.code == 2 and "--data" in ran.err and "'thinking' is not an option of a source" in ran.err
    ran = fledge(*train, data, "--eval-prompts", json.dumps({"source": str(data), "template_kwargs": ON}))
    assert ran.code == 2 and "prompts have no template_kwargs of their own" in ran.err
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data:\n  - source: a.jsonl\n    shar: 0.5\n")
    ran = fledge("train", "--config", recipe, "--target", target)
    assert ran.code == 2 and "recipe.yaml" in ran.err and "'shar' is not an option of a source" in ran.err
    assert torch.get_default_dtype() == torch.float32
