"""Every command on real files; each kind of bad input gives one sentence with the cause and what to do."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fledge.commands import generate as generate_job
from fledge.decode.load import load
from fledge.drafts.weights import save_draft
from fledge.io.files import exclusive_lock, sibling_path
from fledge.measure.prompts import read_prompts
from fledge.measure.record import is_record
from fledge.measure.table import figure_lines, notices
from fledge.regenerate.answerers import OwnEngine
from fledge.targets.loading import load_target
from fledge.targets.transformers import TransformersTarget
from fledge.train.setup import run as run_setup
from support.acceptance import define_measurements, tau_by_definition, tau_of_alpha
from support.chats import tiny_chats
from support.commands import Ran, kill_as_it_writes
from support.files import listing, metrics_of, reconfigure, rows_of, write_rows
from support.mutations import replace_function
from support.runs import recipe_of
from support.targets import tiny_draft, tiny_target, tiny_target_directory

SAME_SHAPE = "--max-length 64 --row-length 128 --steps 3 --depth 3 --device cpu".split()
TRAIN = [*SAME_SHAPE, "--draft-vocab", "200"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with a target, chats, prompts, and a run that was trained on them."""
    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    tiny_chats(root / "chats.jsonl", 200)
    turns = [{"turns": ["the young bird", "tries again"]}, {"turns": ["it can fly"]}]
    write_rows(root / "prompts.jsonl", turns)
    return root


@pytest.fixture(scope="module")
def trained(made):
    """The draft of a training run, and τ by definition for each time that the run measured it."""
    from fledge.commands.train import run
    from fledge.io.display import ProgressDisplay
    from fledge.train.setup.options import TrainOptions

    show = ProgressDisplay(quiet=True)
    options = TrainOptions(
        target=str(made / "target"), data=[str(made / "chats.jsonl")], out=str(made / "run"), max_length=64,
        row_length=128, steps=3, depth=3, draft_vocab=200, device="cpu", eval_tokens=8,
        template_kwargs='{"enable_thinking": false}',
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        defined = define_measurements(patch)
        run(options, show.say, show)
    return made / "run" / "draft", defined


@pytest.fixture(scope="module")
def draft(trained):
    return trained[0]


def test_train_writes_a_draft_and_its_metrics(made, draft, trained):
    lines = metrics_of(made / "run")
    assert [m["step"] for m in lines] == [1, 2, 3]
    assert [m["eval_tau"] for m in lines if "eval_tau" in m] == trained[1] == [lines[-1]["eval_tau"]]
    for m in lines:
        assert m["survive"][0] == m["hit"][0] and all(s <= h for s, h in zip(m["survive"], m["hit"], strict=True))
        assert len(m["hit"]) == 3 and m["live"][0] >= m["scored"][0] > 0 and m["loss"] > 0
    config = json.loads((draft / "config.json").read_text())
    assert config["fledge"]["depth"] == 3 and config["fledge"]["template_kwargs"] == {"enable_thinking": False}
    left = ["checkpoint", "draft", "metrics.jsonl", "recipe.yaml", "report.html", "summary.json"]
    assert sorted(p.name for p in (made / "run").iterdir()) == left


def weights_of(draft: Path) -> dict[str, torch.Tensor]:
    return load_file(draft / "model.safetensors")


def test_train_refuses_to_write_over_a_run(made, draft, fledge):
    again = fledge("train", "--target", made / "target", "--data", made / "chats.jsonl", "--out", made / "run", *TRAIN)
    assert again.code == 2 and "--resume" in again.err


def test_init_from_trains_a_draft_further(made, draft, fledge, tmp_path):
    went = fledge(
        "train", "--target", made / "target", "--data", made / "chats.jsonl", "--out", tmp_path / "more",
        "--init-from", draft, *SAME_SHAPE,
    )  # fmt: skip
    assert went.code == 0, went.err
    config = json.loads((tmp_path / "more" / "draft" / "config.json").read_text())
    assert config["draft_vocab_size"] == 200
    assert config["fledge"]["template_kwargs"] == {"enable_thinking": False}
    went = fledge(
        "train", "--target", made / "target", "--data", made / "chats.jsonl", "--out", tmp_path / "still",
        "--init-from", draft, *SAME_SHAPE, "--lr", 1e-30,
    )  # fmt: skip
    assert went.code == 0, went.err
    begun, more, still = map(weights_of, (draft, tmp_path / "more" / "draft", tmp_path / "still" / "draft"))
    assert all(torch.equal(still[n], begun[n]) for n in begun), "training does not start from the given draft's weights"
    assert not torch.equal(more["fc.weight"], begun["fc.weight"])


def test_variants_train(made, fledge, tmp_path):
    """The command line trains a draft with EAGLE-3.1's norms, its own embeddings, two layers and chosen aux layers."""
    flags = "--fc-norm --norm-output --train-embeddings --layers 2 --aux-layers 1,4,8 --log tensorboard".split()
    went = fledge(
        "train", "--target", made / "target", "--data", made / "chats.jsonl@0.5", "--out", tmp_path / "run", *TRAIN,
        *flags,
    )  # fmt: skip
    assert went.code == 0, went.err
    config = json.loads((tmp_path / "run" / "draft" / "config.json").read_text())
    assert config["fc_norm"] and config["norm_output"] and config["num_hidden_layers"] == 2
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 8]
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    shown = fledge("inspect", tmp_path / "run" / "draft")
    assert shown.code == 0 and "EAGLE-3.1" in shown.out and "SGLang" in shown.out
    for on, flag in (("kept", []), ("moved", ["--train-embeddings"])):  # only the option trains the embeddings
        more = fledge(
            "train", "--target", made / "target", "--data", made / "chats.jsonl@0.5", "--init-from",
            tmp_path / "run" / "draft", "--out", tmp_path / on, *SAME_SHAPE, *flag,
        )  # fmt: skip
        assert more.code == 0, more.err
        before, after = (weights_of(tmp_path / d / "draft") for d in ("run", on))
        assert torch.equal(before["embed_tokens.weight"], after["embed_tokens.weight"]) == (on == "kept")


def test_eagle_1_trains_decodes_and_is_described(made, fledge, tmp_path):
    """An EAGLE-1 draft is trained with its own flags, described by inspect, and decodes to the target's own output."""
    steps = "--max-length 64 --row-length 128 --steps 3 --depth 3 --device cpu".split()
    words = ["train", "--target", made / "target", "--data", made / "chats.jsonl", "--method", "eagle1"]
    went = fledge(*words, "--out", tmp_path / "run", *steps, "--fc-bias", "--feature-noise", 0.1)
    assert went.code == 0, went.err
    config = json.loads((tmp_path / "run" / "draft" / "config.json").read_text())
    assert "LlamaForCausalLMEagle" in config["architectures"] and config["bias"] is True
    assert config["fledge"]["depth"] == 3
    shown = fledge("inspect", tmp_path / "run" / "draft")
    assert shown.code == 0 and "An EAGLE-1 draft" in shown.out and "it drops the bias of fc" in shown.out
    asked = ["generate", "--target", made / "target", "--prompt", "the young bird", "--max-new-tokens", 24]
    for mode in ("chain", "tree"):
        together = fledge(*asked, "--draft", tmp_path / "run" / "draft", "--draft-mode", mode)
        assert together.code == 0 and together.out == fledge(*asked).out, together.err
    more = fledge(
        "train", "--target", made / "target", "--data", made / "chats.jsonl", "--init-from", tmp_path / "run" / "draft",
        "--out", tmp_path / "more", *steps,
    )  # fmt: skip
    assert more.code == 0, more.err
    again = json.loads((tmp_path / "more" / "draft" / "config.json").read_text())
    assert (again["architectures"], again["bias"]) == (config["architectures"], True)
    assert not torch.equal(*(weights_of(tmp_path / d / "draft")["fc.weight"] for d in ("run", "more")))


