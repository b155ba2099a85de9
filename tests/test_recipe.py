"""Recipes: how options resolve, the file that a run writes, and training from a file with flags that override it."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import fledge as api
from fledge.drafts import weights
from fledge.io.formats import config_from_hf
from fledge.train.plan import DropTokens
from fledge.train.setup import recipe as recipes
from fledge.train.setup.options import TrainOptions
from fledge.train.setup.recipe import resolve
from fledge.train.setup.recipe_file import read_yaml, with_config, write_yaml
from support.chats import tiny_chats
from support.runs import recipe_of
from support.targets import tiny_draft, tiny_target, tiny_target_directory

ROOT = Path(__file__).parent.parent
SHORT = "--max-length 64 --row-length 128 --steps 3 --depth 3 --draft-vocab 200 --device cpu --eval-tokens 4".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, chats, prompts and a draft."""
    root = tmp_path_factory.mktemp("made")
    tiny_target_directory(root)
    tiny_chats(root / "chats.jsonl", 40)
    prompts = ["the young bird", "it can fly", "tries its wings and", "falls until"]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    weights.save_draft(tiny_draft(tiny_target()), root / "draft")
    return root


def merged(tmp_path: Path, text: str, **flags: Any) -> tuple[TrainOptions, list[str]]:
    """The options of a recipe file merged with given flags, and the printed messages."""
    file, said = tmp_path / "recipe.yaml", []
    file.write_text(text, encoding="utf-8")
    options = TrainOptions(config=str(file), **flags, given=frozenset({"config", *flags}))
    return with_config(options, said.append), said


# -- YAML -------------------------------------------------------------------------------------------------------------


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.dictionaries(st.text(), VALUES))
def test_what_is_written_is_read_back(value: dict[str, Any]) -> None:
    assert read_yaml(write_yaml(value)) == value


@pytest.mark.parametrize(
    "text", ["1e-4", "yes", "no", "0o17", "12:30", "2024-01-01", "null", "0x1F", ".inf", "=", "<<"]
)
def test_other_yaml_readers_read_the_same_text(text: str) -> None:
    assert yaml.safe_load(write_yaml({"a": text})) == read_yaml(write_yaml({"a": text})) == {"a": text}


def test_numbers_may_have_an_exponent_alone() -> None:
    text = "[1e-4, -2.5E+3, 2.e3, .5e1, .5, 3., 10, yes, ~, True, 2,16, '7']"
    read = [1e-4, -2500.0, 2000.0, 5.0, 0.5, 3.0, 10, True, None, True, 2, 16, "7"]
    assert read_yaml(text) == read


BAD_YAML = {
    "steps: 3\nsteps: 4\n": "line 2: duplicate key steps; keep one",
    "a: &x [1]\nb: *x\n": "line 1: anchors (&) and aliases (*) are not allowed; repeat the value",
    "b: *x\n": "anchors (&) and aliases (*) are not allowed",
    "target: !!python/object/apply:os.system [id]\n": "it is not YAML: could not determine a constructor for the tag",
    "steps: [1\n": "it is not YAML: while parsing a flow sequence",
    "steps: 3\n---\nsteps: 4\n": "it is not YAML: expected a single document",
    "\tsteps: 3\n": "it is not YAML",
    "3: steps\n": "line 1: the key 3 is no text; put it in quotes",
    "steps: 3\ntemplate_kwargs:\n  2024-01-01: x\n": "line 3: the key 2024-01-01 is no text; put it in quotes",
    "? [a]\n: 3\n": "found unhashable key",
    "seed: " + "9" * 5000 + "\n": "Exceeds the limit (4300 digits)",
    "[" * 20_000: "it is nested too deeply",
    "- steps\n": "contains a list of 1; a recipe consists of lines such as `steps: 1000`",
    "steps\n": "contains 'steps'; a recipe consists of lines",
    "a: \x00\n": "it is not YAML: unacceptable character",
}


@pytest.mark.parametrize("text", BAD_YAML, ids=lambda text: text[:20])
def test_text_that_is_not_a_recipe_is_refused(text: str, tmp_path: Path, fledge) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    ran = fledge("train", "--config", file)
    assert (ran.code == 2 and f"{file}: " in ran.err) or f"{file} contains" in ran.err or f"{file} has" in ran.err, (
        ran.err
    )
    assert BAD_YAML[text] in ran.err, ran.err


def test_paths_that_cannot_be_recipes_are_refused(tmp_path: Path, fledge) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"target: caf\xe9\n")
    for file, reason in (
        (tmp_path, "is a directory; a recipe is a file, such as"),
        (tmp_path / "nowhere.yaml", "does not exist or is not a regular file"),
        ("/dev/zero", "does not exist or is not a regular file"),
        (tmp_path / "latin.yaml", "can't decode byte 0xe9"),
    ):
        ran = fledge("train", "--config", file)
        assert ran.code == 2 and str(file) in ran.err and reason in ran.err, ran.err


