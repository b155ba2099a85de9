"""The model card: valid metadata, nothing private, nothing that a name can break, and edits of people stay."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from fledge.config import Provenance
from fledge.engines.support import unsupported
from fledge.eval.environment import environment
from fledge.eval.metrics import alpha_text
from fledge.jobs.model_card import (
    Measurement,
    Training,
    card_text,
    cell,
    code,
    for_repository,
    is_unedited,
    measured_text,
    measurement_of,
    with_section,
)
from fledge.jobs.training.card import shown_source
from fledge.models.weights import draft_sha256
from support.chats import tiny_chats
from support.drafts_on_disk import V, config, saved
from support.targets import tiny_target_directory

HUB_TARGET = Provenance(target="owner/Bird-7B@v1.0", target_layers=8, depth=4, max_length=128)
HOSTILE = ("a\n---\nlicense: mit", "x`y``z|<script>", "{{ 7 * 7 }}", "*a*_b_[c](d)#e", "\x1b[31m", '"quoted": [', "-->")


def card(**overrides) -> str:
    return card_text(config(**{"provenance": HUB_TARGET} | overrides), exports=lambda engine: False)


def metadata(text: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.S)[1])


# -- what is in it ------------------------------------------------------------------------------------------------


def test_the_metadata_is_that_of_the_hub():
    data = ModelCard(card()).data.to_dict()
    assert data == metadata(card()) | {"base_model": "owner/Bird-7B"}
    assert data["pipeline_tag"] == "text-generation" and data["library_name"] == "fledge"
    assert data["tags"] == ["speculative-decoding", "draft-model", "eagle3", "vllm", "sglang"]
    assert "license" not in data and "datasets" not in data


def test_what_engines_cannot_serve_is_said_with_the_reason():
    drafts = {
        "eagle3.1": config(fc_norm=True, norm_output=True, provenance=HUB_TARGET),
        "p-eagle": config(method="peagle", mask_token_id=3, provenance=HUB_TARGET),
        "eagle1": config(V, method="eagle1", num_aux_hidden_states=0, provenance=HUB_TARGET),
    }
    for tag, draft in drafts.items():
        text = card_text(draft, exports=lambda engine: engine == "sglang")
        tags = metadata(text)["tags"]
        assert tag in tags
        for engine, command in (
            ("vllm", "vllm serve owner/Bird-7B --revision v1.0"),
            ("sglang", "sglang.launch_server"),
        ):
            assert (unsupported(draft, engine) is None) == (command in text) == (engine in tags)
    assert "has no one-pass drafting" in card_text(drafts["p-eagle"], exports=lambda engine: False)
    assert "vLLM (0.22 or later)" in card_text(drafts["eagle3.1"], exports=lambda engine: False)
    assert "fledge export --to sglang" in card_text(drafts["eagle1"], exports=lambda engine: engine == "sglang")


def test_of_an_unknown_draft_only_what_is_known_is_said():
    text = card(provenance=Provenance())
    assert "base_model" not in metadata(text) and "## Training" not in text and "not recorded" in text
    assert "Nothing is recorded" in text and "None" not in text


def test_a_path_of_this_machine_is_not_in_it(tmp_path):
    (tmp_path / "bird").mkdir()
    text = card(provenance=Provenance(target=str(tmp_path / "bird")))
    assert "base_model" not in metadata(text) and str(tmp_path) not in text and "# EAGLE-3 draft for bird" in text
    assert "vllm serve TARGET" in text
    assert shown_source(str(tmp_path / "chats.jsonl") + "@0.5") == "chats.jsonl@0.5"
    assert shown_source("owner/chats:train") == "owner/chats:train"


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_it(name, tmp_path):
    plain = card(provenance=Provenance(target="/models/x", template_kwargs={"a": "b"}))
    text = card_text(
        config(provenance=Provenance(target=f"/models/{name}", template_kwargs={name: name})),
        exports=lambda engine: False,
        training=Training(facts=(("Data", code(name)),)),
        measurements=[Measurement(name, name, 2.0, (0.5,), 1.5, name)],
    )
    assert metadata(text) == metadata(plain) and is_unedited(text) and "\x1b" not in text
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert len(headings) == 6 and text.count("<!--") == 5
    (row,) = (line for line in text.splitlines() if "1.50x" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 7, "the row has six cells"
    assert not re.search(r"(?<!`)<script>", re.sub(r"(`+).*?[^`]\1(?!`)", "", text))


# -- edits --------------------------------------------------------------------------------------------------------


def test_edits_are_noticed_and_stay():
    text = card()
    assert is_unedited(text) and is_unedited(text.replace("\n", "\r\n")) and is_unedited(text.rstrip("\n"))
    edited = text.replace("## Limits", "## My limits")
    assert not is_unedited(edited) and not is_unedited("") and not is_unedited(text + "more\n")
    assert for_repository(edited, "bird/draft") == edited
    assert is_unedited(for_repository(text, "bird/draft")) and "bird/draft" in for_repository(text, "bird/draft")
    table = measured_text([Measurement("p", "greedy", 2.5)])
    renewed = with_section(edited, "measured", table)
    assert not is_unedited(renewed) and "## My limits" in renewed and table in renewed
    assert is_unedited(with_section(text, "measured", table))
    assert with_section(renewed, "measured", table) == renewed
    with pytest.raises(ValueError, match="add these two lines"):
        with_section("# Mine\n", "measured", table)


def test_cells_and_code():
    assert cell("a|b") == "a\\|b" and code("a`b") == "``a`b``" and code("`") == "`` ` ``"
    assert len(code("x" * 10_000)) < 300


# -- fledge card --------------------------------------------------------------------------------------------------


def record(tau: float, **more) -> dict:
    return {
        "tau": tau, "alpha": [0.8, 0.5, None], "prompts": 80, "speedup": 1.5, "sampling": {"temperature": 0.0},
        "mode": "chain", "depth": 5, "batch": 1, "environment": environment("cpu", "torch.float32"), **more,
    }  # fmt: skip


def test_measurements_are_put_into_the_card(fledge, tmp_path):
    saved(tmp_path / "draft")
    wrote = fledge("card", "--draft", tmp_path / "draft")
    text = (tmp_path / "draft" / "README.md").read_text()
    assert wrote.code == 0 and is_unedited(text) and "Nothing is recorded" in text, wrote.err
    assert fledge("card", "--draft", tmp_path / "draft").code == 2
    (tmp_path / "eval.json").write_text(json.dumps(record(3.25, prompt_set="mt_bench")))
    done = fledge("card", "--draft", tmp_path / "draft", "--eval", tmp_path / "eval.json")
    text = (tmp_path / "draft" / "README.md").read_text()
    assert done.code == 0 and is_unedited(text) and "Nothing is recorded" not in text, done.err
    assert "| mt\\_bench, 80 | greedy, chain, depth 5 | 3.25 | 0.80 0.50 - | 1.50x |" in text


def test_of_several_drafts_only_its_own_measurements_are_taken(fledge, tmp_path):
    for name in ("one", "two"):
        saved(tmp_path / name)
    records = {f"{tmp_path / 'one'} tree gsm8k": record(2.25), f"{tmp_path / 'two'} tree gsm8k": record(4.5)}
    (tmp_path / "eval.json").write_text(json.dumps(records))
    assert fledge("card", "--draft", tmp_path / "one", "--eval", tmp_path / "eval.json").code == 0
    text = (tmp_path / "one" / "README.md").read_text()
    assert "| tree gsm8k, 80 |" in text and "2.25" in text and "4.50" not in text and str(tmp_path) not in text
    saved(tmp_path / "three")
    other = fledge("card", "--draft", tmp_path / "three", "--eval", tmp_path / "eval.json")
    assert other.code == 2 and "other drafts only" in other.err and not (tmp_path / "three" / "README.md").exists()


def test_a_draft_is_known_by_its_weights(fledge, tmp_path):
    """In whichever layout and directory they are; a draft of the same name with other weights is another one."""
    drafts = {name: saved(tmp_path / name, seed=n, provenance=HUB_TARGET) for n, name in enumerate(("one", "two"))}
    hashes = {name: draft_sha256(draft.state_dict()) for name, draft in drafts.items()}
    out = tmp_path / "copy"
    assert fledge("export", "--draft", tmp_path / "one", "--to", "speculators", "--out", out).code == 0
    records = {
        f"{name} tree": record(tau) | {"draft": name, "draft_sha256": hashes[name]}
        for name, tau in (("one", 2.25), ("two", 4.5))
    }
    (tmp_path / "eval.json").write_text(json.dumps(records))
    for own in ("one", "copy"):
        assert fledge("card", "--draft", tmp_path / own, "--eval", tmp_path / "eval.json").code == 0
        text = (tmp_path / own / "README.md").read_text()
        assert "| tree, 80 |" in text and "2.25" in text and "4.50" not in text
    (tmp_path / "eval.json").write_text(json.dumps(records["two tree"] | {"draft": str(tmp_path / "one")}))
    other = fledge("card", "--draft", tmp_path / "one", "--eval", tmp_path / "eval.json")
    assert other.code == 2 and "measurements of other drafts only" in other.err, other.err


def test_an_older_record_of_a_draft_for_another_target_is_refused(fledge, tmp_path):
    saved(tmp_path / "draft", provenance=HUB_TARGET)
    for target, expected in (("owner/Bird-7B@v1.0", 0), ("owner/Cat-7B", 2)):
        (tmp_path / "eval.json").write_text(json.dumps(record(3.25) | {"draft_for": target}))
        done = fledge("card", "--draft", tmp_path / "draft", "--eval", tmp_path / "eval.json")
        assert done.code == expected and ("other drafts only" in done.err) == (expected == 2), done.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"), ("", "is not JSON"), ("[]", "not a record"), ('{"tau": 1}', "not a record"),
        (json.dumps({"tau": "x", "environment": environment("cpu", "float32")}), "not a record of fledge eval"),
    ],
)  # fmt: skip
def test_other_files_are_refused(fledge, tmp_path, content, said):
    saved(tmp_path / "draft")
    if content is not None:
        (tmp_path / "eval.json").write_text(content)
    done = fledge("card", "--draft", tmp_path / "draft", "--eval", tmp_path / "eval.json")
    assert done.code == 2 and said in done.err and not (tmp_path / "draft" / "README.md").exists()


def test_a_record_without_speed_has_no_speedup():
    measured = measurement_of({k: v for k, v in record(2.0).items() if k != "speedup"})
    assert measured.speedup is None and "| - |" in measured_text([measured])


# -- the commands that write drafts ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on chats in a file of a hostile name."""
    from fledge import train_draft

    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    data = root / "my|chats`<b>.jsonl"
    tiny_chats(data, 200)
    return train_draft(
        model=root / "target", dataset=data, output_dir=root / "run", max_length=64, row_length=128, steps=3, depth=3,
        draft_vocab=200, device="cpu", dtype="fp32", eval_tokens=8, seed=5,
    )  # fmt: skip


def test_training_writes_a_card(trained):
    text = (trained.draft / "README.md").read_text()
    assert is_unedited(text) and str(trained.draft.parent.parent) not in text and "my\\|chats" in text
    rates = alpha_text(trained.metrics["eval_alpha"])
    assert f"| {trained.metrics['eval_tau']:.2f} | {rates} | - |" in text and len(trained.metrics["eval_alpha"]) == 3
    for fact in ("| Steps | 3 of 3 |", "| Seed | 5 |", "| Loss | `ce` over 3 drafted tokens, γ 0.8 |", "torch 2."):
        assert fact in text
    assert "datasets" not in metadata(text)


def test_an_export_has_the_card_with_its_own_commands(trained, fledge, tmp_path):
    source = (trained.draft / "README.md").read_text()
    done = fledge(
        "export", "--draft", trained.draft, "--to", "speculators", "--out", tmp_path / "out", "--target", "o/t"
    )
    text = (tmp_path / "out" / "README.md").read_text()
    assert done.code == 0 and is_unedited(text) and "| Seed | 5 |" in text and text != source
    assert "fledge export --to sglang" in text and "fledge export --to sglang" not in source
