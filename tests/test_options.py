"""Options without effect are refused, and an error message names only flags of the command that prints it."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

import fledge as package
from fledge.commands.chat import ChatOptions
from fledge.commands.check import CheckOptions
from fledge.commands.demo import DemoOptions
from fledge.commands.export import ExportOptions
from fledge.commands.features import FeaturesOptions
from fledge.commands.generate import GenerateOptions
from fledge.commands.inspect import InspectOptions
from fledge.commands.push import PushOptions
from fledge.commands.report import ReportOptions
from fledge.commands.serve import ServeOptions
from fledge.measure.options import EvalOptions
from fledge.options import Options, flag_of, option_fields
from fledge.regenerate.options import RegenerateOptions
from fledge.train.setup.options import TrainOptions
from fledge.types import Sampling

OPTIONS: dict[str, type[Options]] = {
    "train": TrainOptions, "generate": GenerateOptions, "eval": EvalOptions, "regenerate": RegenerateOptions,
    "inspect": InspectOptions, "features": FeaturesOptions, "serve": ServeOptions, "export": ExportOptions,
    "check": CheckOptions, "push": PushOptions, "chat": ChatOptions, "demo": DemoOptions,
    "report": ReportOptions,
}  # fmt: skip
SOME = {
    "generate": ["--target", "t"], "train": ["--target", "t", "--data", "d"],
    "regenerate": ["--target", "t", "--out", "o"], "eval": ["--target", "t", "--draft", "d", "--prompts", "p"],
}  # fmt: skip


# -- options without effect ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "given", "dropped", "why"),
    [
        ("generate", "--top-p 1.0", "--top-p", "at --temperature 0"),
        ("generate", "--top-k 0 --seed 0", "--top-k, --seed", "at --temperature 0"),
        ("generate", "--draft d --draft-sampling coupled", "--draft-sampling", "at --temperature 0"),
        ("generate", "--temperature 0.0 --seed 3", "--seed", "at --temperature 0"),
        ("eval", "--seed 0", "--seed", "at --temperature 0"),
        ("regenerate", "--top-p 1", "--top-p", "at --temperature 0"),
        ("regenerate", "--concurrency 64 --model m", "--model, --concurrency", "without --endpoint"),
        ("regenerate", "--endpoint e --batch 4 --device cpu", "--batch, --device", "with --endpoint"),
        ("eval", "--concurrency 4", "--concurrency", "without --endpoint"),
        ("generate", "--depth 5", "--depth", "without a draft"),
        ("generate", "--draft-mode chain --tree-nodes 60", "--draft-mode, --tree-nodes", "without a draft"),
        ("generate", "--tree-width 10 --draft-cache stable", "--tree-width, --draft-cache", "without a draft"),
        ("generate", "--confidence 0 --draft-device cpu", "--confidence, --draft-device", "without a draft"),
        ("generate", "--temperature 1 --draft-sampling coupled", "--draft-sampling", "without a draft"),
        ("generate", "--draft d --tree-nodes 60", "--tree-nodes", "in a chain"),
        ("generate", "--draft d --draft-mode parallel --tree-width 3", "--tree-width", "in a chain"),
        ("eval", "--draft-mode chain --tree-nodes 60", "--tree-nodes", "in a chain"),
        ("generate", "--raw --system s", "--system", "with --raw"),
        ("generate", "--raw --template-kwargs {}", "--template-kwargs", "with --raw"),
        ("train", "--steps 3 --epochs 1", "--epochs", "with --steps"),
    ],
)
def test_an_option_without_effect_is_refused_even_with_its_default_value(command, given, dropped, why, fledge):
    went = fledge(command, *SOME[command], *given.split())
    assert went.code == 2 and f" no effect {why}" in went.err, went.err
    assert went.err.startswith(f"fledge: {dropped} ha") and went.err.endswith(f"leave {dropped} out\n"), went.err


@pytest.mark.parametrize(
    ("command", "given"),
    [
        ("generate", "--temperature 1 --top-p 0.9 --top-k 5 --seed 3"),
        (
            "generate",
            "--draft d --temperature 1 --draft-sampling sample --depth 3 --confidence 0.3 --draft-cache stable",
        ),
        ("generate", "--draft d --draft-mode tree --tree-nodes 60 --tree-width 4"),
        ("generate", "--raw"),
        ("eval", "--draft-mode chain --draft-mode tree --tree-nodes 60 --depth 3"),
        ("regenerate", "--data d@0.5 --seed 3"),
        ("regenerate", "--endpoint e --concurrency 3 --model m --skip-bad --temperature 1 --top-k 3"),
        ("eval", "--endpoint e --concurrency 1 --concurrency 4 --baseline-endpoint b"),
        ("train", "--steps 3"),
        ("train", "--epochs 2"),
    ],
)
def test_options_with_effect_are_accepted(command, given, fledge, monkeypatch):
    took = []
    module = {"eval": "evaluate"}.get(command, command)
    monkeypatch.setattr(f"fledge.commands.{module}.run", lambda options, *_: took.append(options) or {})
    fledge(command, *SOME[command], *given.split())
    assert len(took) == 1
    words = {flag for flag in (*SOME[command], *given.split()) if flag.startswith("--")}
    assert {flag_of(name) for name in took[0].given} == words
    assert replace(took[0], target="other").given == took[0].given


def test_in_python_an_option_counts_as_given_if_it_differs_from_its_default():
    with pytest.raises(ValueError, match="--epochs has no effect with --steps"):
        TrainOptions(steps=3, epochs=2.0)
    assert TrainOptions(steps=3, epochs=1.0).as_dict()["epochs"] == 1.0
    with pytest.raises(ValueError, match="--depth, --tree-nodes have no effect without a draft"):
        GenerateOptions(target="t", depth=3, tree_nodes=9)
    with pytest.raises(ValueError, match="--data, --steps have no effect with --resume"):
        TrainOptions(resume="run", data=["d"], steps=3)
    assert "given" not in TrainOptions().as_dict()


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "top_p"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_sampling_refuses_values_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})


# -- flags in messages --------------------------------------------------------------------------------------------

ROOT = Path(package.__file__).parent
COMMON = tuple(c for c in OPTIONS if c != "demo")  # which has few options of its own, and runs other commands
READERS = {  # the commands that print a module's messages; all commands for other modules
    **{f"{OPTIONS[c].__module__.removeprefix('fledge.').replace('.', '/')}.py": (c,) for c in OPTIONS},
    "options.py": ("generate", "eval"),  # except for messages about options that every command has
    "decode/options.py": ("generate", "eval"),
    "commands/train.py": ("train",),
    "commands/regenerate.py": ("regenerate",),
    **{file.relative_to(ROOT).as_posix(): ("train",) for file in (ROOT / "train").rglob("*.py")},
    "measure/evaluator.py": ("train",),
    "check/make_probe.py": ("train",),
    "check/pair.py": ("check",),
    "chat.py": ("chat",),
    **{f"regenerate/{file.name}": ("regenerate",) for file in (ROOT / "regenerate").iterdir()},
    **dict.fromkeys(("publish/card.py", "publish/upload.py"), ("push",)),
    **dict.fromkeys(("commands/evaluate.py", "measure/run.py", "measure/server.py", "measure/table.py"), ("eval",)),
    "engines/client.py": ("regenerate", "eval"),
    "measure/endpoint.py": ("eval",),
    "measure/prompts.py": ("eval",),
    "io/http.py": ("eval", "features", "regenerate"),
    "data/tokenize.py": ("train",),
    "data/record.py": ("train", "features", "regenerate", "eval"),
    "data/spans.py": ("train", "regenerate"),
    "report/training.py": ("train",),
    "report/decoding.py": ("eval",),
    "states/writer.py": ("features",),
    "states/source.py": ("train",),
    **{f"states/{file.name}": ("train", "features") for file in (ROOT / "states").glob("vllm*")},
    # the others load no target
    "targets/loading.py": tuple(c for c in COMMON if c not in ("export", "serve", "push", "report", "inspect")),
    "data/template.py": ("train", "generate", "eval", "regenerate"),
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def messages() -> list[tuple[str, str]]:
    """(module, text) of every string in the package except docstrings; an f-string is one text."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(file.read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented)
                and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | docs:
                text = node.value
            else:
                continue
            found.append((file.relative_to(ROOT).as_posix(), text))
    return found