# -- options in a file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("stepz: 3", "'stepz' is not an option of fledge train; did you mean steps?"),
        ("xyzzy: 3", "'xyzzy' is not an option of fledge train; the keys are the names of its flags"),
        ("steps: many", "steps: 'many' is not of type int | None; change it or leave it out"),
        ("steps: 0", "steps: 0: it must be at least 1; change it"),
        ("steps: 1.5", "steps: 1.5 is not of type int | None"),
        ("fc_norm: often", "fc_norm: 'often' is not of type bool"),
        ("data: {a: 1}", "'a' is not an option of a source"),
        ("data: [a.jsonl, 3]", "is not of type list[str]"),
        ("lr: .nan", "lr: nan: it must be above 0"),
        ("template_kwargs: [1]", "template_kwargs: [1] is not of type str | None"),
        ("resume: run", "resume cannot be set in a file; give --resume on the command line"),
        ("config: other.yaml", "config cannot be set in a file"),
        (
            "method: eagle2",
            "method: eagle2 is not one of eagle3, eagle3.1, peagle, eagle1, dflash; change it or leave it out",
        ),
        ("template_kwargs: {chat_template: x}", "--template-kwargs sets chat_template"),
        ("gamma: 0.5\nmethod: peagle", "--gamma has no effect with P-EAGLE"),
        ("epochs: 2\nsteps: 9", "--epochs has no effect with --steps"),
    ],
)
def test_a_wrong_value_is_named_with_file_and_key(line: str, reason: str, tmp_path: Path, fledge) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"target: t\ndata: d\n{line}\n" if "data" not in line else f"target: t\n{line}\n")
    ran = fledge("train", "--config", file, "--out", tmp_path / "run")
    assert ran.code == 2 and str(file) in ran.err and reason in ran.err, ran.err


def test_a_file_may_leave_out_anything(tmp_path: Path) -> None:
    options, said = merged(tmp_path, "", target="t", data=["d"])
    assert (options.target, options.data, options.steps, options.given) == (
        "t",
        ["d"],
        None,
        {"config", "target", "data"},
    )
    assert not said
    options, _ = merged(
        tmp_path,
        "target: t\ndata: d@0.5\ndepth:\naux_layers: [2, 5]\ntemplate_kwargs: {thinking: no, a: 2024-01-01}\n",
    )
    assert options.data == ["d@0.5"] and options.depth is None and options.aux_layers == "2,5"
    assert options.template_kwargs == '{"thinking": false, "a": "2024-01-01"}' and options.was_given("aux_layers")


def test_flags_override_a_file(tmp_path: Path) -> None:
    text = "target: t\ndata: [a, b]\nsteps: 100\nlr: 1e-4\nfc_norm: true\nskip_bad: true\n"
    options, said = merged(tmp_path, text, data=["c"], lr=0.5, skip_bad=False, seed=0)
    assert (options.data, options.lr, options.skip_bad, options.steps, options.fc_norm) == (
        ["c"],
        0.5,
        False,
        100,
        True,
    )
    assert not said and options.out == "draft-run"
    assert options.given == {"config", "target", "data", "steps", "lr", "fc_norm", "skip_bad", "seed"}


def test_a_switch_set_by_a_file_can_be_turned_off(tmp_path: Path, fledge, monkeypatch: pytest.MonkeyPatch) -> None:
    took = []
    monkeypatch.setattr("fledge.commands.train.run", lambda options, *_: took.append(options) or {})
    fledge("train", "--config", "f", "--no-fc-norm")
    assert took[0].given == {"config", "fc_norm"} and took[0].fc_norm is False
    ran = fledge("train", "--config", "f", "--no-fc-norm", "--fc-norm")
    assert ran.code == 2 and "--fc-norm and --no-fc-norm contradict each other; give one" in ran.err
    assert "--no-fc-norm" not in fledge("train", "--help").out


BASE = "target: t\ndata: d\n"


