"""`fledge serve`: the commands that start engines with a draft."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.commands import serve
from fledge.drafts.weights import open_draft, save_draft, write_files
from fledge.engines import export as export_module
from fledge.engines.export import TargetName, export
from support.drafts_on_disk import saved
from support.files import reconfigure
from support.targets import tiny_draft, tiny_target, tiny_target_directory

E3, E1 = dict(method="eagle3"), dict(method="eagle1", W=120, num_aux_hidden_states=0)
PARALLEL = dict(method="peagle", mask_token_id=7)


@pytest.fixture
def dry_run(fledge, tmp_path):
    """A function that saves a draft and returns the words of the command that would serve it."""

    def run(draft: dict[str, Any], *words: Any, target: str = "owner/target") -> list[str]:
        saved(tmp_path / "draft", **draft)
        went = fledge("serve", "--target", target, "--draft", tmp_path / "draft", "--dry-run", *words)
        assert went.code == 0 and went.out.count("\n") == 1 and not went.err, went.err
        return shlex.split(went.out)

    return run


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (E3, {"method": "eagle3"}),
        (dict(fc_norm=True, norm_output=True), {"method": "eagle3"}),
        (E1, {"method": "eagle"}),
        (PARALLEL, {"method": "eagle3", "parallel_drafting": True}),
    ],
    ids=["eagle3", "eagle3.1", "eagle1", "peagle"],
)
def test_vllms_command(draft, expected, dry_run, tmp_path):
    words = dry_run(draft, "--depth", 4, "--", "--port", "8001", "--served-model-name", "a b")
    assert words[:3] == ["vllm", "serve", "owner/target"] and words[-4:] == [
        "--port",
        "8001",
        "--served-model-name",
        "a b",
    ]
    assert words[3] == "--speculative-config" and len(words) == 9
    given = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 4}
    assert json.loads(words[4]) == expected | given


@pytest.mark.parametrize(("draft", "algorithm"), [(E3, "EAGLE3"), (E1, "EAGLE")], ids=["eagle3", "eagle1"])
def test_sglangs_command(draft, algorithm, dry_run, tmp_path):
    words = dry_run(draft, "--engine", "sglang", "--depth", 4)
    assert words[1:3] == ["-m", "sglang.launch_server"]
    flags = dict(zip(words[3:-1:2], words[4::2], strict=True))
    assert flags == {
        "--model-path": "owner/target", "--speculative-algorithm": algorithm,
        "--speculative-draft-model-path": str(tmp_path / "draft"), "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "5",
    }  # fmt: skip
    assert words[-1] == "--enable-metrics"


def test_a_tree_in_sglang(dry_run):
    words = dry_run(E3, "--engine", "sglang", "--depth", 4, "--tree-nodes", 24, "--tree-width", 6)
    tree = dict(itertools.pairwise(words))
    amounts = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    assert [tree[flag] for flag in amounts] == ["4", "6", "24"]
    words = dry_run(E3, "--engine", "sglang", "--depth", 2, "--tree-width", 2)
    assert dict(itertools.pairwise(words))["--speculative-num-draft-tokens"] == "7"  # all that two levels have
    words = dry_run(E3, "--engine", "sglang", "--tree-nodes", 24)
    assert dict(itertools.pairwise(words))["--speculative-eagle-topk"] == "10"


def test_the_depth_is_the_trained_one_and_revisions_are_passed_on(dry_run, tmp_path, monkeypatch):
    from fledge.config import Provenance

    words = dry_run(dict(provenance=Provenance(depth=7)), target="owner/target@v1")
    assert words[2:5] == ["owner/target", "--revision", "v1"] and json.loads(words[6])["num_speculative_tokens"] == 7
    monkeypatch.setattr(export_module, "split_revision", lambda name: (name, "r"))
    assert json.loads(dry_run({})[6])["revision"] == "r"
    assert "--speculative-draft-model-revision" in dry_run({}, "--engine", "sglang")


@pytest.mark.parametrize(
    ("draft", "words", "reason"),
    [
        (PARALLEL, ["--engine", "sglang"], "SGLang (0.5.17 and 0.5.23) cannot serve this draft: it has no one-pass"),
        (E3, ["--tree-nodes", 9], "vLLM drafts chains, no trees"),
        (E3, ["--engine", "sglang", "--depth", 2, "--tree-width", 2, "--tree-nodes", 8], "has at most 7 nodes"),
        (E3, ["--engine", "trtllm"], "--engine trtllm is not one of vllm, sglang"),
        (E3, [], "vllm is not installed here; install it, or take the command of --dry-run"),
    ],
)
def test_what_cannot_be_served_is_refused(draft, words, reason, fledge, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "available", lambda engine: False)
    saved(tmp_path / "draft", **draft)
    went = fledge("serve", "--target", "t", "--draft", tmp_path / "draft", *words)
    assert went.code == 2 and reason in went.err and not went.out, went.err


def prefixed(draft: Path) -> None:
    change(draft, lambda tensors: {f"model.{name}": x for name, x in tensors.items()})


def pickled(draft: Path) -> None:
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()


def in_speculators_format(draft: Path) -> None:
    exported = export(open_draft(draft), "speculators", TargetName("owner/target", ("LlamaForCausalLM",)))
    write_files(exported.encode(), draft)


def change(draft: Path, names: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = draft / "model.safetensors"
    save_file(names(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("rewrite", "engine", "words"),
    [
        (prefixed, "vllm", "instead of model."),
        (pickled, "sglang", "weights in model.safetensors, not pytorch_model.bin"),
        (in_speculators_format, "sglang", "config.json in the flat layout"),
    ],
)
@pytest.mark.parametrize("how", ["--dry-run", "--skip-check"])
def test_files_that_the_engine_needs_otherwise_are_refused(rewrite, engine, words, how, fledge, tmp_path, monkeypatch):
    """With the command that writes the others, whose result is then served."""
    draft, ran = tmp_path / "draft", []
    monkeypatch.setattr(os, "execvp", lambda *command: ran.append(command))
    monkeypatch.setattr(export_module, "available", lambda engine: True)
    saved(draft)
    rewrite(draft)
    went = fledge("serve", "--target", "t", "--draft", draft, "--engine", engine, how)
    said = went.err.replace("\n", " ")
    assert went.code == 2 and words in said and not went.out and not ran, said
    assert f"fledge export --draft {draft} --to {engine} --out DIR" in said
    assert fledge("export", "--draft", draft, "--to", engine, "--out", tmp_path / "out").code == 0
    assert fledge("serve", "--target", "t", "--draft", tmp_path / "out", "--engine", engine, how).code == 0


@pytest.mark.parametrize("trained", [True, False, None])
def test_vllm_serves_speculators_format(fledge, tmp_path, trained):
    """Whether speculators trains the embedding is nothing that vLLM reads."""
    saved(tmp_path / "draft")
    in_speculators_format(tmp_path / "draft")
    reconfigure(tmp_path / "draft", embed_requires_grad=trained)
    went = fledge("serve", "--target", "t", "--draft", tmp_path / "draft", "--dry-run")
    assert went.code == 0 and "--speculative-config" in went.out, went.err


def test_an_option_of_the_engine_goes_behind_two_dashes(fledge):
    went = fledge("serve", "--target", "t", "--draft", "d", "--port", 8000)
    said = " ".join(went.err.replace("│", " ").split())  # a box has words of two lines apart
    assert went.code == 2 and "--port" in said, went.err


def test_a_printed_command_is_of_a_pair_that_fits(fledge, tmp_path):
    target = tiny_target_directory(tmp_path)
    save_draft(tiny_draft(tiny_target(), draft_vocab_size=200), tmp_path / "fits")
    saved(tmp_path / "other", hidden_size=32, target_hidden_size=32)
    for draft, where, more, reason in (
        ("fits", target, [], ""),
        ("other", target, [], "this draft does not fit"),
        ("other", target, ["--skip-check"], ""),
        ("fits", "./elsewhere", [], "./elsewhere does not exist here; with --skip-check the command for another"),
        ("fits", "./elsewhere", ["--skip-check"], ""),
    ):
        went = fledge("serve", "--target", where, "--draft", tmp_path / draft, "--dry-run", *more)
        said = " ".join(went.err.split())
        assert went.code == 2 * bool(reason) and reason in said and ("vllm serve" in went.out) != bool(reason), said


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_drafted_is_said_by_options_of_fledge(fledge, tmp_path, engine):
    """Engines read flags with argparse: shortened, with underscores, and vLLM's with dots for a field of its JSON."""
    saved(tmp_path / "draft")
    words = ["serve", "--target", "t", "--draft", tmp_path / "draft", "--engine", engine, "--dry-run"]
    odd = "--speculative-config --speculative_config --speculative-algorithm=EAGLE --spec --spec-model --sp -sc -sc={}"
    for word in [
        *odd.split(),
        "--speculative-config.model",
        "--model",
        "--mode=t",
        "--model" + "_path" * (engine != "vllm"),
    ]:
        went = fledge(*words, "--", "--port", "1", word, "{}")
        said = " ".join(went.err.split())
        assert went.code == 2 and not went.out and f"{word.partition('=')[0]} is among the words after --, but" in said
    passed = ["--port", "1", "--max_model_len", "9", "--served-model-name=speculative", "--trust-remote-code"]
    assert fledge(*words, "--", *passed).out.rstrip().endswith(" ".join(passed))
    assert (
        fledge(*words, "--", "--revision", "r").code
        == 0
        != fledge(*words, "--target", "o/t@r", "--", "--rev", "r").code
    )