def test_p_eagle_trains_decodes_and_is_described(made, fledge, tmp_path, monkeypatch):
    defined = define_measurements(monkeypatch)
    steps = "--max-length 64 --row-length 128 --steps 3 --depth 3 --device cpu --eval-every 2 --eval-tokens 4".split()
    words = ["train", "--target", made / "target", "--data", made / "chats.jsonl", "--method", "peagle"]
    went = fledge(*words, "--out", tmp_path / "run", *steps, "--layers", 2, "--cod-rate", 0.6, "--eval-prompts",
                  made / "prompts.jsonl")  # fmt: skip
    assert went.code == 0, went.err
    assert "stands for tokens that are not known yet" in went.err
    lines = metrics_of(tmp_path / "run")
    assert all("tau" not in m and m["live"][2] < m["live"][1] < m["live"][0] for m in lines)
    assert [m["tau_slots"] for m in lines] == pytest.approx([1 + sum(m["survive"]) for m in lines])
    assert [m["eval_tau"] for m in lines if "eval_tau" in m] == defined and len(defined) == 2
    draft = tmp_path / "run" / "draft"
    shown = fledge("inspect", draft)
    assert shown.code == 0 and "A P-EAGLE draft" in shown.out and "parallel_drafting" in shown.out
    asked = ["generate", "--target", made / "target", "--prompt", "the young bird", "--max-new-tokens", 24]
    for mode in ([], ["--draft-mode", "parallel"], ["--draft-mode", "chain"], ["--draft-mode", "tree"]):
        together = fledge(*asked, "--draft", draft, *mode)
        assert together.code == 0 and together.out == fledge(*asked).out, together.err
    with_all = tmp_path / "all.jsonl"
    mask = json.loads((draft / "config.json").read_text())["mask_token_id"]
    word = load_target(made / "target").tokenizer.decode([mask])
    with_all.write_text(json.dumps({"text": f"the young bird {word} and the nest"}) + "\n")
    refused = fledge("train", "--target", made / "target", "--data", with_all, "--init-from", draft, *steps[:-4])
    assert refused.code == 2 and "which is this draft's mask token" in refused.err, refused.err
    more = ["train", "--target", made / "target", "--data", made / "chats.jsonl", "--init-from", draft]
    went = fledge(*more, "--out", tmp_path / "more", *steps)
    assert went.code == 0, went.err
    assert json.loads((tmp_path / "more" / "draft" / "config.json").read_text())["mask_token_id"] == mask
    assert not torch.equal(*(weights_of(tmp_path / d / "draft")["fc.weight"] for d in ("run", "more")))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--method", "peagle", "--depth", 1], "--depth 1: P-EAGLE needs a depth of at least 2"),
        (["--method", "peagle", "--cod-rate", 1.5], "--cod-rate 1.5: it must be above 0 and at most 1"),
        (["--method", "eagle1", "--cod-rate", 0.5], "--cod-rate has no effect with EAGLE-1; use --method eagle3, or"),
        (
            ["--method", "peagle", "--gamma", 0.8],
            "--gamma has no effect with P-EAGLE; use --method eagle3, or",
        ),
        (["--method", "eagle1", "--gamma", 0.8], "--gamma has no effect with EAGLE-1; use --method eagle3, or leave"),
        (["--method", "eagle2"], "--method eagle2 is not one of eagle3, eagle3.1, peagle, eagle1, dflash"),
        (["--method", "eagle1", "--draft-vocab", 100], "over the target's whole vocabulary; leave --draft-vocab out"),
        (["--method", "eagle1", "--train-embeddings"], "leave --train-embeddings out"),
        (["--feature-noise", 0.5, "--init-from"], "--feature-noise has no effect with EAGLE-3; use --method eagle1"),
        (
            ["--method", "eagle3.1", "--init-from"],
            r"was trained without its norms \(fc_norm, norm_output\); leave --method out",
        ),
        (
            ["--method", "eagle1", "--fc-norm", "--qk-norm"],
            "--fc-norm, --qk-norm have no effect with EAGLE-1; use --method eagle3, or",
        ),
        (["--feature-noise", 0.1, "--fc-bias"], "--fc-bias, --feature-noise have no effect with EAGLE-3; use"),
        (["--method", "eagle1", "--init-from"], "but .* is a draft of eagle3"),
    ],
)
def test_methods_and_flags_that_do_not_go_together(made, draft, flags, reason, fledge, tmp_path):
    words = ["train", "--target", made / "target", "--data", made / "chats.jsonl", "--out", tmp_path / "run"]
    went = fledge(*words, "--max-length", 64, *flags, *([draft] if flags[-1] == "--init-from" else []))
    assert went.code == 2 and re.search(reason, went.err), went.err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--steps", 0], "--steps 0: it must be at least 1"),
        (["--rows-per-step", 10**9], "--rows-per-step 1000000000: it must be at least 1 and at most 65536"),
        (["--epochs", 0], "--epochs 0.0: it must be above 0"),
        (["--lr", -0.1], "--lr -0.1: it must be above 0"),
        (["--lr", "nan"], "--lr nan: it must be above 0"),
        (["--warmup", 5], "--warmup 5.0: it must be at least 0 and at most 1"),
        (["--save-every", 0], "--save-every 0: it must be at least 1"),
        (["--layers", 0], "--layers 0: it must be at least 1"),
        (["--max-length", 0], "--max-length 0: it must be at least 3"),
        (["--max-length", 5000], "more than the target's context; give 512 or less"),
        (["--device", "foo"], "'foo' is not a device"),
        (["--device", "mps"], "fledge runs on CPUs and CUDA GPUs, not on mps"),
        (["--seed", 2**64], "--seed 18446744073709551616: it must be at least 0 and at most 18446744073709551615"),
        (["--seed", -1], "--seed -1: it must be at least 0"),
        (["--lr", 10**400], "--lr inf: it must be above 0"),
        (["--aux-layers", "1,4,4"], "--aux-layers 1,4,4 contains a layer twice"),
        (["--draft-vocab", 1], "--draft-vocab 1: it must be at least 2"),
        (["--eval-every", 2, "--data", "few.jsonl"], "--eval-every needs held-out prompts"),
        (["--eval-tokens", 600], "--eval-tokens 600 leaves no room for a prompt in the target's context of 512 tokens"),
        (["--eval-prompts", "nowhere.jsonl"], "--eval-prompts nowhere.jsonl does not exist"),
        (["--out", "few.jsonl"], "is a file; choose another name"),
        (["--out", "few.jsonl/run"], "few.jsonl is not a directory"),
        (["--init-from", "draft", "--layers", 2, "--qk-norm"], "vocabulary and shape; leave --layers, --qk-norm out"),
        (["--init-from", "draft", "--target", "other"], "does not fit .*it was trained with another tokenizer"),
    ],
)
def test_options_that_make_no_sense_train_nothing(made, draft, flags, reason, fledge, tmp_path):
    few = tiny_chats(tmp_path / "few.jsonl", 20)
    other = shutil.copytree(made / "target", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["Q"], words["S"] = words["S"], words["Q"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    at = {"few.jsonl": few, "few.jsonl/run": few / "run", "draft": draft, "other": other}
    words = {"--target": made / "target", "--data": few, "--out": tmp_path / "run", "--max-length": 64, "--steps": 1}
    words |= {"--device": "cpu"}
    pairs = list(zip(flags[::2], flags[1::2], strict=False)) if "--qk-norm" not in flags else [("--init-from", draft)]
    words |= {flag: at.get(value, value) for flag, value in pairs}
    more = ["--layers", 2, "--qk-norm"] if "--qk-norm" in flags else []
    went = fledge("train", *(w for pair in words.items() for w in pair), *more)
    assert went.code == 2 and re.search(reason, went.err), went.err
    assert not (tmp_path / "run").exists() and len(few.read_text().splitlines()) == 20


def bare_target(directory, **config):
    """Makes a directory with a target, chats and prompts; returns the paths of the target and the chats."""
    directory.mkdir(exist_ok=True)
    target = tiny_target_directory(directory, **config)
    (directory / "prompts.jsonl").write_text('{"prompt": "the young bird"}\n')
    return target, tiny_chats(directory / "chats.jsonl", 20)


@pytest.mark.parametrize("layers", range(2, 7))
def test_a_shallow_target_needs_no_option(layers, fledge, tmp_path):
    """A target of 2 to 6 layers is trained by default: its draft lists the layers it reads, is trained further and
    decodes."""
    target, chats = bare_target(tmp_path, num_hidden_layers=layers)
    words = ["train", "--target", target, "--data", chats, *SAME_SHAPE, "--eval-tokens", 2]
    went = fledge(*words, "--out", tmp_path / "run")
    assert went.code == 0, went.err
    draft = tmp_path / "run" / "draft"
    config = json.loads((draft / "config.json").read_text())
    read = config["eagle_aux_hidden_state_layer_ids"]
    assert len(set(read)) == 3 and read == sorted(read) and set(read) <= set(range(layers + 1))
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in read]
    shown = fledge("inspect", draft)
    assert shown.code == 0 and ("it cannot read the output of the target's last layer" in shown.out) == (layers == 2)
    went = fledge(*words, "--out", tmp_path / "more", "--init-from", draft)
    assert went.code == 0, went.err
    assert json.loads((tmp_path / "more" / "draft" / "config.json").read_text())["fledge"]["aux_layers"] == read
    asked = ["generate", "--target", target, "--prompt", "the young bird", "--max-new-tokens", 16]
    assert fledge(*asked, "--draft", tmp_path / "more" / "draft").out == fledge(*asked).out


def test_a_one_layer_target_is_refused_with_a_method_that_works(fledge, tmp_path):
    target, chats = bare_target(tmp_path, num_hidden_layers=1)
    words = ["train", "--target", target, "--data", chats, "--out", tmp_path / "run", *SAME_SHAPE, "--eval-tokens", 2]
    refused = fledge(*words)
    cure = re.search(r"use fledge train (--method eagle1)", refused.err)
    assert refused.code == 2 and cure and not (tmp_path / "run").exists(), refused.err
    went = fledge(*words, *cure[1].split())
    assert went.code == 0, went.err
    asked = ["generate", "--target", target, "--prompt", "the young bird", "--max-new-tokens", 16]
    assert fledge(*asked, "--draft", tmp_path / "run" / "draft").out == fledge(*asked).out


def test_a_draft_that_does_not_list_a_shallow_targets_layers(fledge, tmp_path):
    target, chats = bare_target(tmp_path, num_hidden_layers=4)
    words = ["train", "--target", target, "--data", chats, "--out", tmp_path / "run", *SAME_SHAPE, "--eval-tokens", 2]
    assert fledge(*words).code == 0
    file = tmp_path / "run" / "draft" / "config.json"
    config = json.loads(file.read_text())
    read = config.pop("eagle_aux_hidden_state_layer_ids")
    del config["eagle_config"], config["fledge"]["aux_layers"]
    file.write_text(json.dumps(config))
    asked = ["generate", "--target", target, "--prompt", "the bird", "--max-new-tokens", 8]
    refused = fledge(*asked, "--draft", file.parent)
    cure = re.search(r"too few for the engines' default; list them as (\w+)", refused.err)
    assert refused.code == 2 and cure, refused.err
    file.write_text(json.dumps(config | {cure[1]: read}))
    assert fledge(*asked, "--draft", file.parent).out == fledge(*asked).out


@pytest.mark.parametrize("context", [64, 300])
def test_the_readmes_commands_on_a_target_of_short_context(context, fledge, tmp_path):
    """Default lengths follow the target's context; a given length that is too long is refused with the limit."""
    target, chats = bare_target(tmp_path, max_position_embeddings=context)
    words = ["train", "--target", target, "--data", chats, "--out", tmp_path / "run", "--steps", 1]
    refused = fledge(*words, "--max-length", context + 1)
    cure = re.search(rf"--max-length {context + 1} is more than the target's context; give (\d+) or less", refused.err)
    assert refused.code == 2 and cure, refused.err
    given = fledge(*words[:5], "--out", tmp_path / "given", "--steps", 1, "--max-length", cure[1])
    assert given.code == 0, given.err
    went = fledge(*words)
    assert went.code == 0, went.err
    settled = recipe_of(tmp_path / "run")["settled"]
    assert settled["max_length"] == context and settled["eval_tokens"] == min(64, context // 2)
    draft = tmp_path / "run" / "draft"
    assert json.loads((draft / "config.json").read_text())["fledge"]["max_length"] == context
    asked = "generate", "--target", target, "--prompt", "Hello"
    said = fledge(*asked, "--draft", draft, "--stats")
    assert said.code == 0 and said.out == fledge(*asked).out, said.err
    record = fledge("eval", "--target", target, "--draft", draft, "--prompts", tmp_path / "prompts.jsonl", "--json")
    assert json.loads(record.out)["max_new_tokens"] == min(128, context // 2)
    (tmp_path / "short.jsonl").write_text('{"messages": [{"role": "user", "content": "fly"}]}\n')
    own = fledge("regenerate", "--target", target, "--data", tmp_path / "short.jsonl", "--out", tmp_path / "own.jsonl")
    assert own.code == 0, own.err
    (row,) = rows_of(tmp_path / "own.jsonl")
    assert row["messages"][0]["content"] == "fly" and row["messages"][1]["role"] == "assistant"


def test_drafts_stay_within_a_table_of_positions(fledge, tmp_path, monkeypatch):
    """With a table of positions, drafted tokens need positions within it too: training refuses too long prompts before
    its first step, and the defaults leave enough room."""
    table = property(lambda self: False, lambda self, found: None)  # whatever is found when a target is made
    monkeypatch.setattr(TransformersTarget, "rotary", table, raising=False)
    target, chats = bare_target(tmp_path, max_position_embeddings=64)
    words = ["train", "--target", target, "--data", chats, "--out", tmp_path / "run", *SAME_SHAPE, "--eval-tokens", 30]
    long = {"prompt": load_target(target).tokenizer.decode([9] * 33)}
    (tmp_path / "long.jsonl").write_text(json.dumps(long) + "\n")
    refused = fledge(*words, "--eval-prompts", tmp_path / "long.jsonl")
    assert refused.code == 2 and "has a prompt of over 31 tokens" in refused.err, refused.err
    assert not (tmp_path / "run").exists()
    went = fledge(*words, "--eval-prompts", tmp_path / "prompts.jsonl")
    assert went.code == 0, went.err
    draft = tmp_path / "run" / "draft"
    asked = ["generate", "--target", target, "--prompt", "the young bird"]
    together, alone = fledge(*asked, "--draft", draft), fledge(*asked)
    assert together.code == 0 and alone.out.startswith(together.out.removesuffix("\n")), together.err


def test_a_document_is_no_longer_than_a_row(made, fledge, tmp_path):
    few = tiny_chats(tmp_path / "few.jsonl", 20)
    words = ["train", "--target", made / "target", "--data", few, "--out", tmp_path / "run", "--steps", 1]
    went = fledge(*words, "--row-length", 100)
    assert went.code == 0, went.err
    assert recipe_of(tmp_path / "run")["settled"]["max_length"] == 100


def test_resuming_takes_no_other_options(made, draft, fledge):
    went = fledge("train", "--resume", made / "run", "--steps", 9, "--lr", 0.5)
    assert went.code == 2 and "leave --steps, --lr out" in went.err
    for same in (["--steps", 3], ["--epochs", 1.0], ["--out", "draft-run"]):  # values of this run, and defaults
        went = fledge("train", "--resume", made / "run", *same)
        assert went.code == 2 and f"leave {same[0]} out" in went.err, went.err


def test_init_from_refuses_a_shape_that_is_the_default(made, draft, fledge, tmp_path):
    words = ["train", "--target", made / "target", "--data", made / "chats.jsonl", "--out", tmp_path / "run"]
    went = fledge(*words, "--max-length", 64, "--init-from", draft, "--layers", 1)
    assert went.code == 2 and "--layers has no effect with --init-from" in went.err, went.err


def test_a_row_is_at_most_as_long_as_the_data(made, fledge, tmp_path, monkeypatch):
    few = tiny_chats(tmp_path / "few.jsonl", 20)
    words = ["train", "--target", made / "target", "--data", few, "--max-length", 64, "--steps", 2, "--device", "cpu"]
    went = fledge(*words, "--out", tmp_path / "run", "--row-length", 10**9)
    held = int(re.search(r"documents, ([\d,]+) tokens", went.err)[1].replace(",", ""))
    assert went.code == 0 and f"2 steps of 1 x {held:,} tokens" in went.err, went.err
    assert f"--row-length 1,000,000,000 is more than the {held:,} tokens of the data" in went.err
    monkeypatch.setattr("fledge.train.setup.data.total_memory", lambda device: 400_000)
    went = fledge(*words, "--out", tmp_path / "more", "--row-length", 10**9)
    shorter = int(re.search(r"lower it to about ([\d,]+) or less", went.err)[1].replace(",", ""))
    assert went.code == 2 and f"--row-length {held:,}: " in went.err and not (tmp_path / "more").exists()
    assert fledge(*words, "--out", tmp_path / "more", "--row-length", shorter).code == 0
    assert len(metrics_of(tmp_path / "more")) == 2


def test_held_out_records_are_counted(made, fledge, tmp_path):
    chats = (made / "chats.jsonl").read_text()
    (tmp_path / "twice.jsonl").write_text(2 * chats)
    words = ["--target", made / "target", "--data", tmp_path / "twice.jsonl", *TRAIN, "--eval-tokens", 2]
    went = fledge("train", *words, "--out", tmp_path / "run")
    copies = int(
        re.search(r"^16 of 400 records are held out .* (\d+) more with the same content are", went.err, re.M)[1]
    )
    assert went.code == 0 and f"\n{400 - 16 - copies} records, " in went.err, went.err
    said = [{r: f"{i} " + "bird " * (3 if i % 2 else 600) for r in ("user", "assistant")} for i in range(160)]
    rows = [{"messages": [{"role": r, "content": c} for r, c in each.items()]} for each in said]
    write_rows(tmp_path / "long.jsonl", rows)
    words[3] = tmp_path / "long.jsonl"
    went = fledge("train", *words, "--out", tmp_path / "run2")
    (tmp_path / "one.jsonl").write_text(200 * (json.dumps(rows[1]) + "\n"))
    words[3] = tmp_path / "one.jsonl"
    same = fledge("train", *words, "--out", tmp_path / "run3")
    assert same.code == 0 and "200 records" in same.err and "held out" not in same.err, same.err
    assert re.search(r"τ is measured on \d+ of the 16 held-out records; the others are too long", went.err), went.err


def test_one_token_has_no_tau(made, fledge, tmp_path, monkeypatch):
    """An answer of one token, requested or not, has no round, so there is no τ and the last draft is saved."""
    words = ["train", "--target", made / "target", "--data", made / "chats.jsonl", *TRAIN, "--eval-every", 1]
    for name, tokens, reason in (("a", 1, "an answer of one token needs no draft"), ("b", 8, "there is no decoded τ")):
        monkeypatch.setattr(
            "fledge.measure.metrics.tau", lambda traces: pytest.fail("τ was computed without any round")
        )
        with monkeypatch.context() as m:
            m.setattr("fledge.decode.request.Request.over", property(lambda self: True, lambda self, over: None))
            went = fledge(*words, "--out", tmp_path / name, "--eval-tokens", tokens)
        assert went.code == 0 and reason in went.err and "τ 0.0" not in went.err, went.err
        lines = metrics_of(tmp_path / name)
        assert len(lines) == 3 and not any("eval_tau" in m for m in lines)
        saved, last = (load_file(tmp_path / name / d / "model.safetensors") for d in ("draft", "checkpoint"))
        assert all(torch.equal(saved[n], last[n]) for n in last)


def test_a_small_draft_vocabulary_warns_that_the_loss_covers_only_its_tokens(made, fledge, tmp_path):
    words = ["train", "--target", made / "target", "--data", made / "chats.jsonl", *SAME_SHAPE, "--eval-tokens", 2]
    went = fledge(*words, "--draft-vocab", 2, "--out", tmp_path / "run")
    assert went.code == 0 and "the loss covers only these tokens" in went.err and "loss 0.000" not in went.err, went.err


def test_regenerate_reports_progress_after_each_answer(made, tmp_path):
    """Progress is counted per answer, not once for all 64 records of a batch."""
    from contextlib import contextmanager

    from fledge.commands.regenerate import run
    from fledge.regenerate.options import RegenerateOptions

    out, seen = tmp_path / "own.jsonl", []

    class Progress:
        @contextmanager
        def count(self, what, total, done=0, unit=None):
            seen.append((total, done))
            yield lambda: seen.append(out.stat().st_size)

    options = RegenerateOptions(
        target=str(made / "target"), data=[str(made / "chats.jsonl")], out=str(out), limit=8, max_new_tokens=4
    )
    run(options, lambda line: None, Progress())
    assert seen == [(16, 0)] + 16 * [0], "each record has two answers, which are counted before the file is written"
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:3]))
    seen.clear()
    run(options, lambda line: None, Progress())
    assert seen[0] == (16, 6) and len(seen) == 11


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--draft-vocab", 900], "has 900 tokens and the target's only"),
        (["--fc-norm", "--norm-before-fc"], "exclude each other"),
        (["--method", "eagle1", "--norm-output"], "with EAGLE-1; use --method eagle3, or leave"),
        (["--method", "peagle"], "nowhere.jsonl does not exist"),
    ],
)
def test_a_draft_shape_that_cannot_exist_is_refused_before_the_data_is_read(made, flags, reason, fledge, tmp_path):
    words = "--target", made / "target", "--data", tmp_path / "nowhere.jsonl", "--out", tmp_path / "run"
    went = fledge("train", *words, "--max-length", 64, *flags)
    assert went.code == 2 and reason in went.err, went.err


