"""The model card: valid metadata, nothing private, nothing that a name can break, and what people add stays."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from fledge.config import Provenance
from fledge.drafts.weights import open_draft
from fledge.engines.support import unsupported
from fledge.io.fingerprints import draft_sha256
from fledge.io.machine import environment
from fledge.measure.metrics import alpha_text
from fledge.publish.card import END, MEASURED, START, card_text, cell, code, measured_row, shown_source
from fledge.publish.upload import USE, keep_edits, measured_rows, use_text, with_section
from support.chats import tiny_chats
from support.drafts_on_disk import V, config, saved
from support.targets import tiny_target_directory

HUB_TARGET = Provenance(target="owner/Bird-7B@v1.0", target_layers=8, depth=4, max_length=128)
HOSTILE = ("a\n---\nlicense: mit", "x`y``z|<script>", "{{ 7 * 7 }}", "*a*_b_[c](d)#e", "\x1b[31m", '"quoted": [', "-->")


def card(**overrides) -> str:
    return card_text(config(**{"provenance": HUB_TARGET} | overrides))


def use(directory, *words, **fields) -> str:
    saved(directory, *words, **fields)
    return use_text(open_draft(directory), "bird/draft")


def metadata(text: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.S)[1])


# -- what is in it ------------------------------------------------------------------------------------------------


def test_the_metadata_is_that_of_the_hub():
    data = ModelCard(card()).data.to_dict()
    assert data == metadata(card()) | {"base_model": "owner/Bird-7B"}
    assert data["pipeline_tag"] == "text-generation" and data["library_name"] == "fledge"
    assert data["tags"] == ["speculative-decoding", "draft-model", "eagle3"]
    assert "license" not in data and "datasets" not in data


def test_what_engines_cannot_serve_is_said_with_the_reason(tmp_path):
    drafts = {
        "eagle3.1": {"fc_norm": True, "norm_output": True},
        "p-eagle": {"method": "peagle", "mask_token_id": 3},
        "eagle1": {"method": "eagle1", "num_aux_hidden_states": 0, "fc_bias": True},
    }
    texts = {}
    for tag, fields in drafts.items():
        fields["provenance"] = HUB_TARGET
        words = [V] if tag == "eagle1" else []
        draft = config(*words, **fields)
        tags, text = metadata(card_text(draft))["tags"], use(tmp_path / tag, *words, **fields)
        texts[tag] = text
        assert tag in tags
        for engine, command in (
            ("vllm", "vllm serve owner/Bird-7B --revision v1.0"),
            ("sglang", "sglang.launch_server"),
        ):
            assert (unsupported(draft, engine) is None) == (command in text)
    assert "has no one-pass drafting" in texts["p-eagle"] and "vLLM (0.22 or later)" in texts["eagle3.1"]
    assert "fledge export" not in texts["eagle3.1"]
    assert "fledge export --draft bird/draft --to sglang --out DIR" in texts["eagle1"]
    assert "--speculative-draft-model-path DIR" in texts["eagle1"]


def test_of_an_unknown_draft_only_what_is_known_is_said():
    text = card(provenance=Provenance())
    assert "base_model" not in metadata(text) and "## Training" not in text and "not recorded" in text
    assert "Nothing is recorded" in text and "None" not in text


def test_a_path_of_this_machine_is_not_in_it(tmp_path):
    (tmp_path / "bird").mkdir()
    known = Provenance(target=str(tmp_path / "bird"))
    text = card(provenance=known)
    assert "base_model" not in metadata(text) and str(tmp_path) not in text and "# EAGLE-3 draft for bird" in text
    commands = use(tmp_path / "draft", provenance=known)
    assert "vllm serve TARGET" in commands and str(tmp_path) not in commands
    assert shown_source(str(tmp_path / "chats.jsonl") + "@0.5") == ("chats.jsonl@0.5", None)
    assert shown_source("owner/chats:train") == ("owner/chats:train", "owner/chats")


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_it(name, tmp_path):
    plain = card(provenance=Provenance(target="/models/x", template_kwargs={"a": "b"}))
    known = Provenance(target=f"/models/{name}", template_kwargs={name: name})
    row = measured_row(name, name, 2.0, (0.5,), 1.5, name)
    text = card_text(config(provenance=known), [row], facts={"Data": code(name)})
    text = with_section(text, USE, use(tmp_path / "draft", provenance=known))
    assert metadata(text) == metadata(plain) and "\x1b" not in text
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert len(headings) == 6 and text.count("<!--") == 2
    (row,) = (line for line in text.splitlines() if "1.50x" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 7, "the row has six cells"
    assert not re.search(r"<script>", re.sub(r"`[^`]*`", "", text.replace(r"\`", "")))


def test_cells_and_code():
    assert cell("a|b") == "a\\|b" and code("a`b") == "`a'b`"
    assert len(code("x" * 10_000)) < 300


# -- the generated part -------------------------------------------------------------------------------------------


def test_a_section_is_replaced_or_added_in_the_generated_part_alone():
    text = f"# Mine\n{MEASURED}\nmine\n{card()}\n{MEASURED}\nmine\n"
    first = with_section(text, MEASURED, "2.5")
    assert "Nothing is recorded" in text and "Nothing is recorded" not in first
    assert first.count("mine") == 2 and f"{MEASURED}\n\n2.5\n\n## Limits" in first
    assert with_section(first, MEASURED, "2.5") == first
    used = with_section(first, USE, r"run \1")
    assert f"{USE}\n\nrun \\1\n\n{END}" in used and with_section(used, USE, r"run \1") == used
    assert with_section("# Mine\n", MEASURED, "2.5") == "# Mine\n"


def test_text_outside_of_the_generated_part_stays():
    new = with_section(card(), MEASURED, "2.5")
    there = "---\nlicense: mit\n---\n# Mine\n" + card()[card().index(START) :] + "\n## Contact\nmine\n"
    kept = keep_edits(there, new)
    assert kept.startswith("---\nlicense: mit\n---\n# Mine\n") and kept.endswith("\n## Contact\nmine\n")
    assert "2.5" in kept and "Nothing is recorded" not in kept
    assert keep_edits(card(), new) == new
    assert keep_edits("# Mine\n", new) == "# Mine\n" and keep_edits(there, "# Mine\n") == there


# -- measurements -------------------------------------------------------------------------------------------------


def record(tau: float, **more) -> dict:
    return {
        "tau": tau, "alpha": [0.8, 0.5, None], "prompts": 80, "speedup": 1.5, "sampling": {"temperature": 0.0},
        "mode": "chain", "depth": 5, "batch": 1, "environment": environment("cpu", "torch.float32"), **more,
    }  # fmt: skip


def push(fledge, draft, *words):
    return fledge("push", "--draft", draft, "bird/draft", "--eval", draft.parent / "eval.json", *words)


def test_measurements_are_put_into_the_card(fledge, tmp_path):
    draft = tmp_path / "draft"
    saved(draft)
    (draft / "README.md").write_text(card() + "\nmine\n")
    (tmp_path / "eval.json").write_text(json.dumps(record(3.25, prompt_set="mt_bench")))
    row = "| mt\\_bench, 80 | greedy, chain, depth 5 | 3.25 | 0.80 0.50 - | 1.50x |"
    shown = push(fledge, draft, "--dry-run")
    assert shown.code == 0 and row in shown.out and "--draft bird/draft" in shown.out, shown.err
    assert (draft / "README.md").read_text() == card() + "\nmine\n"
    (draft / "README.md").write_text("# Mine\n")
    refused = push(fledge, draft, "--dry-run")
    assert refused.code == 2 and f"no lines {START}" in refused.err


def test_a_draft_is_known_by_its_weights(tmp_path, fledge):
    """In whichever layout and directory they are; a draft of the same name with other weights is another one."""
    drafts = {name: saved(tmp_path / name, seed=n, provenance=HUB_TARGET) for n, name in enumerate(("one", "two"))}
    hashes = {name: draft_sha256(draft.state_dict()) for name, draft in drafts.items()}
    out, file = tmp_path / "copy", tmp_path / "eval.json"
    assert fledge("export", "--draft", tmp_path / "one", "--to", "speculators", "--out", out).code == 0
    records = {
        f"{name} tree": record(tau, draft=name, draft_sha256=hashes[name], prompt_set="gsm8k")
        for name, tau in (("one", 2.25), ("two", 4.5))
    }
    file.write_text(json.dumps(records))
    for own in ("one", "copy"):
        (row,) = measured_rows(file, open_draft(tmp_path / own))
        assert row.startswith("| gsm8k, 80 |") and "| 2.25 |" in row
    file.write_text(json.dumps(record(4.5, draft=str(tmp_path / "one"), draft_sha256=hashes["two"])))
    other = push(fledge, tmp_path / "one", "--dry-run")
    assert other.code == 2 and "measurements of other drafts only" in other.err, other.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"), ("", "cannot be read"), ("[]", "not a record"), ('{"tau": 1}', "not a record"),
        (json.dumps({"tau": "x", "environment": environment("cpu", "float32")}), "not a record of fledge eval"),
    ],
)  # fmt: skip
def test_other_files_are_refused(fledge, tmp_path, content, said):
    saved(tmp_path / "draft")
    if content is not None:
        (tmp_path / "eval.json").write_text(content)
    done = push(fledge, tmp_path / "draft")
    assert done.code == 2 and said in done.err and not (tmp_path / "draft" / "README.md").exists()


def test_what_was_not_measured_is_left_open(tmp_path):
    """The speed in some records; of a server, neither its draft nor its device is known."""
    saved(tmp_path / "draft")
    more = {"endpoint": "http://bird", "draft_sha256": None}
    records = {"mt_bench": {k: v for k, v in record(2.0, **more).items() if k != "speedup"}}
    (tmp_path / "eval.json").write_text(json.dumps(records))
    (row,) = measured_rows(tmp_path / "eval.json", open_draft(tmp_path / "draft"))
    assert row.startswith("| mt\\_bench, 80 |") and row.endswith("| - | a server |")


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
    assert str(trained.draft.parent.parent) not in text and "my\\|chats" in text
    assert text.index(START) < text.index("# EAGLE-3 draft") < text.index(END) and USE not in text
    rates = alpha_text(trained.metrics["eval_alpha"])
    assert f"| {trained.metrics['eval_tau']:.2f} | {rates} | - |" in text and len(trained.metrics["eval_alpha"]) == 3
    for fact in ("| Steps | 3 of 3 |", "| Seed | 5 |", "| Loss | `ce` over 3 drafted tokens, γ 0.8 |", "torch 2."):
        assert fact in text
    assert "datasets" not in metadata(text)


def test_an_export_has_the_card(trained, fledge, tmp_path):
    words = ["--to", "speculators", "--out", tmp_path / "out", "--target", "o/t"]
    done = fledge("export", "--draft", trained.draft, *words)
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "README.md").read_bytes() == (trained.draft / "README.md").read_bytes()
