"""The Python API: public names, forms of prompts and sampling options, models that are already loaded, and training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import fledge as api
from fledge.drafts.weights import save_draft
from fledge.measure.metrics import tau
from fledge.types import Round, Trace
from support.chats import tiny_chats
from support.runs import recipe_of, write_recipe
from support.targets import tiny_draft, tiny_target, tiny_target_directory, tiny_tokenizer

PUBLIC = {
    "Completion", "Engine", "Prompt", "Request", "Sampling", "Target", "TrainedDraft", "TreeShape", "__version__",
    "load", "load_target", "train_draft",
}  # fmt: skip
CHAT = [{"role": "user", "content": "the young bird"}]
IDS = [5, 200, 77, 31]


@pytest.fixture(scope="module")
def engine() -> api.Engine:
    target = tiny_target(dtype=torch.float64)
    return api.load(target, tiny_draft(target), depth=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, a draft of it, and chats."""
    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    save_draft(tiny_draft(tiny_target()), root / "draft")
    tiny_chats(root / "chats.jsonl", 40)
    return root


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)


# -- the package ------------------------------------------------------------------------------------------------------


def test_the_public_names_are_those_that_dir_shows() -> None:
    assert set(dir(api)) == set(api.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(api, name) is not None
    with pytest.raises(AttributeError, match="module 'fledge' has no attribute 'Generate'"):
        _ = api.Generate


def test_importing_fledge_is_light() -> None:
    heavy = "{'torch', 'transformers', 'typer', 'rich', 'datasets'}"
    assert python("-c", f"import sys, fledge; dir(fledge); print({heavy} & set(sys.modules))").stdout == "set()\n"


def test_version(fledge) -> None:
    assert fledge("--version").out == f"fledge {api.__version__}\n"
    assert python("-m", "fledge", "--version").stdout == f"fledge {api.__version__}\n"


# -- how prompts and sampling are given -------------------------------------------------------------------------------


def test_sampling_may_be_given_by_its_fields(engine: api.Engine) -> None:
    fields = dict(temperature=0.9, top_p=0.9, seed=4)
    sampling = api.Sampling(**fields)
    done = engine.generate(IDS, max_new_tokens=20, sampling=sampling)
    assert done.tokens != engine.generate(IDS, max_new_tokens=20).tokens
    assert engine.generate(IDS, max_new_tokens=20, **fields).tokens == done.tokens
    assert engine.generate_all([IDS], max_new_tokens=20, **fields)[0].tokens == done.tokens
    assert "".join(engine.stream(IDS, max_new_tokens=20, **fields)) == done.text
    for call in (engine.generate, engine.stream, lambda p, **how: engine.generate_all([p], **how)):
        with pytest.raises(ValueError, match=r"give sampling=Sampling\(\.\.\) or temperature and seed, not both"):
            call(IDS, sampling=sampling, temperature=0.5, seed=1)
        with pytest.raises(
            TypeError, match=r"temprature is not an option of decoding; the options are .*max_new_tokens.*temper"
        ):
            call(IDS, temprature=0.5)


def test_options_of_other_methods_are_named() -> None:
    engine = api.load(tiny_target())
    for call, options in (
        (engine.stream, dict(batch=4)),
        (engine.generate, dict(answered=print)),
        (engine.prepare, dict(stop="x")),
    ):
        first = () if call == engine.prepare else (IDS,)
        with pytest.raises(TypeError, match=f"{next(iter(options))} is not an option of decoding; the options are "):
            call(*first, **options)
    with pytest.raises(TypeError, match=r"into must be a fledge\.Completion"):
        engine.generate(IDS, into=5)


def test_a_prompt_is_read_once_and_answered_as_its_text(engine: api.Engine) -> None:
    for asked in ("the young bird", CHAT):
        prompt = engine.reader.read(asked)
        assert isinstance(prompt, api.Prompt) and len(prompt) > 2
        assert engine.generate(prompt, max_new_tokens=5).tokens == engine.generate(asked, max_new_tokens=5).tokens
    both = engine.generate([prompt, "the young bird"], max_new_tokens=5)
    assert len(both) == 2 and both[0].tokens == engine.generate(CHAT, max_new_tokens=5).tokens
    same = [engine.generate(api.Prompt(ids), max_new_tokens=5).tokens for ids in (IDS, torch.tensor(IDS), tuple(IDS))]
    assert same == [engine.generate(IDS, max_new_tokens=5).tokens] * 3
    for empty in (
        lambda: engine.generate(api.Prompt([])),
        lambda: engine.reader.read(""),
        lambda: engine.reader.read([]),
    ):
        with pytest.raises(ValueError, match="the prompt is empty"):
            empty()
    for ids in ("hello", [1.5, 2], [True]):
        with pytest.raises(TypeError, match=r"the ids of a fledge\.Prompt must be a list of integers"):
            engine.generate(api.Prompt(ids))


def test_an_unknown_option_of_drafting_is_named_before_a_target_is_loaded(tmp_path) -> None:
    for target in (tmp_path / "none", tiny_target()):
        with pytest.raises(TypeError, match="modes is not an option of drafting; the options are depth, mode, "):
            api.load(target, modes="tree")


SEVERAL: dict[str, Any] = {
    "texts": ["the young bird", "tries again"],
    "chats": [CHAT, [{"role": "system", "content": "falls"}, *CHAT]],
    "token ids": [IDS, IDS[:2]],
    "a tuple of tuples": (tuple(IDS), tuple(IDS[:2])),
    "a tensor": torch.tensor([IDS, IDS[::-1]]),
    "tensors": [torch.tensor(IDS), torch.tensor(IDS[:2])],
    "an array": np.array([IDS, IDS[::-1]]),
    "of each kind": ["the young bird", CHAT, IDS],
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_list_of_prompts_gets_a_list_of_answers(kind: str, engine: api.Engine) -> None:
    asked, options = SEVERAL[kind], dict(max_new_tokens=10)
    answers = engine.generate(asked, batch=2, **options)
    assert [c.tokens for c in answers] == [engine.generate(prompt, **options).tokens for prompt in asked]


@pytest.mark.parametrize("same", [tuple(IDS), torch.tensor(IDS), np.array(IDS)], ids=["tuple", "tensor", "array"])
def test_token_ids_and_a_chat_are_one_prompt(same: Any, engine: api.Engine) -> None:
    assert engine.generate(same, max_new_tokens=10).tokens == engine.generate(IDS, max_new_tokens=10).tokens
    chat = engine.generate(CHAT, batch=4, max_new_tokens=10)  # batch is a maximum, so a single prompt is allowed
    assert chat.text == engine.generate_all([CHAT], max_new_tokens=10)[0].text


A_PROMPT = "a prompt is a string, a list of token ids or a list of messages"
WRONG_PROMPTS: dict[str, tuple[Any, type[Exception], str]] = {
    "None": (None, TypeError, f"{A_PROMPT}, but this is a value of type NoneType"),
    "a number": (7, TypeError, f"{A_PROMPT}, but this is a value of type int"),
    "bytes": (b"hi", TypeError, f"{A_PROMPT}, but this is a value of type bytes"),
    "a message alone": (CHAT[0], TypeError, f"{A_PROMPT}, but this is a value of type dict"),
    "floats": ([0.5, 1.5], TypeError, f"{A_PROMPT}, but this list of token ids holds a value of type float"),
    "ids and text": ([5, "hi"], TypeError, f"{A_PROMPT}, but this list of token ids holds a value of type str"),
    "a chat and text": ([*CHAT, "hi"], TypeError, f"{A_PROMPT}, but this list of messages holds a value of type str"),
    "booleans": ([True, False], TypeError, f"{A_PROMPT}, but this list of token ids holds a value of type bool"),
    "text and a number": (["hi", 5], TypeError, f"{A_PROMPT}, but this is a value of type int"),
    "lists too deep": ([[[5]]], TypeError, "this is a list of several prompts, but one prompt is needed; use generate"),
    "nothing": ([], ValueError, "the prompt is empty"),
    "no text": ("", ValueError, "the prompt is empty"),
    "an empty one among others": (["hi", []], ValueError, "the prompt is empty"),
    "half a character": (
        "\ud83d",
        ValueError,
        r"the prompt is not valid Unicode \(surrogates not allowed at char.* 0\)",
    ),
    "ids beyond the vocabulary": ([5, 400], ValueError, r"token ids outside 0\.\.399"),
}


@pytest.mark.parametrize("kind", WRONG_PROMPTS)
def test_an_invalid_prompt_gives_an_error_of_one_sentence(kind: str, engine: api.Engine) -> None:
    asked, error, words = WRONG_PROMPTS[kind]
    with pytest.raises(error, match=words) as raised:
        engine.generate(asked)
    assert "\n" not in str(raised.value)


def test_one_prompt_where_several_are_asked_for_and_the_other_way_round(engine: api.Engine) -> None:
    for one in ("hi", IDS, CHAT):
        with pytest.raises(TypeError, match="a list of prompts is needed, but this is one prompt"):
            engine.generate_all(one)
    with pytest.raises(TypeError, match="a list of prompts is needed, but this is a value of type int"):
        engine.generate_all(5)
    with pytest.raises(TypeError, match="this is a list of several prompts, but one prompt is needed; use generate"):
        engine.stream(["hi", "there"])


WRONG_OPTIONS: dict[str, tuple[Any, str]] = {
    "temperature": ("hot", "temperature must be a number, not a value of type str"),
    "top_k": (2.5, "top_k must be an integer, not a value of type float"),
    "seed": (None, "seed must be an integer, not a value of type NoneType"),
    "processors": (print, "processors must be a list of LogitsProcessor objects, not a value of type builtin"),
    "sampling": (dict(temperature=1), r"sampling must be a fledge\.Sampling, not a value of type dict"),
    "max_new_tokens": ("12", "max_new_tokens must be an integer, not a value of type str"),
    "stop": (3, "stop must be a string or a list of strings, not a value of type int"),
    "speculate": (None, "speculate must be True or False, not a value of type NoneType"),
    "request": (2.5, "request must be an integer, not a value of type float"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_an_option_of_the_wrong_type_gives_an_error_of_one_sentence(name: str, engine: api.Engine) -> None:
    value, words = WRONG_OPTIONS[name]
    with pytest.raises(TypeError, match=words):
        engine.generate(IDS, **{name: value})


@pytest.mark.parametrize("fields", [dict(temperature=float("nan")), dict(temperature=float("inf")), dict(top_p=2.0),
                                    dict(temperature=1e-40), dict(temperature=-1),
                                    dict(repetition_penalty=float("inf")), dict(draft="often")])  # fmt: skip
def test_sampling_out_of_range(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        api.Sampling(**fields)


def test_more_options_of_the_wrong_type(engine: api.Engine) -> None:
    with pytest.raises(TypeError, match="stop must be a string or a list of strings, not a value of type int"):
        engine.generate(IDS, stop=["a", 3])
    for asked in (IDS, [IDS]):
        with pytest.raises(TypeError, match="batch must be an integer, not a value of type str"):
            engine.generate(asked, batch="4")
        with pytest.raises(ValueError, match="batch is -1; it must be at least 1"):
            engine.generate(asked, batch=-1)
    with pytest.raises(
        TypeError, match="draft must be the directory of a draft, or a loaded draft, not a value of type int"
    ):
        api.load(engine.target, 5)
    with pytest.raises(ValueError, match=r"this draft is loaded already: move it with draft\.to"):
        api.load(engine.target, engine.draft, draft_device="cpu")


def test_request_numbers_and_top_k_of_any_integer_type(engine: api.Engine) -> None:
    sampled = dict(temperature=1.0, max_new_tokens=8)
    expected = engine.generate(IDS, request=3, **sampled).tokens
    assert engine.generate(IDS, request=np.int64(3), top_k=2**70, **sampled).tokens == expected
    for numbers in (np.int64(3), [np.int64(3)]):
        assert [c.tokens for c in engine.generate([IDS], request=numbers, **sampled)] == [expected]
    with pytest.raises(TypeError, match="request must be an integer, not a value of type float"):
        engine.generate([IDS, IDS], request=[3.5, 4])
    with pytest.raises(TypeError, match="request must be an integer, or a list of them, not a value of type float"):
        engine.generate([IDS], request=3.5)


def test_what_could_not_be_answered_is_refused_when_called(engine: api.Engine) -> None:
    """Also by `stream`, whose caller may have promised an answer once there is a generator."""
    with pytest.raises(ValueError, match="a stop string is empty; leave it out"):
        engine.stream(IDS, stop=["a", ""])
    used = engine.generate(IDS, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"into has an answer already; give a new fledge\.Completion"):
        engine.generate(IDS, into=used)
    tree = api.load(engine.target, engine.draft, mode="tree")
    with pytest.raises(ValueError, match="sampled drafts need a chain"):
        tree.stream(IDS, temperature=1.0, draft="sample")
    assert len(tree.generate(IDS, temperature=1.0, draft="sample", speculate=False, max_new_tokens=2).tokens) == 2


def test_a_program_may_end_with_an_open_stream() -> None:
    """Nothing is said of it: the stream is closed while torch still works."""
    demo = Path(api.__file__).parent / "demo"
    words = f"""
import fledge
engine = fledge.load({str(demo / "target")!r}, draft={str(demo / "draft")!r})
stream = engine.stream([dict(role="user", content="Tell me a story.")], max_new_tokens=30)
next(stream)
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.returncode == 0 and "Error" not in done.stderr and "ignored" not in done.stderr, done.stderr


def test_a_target_with_a_table_of_positions_keeps_some_for_the_draft(engine: api.Engine, monkeypatch) -> None:
    monkeypatch.setattr(engine.target, "rotary", False)
    room = engine.target.context - len(IDS)
    words = f"a context of {engine.target.context} tokens, the last 3 of which are for drafted tokens; shorten the"
    with pytest.raises(
        ValueError, match=f"{words} prompt, or generate at most {room - 3} new tokens, or use a smaller"
    ):
        engine.stream(IDS, max_new_tokens=room)
    engine.stream(IDS, max_new_tokens=room, speculate=False).close()
    engine.stream(IDS, max_new_tokens=room - 3).close()


@pytest.mark.parametrize(
    ("drafting", "error", "words"),
    [
        (dict(depth=2.5), TypeError, "depth must be an integer or 'auto', not a value of type float"),
        (dict(mode="tree", nodes=8.0), TypeError, "nodes must be an integer or 'auto', not a value of type float"),
        (dict(stable="unstable"), TypeError, "stable must be True or False, not a value of type str"),
        (dict(confidence="0.3"), TypeError, "confidence must be a number, not a value of type str"),
        (dict(mode="tree", shape=[0]), TypeError, r"shape must be a fledge\.TreeShape, not a value of type list"),
        (dict(depth=65), ValueError, "the depth 65 is above 64, the most that is drafted in a round"),
        (dict(mode="tree", nodes=2000), ValueError, "the number of nodes 2000 is above 1024"),
    ],
)
def test_drafting_out_of_range(drafting: dict[str, Any], error: type[Exception], words: str, engine: api.Engine):
    with pytest.raises(error, match=words):
        api.load(engine.target, engine.draft, **drafting)


def test_options_of_drafting_need_a_draft(engine: api.Engine, tmp_path: Path) -> None:
    for target in (engine.target, tmp_path / "none"):
        with pytest.raises(ValueError, match="depth and mode has no effect without a draft; give draft="):
            api.load(target, depth="auto", mode="tree")
    assert api.load(engine.target, depth=None, confidence=0.0).draft is None
    with pytest.raises(ValueError, match="draft_device= has no effect without a draft; give draft="):
        api.load(tmp_path / "none", draft_device="cpu")


# -- loading ----------------------------------------------------------------------------------------------------------


def hugging_face_model(directory: Path) -> transformers.PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def test_a_loaded_model_is_accepted(made: Path) -> None:
    """`load` accepts a transformers model, with the tokenizer of the model's directory or with a given one."""
    there = api.load(made / "target", draft=made / "draft")
    answer = there.generate("the young bird", max_new_tokens=20)
    model = hugging_face_model(made / "target")
    engine = api.load(model, draft=made / "draft")
    assert engine.target.model is model and engine.target.name == str(made / "target")
    assert engine.generate("the young bird", max_new_tokens=20).text == answer.text
    without_place = tiny_target().model
    given = api.load(without_place, tokenizer=tiny_tokenizer())
    assert given.generate("the young bird", max_new_tokens=20).text == answer.text
    assert given.target.name == "LlamaForCausalLM"
    again = api.load(given.target, draft=str(made / "draft"))
    assert again.target is given.target
    for options, named in (
        (dict(dtype=torch.float64), "dtype="),
        (dict(device="cpu", target_impl="native"), "device= and target_impl="),
        (dict(tokenizer=tiny_tokenizer(), trust_remote_code=True), "tokenizer= and trust_remote_code="),
    ):
        with pytest.raises(
            ValueError, match=f"^{named} has no effect on a target that is loaded already; leave it out"
        ):
            api.load(given.target, draft=str(made / "draft"), **options)


def test_a_dtype_may_be_given_by_its_name(made: Path) -> None:
    """The names of --dtype, in all functions that load a target."""
    assert api.load(made / "target", dtype="bf16").target.dtype == torch.bfloat16
    assert api.load_target(made / "target", dtype="float64").dtype == torch.float64
    assert api.load_target(made / "target", dtype="auto").dtype == torch.float32
    with pytest.raises(ValueError, match=r"^dtype 'int8' is not one of auto, bf16, fp16"):
        api.load(made / "target", dtype="int8")
    with pytest.raises(ValueError, match="--steps 0: it must be at least 1"):  # after the type of dtype
        api.train_draft(target=made / "target", data="none", dtype=torch.bfloat16, steps=0)


def test_an_answer_has_its_tau_and_objects_are_shown_in_a_line(engine: api.Engine) -> None:
    answer = engine.generate("the young bird", max_new_tokens=20)
    rounds = answer.trace.rounds
    assert answer.trace.tau == tau([answer.trace]) == 1 + sum(r.accepted for r in rounds) / len(rounds)
    shown = f"<Completion {answer.text!r}, {len(answer.tokens)} tokens, {answer.finish}, <Trace of {len(rounds)} round"
    assert repr(answer).startswith(shown) and f", τ {answer.trace.tau:.2f}, " in repr(answer)
    assert repr(engine) == "<Engine of <TransformersTarget 'tiny llama' in float64 on cpu>, draft: EAGLE-3, chain>"
    alone = api.load(engine.target)
    assert repr(alone).endswith(", draft: none>")
    nothing = api.Completion()
    assert nothing.trace.tau == 0.0 and "not ended, <Trace of 0 rounds" in repr(nothing)
    assert repr(Trace([Round(drafted=3, accepted=1)])) == "<Trace of 1 round, τ 2.00, 0.00 s>"


def test_models_that_cannot_be_used_are_refused(made: Path, tmp_path: Path) -> None:
    model = tiny_target().model
    with pytest.raises(ValueError, match=r"no tokenizer can be loaded since the model.s config has no name_or_path; "):
        api.load(model)
    model.save_pretrained(tmp_path / "alone")
    with pytest.raises(
        ValueError, match=r"no tokenizer can be loaded from .*alone, .*; pass one with load\(model, tokenizer=\.\.\)"
    ):
        api.load(hugging_face_model(tmp_path / "alone"))
    for more in (dict(device="cpu"), dict(dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"this model is loaded already: move it with model\.to"):
            api.load(model, tokenizer=tiny_tokenizer(), **more)
    with pytest.raises(ValueError, match="LlamaModel is not a causal language model; load one by AutoModelForCausalLM"):
        api.load(model.model, tokenizer=tiny_tokenizer())
    with pytest.raises(ValueError, match="tokenizer= goes with a loaded model; a target's directory has its own"):
        api.load(made / "target", tokenizer=tiny_tokenizer())
    with pytest.raises(
        TypeError, match=r"target must be a directory, a hub id, a transformers model or a fledge\.Target that"
    ):
        api.load(None)
    with pytest.raises(ValueError, match="fledge needs a fast tokenizer"):
        api.load(tiny_target(tokenizer=False))


# -- training ---------------------------------------------------------------------------------------------------------


OPTIONS = dict(max_length=64, row_length=128, steps=2, depth=2, draft_vocab=200, device="cpu")


def test_training_from_python_gives_the_same_draft_as_the_command(made: Path, tmp_path: Path, fledge, capsys) -> None:
    data = made / "chats.jsonl"
    trained = api.train_draft(
        target=made / "target", data=data, out=tmp_path / "python", aux_layers=[1, 4, 6],
        template_kwargs={"enable_thinking": False}, **OPTIONS,
    )  # fmt: skip
    assert trained.draft == tmp_path / "python" / "draft" and trained.metrics["step"] == 2
    assert not any(capsys.readouterr()), "training from Python prints nothing"
    flags = [w for name, value in OPTIONS.items() for w in ("--" + name.replace("_", "-"), value)]
    ran = fledge(
        "train", "--target", made / "target", "--data", data, "--out", tmp_path / "command", "--aux-layers", "1,4,6",
        "--template-kwargs", '{"enable_thinking": false}', *flags,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    for file in ("model.safetensors", "config.json"):
        assert (trained.draft / file).read_bytes() == (tmp_path / "command" / "draft" / file).read_bytes()
    pair, alone = api.load(made / "target", draft=trained.draft), api.load(made / "target")
    assert pair.generate("it can fly", max_new_tokens=8).tokens == alone.generate("it can fly", max_new_tokens=8).tokens
    assert api.train_draft(resume=tmp_path / "python").draft == trained.draft
    api.train_draft(resume=str(tmp_path / "python"), progress=True)
    assert "this run was already finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(steps="2"), r"--steps '2' is not of type int \| None"),
        (dict(skip_bad="no"), "--skip-bad 'no' is not of type bool"),
        (dict(max_length=64.5), r"--max-length 64\.5 is not of type int"),
        (dict(lr="1e-3"), r"--lr '1e-3' is not of type float \| None"),
        (dict(data=[3]), r"--data \[3\] is not of type list\[str\]"),
        (dict(target=3), r"--target 3 is not of type str \| None"),
        (dict(steps=0), "--steps 0: it must be at least 1"),
    ],
)
def test_training_options_of_the_wrong_type(options: dict[str, Any], words: str, made: Path, tmp_path: Path) -> None:
    asked = dict(target=made / "target", data=made / "chats.jsonl", out=tmp_path / "run") | options
    with pytest.raises(ValueError, match=words):
        api.train_draft(**asked)
    assert not (tmp_path / "run").exists()


def test_unknown_training_options_are_refused(made: Path) -> None:
    for name, cure in (("stepz", r"did you mean steps\?"), ("xyzzy", "TrainOptions lists them")):
        with pytest.raises(TypeError, match=f"{name} is not an option of training; {cure}"):
            api.train_draft(target=made / "target", data=made / "chats.jsonl", **{name: 3})


def test_options_in_a_runs_file_are_checked_too(made: Path, tmp_path: Path, fledge) -> None:
    """Resuming from a recipe that was edited gives an error message of one sentence."""
    out = tmp_path / "run"
    api.train_draft(target=made / "target", data=made / "chats.jsonl", out=out, **OPTIONS)
    write_recipe(out, recipe_of(out) | {"steps": "many"})
    ran = fledge("train", "--resume", out)
    assert ran.code == 2 and "recipe.yaml: steps" in ran.err and "the file is damaged" in ran.err, ran.err