def test_init_from_keeps_the_depth_and_reports_the_coverage(made, draft, fledge, tmp_path):
    words = "--max-length 64 --row-length 128 --steps 1 --device cpu".split()
    (tmp_path / "few.jsonl").write_text("".join((made / "chats.jsonl").read_text().splitlines(keepends=True)[:20]))
    went = fledge("train", "--target", made / "target", "--data", tmp_path / "few.jsonl", "--out", tmp_path / "more",
                  "--init-from", draft, *words)  # fmt: skip
    assert went.code == 0, went.err
    ours = json.loads((tmp_path / "more" / "draft" / "config.json").read_text())["fledge"]
    assert ours["depth"] == 3 and 0 < ours["coverage"] <= 1 and f"{ours['coverage']:.2%}" in went.err


def test_noise_and_dropping_are_applied_and_repeatable(made, fledge, tmp_path, monkeypatch):
    """EAGLE-1's noise changes the loss, P-EAGLE's depths have equal weights, and both repeat with the same seed."""
    planned, schedules = run_setup.make_schedule, []
    monkeypatch.setattr(run_setup, "make_schedule", lambda *given: schedules.append(planned(*given)) or schedules[-1])

    def losses(name: str, *flags: object) -> list[float]:
        went = fledge("train", "--target", made / "target", "--data", made / "chats.jsonl", "--out", tmp_path / name,
                      *SAME_SHAPE, "--eval-tokens", 1, *flags)  # fmt: skip
        assert went.code == 0, went.err
        return [m["loss"] for m in metrics_of(tmp_path / name)]

    noisy = losses("a", "--method", "eagle1", "--feature-noise", 0.5)
    assert noisy == losses("b", "--method", "eagle1", "--feature-noise", 0.5) != losses("c", "--method", "eagle1")
    dropped = losses("d", "--method", "peagle")
    assert dropped == losses("e", "--method", "peagle")
    assert [s.objective.gamma for s in schedules] == [1.0] * 5


