"""Code in a target's files: it runs only with --trust-remote-code, whatever standard input contains."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fledge.data.read import read_records
from fledge.decode.load import load
from fledge.drafts.weights import save_draft
from fledge.targets import loading
from support.chats import tiny_chats
from support.files import change_json, rows_of
from support.runs import recipe_of
from support.targets import tiny_draft, tiny_target, tiny_target_directory

MODEL = """
open({marker!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM

class HomemadeConfig(LlamaConfig):
    model_type = "homemade"

class HomemadeModel(LlamaForCausalLM):
    config_class = HomemadeConfig
"""
TOKENIZER = """
open({marker!r}, "w").close()
from transformers import PreTrainedTokenizerFast

class HomemadeTokenizer(PreTrainedTokenizerFast):
    pass
"""
TRAIN = "--max-length 64 --row-length 128 --steps 2 --depth 2 --draft-vocab 200 --eval-tokens 4 --device cpu".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A directory with a target, chats, prompts and a draft."""
    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    tiny_chats(root / "chats.jsonl", 20)
    (root / "prompts.jsonl").write_text('{"prompt": "the young bird"}\n')
    save_draft(tiny_draft(tiny_target()), root / "draft", torch.float32)
    return root


@pytest.fixture(autouse=True)
def modules_of_this_test(tmp_path, monkeypatch):
    """Gives the test its own cache, into which transformers copies code, and a standard input that answers yes."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    say_yes(monkeypatch)


def say_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))


def bring_code(target: Path, directory: Path, *, model: bool = True, tokenizer: bool = False) -> tuple[Path, Path]:
    """Copies a target and makes its model or tokenizer need code. Returns the copy, and the file that this code creates
    when it runs."""
    marker = directory / "ran"
    made = Path(shutil.copytree(target, directory / "target"))
    if model:
        classes = {"AutoConfig": "model_code.HomemadeConfig", "AutoModelForCausalLM": "model_code.HomemadeModel"}
        change_json(made / "config.json", model_type="homemade", auto_map=classes)
        (made / "model_code.py").write_text(MODEL.format(marker=str(marker)))
    if tokenizer:
        classes = {"AutoTokenizer": [None, "tokenizer_code.HomemadeTokenizer"]}
        change_json(made / "tokenizer_config.json", tokenizer_class="HomemadeTokenizer", auto_map=classes)
        (made / "tokenizer_code.py").write_text(TOKENIZER.format(marker=str(marker)))
    return made, marker


def commands(made: Path, target: Path, out: Path) -> dict[str, list]:
    data = ["--data", made / "chats.jsonl"]
    return {
        "generate": ["generate", "--target", target, "--max-new-tokens", 4],
        "train": ["train", "--target", target, *data, "--out", out / "run", *TRAIN],
        "regenerate": ["regenerate", "--target", target, *data, "--out", out / "own.jsonl", "--max-new-tokens", 2],
        "eval": ["eval", "--target", target, "--draft", made / "draft", "--prompts", made / "prompts.jsonl",
                 "--max-new-tokens", 4, "--json"],
    }  # fmt: skip


@pytest.mark.parametrize("command", ["generate", "train", "regenerate", "eval"])
def test_no_command_runs_code_without_the_flag(command, made, tmp_path, fledge):
    target, marker = bring_code(made / "target", tmp_path)
    went = fledge(*commands(made, target, tmp_path)[command])
    assert went.code == 2 and went.err.count("\n") == 1, went.err
    assert "comes with code of its own" in went.err and "give --trust-remote-code" in went.err
    assert not marker.exists() and not (tmp_path / "run").exists() and sys.stdin.read() == "y\n" * 9


def test_a_piped_prompt_does_not_answer_the_question(made, tmp_path):
    """A prompt piped into the command is not taken as an answer to transformers' question."""
    target, marker = bring_code(made / "target", tmp_path, tokenizer=True)
    words = [sys.executable, "-m", "fledge.cli", "generate", "--target", str(target)]
    went = subprocess.run(words, input="y\nWrite a haiku.\n", capture_output=True, text=True, timeout=120)
    assert went.returncode == 2 and went.stderr.startswith(f"fledge: the target {target} comes with code of its own")
    assert went.stderr.count("\n") == 1 and not went.stdout and not marker.exists()


def test_code_of_a_tokenizer_needs_the_flag(made, tmp_path, fledge, monkeypatch):
    target, marker = bring_code(made / "target", tmp_path, model=False, tokenizer=True)
    words = commands(made, target, tmp_path)["generate"]
    went = fledge(*words)
    assert went.code == 2 and "give --trust-remote-code" in went.err and not marker.exists()
    went = fledge(*words, "--trust-remote-code")
    say_yes(monkeypatch)
    own = fledge(*commands(made, made / "target", tmp_path)["generate"])
    assert went.code == 0 and went.out == own.out and marker.exists()


def test_a_known_model_type_loads_without_running_code(made, tmp_path, fledge):
    """If transformers knows the model type itself, the model loads and the code in its files does not run."""
    target, marker = bring_code(made / "target", tmp_path)
    change_json(target / "config.json", model_type="llama")
    words = ["--prompt", "the bird", "--max-new-tokens", 4]
    found, own = (fledge("generate", "--target", t, *words) for t in (target, made / "target"))
    assert found.code == 0 and found.out == own.out and not marker.exists(), found.err


def test_with_the_flag_every_command_runs_the_code(made, tmp_path, fledge, monkeypatch):
    """The code runs and the flag is recorded; a run resumes only if the flag is given again."""
    target, marker = bring_code(made / "target", tmp_path)
    every = commands(made, target, tmp_path)
    said = {name: fledge(*words, "--trust-remote-code") for name, words in every.items()}
    assert all(went.code == 0 for went in said.values()), [went.err for went in said.values()]
    assert marker.exists()
    plain = tmp_path / "plain"
    plain.mkdir()
    say_yes(monkeypatch)
    known = {}
    for name, words in commands(made, made / "target", plain).items():
        with monkeypatch.context() as patch:
            if name == "train":  # weights are compared bit for bit, and code of its own is never computed natively
                patch.setattr(loading, "native_problem", lambda *of: "transformers is to compute it")
            known[name] = fledge(*words)
    assert said["generate"].out == known["generate"].out
    answered = [[row["messages"] for row in rows_of(at / "own.jsonl")] for at in (tmp_path, plain)]
    assert answered[0] == answered[1]
    same = "tau", "alpha", "identical", "prompts"
    theirs, ours = (json.loads(went["eval"].out) for went in (known, said))
    assert [ours[key] for key in same] == [theirs[key] for key in same]
    weights = [(at / "run" / "draft" / "model.safetensors").read_bytes() for at in (tmp_path, plain)]
    assert weights[0] == weights[1]
    assert recipe_of(tmp_path / "run")["trust_remote_code"] is True
    assert json.loads(said["eval"].out)["trust_remote_code"] is True
    marker.unlink()
    again = fledge("train", "--resume", tmp_path / "run")
    assert again.code == 2 and "give --trust-remote-code" in again.err and not marker.exists()
    again = fledge("train", "--resume", tmp_path / "run", "--trust-remote-code")
    assert again.code == 0 and "this run was already finished" in again.err, again.err


def test_a_run_started_without_the_flag_refuses_it_on_resume(made, tmp_path, fledge):
    words = commands(made, made / "target", tmp_path)["train"]
    assert fledge(*words).code == 0
    assert recipe_of(tmp_path / "run")["trust_remote_code"] is False
    again = fledge("train", "--resume", tmp_path / "run", "--trust-remote-code")
    assert again.code == 2 and "leave --trust-remote-code out" in again.err


def test_a_tokenizer_with_code_is_sent_to_the_processes_that_tokenize(made, fledge, tmp_path):
    target, marker = bring_code(made / "target", tmp_path, model=False, tokenizer=True)
    words = (
        "--data",
        made / "chats.jsonl",
        "--data-workers",
        2,
        "--data-cache",
        tmp_path / "cache",
        "--trust-remote-code",
    )
    went = fledge("train", "--target", target, *words, "--out", tmp_path / "run", *TRAIN)
    assert went.code == 0 and "kept for later runs" in went.err and marker.exists(), went.err


def test_data_sets_never_run_code(monkeypatch):
    asked = {}
    monkeypatch.setattr("datasets.load_dataset", lambda name, **how: asked.update(how) or [{"text": "the bird"}])
    assert read_records(["owner/name"])[0].text == "the bird" and asked["trust_remote_code"] is False


def test_the_python_api_needs_the_argument_too(made, tmp_path):
    target, marker = bring_code(made / "target", tmp_path)
    with pytest.raises(ValueError, match="in Python trust_remote_code=True"):
        load(str(target))
    assert not marker.exists()
    engine = load(str(target), str(made / "draft"), trust_remote_code=True)
    known = load(str(made / "target"))
    answers = [e.generate("the bird", max_new_tokens=4).tokens for e in (engine, known)]
    assert engine.target.trust_remote_code and answers[0] == answers[1]