def test_the_engine_takes_the_place_of_the_process(fledge, tmp_path, monkeypatch):
    saved(tmp_path / "draft")
    ran: list[Any] = []
    monkeypatch.setattr(os, "execvp", lambda file, words: ran.append((file, words)))
    monkeypatch.setattr(export_module, "available", lambda engine: True)
    words = ["serve", "--target", "t", "--draft", tmp_path / "draft", "--depth", 2, "--skip-check", "--", "--port", 1]
    went = fledge(*words)
    ((file, words),) = ran
    assert went.code == 0 and file == words[0] and words[-2:] == ["--port", "1"] and not went.out
    assert "starting vllm: vllm serve t --speculative-config" in went.err


def test_a_draft_is_checked_before_the_engine_starts(fledge, tmp_path, monkeypatch):
    """By the real command, here in this process: what it says of a draft of random weights keeps the engine from
    starting."""
    target, ran, codes = tiny_target_directory(tmp_path), [], []
    save_draft(tiny_draft(tiny_target(), draft_vocab_size=200), tmp_path / "draft")

    def run(words: list[str]) -> SimpleNamespace:
        codes.append(fledge(*words[3:]).code)
        return SimpleNamespace(returncode=codes[-1])

    monkeypatch.setattr(serve, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(os, "execvp", lambda *command: ran.append(command))
    monkeypatch.setattr(export_module, "available", lambda engine: True)
    words = ["serve", "--target", target, "--draft", tmp_path / "draft", "--trust-remote-code"]
    went = fledge(*words)
    assert codes == [1] and not ran and went.code == 2 and "fledge check failed; correct what it names" in went.err
    monkeypatch.setattr(serve, "subprocess", SimpleNamespace(run=lambda words: SimpleNamespace(returncode=0)))
    assert fledge(*words).code == 0 and ran[0][1][-1] == "--trust-remote-code"


@pytest.mark.parametrize("memory", ["estimated", "killed"])
@pytest.mark.parametrize("sound", [True, False])
def test_of_a_target_that_does_not_fit_files_are_checked(fledge, tmp_path, monkeypatch, memory, sound):
    target, ran, asked, said = tiny_target_directory(tmp_path), [], [], []
    save_draft(tiny_draft(tiny_target(), draft_vocab_size=200), tmp_path / "draft")
    if not sound:
        reconfigure(tmp_path / "draft", max_position_embeddings=64)

    def run(words: list[str]) -> SimpleNamespace:
        asked.append(words[3:])
        if memory == "killed" and "--files-only" not in words:
            return SimpleNamespace(returncode=-9)
        return SimpleNamespace(returncode=fledge(*words[3:]).code)

    monkeypatch.setattr("fledge.check.pair.free_bytes", lambda device: 1000)
    monkeypatch.setattr(serve, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(os, "execvp", lambda *command: ran.append(command))
    monkeypatch.setattr(export_module, "available", lambda engine: True)
    options = serve.ServeOptions(target=str(target), draft=str(tmp_path / "draft"), engine="sglang")
    with contextlib.nullcontext() if sound else pytest.raises(ValueError, match="fledge check failed"):
        serve.run(options, said.append)
    assert ["--files-only" in words for words in asked] == [False, True] and len(ran) == sound
    assert "does not fit in memory as fledge check loads it" in said[0]


def test_vllm_without_its_script_is_started_as_a_module(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(export_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(export_module.importlib.util, "find_spec", lambda name: object())
    assert export_module.program("vllm")[1:] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert export_module.available("sglang") and export_module.program("sglang")[0] == sys.executable
