"""Other names of options, short names of dtypes, and what a shell completes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fledge.cli import VALUES, flags_of
from fledge.commands.train import _options
from fledge.io.fields import DTYPES, parse_dtype
from fledge.options import ALIASES, aliases_of, flag_of, option_fields
from fledge.train.setup.options import TrainOptions
from fledge.train.setup.recipe_file import with_config
from test_options import OPTIONS

REPOSITORY = Path(__file__).parents[1]


# -- other names --------------------------------------------------------------------------------------------------


def test_names_are_free_and_their_options_exist():
    fields = {name: {f.name for f in option_fields(kind)} for name, kind in OPTIONS.items()}
    assert ALIASES.keys() | VALUES.keys() <= set().union(*fields.values())
    for command, kind in OPTIONS.items():
        names = [n for f in option_fields(kind) for n in (f.name, *aliases_of(kind, f.name))]
        assert len(names) == len(set(names)), command
    assert "model" in aliases_of(TrainOptions, "target") and "model" not in aliases_of(OPTIONS["eval"], "target")


def test_a_command_takes_both_names(fledge, monkeypatch):
    took = []
    monkeypatch.setattr("fledge.commands.train.run", lambda options, say, progress: took.append(options))
    other = (
        "--model t --dataset d --output-dir o --learning-rate 1e-3 --max-seq-length 64 --batch-size 2 --num-epochs 2"
    )
    own = "--target t --data d --out o --lr 1e-3 --max-length 64 --rows-per-step 2 --epochs 2"
    for words in (other, own):
        done = fledge("train", *words.split())
        assert done.code == 0, done.err
    assert took[0] == took[1] and took[0].given == took[1].given and took[0].lr == 1e-3


def test_a_list_takes_both_names_and_a_value_may_look_like_one(fledge, monkeypatch):
    took = []
    monkeypatch.setattr("fledge.commands.train.run", lambda options, say, progress: took.append(options))
    monkeypatch.setattr("fledge.commands.generate.run", lambda options, progress: took.append(options))
    done = fledge("train", "--target", "t", "--data", "d", "--dataset", "e", "--lr", "1", "--lr", "2")
    assert done.code == 0 and took[0].data == ["d", "e"] and took[0].lr == 2, done.err
    done = fledge("generate", "--target", "t", "--draft", "d", "--prompt", "--draft-model")
    assert done.code == 0 and took[1].prompt == "--draft-model", done.err


def test_help_shows_the_names_next_to_the_flag(fledge, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "--lr,--learning-rate" in fledge("train", "--help").out.replace(" ", "")
    assert "--target,--model" not in fledge("eval", "--help").out.replace(" ", "")


def test_a_wrong_flag_is_answered_with_the_right_one(fledge):
    said = fledge("train", "--taget", "t").err
    assert "--target" in said
    assert "--learning-rate" in fledge("train", "--learning_rate", "1e-3").err


def test_recipes_and_python_take_both_names(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: t\ndataset: d\nlearning_rate: 0.001\n")
    options = with_config(TrainOptions(config=str(recipe), given=frozenset(["config"])), print)
    assert (options.target, options.data, options.lr) == ("t", ["d"], 0.001)
    recipe.write_text("model: t\ntarget: u\n")
    with pytest.raises(ValueError, match=r"recipe.yaml: model and .*recipe.yaml: target are the same option"):
        with_config(TrainOptions(config=str(recipe), given=frozenset(["config"])), print)
    options = _options(None, (), "draft-run", {"model": "t", "dataset": "d", "output_dir": "o", "max_steps": 3})
    assert (options.target, options.data, options.out, options.steps) == ("t", ["d"], "o", 3)
    assert options.given == {"target", "data", "out", "steps"}
    with pytest.raises(ValueError, match="model and target are the same option"):
        _options("t", ["d"], "draft-run", {"model": "u"})


def test_none_counts_as_not_given():
    given = {"steps": None, "max_steps": 5, "lr": None, "dataset": "d", "loss": None, "keep_out_of_vocab": True}
    options = _options("t", None, None, given)
    assert (options.steps, options.data, options.out) == (5, ["d"], TrainOptions.out)
    assert options.given == {"target", "steps", "data", "keep_out_of_vocab"}


@pytest.mark.parametrize("name", [None, "auto"])
def test_auto_leaves_the_dtype_open(name):
    assert parse_dtype(name) is None


def test_short_and_long_names_of_dtypes():
    assert parse_dtype("bf16") is parse_dtype("bfloat16") is torch.bfloat16
    assert parse_dtype("fp16") is torch.float16 and parse_dtype("fp32") is torch.float32
    with pytest.raises(ValueError, match="dtype 'int8' is not one of auto, bf16"):
        parse_dtype("int8")


# -- completion -----------------------------------------------------------------------------------------------------


def test_the_completed_values_are_those_that_are_accepted():
    from fledge.engines.support import ENGINES
    from fledge.ops.attention_ttt import IMPLS
    from fledge.ops.loss import KINDS
    from fledge.states.layout import PRECISIONS
    from fledge.targets.loading import IMPLEMENTATIONS

    fields = {f.name: f.metadata["choices"] for kind in OPTIONS.values() for f in option_fields(kind)}
    tables = dict(loss=KINDS, impl=IMPLS, target_impl=IMPLEMENTATIONS, precision=PRECISIONS,
                  to=ENGINES, dtype=DTYPES)  # fmt: skip
    for name, table in tables.items():
        assert set(table) == set(fields[name] or VALUES[name]), name


def complete(shell: str, line: str) -> tuple[str, str]:
    """What a shell gets for a line that ends at the cursor, and the modules that were imported for it."""
    script = "import sys; sys.argv[0] = 'fledge'; from fledge.cli import main\ntry:\n  main()\nfinally:\n"
    script += "  print(*sorted(sys.modules), file=sys.stderr)"
    own = {"PYTHONPATH": str(REPOSITORY), "_FLEDGE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    own |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **own}, capture_output=True, text=True, timeout=60
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fledge train --method ", ["eagle3", "eagle3.1", "peagle", "eagle1", "dflash"]),
        ("fledge train --report-to t", ["tensorboard"]),
        ("fledge eval --draft-mode ", ["chain", "tree", "parallel"]),
        ("fledge serve --engine s", ["sglang"]),
        ("fledge train --learn", ["--learning-rate"]),
        ("fledge exp", ["export"]),
    ],
)
def test_bash_completes_values_flags_and_commands(line, found):
    assert complete("bash", line)[0].split() == found


def test_zsh_completes_values_and_leaves_paths_to_itself():
    out, modules = complete("zsh", "fledge export --to v")
    assert '"vllm"' in out and "sglang" not in out
    assert complete("zsh", "fledge train --data ")[0].strip() == "_files"
    assert "fledge.cli" in modules.split() and not {"torch", "transformers", "numpy"} & set(modules.split())


def test_bash_leaves_paths_to_itself():
    """The script of --show-completion has `-o default`: without an answer, bash completes files."""
    out, modules = complete("bash", "fledge generate --draft ru")
    assert not out.strip() and not {"torch", "transformers", "numpy"} & set(modules.split())
    # the shell is named, since typer finds none where none is among the parents of this process
    own = {"PYTHONPATH": str(REPOSITORY), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = "import sys; sys.argv[0] = 'fledge'; from fledge.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--show-completion", "bash"], env={**os.environ, **own}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert "-o default" in done.stdout or "complete" in done.stdout, done.stderr


def test_every_flag_has_its_own_name_first():
    for kind in OPTIONS.values():
        for f in option_fields(kind):
            assert flags_of(kind, f)[0] == flag_of(f.name)


def test_the_documented_names_are_these():
    lines = (REPOSITORY / "docs" / "command-line.md").read_text().splitlines()
    rows = [line.replace("`", "").split("|") for line in lines if line.startswith("| `--")]
    documented = {row[1].strip(): row[2].strip().split(", ") for row in rows}
    assert documented == {flag_of(n): [flag_of(a) for a in aliases] for n, aliases in ALIASES.items()}