def test_generate_with_a_draft_prints_what_the_target_alone_prints(made, draft, fledge):
    words = ["generate", "--target", made / "target", "--prompt", "the young bird", "--max-new-tokens", 24]
    alone, together = fledge(*words), fledge(*words, "--draft", draft, "--stats")
    assert alone.code == together.code == 0, together.err
    assert alone.out == together.out and "rounds" in together.err
    sampled = ["--temperature", 1.0, "--top-p", 0.9, "--seed", 5]
    tree = ["--draft", draft, "--draft-mode", "tree", "--tree-nodes", 12, "--tree-width", 3]
    assert fledge(*words, *sampled).out == fledge(*words, *sampled, "--draft", draft).out
    assert fledge(*words, *tree).out == alone.out
    assert fledge(*words, *tree, "--draft-cache", "unstable").out == alone.out
    assert "neither stable nor unstable" in fledge(*words, *tree, "--draft-cache", "shaky").err
    assert fledge(*words, *sampled, *tree).out == fledge(*words, *sampled).out


def test_a_full_gpu_gives_a_one_sentence_error(made, fledge, monkeypatch):
    """Other RuntimeErrors of torch are raised as they are."""

    def fails(error: RuntimeError):
        def run(options, say):
            raise error

        monkeypatch.setattr(generate_job, "run", run)
        return fledge("generate", "--target", made / "target", "--prompt", "the bird")

    full = fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert full.code == 2 and full.err.startswith("fledge: not enough GPU memory: CUDA out of")
    with pytest.raises(RuntimeError, match="a bug"):
        fails(RuntimeError("a bug"))


