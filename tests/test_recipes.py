"""The recipes that come with fledge: each is resolved as it is, and trains a draft for a tiny model of its family and
template, with which decoding gives the target's own tokens."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from fledge import load
from fledge.data.documents import Document
from fledge.data.pack import make_row
from fledge.data.spans import training_documents
from fledge.data.template import ChatTemplate, ModeWarning
from fledge.drafts.weights import read_draft_config
from fledge.targets.loading import load_target
from fledge.train.plan import DrawAnchors
from fledge.train.setup.options import TrainOptions
from fledge.train.setup.recipe import resolve
from fledge.train.setup.recipe_file import RECIPES, recipe_names, with_config
from support.chats import tiny_chats
from support.targets import read_alone, tiny_tokenizer
from support.templates import GEMMA3, HARMONY, LLAMA3, QWEN3

SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=400, max_position_embeddings=512, pad_token_id=0, bos_token_id=None, eos_token_id=1,
)  # fmt: skip
WINDOW = 16  # of sliding layers, which is shorter than the chats
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)


def gpt_oss() -> transformers.PreTrainedConfig:
    yarn = dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, original_max_position_embeddings=128)
    return transformers.GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, rope_parameters=yarn
    )


def gemma3() -> transformers.PreTrainedConfig:
    text = transformers.Gemma3TextConfig(**SIZES, sliding_window=WINDOW, sliding_window_pattern=4)
    return transformers.Gemma3Config(text_config=text.to_dict(), vision_config=VISION, mm_tokens_per_image=4)


TARGETS = {
    "llama-3.1-8b": (lambda: transformers.LlamaConfig(**SIZES), LLAMA3),
    "qwen3-8b": (lambda: transformers.Qwen3Config(**SIZES), QWEN3),
    "gpt-oss-20b": (gpt_oss, HARMONY),
    "gemma-3": (gemma3, GEMMA3),
    "laptop": (lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True), QWEN3),
    "eagle3": (lambda: transformers.LlamaConfig(**SIZES), LLAMA3),
    "peagle": (lambda: transformers.LlamaConfig(**SIZES), LLAMA3),
    "dflash": (lambda: transformers.Qwen3Config(**SIZES), QWEN3),
    "dflash2": (lambda: transformers.Qwen3Config(**SIZES), QWEN3),
    "jetspec": (lambda: transformers.LlamaConfig(**SIZES), LLAMA3),
}
# of recipes; those of the others are eagle3
METHODS = {"peagle": "peagle", "dflash": "dflash", "dflash2": "dflash", "jetspec": "dflash"}
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
QWEN3_SIZES = dict(num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960)
GEMMA3_SIZES = dict(
    hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8, num_key_value_heads=4,
    head_dim=256, vocab_size=262208, sliding_window=1024,
)  # fmt: skip
# the configs of the models that the recipes name, as published, and the GB of memory that the recipes are sized for
PUBLISHED = {
    "llama-3.1-8b": (
        transformers.LlamaConfig,
        dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rope_parameters=LLAMA3_ROPE),
        80,
    ),
    "qwen3-8b": (
        transformers.Qwen3Config,
        dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, **QWEN3_SIZES),
        80,
    ),
    "gpt-oss-20b": (
        transformers.GptOssConfig,
        dict(num_hidden_layers=24, num_local_experts=32, quantization_config={"quant_method": "mxfp4"}),
        80,
    ),
    "gemma-3": (transformers.Gemma3Config, dict(text_config=GEMMA3_SIZES), 80),
    "laptop": (
        transformers.Qwen3Config,
        dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
             tie_word_embeddings=True, **QWEN3_SIZES),
        8,
    ),
}  # fmt: skip
MODES = {
    "qwen3-8b": {"enable_thinking": False}, "laptop": {"enable_thinking": False},
    "gpt-oss-20b": {"reasoning_effort": "medium"},
}  # fmt: skip
OTHER_MODES = {"qwen3-8b": {"enable_thinking": True}, "gpt-oss-20b": {"reasoning_effort": "high"}}
# float64, in which rounding changes no token; transformers' experts need float32
DTYPES = {name: torch.float32 if name == "gpt-oss-20b" else torch.float64 for name in TARGETS}
CHAT = [
    {"role": "user", "content": "the young bird tries its wings"},
    {"role": "assistant", "content": "falls and tries again"},
    {"role": "user", "content": "until it can fly"},
]


def random_model(config: transformers.PreTrainedConfig) -> PreTrainedModel:
    """A random model whose next token depends on its context."""
    torch.manual_seed(0)
    images = hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "embed_tokens" in name:
                p.normal_(0, 0.2)  # Gemma multiplies it, and a larger one would drown the layers
            elif p.dim() > 1:
                p.normal_(0, p.shape[-1] ** -0.5)
            elif "sinks" in name:
                p.normal_()
    return model.eval()


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


def target_of(name: str, made: dict[str, Path], parent: Path) -> Path:
    """The directory of a tiny target for a recipe."""
    if name not in made:
        config, template = TARGETS[name]
        random_model(config()).save_pretrained(parent / "target")
        tiny_tokenizer(template).save_pretrained(parent / "target")
        made[name] = parent / "target"
    return made[name]


def complete(name: str, **given: Any) -> TrainOptions:
    """The options of a recipe."""
    return with_config(TrainOptions(config=name, **given), lambda line: None)


def test_every_recipe_has_a_test_and_is_named_in_the_help() -> None:
    assert recipe_names() == sorted(TARGETS)
    shown = TrainOptions.__dataclass_fields__["config"].metadata["help"]
    assert all(name in shown for name in recipe_names())


@pytest.mark.parametrize("name", TARGETS)
def test_a_recipe_is_resolved_as_it_is(name: str) -> None:
    general = name in ("eagle3", *METHODS)  # which name no target and no data
    options = complete(name, **dict(target="my/model", data=["chats.jsonl"]) if general else {})
    recipe = resolve(options, imagined=True)
    assert recipe.options.target and recipe.data.sources
    assert recipe.data.modes == (MODES.get(name, {}),)
    assert recipe.method.name == METHODS.get(name, "eagle3")
    assert f"--config {name}" in (RECIPES / f"{name}.yaml").read_text()


def test_recipes_of_block_drafts_are_those_of_the_papers() -> None:
    """The papers' losses, weights, learning rates and lengths (arXiv:2602.06036, section 4, and 2606.18394)."""
    recipes = {
        name: resolve(complete(name, target="my/model", data=["chats.jsonl"]), imagined=True)
        for name in ("dflash", "jetspec")
    }
    for recipe in recipes.values():
        options = recipe.options
        assert (recipe.depth, recipe.layers, recipe.objective.drop) == (15, 5, DrawAnchors(512))
        assert (options.optimizer, options.epochs, options.clip) == ("adamw", 6, 1.0)
        assert (options.warmup, options.max_length, options.row_length) == (0.04, 3072, 3072)
    dflash, jetspec = recipes["dflash"], recipes["jetspec"]
    assert (dflash.objective.loss, dflash.options.lr, dflash.switches) == ("hard", 6e-4, ())
    assert dflash.objective.discounts()[7] == pytest.approx(math.exp(-1))
    assert (jetspec.objective.loss, jetspec.options.lr, jetspec.switches) == ("kl", 3e-4, ("block_causal",))
    assert jetspec.objective.discounts() == [1.0] * 15
    second = resolve(complete("dflash2", target="my/model", data=["chats.jsonl"]), imagined=True)
    assert (second.depth, second.switches) == (7, ("block_conv", "candidate_selector"))
    assert (second.options.sliding_window, second.options.lr) == (2048, 6e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_a_recipe_trains_a_draft_that_decodes_losslessly(
    name: str, targets: dict[str, Path], tmp_path: Path, fledge
) -> None:
    target, data, run = target_of(name, targets, tmp_path), tiny_chats(tmp_path / "chats.jsonl", 30), tmp_path / "run"
    words = ["--config", name, "--target", target, "--data", data, "--out", run, "--steps", 2, "--eval-every", 0]
    words += ["--max-length", 96, "--row-length", 192, "--device", "cpu"]
    words += [] if METHODS.get(name) == "dflash" else ["--draft-vocab", 200]
    words += ["--dtype", str(DTYPES[name]).removeprefix("torch.")]
    ran = fledge("train", *words)
    assert ran.code == 0, ran.err
    assert read_draft_config(run / "draft").provenance.modes == (MODES.get(name, {}),)
    alone = load(target, dtype=DTYPES[name], template_kwargs=MODES.get(name))
    engine = load(alone.target, draft=run / "draft")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModeWarning)
        for prompt in (CHAT, CHAT[:1]):
            # random models repeat themselves without the penalty
            theirs, ours = (e.generate(prompt, max_new_tokens=40, repetition_penalty=3.0) for e in (alone, engine))
            assert ours.tokens == theirs.tokens and ours.trace.rounds and len(set(theirs.tokens)) > 10
    if other := OTHER_MODES.get(name):
        with pytest.warns(ModeWarning):
            load(alone.target, draft=run / "draft", template_kwargs=other).generate(CHAT, max_new_tokens=2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_fits_on_the_gpu_that_it_is_meant_for(name: str, tmp_path: Path, fledge) -> None:
    """With rows that are full of supervised tokens."""
    kind, sizes, memory = PUBLISHED[name]
    kind(**sizes, dtype="bfloat16").save_pretrained(tmp_path / "target")
    tiny_tokenizer(TARGETS[name][1]).save_pretrained(tmp_path / "target")
    answer = {"role": "assistant", "content": " ".join(CHAT[0]["content"] for _ in range(400))}
    row = json.dumps({"messages": [CHAT[0], answer]}) + "\n"
    (tmp_path / "chats.jsonl").write_text(row * 4)
    words = ["--target", tmp_path / "target", "--data", tmp_path / "chats.jsonl", "--out", tmp_path / "run"]
    ran = fledge("train", "--config", name, *words, "--dry-run", "--gpus", 1, "--gpu-memory", memory)
    assert ran.code == 0 and "Memory: fits" in ran.out, ran.out + ran.err
    recipe = resolve(complete(name), imagined=True)
    assert f"of {2 * recipe.data.longest:,} tokens" in ran.out


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3"])
def test_packed_documents_have_the_states_that_they_have_alone(
    name: str, targets: dict[str, Path], tmp_path: Path
) -> None:
    """Sliding windows, sinks and two RoPE bases, in rows of several documents that are longer than a window."""
    dtype = DTYPES[name]
    target = load_target(target_of(name, targets, tmp_path), dtype=dtype)
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 400, (n,), generator=draw, dtype=torch.int32) for n in (40, 25)]
    documents = [Document(tokens.numpy(), torch.zeros_like(tokens).numpy()) for tokens in texts]
    row = make_row(documents, 80)
    layers, tolerance = (2, 4, 5), 1e-9 if dtype is torch.float64 else 1e-4
    packed, at = target.features(row, layers), 0
    for tokens in texts:
        _, features = read_alone(target, tokens.tolist(), layers)
        together = packed.aux_TAD[at : at + len(tokens)]
        torch.testing.assert_close(together, features.aux_TAD.reshape(together.shape), atol=tolerance, rtol=tolerance)
        at += len(tokens)