def test_a_flag_replaces_related_options_of_a_file(tmp_path: Path) -> None:
    """A flag for the training length, --init-from or --method replaces the related options of the file."""
    options, said = merged(tmp_path, BASE + "steps: 100\n", epochs=2.0)
    assert (options.steps, options.epochs) == (None, 2.0) and not said
    options, said = merged(tmp_path, BASE + "epochs: 3\n", steps=50)
    assert (options.steps, options.epochs) == (50, 1.0) and not said
    text = BASE + "method: eagle3\nlayers: 2\ndraft_vocab: 100\nfc_norm: true\ngamma: 0.9\nlr: 1e-4\n"
    options, said = merged(tmp_path, text, init_from="draft")
    assert (options.method, options.layers, options.draft_vocab, options.fc_norm) == (None, None, None, False)
    assert (options.gamma, options.lr) == (0.9, 1e-4) and len(said) == 4
    assert f"layers of {tmp_path / 'recipe.yaml'} is not used with --init-from, which keeps" in " ".join(said)
    options, said = merged(tmp_path, text, method="peagle")
    assert (options.gamma, options.layers, len(said)) == (None, 2, 1) and "gamma of" in said[0]
    options, said = merged(tmp_path, BASE + "method: peagle\ncod_rate: 0.5\n", method="eagle1")
    assert options.cod_rate is None and any("cod_rate" in one and "is not used with EAGLE-1" in one for one in said)


def test_contradictions_of_a_flag_with_a_file_are_refused(made: Path, tmp_path: Path) -> None:
    for text, flags, reason in (
        ("init_from: DRAFT\n", {"layers": 2}, "--layers has no effect with --init-from"),
        ("init_from: DRAFT\n", {"method": "peagle"}, "is a draft of eagle3; leave --method out"),
        ("method: peagle\n", {"gamma": 0.8}, "--gamma has no effect with P-EAGLE"),
        ("row_length: 128\n", {"max_length": 256}, "--row-length 128 is less than --max-length 256"),
        ("depth: 1\n", {"method": "peagle"}, "--depth 1: P-EAGLE needs a depth of at least 2"),
        ("activations: recompute\n", {"impl": "eager"}, "--activations recompute needs a CUDA GPU"),
    ):
        options, _ = merged(tmp_path, BASE + text.replace("DRAFT", str(made / "draft")), device="cpu", **flags)
        with pytest.raises(ValueError, match=reason):
            resolve(options)
    with pytest.raises(ValueError, match="--epochs has no effect with --steps"):
        merged(tmp_path, BASE, steps=3, epochs=1.0)


def test_a_file_does_not_set_trust_remote_code_or_out(made: Path, tmp_path: Path, fledge) -> None:
    options, _ = merged(tmp_path, BASE + "trust_remote_code: true\n")
    assert options.trust_remote_code is False
    with pytest.raises(ValueError, match="out cannot be set in a file; give --out on the command line"):
        merged(tmp_path, BASE + "out: elsewhere\n")
    options, _ = merged(tmp_path, BASE + "trust_remote_code: true\n", trust_remote_code=True)
    assert options.trust_remote_code is True


# -- what options resolve to ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda file: file.stem)
def test_ready_recipes_resolve(file: Path) -> None:
    options = TrainOptions(config=str(file), target="t", data=["d"])
    said: list[str] = []
    recipe = resolve(with_config(options, said.append))
    assert not said and recipe.method.name == file.stem and recipe.options.target == "t"
    assert f"--config recipes/{file.name}" in file.read_text()


def test_a_recipe_is_resolved_from_the_table_of_methods(made: Path) -> None:
    def recipe(**options: Any):
        return resolve(TrainOptions(target="t", data=["d"], device="cpu", **options))

    assert recipe().objective.depth == recipe().depth == 5 and recipe().objective.gamma == 0.8
    assert recipe(method="eagle3.1").draft is None and recipe(method="eagle3.1").switches == ("fc_norm", "norm_output")
    eagle1 = recipe(method="eagle1", depth=4, fc_bias=True)
    assert (eagle1.depth, eagle1.objective.depth, eagle1.objective.drop) == (4, 1, None)
    peagle = recipe(method="peagle", cod_min_rate=0.5)
    assert (peagle.objective.gamma, peagle.objective.drop) == (1.0, DropTokens(0.8, 0.5))
    assert recipe().objective.drop is None and recipe(cod_rate=0.7).objective.drop == DropTokens(0.7, 0.2)
    with pytest.raises(FrozenInstanceError):
        peagle.depth = 3


def test_the_config_of_the_draft_to_train_further_is_read_once(made: Path, fledge, monkeypatch, tmp_path: Path) -> None:
    reads, read = [], recipes.read_draft_config
    monkeypatch.setattr(recipes, "read_draft_config", lambda name: reads.append(name) or read(name))
    words = "--target", made / "target", "--data", made / "chats.jsonl", "--init-from", made / "draft"
    ran = fledge("train", *words, "--out", tmp_path / "run", *SHORT[:6], "--device", "cpu")
    assert ran.code == 0 and reads == [str(made / "draft")], ran.err