def test_no_held_out_chat_fits(made, fledge, tmp_path):
    words = "--data", tiny_chats(tmp_path / "many.jsonl", 200), "--out", tmp_path / "run", "--eval-tokens", 511
    went = fledge("train", "--target", made / "target", *words, *SAME_SHAPE)
    assert went.code == 0 and "no held-out chat fits in the target's context with --eval-tokens" in went.err, went.err
    assert not any("eval_tau" in m for m in metrics_of(tmp_path / "run"))


def test_a_held_out_record_that_the_template_refuses(made, fledge, tmp_path):
    """The command fails as for any other record; with --skip-bad the record is left out."""
    target = shutil.copytree(made / "target", tmp_path / "target")
    refusal = "{% for m in messages %}{% if 'nest' in m['content'] %}{{ raise_exception('no nests') }}{% endif %}"
    template = (target / "chat_template.jinja").read_text()
    (target / "chat_template.jinja").write_text(refusal + "{% endfor %}" + template)
    rows = rows_of(made / "chats.jsonl")
    for i, row in enumerate(rows):
        row["messages"][0]["content"] += f" {i}" + " nest" * (i % 2)
    write_rows(tmp_path / "chats.jsonl", rows)
    words = ["train", "--target", target, "--data", tmp_path / "chats.jsonl", *TRAIN, "--eval-tokens", 4]
    refused = fledge(*words, "--out", tmp_path / "a")
    assert refused.code == 2 and "no nests" in refused.err
    went = fledge(*words, "--out", tmp_path / "b", "--skip-bad")
    assert went.code == 0 and "of the 16 held-out records; the others are too long or refused" in went.err, went.err