def test_harmony_makes_a_document_of_each_turn(tmp_path: Path) -> None:
    """A turn ends otherwise, and loses its reasoning, once another follows; each is trained on as it was generated."""
    from fledge.data.record import Record

    chat = [*CHAT[:1], CHAT[1] | {"thinking": "can it"}, CHAT[2], {"role": "assistant", "content": "it can"}]
    template = ChatTemplate(tiny_tokenizer(HARMONY), {1}, {"reasoning_effort": "high"})
    documents = training_documents(template, Record("here", messages=chat))
    supervised = [template.tokenizer.decode(d.tokens[d.spans >= 0]) for d in documents]
    assert any("<|channel|>analysis<|message|>can it" in text for text in supervised)
    assert any("<|channel|>final<|message|>it can<|return|>" in text for text in supervised)
    assert all("Reasoning: high" in template.tokenizer.decode(d.tokens) for d in documents)


def test_names_and_files_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fledge) -> None:
    monkeypatch.chdir(tmp_path)
    ran = fledge("train", "--config", "qwen-8b")
    assert ran.code == 2 and "gpt-oss-20b" in ran.err and "did you mean qwen3-8b?" in ran.err
    ran = fledge("train", "--config", "no/qwen3-8b")
    assert ran.code == 2 and "does not exist" in ran.err
    Path("eagle3").write_text("method: peagle\n")  # a file takes precedence
    assert complete("eagle3").method == "peagle"
    Path("qwen3-8b").mkdir()  # a run's directory does not
    assert complete("qwen3-8b", target="mine").target == "mine"