def test_nothing_heavy_is_loaded_before_a_contradiction_is_refused(monkeypatch, fledge, tmp_path: Path) -> None:
    monkeypatch.setattr("fledge.targets.loading.load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    words = "--target", tmp_path / "nowhere", "--data", tmp_path / "nowhere.jsonl", "--out", tmp_path / "run"
    for flags, reason in (
        (["--method", "eagle1", "--draft-vocab", 9], "--draft-vocab has no effect with EAGLE-1"),
        (["--loss", "mse"], "--loss mse is not one of ce, kl, accept, mixed"),
        (["--template-kwargs", "["], "--template-kwargs is not JSON"),
        (["--aux-layers", "a"], "--aux-layers a is not a list of layer numbers"),
        (["--log", "paper"], "--log paper is not one of tensorboard, wandb"),
        (["--dtype", "int8"], "dtype 'int8' is not one of"),
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--eval-prompts", tmp_path / "no.jsonl"], "--eval-prompts"),
    ):
        ran = fledge("train", *words, *flags)
        assert ran.code == 2 and reason in ran.err, ran.err


# -- a run's file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        [
            "--method",
            "eagle3.1",
            "--gamma",
            0.7,
            "--template-kwargs",
            '{"enable_thinking": false}',
            "--aux-layers",
            "1,4,6",
        ],
        ["--method", "peagle", "--layers", 2, "--cod-min-rate", 0.5, "--keep-out-of-vocab"],
    ],
    ids=["eagle3.1", "peagle"],
)
def test_a_runs_recipe_trains_the_same_draft_again(flags: list, made: Path, tmp_path: Path, fledge) -> None:
    words = ["--target", made / "target", "--data", f"{made / 'chats.jsonl'}@0.5", *SHORT, "--seed", 7, *flags]
    first = fledge("train", *words, "--out", tmp_path / "run")
    assert first.code == 0, first.err
    recipe = recipe_of(tmp_path / "run")
    assert recipe["fledge_version"] == api.__version__ and recipe["steps"] == 3 and "epochs" not in recipe
    assert recipe["settled"]["steps"] == 3 and not {"out", "resume", "config"} & recipe.keys()
    again = fledge("train", "--config", tmp_path / "run" / "recipe.yaml", "--out", tmp_path / "again")
    assert again.code == 0 and "is not used" not in again.err, again.err
    draft, other = tmp_path / "run" / "draft", tmp_path / "again" / "draft"
    for file in ("model.safetensors", "config.json"):
        assert (draft / file).read_bytes() == (other / file).read_bytes()
    assert recipe_of(tmp_path / "again") == recipe
    taken = fledge("train", "--config", tmp_path / "run" / "recipe.yaml", "--out", tmp_path / "run")
    assert taken.code == 2 and "holds a training run" in taken.err


def test_from_python(made: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        f"target: {made / 'target'}\ndata: {made / 'chats.jsonl'}\nmax_length: 64\nsteps: 3\ndepth: 2\nepochs: 1\n"
        "draft_vocab: 200\ndevice: cpu\neval_tokens: 1\n"
    )
    trained = api.train_draft(config=tmp_path / "recipe.yaml", out=tmp_path / "run", steps=2, row_length=None)
    assert trained.metrics["step"] == 2
    assert weights.read_draft_config(trained.draft).draft_vocab_size == 200
    recipe = recipe_of(tmp_path / "run")
    assert recipe["steps"] == 2 and recipe["data"] == [str(made / "chats.jsonl")]


# -- τ ----------------------------------------------------------------------------------------------------------------


def test_tau_of_training_equals_tau_of_eval(made: Path, tmp_path: Path, fledge) -> None:
    """Training and eval measure exactly the same τ on the same weights, prompts and number of new tokens.

    Training measures the draft in memory, in the dtype of training; a draft is written in bfloat16. The weights are
    therefore the same if training runs in bfloat16, and differ by rounding if it runs in float32. The draft is trained
    on the target's own answers, so that some of its tokens are accepted.
    """
    engine = api.load(made / "target", device="cpu")
    texts = [p["prompt"] for p in map(json.loads, (made / "prompts.jsonl").read_text().splitlines())]
    own = [{"text": text + engine.generate(text, max_new_tokens=24).text} for text in texts]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in own))
    words = ["--target", made / "target", "--device", "cpu", "--dtype", "bfloat16"]
    prompts = made / "prompts.jsonl"
    ran = fledge(
        "train", *words, "--data", tmp_path / "own.jsonl", "--out", tmp_path / "run", "--max-length", 64, "--steps", 60,
        "--depth", 4, "--eval-prompts", prompts, "--eval-tokens", 24,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    tau = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["eval_tau"]
    draft = tmp_path / "run" / "draft"
    found = fledge("eval", *words, "--draft", draft, "--prompts", prompts, "--max-new-tokens", 24, "--json")
    record = json.loads(found.out)
    assert record["prompts"] == 4 and record["tau"] == tau > 1.05
    assert config_from_hf(json.loads((draft / "config.json").read_text())).provenance.depth == 4