def test_eval_writes_a_whole_record(made, draft, fledge, tmp_path):
    words = [
        "eval", "--target", made / "target", "--draft", draft, "--prompts", made / "prompts.jsonl",
        "--max-new-tokens", 16, "--out", tmp_path / "r.json",
    ]  # fmt: skip
    shown = fledge(*words, "--json")
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    assert record == json.loads((tmp_path / "r.json").read_text())
    assert record["prompts"] == record["identical"] == 3  # two turns and one
    assert record["different"] == 0 and len(record["alpha"]) == 3
    chains = load(made / "target", draft)
    asked = [[{"role": "user", "content": "the young bird"}], [{"role": "user", "content": "it can fly"}]]
    answer = chains.generate(asked[0], max_new_tokens=16, speculate=False).text
    answered = {"role": "assistant", "content": answer}
    asked.insert(1, [*asked[0], answered, {"role": "user", "content": "tries again"}])
    asked = [chains.reader.template.prompt_ids(chat) for chat in asked]
    assert record["tau"] == tau_by_definition(chains, asked, 16) == pytest.approx(tau_of_alpha(record["alpha"]))
    assert record["speedup"] == pytest.approx(record["tokens_per_s"] / record["baseline_tokens_per_s"])
    assert record["template_kwargs"] == {"enable_thinking": False}
    for key in ("tokens_per_s", "baseline_tokens_per_s", "speedup", "round", "environment", "repeated_8grams"):
        assert record[key] is not None, key
    table = fledge(*words)
    assert table.code == 0 and "identical" in table.out
    for speedup, disturbed in ((record["tau"] + 0.1, True), (record["tau"] - 0.1, False)):
        assert any("above τ is not" in line for line in notices(record | {"speedup": speedup})) == disturbed
    paused = record | {"depth": "auto", "paused": 0.5, "pause_reason": "a round takes too long"}
    assert "Speculation paused in 50% of the rounds: a round takes too long." in figure_lines(paused)
    assert "Speculation paused in 50% of the rounds." in figure_lines(paused | {"pause_reason": ""})
    trees = json.loads(fledge(*words, "--json", "--draft-mode", "tree", "--tree-nodes", 20, "--tree-width", 4).out)
    assert trees["identical"] == 3 and trees["tau"] >= record["tau"]
    assert trees["tau"] == tau_by_definition(load(made / "target", draft, mode="tree", nodes=20, width=4), asked, 16)
    assert (trees["mode"], trees["nodes"], trees["width"], trees["depth"]) == ("tree", 20, 4, 3)
    batched = json.loads(fledge(*words, "--json", "--batch", 3).out)
    assert batched["identical"] == 3 and batched["batch"] == 3 and "baseline_over_transformers" not in batched
    assert (batched["tau"], batched["alpha"]) == (record["tau"], record["alpha"])
    assert "--batch 0: it must be at least 1" in fledge(*words, "--batch", 0).err
    both = ["--draft-mode", "chain", "--draft-mode", "tree", "--prompts", made / "more.jsonl"]
    (made / "more.jsonl").write_text((made / "prompts.jsonl").read_text().splitlines()[1] + "\n")
    several = json.loads(fledge(*words, "--json", *both).out)
    assert list(several) == ["chain prompts", "tree prompts", "chain more", "tree more"]
    assert len({several[f"{mode} prompts"]["baseline_tokens_per_s"] for mode in ("chain", "tree")}) == 1
    assert several["chain prompts"]["tau"] == record["tau"] and several["tree more"]["mode"] == "tree"
    other = shutil.copytree(draft, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["fledge"]["template_kwargs"] = {"enable_thinking": True}
    (other / "config.json").write_text(json.dumps(config))
    (tmp_path / "raw.jsonl").write_text('{"prompt": "the young bird"}\n')
    raw = ["eval", "--target", made / "target", "--draft", draft, "--draft", other, "--prompts", tmp_path / "raw.jsonl"]
    assert len(json.loads(fledge(*raw, "--max-new-tokens", 4, "--json").out)) == 2, "raw text uses no template"
    for more, reason in (
        (["--draft", other], "different template arguments"),
        (["--draft-mode", "chain", "--draft-mode", "bush"], "none of chain, tree"),
        (["--draft-mode", "chain", "--draft-mode", "parallel"], "needs a draft of P-EAGLE"),
        (["--draft-mode", "chain", "--draft-mode", "tree", "--confidence", 0.3], "leave it out"),
        (["--draft", tmp_path / "none"], "holds no config.json"),
        (["--prompts", made / "prompts.jsonl"], "two of them would have the same name"),
    ):
        went = fledge(*words, *more, "--out", tmp_path / "nothing.json")
        assert went.code == 2 and reason in went.err and not (tmp_path / "nothing.json").exists(), went.err
    refused = fledge(*words, "--draft-mode", "bush")
    assert refused.code == 2 and "none of chain, tree" in refused.err


def test_a_target_that_is_not_computed_natively_is_named_with_the_reason(made, draft, fledge, tmp_path):
    """`generate` and `eval` say so once on standard error, unless --target-impl asked for it; the record says it."""
    other = shutil.copytree(made / "target", tmp_path / "other")
    reconfigure(other, hidden_act="gelu")
    reason = "transformers, since its activation is gelu, and the native MLP computes silu"
    notice = f"{other} is computed by {reason}\n"
    generate = ["generate", "--prompt", "the bird", "--max-new-tokens", 4, "--target"]
    measure = ["eval", "--draft", draft, "--draft-mode", "chain", "--draft-mode", "tree", "--depth", 2,
               "--prompts", made / "prompts.jsonl", "--max-new-tokens", 4, "--target"]  # fmt: skip
    for words in (generate, measure):
        said = fledge(*words, other)
        assert said.code == 0 and said.err.count(notice) == 1, said.err
        for more in ([other, "--target-impl", "transformers"], [made / "target"]):
            silent = fledge(*words, *more)
            assert silent.code == 0 and "is computed by" not in silent.err, silent.err
        refused = fledge(*words, other, "--target-impl", "native")
        assert refused.code == 2 and refused.err.count("\n") == 1
        assert "cannot run natively: its activation is gelu" in refused.err and "use the imp" in refused.err
        unknown = fledge(*words, other, "--target-impl", "torch")
        assert unknown.code == 2 and "'torch' is none of auto, native, transformers" in unknown.err
    for target, impl, found in (
        (other, "auto", reason), (made / "target", "auto", "native"), (made / "target", "transformers", "transformers")
    ):  # fmt: skip
        record = fledge(*measure, target, "--target-impl", impl, "--json").out
        assert {r["target_implementation"] for r in json.loads(record).values()} == {found}


def test_eval_names_the_prompt_that_does_not_fit(made, draft, fledge, tmp_path):
    """A prompt that is too long is named by its line before anything is decoded; a later turn by its turn number."""
    words = ["eval", "--target", made / "target", "--draft", draft, "--max-new-tokens", 16]
    for line, where in (
        ({"turns": ["the young bird " * 400]}, "line 2: the prompt has"),
        ({"turns": ["the young bird", "it can fly " * 400]}, "line 2, turn 2: the prompt has"),
    ):
        write_rows(tmp_path / "p.jsonl", [{"turns": ["it can fly"]}, line])
        went = fledge(*words, "--prompts", tmp_path / "p.jsonl")
        assert went.code == 2 and f"p.jsonl, {where}" in went.err and "has a context of" in went.err, went.err


def test_eval_compares_sampled_outputs_only_where_they_must_be_equal(made, draft, fledge):
    words = [
        "eval", "--target", made / "target", "--draft", draft, "--prompts", made / "prompts.jsonl", "--json",
        "--max-new-tokens", 12, "--temperature", 1,
    ]  # fmt: skip
    same = json.loads(fledge(*words).out)
    assert same["identical"] == same["prompts"]
    assert json.loads(fledge(*words, "--draft-sampling", "sample").out)["identical"] is None


def test_eval_fails_when_outputs_differ(made, draft, fledge, monkeypatch):
    """A verification that commits a wrong token is found out, and is no near tie."""
    from fledge.decode import verify

    def wrong(rule, tree, *given):
        verdict = rule(tree, *given)
        if tree.levels:  # something was drafted
            verdict.token_BR[0, verdict.count_B - 1] += 1
            verdict.token_BR.remainder_(400)
        return verdict

    replace_function(monkeypatch, verify, "accept_by_match", wrong)
    words = ["--prompts", made / "prompts.jsonl", "--max-new-tokens", 12, "--json"]
    found = fledge("eval", "--target", made / "target", "--draft", draft, *words)
    assert found.code == 2 and "changed the output" in found.err


RECORD = {
    "tau": 2.0,
    "environment": {k: None for k in "device dtype cores threads python torch transformers commit".split()},
}


def test_eval_out_replaces_only_earlier_records(made, draft, fledge, tmp_path):
    """Other files are refused before any work and not changed; neighbouring files stay; links are followed."""
    config = shutil.copy(draft / "config.json", tmp_path / "config.json")
    prompts = shutil.copy(made / "prompts.jsonl", tmp_path / "prompts.jsonl")
    mine = {
        "noted.json": json.dumps({"a": RECORD, "note": "mine"}), "environment.json": '{"environment": {"home": "/"}}',
        "list.json": json.dumps([RECORD]), "nothing.json": "{}", "deep.json": "[" * 5000, "bytes": "\x00\x01",
    }  # fmt: skip
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.json").symlink_to("noted.json")
    (tmp_path / "nowhere.json").symlink_to("none.json")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.exists()}
    words = ["eval", "--target", tmp_path / "none", "--draft", draft, "--prompts", prompts, "--out"]
    for name in (*mine, "config.json", "prompts.jsonl", "link.json"):
        went = fledge(*words, tmp_path / name)
        assert went.code == 2 and f"{name} already exists and is not a record that fledge wrote" in went.err, went.err
    for path, reason in (
        (tmp_path / "nowhere.json", "is a broken symbolic link"),
        ("/dev/null", "is a device, pipe or socket"),
        (tmp_path, "is a directory"),
    ):
        went = fledge(*words, path)
        assert went.code == 2 and f"{path} {reason}" in went.err, went.err
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.exists()} == before
    assert config.exists() and "target" in fledge(*words, tmp_path / "new.json").err, "a free path is accepted"

    (tmp_path / "empty.json").write_text("")
    (tmp_path / "one.json").write_text(json.dumps(RECORD))
    (tmp_path / "several.json").write_text(json.dumps({"a": RECORD, "b": {"c": RECORD}}))
    (tmp_path / "to-one.json").symlink_to("one.json")
    for name in ("empty.json", "one.json", "several.json", "to-one.json"):
        (tmp_path / f"{name}.new").write_text("mine")
        asked = "eval", "--target", made / "target", "--draft", draft, "--prompts", prompts, "--max-new-tokens", 4
        went = fledge(*asked, "--out", tmp_path / name)
        assert went.code == 0 and json.loads((tmp_path / name).read_text())["prompts"] == 3, went.err
        assert (tmp_path / f"{name}.new").read_text() == "mine"
    assert (tmp_path / "to-one.json").is_symlink() and not list(tmp_path.glob(".fledge*"))


def test_committed_records_are_recognised_as_records():
    kept = sorted((Path(__file__).parents[1] / "bench" / "results").glob("*.json"))
    unknown = [file.name for file in kept if not is_record(json.loads(file.read_text()))]
    assert len(kept) > 10 and unknown == ["demo.json", "demo_quiet.json", "demo_xeon.json"]


def test_eval_prints_its_figures_when_the_disk_is_full(made, draft, fledge, tmp_path, monkeypatch):
    words = ["eval", "--target", made / "target", "--draft", draft, "--prompts", made / "prompts.jsonl"]
    words += ["--max-new-tokens", 4, "--out", tmp_path / "r.json"]

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "more.jsonl").write_text('{"turns": ["it can fly"]}\n')
    monkeypatch.setattr(os, "fsync", full)
    for more in ([], ["--prompts", tmp_path / "more.jsonl"]):
        for way, shown in ((["--json"], '"tau"'), ([], "τ")):
            went = fledge(*words, *more, *way)
            assert went.code == 2 and shown in went.out, went
            assert "no space to write" in went.err and "r.json" in went.err and "free some disk space" in went.err
    assert list(tmp_path.iterdir()) == [tmp_path / "more.jsonl"]