def known_to(commands) -> set[str]:
    """The flags that all these commands have; for train also the negations of its switches."""
    switches = {flag_of(f"no_{f.name}") for f in option_fields(TrainOptions) if f.type == "bool"}
    known = set.intersection(*({flag_of(f.name) for f in option_fields(OPTIONS[c])} for c in commands))
    return known | switches if tuple(commands) == ("train",) else known


OTHERS = (  # flags of other programs: torchrun's in train/setup/launch.py, and those of serving engines
    "--standalone", "--nproc-per-node", "--enable-metrics", "--speculative-config", "--kv-transfer-config",
    "--no-enable-prefix-caching", "--max-model-len", "--revision", "--disable-log-stats",
    "--gpu-memory-utilization", "--mem-fraction-static",
)  # fmt: skip


def test_messages_name_only_flags_of_their_command():
    """A flag of another command must follow that command's name, as in: fledge train --resume."""
    seen, wrong = 0, []
    for module, text in messages():
        # flags of git, engines and compilers; the commands
        if module in ("io/machine.py", "engines/export.py", "ops/compiled.py", "cli.py"):
            continue
        known = {*known_to(READERS.get(module, COMMON)), *OTHERS}
        for flag in FLAG.finditer(text):
            before = re.search(r"fledge (\w+) [^;,.]*$", text[: flag.start()])
            has = known_to([before[1]]) if before else known
            seen += 1
            wrong += [f"{module}: {text}"] if flag[0] not in has else []
    assert seen > 50 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["train", "--target", "t", "--data", ""], "--data"),
        (["eval", "--target", "t", "--prompts", ""], "--prompts"),
        (["generate", "--target", "t", "--draft", ""], "--draft"),
        (["eval", "--target", "t", "--draft", "d", "--draft", ""], "--draft"),
        (["chat", "--target", ""], "--target"),
        (["eval", "--target", "t", "--out", ""], "--out"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else x,
)
def test_an_empty_value_is_refused(words: list[str], flag: str, fledge) -> None:
    """As of a variable of the shell that is not set: it does not mean the current directory, or that the option was not
    given."""
    ran = fledge(*words)
    assert ran.code == 2 and ran.err == f"fledge: {flag} is empty; give it a value, or leave it out\n"


def test_an_engines_own_arguments_may_be_empty() -> None:
    """They are not fledge's to judge."""
    arguments = ["--chat-template", ""]
    assert ServeOptions(draft="d", target="t", engine="vllm", arguments=arguments).arguments == arguments