def closed_pipe(monkeypatch, name: str) -> None:
    """Replaces a stream by a pipe that nobody reads, as after `| true`."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, name, os.fdopen(writer, "w"))


def test_a_closed_pipe_ends_commands_quietly(made, draft, fledge, tmp_path, monkeypatch):
    """The exit code is that of SIGPIPE, and files are still written."""
    pair = "--target", made / "target", "--draft", draft, "--max-new-tokens", 4
    asked = "eval", *pair, "--prompts", made / "prompts.jsonl"
    for words in (
        ["inspect", draft], ["generate", *pair, "--prompt", "bird"], [*asked, "--out", tmp_path / "a.json"],
        [*asked, "--json", "--out", tmp_path / "b.json"],
    ):  # fmt: skip
        with monkeypatch.context() as closed:
            closed_pipe(closed, "stdout")
            went = fledge(*words)
            sys.stdout.close()  # flushes, as Python does at its end
        told = [line for line in went.err.splitlines() if not line.startswith("answers to prompts")]
        assert (went.code, told) == (141, []), words
    assert json.loads((tmp_path / "a.json").read_text())["prompts"] == 3
    assert json.loads((tmp_path / "b.json").read_text())["prompts"] == 3


def test_commands_run_with_closed_standard_streams(made, draft, fledge, monkeypatch):
    """As in a shell with `>&- 2>&- <&-`."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    said, generate = [], generate_job.run
    monkeypatch.setattr(generate_job, "run", lambda *given: said.append(generate(*given)))
    assert fledge("generate", "--target", made / "target", "--prompt", "bird", "--max-new-tokens", 4).code == 0
    assert len(said) == 1 and fledge("inspect", draft / "none").code == 2


def test_a_full_standard_output_gives_a_one_sentence_error(made, draft, fledge, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        went = fledge("inspect", draft)
        monkeypatch.undo()
    assert went.code == 2 and went.err == "fledge: [Errno 28] No space left on device\n"


def test_regenerate_refuses_a_file_that_another_process_writes(made, fledge, tmp_path):
    out = tmp_path / "own.jsonl"
    (tmp_path / "link.jsonl").symlink_to(out)
    words = ["regenerate", "--target", made / "target", "--data", made / "chats.jsonl", "--limit", 2]
    words += ["--max-new-tokens", 4, "--out"]
    out.write_text("")
    with exclusive_lock(sibling_path(out, "lock"), str(out)):
        for name in (out, tmp_path / "link.jsonl"):
            went = fledge(*words, name)
            assert went.code == 2 and f"{name} is in use: process {os.getpid()} on" in went.err, went.err
    assert out.read_text() == ""
    assert fledge(*words, tmp_path / "link.jsonl").code == 0
    assert len(out.read_text().splitlines()) == 2 and sorted(tmp_path.iterdir()) == [tmp_path / "link.jsonl", out]


def test_regenerate_says_how_to_continue(made, fledge, tmp_path, monkeypatch):
    """After a signal or on a full disk, regenerate names the command that continues, and that command continues."""
    out, ask = tmp_path / "own.jsonl", OwnEngine.ask
    words = ["regenerate", "--target", made / "target", "--data", made / "chats.jsonl", "--limit", 10, "--batch", 1]
    words += ["--max-new-tokens", 4, "--out", out]

    def ending(engine, question):
        if question.index == 4:  # those before it are answered
            os.kill(os.getpid(), signal.SIGTERM)
        ask(engine, question)

    monkeypatch.setattr(OwnEngine, "ask", ending)
    went = fledge(*words)
    said = went.err.replace("\n", " ")
    assert went.code == 130 and f"stopped; run the same command again to continue {out}" in said, went.err
    monkeypatch.undo()
    assert len(out.read_text().splitlines()) == 4 and list(tmp_path.iterdir()) == [out]

    size = out.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 300, before[0][1]))
    try:
        went = fledge(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
    assert (
        went.code == 2 and f"{out} cannot be written: File too large; free some disk space and run the same" in went.err
    )
    assert out.stat().st_size == size + 300
    assert fledge(*words).code == 0 and len(out.read_text().splitlines()) == 10


def test_regenerate_writes_the_targets_answers_and_resumes(made, draft, fledge, tmp_path):
    out = tmp_path / "own.jsonl"
    words = [
        "regenerate", "--target", made / "target", "--data", made / "chats.jsonl", "--limit", 10, "--batch", 4,
        "--max-new-tokens", 8, "--out", out,
    ]  # fmt: skip
    assert fledge(*words).code == 0
    whole = out.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert len(rows) == 10 and [m["role"] for m in rows[0]["messages"]] == ["user", "assistant"] * 2
    out.write_text(whole[: len(whole) // 2])  # as after a kill in the middle of a line
    assert fledge(*words).code == 0
    assert out.read_text() == whole
    alone = fledge("generate", "--target", made / "target", "--prompt", rows[0]["messages"][0]["content"],
                   "--max-new-tokens", 8)  # fmt: skip
    assert alone.out.rstrip("\n") == rows[0]["messages"][1]["content"].rstrip("\n")
    kwargs = ["--template-kwargs", '{"enable_thinking": false}']  # as the draft's chats were rendered
    assert fledge(*words[:-1], tmp_path / "none.jsonl", "--batch", 0).code == 2
    for more in (["--draft", draft, *kwargs], ["--batch", 1]):
        again = tmp_path / "again.jsonl"
        assert fledge(*words[:-1], again, *more).code == 0
        assert [row["messages"] for row in rows_of(again)] == [r["messages"] for r in rows]
        again.unlink()
    sampled = [*words[:-1], tmp_path / "sampled.jsonl", "--temperature", 1]
    assert fledge(*sampled).code == 0
    whole = (tmp_path / "sampled.jsonl").read_text()
    assert whole != out.read_text()
    (tmp_path / "sampled.jsonl").write_text("".join(whole.splitlines(keepends=True)[:3]))
    assert fledge(*sampled).code == 0 and (tmp_path / "sampled.jsonl").read_text() == whole


def test_an_eval_that_is_killed_as_it_writes_leaves_nothing_for_ever(made, draft, fledge, tmp_path):
    """The next one removes the unfinished record, which has texts of the prompts."""
    words = ["eval", "--target", made / "target", "--draft", draft, "--prompts", made / "prompts.jsonl"]
    words += ["--max-new-tokens", 4, "--device", "cpu", "--out", tmp_path / "r.json"]
    kill_as_it_writes("r.json", *words)
    assert len(listing(tmp_path)) == 1
    assert fledge(*words).code == 0 and listing(tmp_path) == ["r.html", "r.json"]


def test_regenerate_does_not_overwrite_files_that_it_did_not_write(made, fledge, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": "the young bird"}]}, {"text": "it can fly"}]
    prompts.write_text("\n".join(map(json.dumps, rows)))  # no line end after the last
    words = ["regenerate", "--target", made / "target", "--data", prompts, "--max-new-tokens", 4, "--out"]
    before = prompts.read_text()
    went = fledge(*words, prompts)
    assert went.code == 2 and "choose another --out" in went.err and prompts.read_text() == before
    out = tmp_path / "own.jsonl"
    assert fledge(*words, out).code == 0
    made_rows = rows_of(out)
    assert [m["role"] for m in made_rows[0]["messages"]] == ["user", "assistant"] and made_rows[1]["text"]
    written = out.read_text()
    out.write_text(written.splitlines(keepends=True)[0])
    for more in (["--temperature", 1], ["--max-new-tokens", 5]):
        went = fledge(*words, out, *more)
        assert went.code == 2 and "was not made from this --data with these options" in went.err
    prompts.write_text(before.replace("young bird", "old bird"))
    assert fledge(*words, out).code == 2
    prompts.write_text(before)
    assert fledge(*words, out).code == 0 and out.read_text() == written
    assert fledge(*words, tmp_path).code == 2
    prompts.write_text('{"text": " "}\n')
    assert "the text is empty" in fledge(*words, tmp_path / "none.jsonl").err
    prompts.write_text(json.dumps({"text": "the bird"}) + "\n" + json.dumps(rows[0]).replace("bird", "bird " * 600))
    went = fledge(*words, tmp_path / "long.jsonl")
    assert went.code == 2 and "line 2" in went.err and "shorten the record" in went.err


def test_prompts_with_unusual_text_are_read_or_refused_with_their_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"turns": ["a\u2028b"]}\n{"turns": ["c"]}\n')
    assert [p.turns for p in read_prompts(file)] == [("a\u2028b",), ("c",)]
    file.write_text('{"turns": ["a"]}\n3\n')
    with pytest.raises(ValueError, match="line 2 is a int, not an object with"):
        read_prompts(file)
    file.write_bytes('{"turns": ["é"]}'.encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_prompts(file)


def test_generate_refuses_options_that_do_not_fit(made, draft, fledge):
    words = ["generate", "--target", made / "target", "--prompt", "the young bird"]
    for more, reason in (
        (["--raw", "--system", "be kind"], "leave --system out"),
        (["--draft", draft, "--draft-mode", "bush"], "none of chain, tree"),
        (["--draft", made / "run"], f"the run's draft is {draft}"),
        (["--draft", draft, "--depth", 0], "--depth 0: it must be at least 1"),
        (["--draft", draft, "--draft-device", "cuda"], "no CUDA device" if not torch.cuda.is_available() else ""),
    ):
        if reason:
            went = fledge(*words, *more)
            assert went.code == 2 and reason in went.err, went.err
    assert "is a draft; the target is" in fledge("generate", "--target", draft, "--prompt", "the").err


def _broken_json(made, tmp_path):
    lines = (made / "chats.jsonl").read_text().splitlines() * 40
    lines[6999] = lines[6999][:-5]
    (tmp_path / "broken.jsonl").write_text("\n".join(lines) + "\n")
    return ["--data", tmp_path / "broken.jsonl"], "line 7000"


def _empty(made, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    return ["--data", tmp_path / "empty.jsonl"], "empty.jsonl is empty"


def _nobody_answers(made, tmp_path):
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "the bird"}]}) + "\n")
    return ["--data", tmp_path / "asked.jsonl"], "no assistant message"


def _vocabulary_too_large(made, tmp_path):
    return ["--data", made / "chats.jsonl", "--draft-vocab", 500], "has 500 tokens and the target's only"


def _truncated_target(made, tmp_path):
    shutil.copytree(made / "target", tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return ["--target", tmp_path / "cut", "--data", made / "chats.jsonl"], "truncated"


def _bad_kwargs(made, tmp_path):
    return ["--data", made / "chats.jsonl", "--template-kwargs", "thinking=no"], "--template-kwargs is not JSON"


def _no_such_file(made, tmp_path):
    return ["--data", tmp_path / "nowhere.jsonl"], "does not exist"


def _no_such_layers(made, tmp_path):
    return ["--data", made / "chats.jsonl", "--aux-layers", "2,4,99"], "layers 0..8"


BAD = [
    _broken_json, _empty, _nobody_answers, _vocabulary_too_large, _truncated_target, _bad_kwargs, _no_such_file,
    _no_such_layers,
]  # fmt: skip


@pytest.mark.parametrize("case", BAD, ids=[case.__name__.strip("_") for case in BAD])
def test_bad_input_gives_an_error_without_a_traceback(made, fledge, tmp_path, case):
    flags, cause = case(made, tmp_path)
    kept = [w for pair in zip(TRAIN[::2], TRAIN[1::2], strict=True) if pair[0] not in flags for w in pair]
    target = [] if "--target" in flags else ["--target", made / "target"]
    ended = fledge("train", *target, "--out", tmp_path / "run", *kept, *flags)
    assert ended.code == 2 and cause in ended.err, ended.err
    assert "Traceback" not in ended.err and not (tmp_path / "run" / "draft").exists()


def test_a_draft_of_another_tokenizer_is_refused(made, draft, fledge, tmp_path):
    from support.targets import tiny_tokenizer

    shutil.copytree(made / "target", tmp_path / "other")
    tokenizer = tiny_tokenizer()
    text = json.loads(tokenizer.backend_tokenizer.to_str())
    names = {name: i for i, name in enumerate(reversed(text["model"]["vocab"]))}
    text["model"]["vocab"] = names
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(text))
    refused = fledge("generate", "--target", tmp_path / "other", "--draft", draft, "--prompt", "the bird")
    assert refused.code == 2 and "another tokenizer" in refused.err


def test_a_prompt_longer_than_the_context_is_refused(made, draft, fledge):
    refused = fledge("generate", "--target", made / "target", "--prompt", "bird " * 600)
    assert refused.code == 2 and refused.err.endswith("has a context of 512 tokens; shorten the prompt\n"), refused.err
    refused = fledge("generate", "--target", made / "target", "--prompt", "bird " * 60, "--max-new-tokens", 500)
    room = int(re.search(r"or generate at most (\d+) new tokens", refused.err)[1])
    fits = fledge("generate", "--target", made / "target", "--prompt", "bird " * 60, "--max-new-tokens", room)
    assert refused.code == 2 and fits.code == 0, fits.err


def test_inspect_names_what_is_wrong(made, draft, fledge, tmp_path):
    shutil.copytree(draft, tmp_path / "bad")
    weights = tmp_path / "bad" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    shown = fledge("inspect", tmp_path / "bad")
    assert shown.code == 1 and "truncated" in shown.out
    fine = fledge("inspect", draft)
    assert fine.code == 0 and "Nothing is wrong" in fine.out and "200 of 400 tokens" in fine.out
    shutil.copytree(draft, tmp_path / "moved")
    reconfigure(tmp_path / "moved", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    shown = fledge("check", "--draft", tmp_path / "moved", "--target", made / "target")
    assert shown.code == 1 and "vLLM (eagle_aux_hidden_state_layer_ids) reads the hidden states" in shown.out


@pytest.mark.parametrize("name", ["ImportError", "PTXASError"])
def test_an_interrupt_that_becomes_an_error(name: str, fledge, monkeypatch) -> None:
    """Libraries make an ImportError of a signal while they are imported, and Triton a PTXASError while it compiles;
    neither is shown. Without a signal, they are errors."""
    error = ImportError if name == "ImportError" else pytest.importorskip("triton.runtime.errors").PTXASError

    def missing() -> None:
        raise error("cannot load module more than once per process")

    def interrupted() -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        missing()

    for app in (missing, interrupted, missing):
        monkeypatch.setattr("fledge.cli.app", app)
        if app is missing:
            with pytest.raises(error):
                fledge()
        else:
            assert fledge() == Ran(130, "", "")


def test_a_target_that_lost_its_template(fledge, tmp_path) -> None:
    """It continues text, as a base model does; a draft that was trained on chats tells that this is a mistake."""
    directory = tiny_target_directory(tmp_path)
    (directory / "chat_template.jinja").unlink()
    draft = tiny_draft(tiny_target())
    save_draft(draft, tmp_path / "base")
    draft.config = replace(draft.config, provenance=replace(draft.config.provenance, template_sha256="0" * 64))
    save_draft(draft, tmp_path / "chats")
    for name, extra, said in (("base", [], False), ("chats", [], True), ("chats", ["--raw"], False)):
        words = ["--target", directory, "--draft", tmp_path / name, "--prompt", "a", "--max-new-tokens", 2, *extra]
        ran = fledge("generate", *words)
        assert ran.code == 0 and ("has no chat template, so the prompt is continued as text" in ran.err) == said


def test_held_out_texts_keep_special_tokens_as_prompts(made, fledge, tmp_path, monkeypatch):
    write_rows(
        tmp_path / "texts.jsonl", [{"text": f"<|im_start|>user\nbird {i} can fly<|im_end|>\n"} for i in range(200)]
    )
    prompts = []
    monkeypatch.setattr(
        "fledge.measure.evaluator.greedy_traces", lambda engine, asked, tokens: prompts.extend(asked) or []
    )
    words = ["--target", made / "target", "--data", tmp_path / "texts.jsonl", *TRAIN, "--eval-tokens", 2]
    went = fledge("train", *words, "--out", tmp_path / "run")
    assert went.code == 0 and prompts, went.err
    assert all(prompt.text.startswith("<|im_start|>user") for prompt in prompts)
