"""fledge's own forward pass of a target computes what transformers' does, and refuses the models that it cannot."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fledge.config import ROPE_TYPES
from fledge.decode import batch
from fledge.decode.load import load
from fledge.ops import attention_prompt
from fledge.targets.loading import load_target, target_of
from fledge.targets.native import NativeTarget
from fledge.targets.transformers import TransformersTarget
from fledge.types import Features, Prompt, Tree
from support.rows import DOCUMENTS, row_of
from support.targets import greedy_by_transformers, tiny_draft, tiny_target, tiny_tokenizer

N = 4  # decoder layers
LAYERS = tuple(range(N + 1))
WINDOW = 5
BY_TURNS = dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
MIXTURE = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16)
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(family="llama"),
    "llama with biases": dict(family="llama", attention_bias=True, mlp_bias=True),
    "llama with tied embeddings": dict(family="llama", tie_word_embeddings=True),
    "a key head for each query head": dict(family="llama", num_key_value_heads=4),
    "three query heads for a key head": dict(family="llama", num_attention_heads=6, hidden_size=48),
    "wide heads": dict(family="llama", head_dim=16),
    "a window in the config of llama, which has none": dict(family="llama", sliding_window=WINDOW),
    "mistral": dict(family="mistral", sliding_window=WINDOW),
    "mistral without a window": dict(family="mistral", sliding_window=None),
    "phi3": dict(family="phi3", rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "phi3 with a window": dict(family="phi3", sliding_window=WINDOW),
    "qwen2": dict(family="qwen2"),
    "qwen2 by turns": dict(family="qwen2", **BY_TURNS),
    "qwen3": dict(family="qwen3"),
    "qwen3 by turns": dict(family="qwen3", **BY_TURNS),
    "mixtral": dict(family="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mixtral with a window": dict(family="mixtral", num_local_experts=5, num_experts_per_tok=1, sliding_window=WINDOW),
    "qwen3 moe": dict(family="qwen3_moe", norm_topk_prob=True, **MIXTURE),
    "qwen3 moe in every other layer": dict(family="qwen3_moe", norm_topk_prob=False, decoder_sparse_step=2, **MIXTURE),
    "qwen3 moe but in one layer, with a window": dict(
        family="qwen3_moe", mlp_only_layers=[1], use_sliding_window=True, sliding_window=WINDOW, **MIXTURE
    ),
    "qwen2 moe": dict(family="qwen2_moe", shared_expert_intermediate_size=24, **MIXTURE),
    "qwen2 moe by turns": dict(
        family="qwen2_moe", shared_expert_intermediate_size=24, norm_topk_prob=True, decoder_sparse_step=2,
        **MIXTURE, **BY_TURNS,
    ),
}  # fmt: skip
MIXTURES = [name for name in MODELS if "moe" in name or "mixtral" in name]
WINDOWED = (
    "llama", "mistral", "phi3 with a window", "qwen3 by turns", "qwen3 moe but in one layer, with a window"
)  # fmt: skip
LONGROPE = dict(rope_type="longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[4.0, 3.0, 2.0, 5.0])
# rope_parameters, further fields of the config, and max_length; the tests run at most 40 tokens
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "default": (dict(rope_type="default", rope_theta=500.0), {}, None),
    "linear": (dict(rope_type="linear", factor=2.5), {}, None),
    "llama3": (
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=64), {}, None,
    ),
    "yarn": (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16), {}, None),
    "longrope short": (LONGROPE, dict(original_max_position_embeddings=64), 64),
    "longrope long": (LONGROPE, dict(original_max_position_embeddings=16), None),
}  # fmt: skip


def model_of(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A random model of N layers, which no target has changed but for the attention's implementation."""
    return tiny_target(family, dtype=dtype, num_hidden_layers=N, seed=seed, **config).model


def rope_model(name: str, dtype: torch.dtype = torch.float64) -> tuple[PreTrainedModel, int | None]:
    parameters, config, max_length = ROPES[name]
    parameters = {"rope_theta": 1e4, **parameters}
    family = "phi3" if parameters["rope_type"] == "longrope" else "llama"
    torch.manual_seed(0)
    target = tiny_target(
        family, dtype=dtype, num_hidden_layers=N, rope_parameters=parameters, max_length=max_length, **config
    )
    return target.model, max_length


def native(model: PreTrainedModel, max_length: int | None = None) -> NativeTarget:
    """A native target of a copy of a model."""
    return NativeTarget(copy.deepcopy(model), tiny_tokenizer(), name="tiny", max_length=max_length)


def theirs(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[Tensor, Features]:
    """transformers' logits [T, V] of a text, with its plain attention, and the features of all layers."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    inputs = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    out = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    hook.remove()
    *hidden, last = out.hidden_states
    return out.logits[0], Features(torch.stack([*(x[0] for x in hidden), inputs[0][0]], dim=1), last[0])


def assert_near(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Logits or features are equal up to a relative error; transformers computes norms and RoPE in float32."""
    if isinstance(expected, Features):
        for i in range(expected.aux_TAD.shape[1]):
            assert_near(found.aux_TAD[:, i], expected.aux_TAD[:, i], tolerance)
        found, expected = found.last_TD, expected.last_TD
    assert found.shape == expected.shape and found.dtype == expected.dtype
    error = float((found - expected).float().norm() / expected.float().norm())
    assert error <= tolerance, error


def text(n: int, seed: int = 0) -> list[int]:
    return torch.randint(400, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefilled(target: NativeTarget, *prompts: Sequence[int], room: int = 32) -> tuple[Any, Tensor, list[Features]]:
    cache = target.new_cache([len(p) + room for p in prompts])
    return cache, *target.prefill([Prompt(p) for p in prompts], cache, LAYERS)


# -- one pass -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MODELS, *ROPES])
def test_logits_and_features_are_those_of_transformers(name: str) -> None:
    model, max_length = rope_model(name) if name in ROPES else (model_of(**MODELS[name]), None)
    target, tokens = native(model, max_length), text(40)
    logits, features = theirs(model, tokens)
    cache, last, (found,) = prefilled(target, tokens)
    assert_near(last, logits[-1:])
    assert_near(found, features)
    assert_near(target.logits(found.last_TD), logits)
    assert cache.lengths == [40]
    verified, nodes = target.verify(Tree.chain(torch.tensor([tokens])), target.new_cache([40]), LAYERS)
    assert_near(verified[0], logits)
    assert_near(nodes, features)
    target.check_logits()


def test_every_rope_type_is_tested() -> None:
    assert {parameters["rope_type"] for parameters, *_ in ROPES.values()} == set(ROPE_TYPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen2", "qwen3 by turns"])
def test_narrower_dtypes(name: str, dtype: torch.dtype) -> None:
    """As near to float64 as transformers is, up to half as much more."""
    model, tokens = model_of(**MODELS[name]), text(40)
    exact, _ = theirs(model, tokens)
    narrow = copy.deepcopy(model).to(dtype)
    logits, features = theirs(narrow, tokens)
    _, _, (found,) = prefilled(target := native(narrow), tokens)
    assert found.aux_TAD.dtype == found.last_TD.dtype == dtype
    error = float((logits - exact).norm() / exact.norm())
    assert_near(target.logits(found.last_TD).double(), exact, 1.5 * error + 1e-6)
    assert_near(found, features, 1e-4 if dtype == torch.float32 else 3 * error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "qwen2 moe", "qwen3 moe"])
def test_narrower_dtypes_of_mixtures(name: str, dtype: torch.dtype) -> None:
    """Most rows are as near to float64 as those of transformers, up to half as much more; in the others, another of two
    experts with nearly equal scores is chosen than in float64."""
    model, tokens = model_of(**MODELS[name]), text(40)
    exact, _ = theirs(model, tokens)
    narrow = copy.deepcopy(model).to(dtype)
    _, _, (found,) = prefilled(target := native(narrow), tokens)
    error, own = (
        float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).median())
        for logits in (theirs(narrow, tokens)[0], target.logits(found.last_TD))
    )
    assert own <= 1.5 * error + 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_documents_of_a_packed_row_do_not_see_each_other(name: str) -> None:
    """The features of a row are those of each document alone, and zeros at its filler."""
    model, row = model_of(**MODELS[name]), row_of(DOCUMENTS, filler=6)
    found = native(model).features(row, LAYERS)
    expected = [theirs(model, row.token_T[a:b].tolist())[1] for a, b in row.without_filler()]
    n = row.without_filler()[-1][1]
    assert_near(
        Features(found.aux_TAD[:n], found.last_TD[:n]),
        Features(torch.cat([f.aux_TAD for f in expected]), torch.cat([f.last_TD for f in expected])),
    )
    assert found.last_TD.shape[0] == n + 6 and not found.last_TD[n:].any() and not found.aux_TAD[n:].any()
    some = native(model).features(row, (1, 3))
    torch.testing.assert_close(some.aux_TAD, found.aux_TAD[:, [1, 3]], rtol=0, atol=0)
    assert native(model).features(row, ()).aux_TAD.shape == (n + 6, 0, model.config.hidden_size)


# -- passes after one another -------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [3, 2048])
@pytest.mark.parametrize("parts", [[17, 17, 6], [1, 1, 38], [4, 3, 33]], ids=str)
@pytest.mark.parametrize("name", WINDOWED)
def test_a_prompt_in_parts_gives_what_it_gives_in_one(
    name: str, parts: list[int], queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a window is shorter than a part, or longer, and where attention takes the queries in parts."""
    monkeypatch.setattr(attention_prompt, "QUERIES", queries)
    model, tokens = model_of(**MODELS[name]), text(40)
    logits, features = theirs(model, tokens)
    target = native(model)
    cache, first, found = target.new_cache([40]), 0, []
    for n in parts:
        last, (part,) = target.prefill([Prompt(tokens[first : first + n])], cache, LAYERS)
        first += n
        assert_near(last[0], logits[first - 1])
        found.append(part)
    assert_near(Features(torch.cat([f.aux_TAD for f in found]), torch.cat([f.last_TD for f in found])), features)


@pytest.mark.parametrize("name", WINDOWED)
def test_prompts_of_several_lengths_run_together(name: str) -> None:
    model, prompts = model_of(**MODELS[name]), [text(n, seed=n) for n in (3, 40, 1, 17)]
    target = native(model)
    cache, last, features = prefilled(target, *prompts)
    assert cache.lengths == [3, 40, 1, 17]
    for prompt, logits, found in zip(prompts, last, features, strict=True):
        their_logits, their_features = theirs(model, prompt)
        assert_near(logits, their_logits[-1])
        assert_near(found, their_features)
    again, none = target.prefill([Prompt(p) for p in prompts], target.new_cache([40] * 4))
    torch.testing.assert_close(again, last, rtol=1e-12, atol=1e-12)
    assert none == []


@pytest.mark.parametrize("layers", [(1, 3), LAYERS], ids=["some", "all"])
@pytest.mark.parametrize("name", WINDOWED)
def test_the_final_state_of_each_prompt_alone(name: str, layers: Sequence[int]) -> None:
    """Without `final`, the last layer computes the last rows only, unless its output is captured. What is left is the
    same, in the first part of the prompts and in the second, where one prompt has ended."""
    target, parts = native(model_of(**MODELS[name])), ([text(n, seed=n) for n in (3, 40, 1)], [text(5), text(1), []])
    whole, few = (target.new_cache([60] * 3) for _ in range(2))
    for prompts in parts:
        running = [b for b, prompt in enumerate(prompts) if prompt]
        logits, features = target.prefill([Prompt(p) for p in prompts], whole, layers)
        last, found = target.prefill([Prompt(p) for p in prompts], few, layers, final=False)
        torch.testing.assert_close(last[running], logits[running], rtol=1e-12, atol=1e-12)
        for b in running:
            torch.testing.assert_close(found[b].aux_TAD, features[b].aux_TAD, rtol=0, atol=0)
            torch.testing.assert_close(found[b].last_TD, features[b].last_TD[-1:], rtol=1e-12, atol=1e-12)
    assert few.lengths == whole.lengths == [8, 41, 1]
    (first, _), (second, _) = (cache.segments[1] for cache in (whole, few))
    kept = target.pool.buffer
    torch.testing.assert_close(kept[..., second : second + 41, :], kept[..., first : first + 41, :], rtol=0, atol=0)


PARENTS = [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]  # two paths, each of five nodes after the root
PATHS = {"left": [0, 1, 3, 5, 7, 9], "right": [0, 2, 4, 6, 8, 10], "root": [0]}


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("kept", [("left", "right"), ("right", "left"), ("root", "right")], ids="-".join)
def test_every_node_of_a_tree_is_that_of_its_path(name: str, kept: tuple[str, str]) -> None:
    """Each request of a batch: logits and features of all nodes, though a path is longer than the window; and those of
    a chain after one of its paths was kept."""
    model, prompts = model_of(**MODELS[name]), [text(n, seed=n) for n in (9, 14)]
    target = native(model)
    cache, *_ = prefilled(target, *prompts)
    token_BN = torch.tensor([text(11, seed=b) for b in (20, 21)])
    tree = Tree(token_BN, torch.tensor([PARENTS] * 2), 5)
    logits_BNV, features = target.verify(tree, cache, LAYERS)
    for b, prompt in enumerate(prompts):
        for path in PATHS.values():
            their_logits, theirs_of = theirs(model, prompt + token_BN[b, path].tolist())
            n, rows = len(prompt), torch.tensor(path) + 11 * b
            assert_near(logits_BNV[b, path], their_logits[n:])
            assert_near(
                Features(features.aux_TAD[rows], features.last_TD[rows]),
                Features(theirs_of.aux_TAD[n:], theirs_of.last_TD[n:]),
            )
    paths = [PATHS[name] for name in kept]
    path_BR = torch.tensor([[*path, *[0] * (6 - len(path))] for path in paths])
    cache.keep(path_BR, torch.tensor([len(path) for path in paths]))
    assert cache.lengths == [9 + len(paths[0]), 14 + len(paths[1])]
    said = [p + token_BN[b, path].tolist() for b, (p, path) in enumerate(zip(prompts, paths, strict=True))]
    chain = torch.tensor([text(7, seed=b) for b in (30, 31)])
    after, _ = target.verify(Tree.chain(chain), cache)
    for b, line in enumerate(said):
        assert_near(after[b], theirs(model, line + chain[b].tolist())[0][len(line) :])
    cache.keep(None, torch.tensor([2, 5]))
    cache.select([1])
    after, _ = target.verify(Tree.chain(chain[:1]), cache)
    assert_near(after[0], theirs(model, said[1] + chain[1, :5].tolist() + chain[0].tolist())[0][-7:])


@pytest.mark.parametrize("name", WINDOWED)
def test_the_masks_and_the_rollback_pass_their_checks(name: str) -> None:
    target = native(model_of(**MODELS[name]))
    target.check_rollback()
    target.check_masks()
    target.check_masks(2)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_long_prompt_is_read_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are transformers' own, with a draft and without, whatever fits in a prefill pass."""
    target = native(model := model_of(**MODELS[name]))
    prompts = [text(n, seed=n) for n in (33, 7, 15, 1)]
    expected = [greedy_by_transformers(model, p, 12) for p in prompts]
    engine = load(target, tiny_draft(target, aux_layers=(1, 2, 3)), depth=3)
    assert not engine._batching_problem  # which is found by running a text that is longer than the window
    counts: list[int] = []
    prefill = target.prefill
    monkeypatch.setattr(target, "prefill", lambda p, *more: counts.extend(map(len, p)) or prefill(p, *more))
    for limit in (7, 8192):
        monkeypatch.setattr(batch, "PREFILL_TOKENS", limit)
        for speculate in (True, False):
            done = engine.generate_all(prompts, max_new_tokens=12, batch=4, speculate=speculate)
            assert [c.tokens for c in done] == expected
        assert (max(counts) <= 7) == (limit == 7)
    assert not target.pool.slots, "all slots are free again"


# -- the model's weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama with biases", "llama with tied embeddings", "phi3", "qwen2", "qwen3", *MIXTURES]
)
def test_the_weights_are_the_models_own(name: str, tmp_path: Path) -> None:
    """Joined matrices have the memory of their parts, which are views of them; the model computes and is saved as
    before."""
    model = model_of(**MODELS[name])
    before, expected = copy.deepcopy(model.state_dict()), theirs(model, text(20))[0]
    said = greedy_by_transformers(model, text(9), 12)
    target = NativeTarget(model, tiny_tokenizer())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    parameters = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(parameters.values()) == sum(p.numel() * p.element_size() for p in model.parameters())
    layers = target.native.layers
    parts = [*layers, *(layer.experts for layer in layers if layer.experts is not None)]
    weights = [value for part in parts for value in vars(part).values() if isinstance(value, Tensor)]
    used = {w.untyped_storage().data_ptr() for w in (*weights, target.native.embedding, target.native.norm)}
    assert used | {model.lm_head.weight.untyped_storage().data_ptr()} == parameters.keys()
    for name, p in model.model.layers[1].mlp.named_parameters():
        p.mul_(2 if "gate" in name else -1)
    assert_near(prefilled(target, text(20))[1][0], theirs(model, text(20))[0][-1])
    model.load_state_dict(before)
    assert torch.equal(theirs(model, text(20))[0], expected)
    assert greedy_by_transformers(model, text(9), 12) == said == target.reference_generate(text(9), 12)
    model.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(before[name], value) for name, value in read.state_dict().items())


@pytest.mark.parametrize("original", [True, False], ids=["an expert a tensor", "joined"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2 moe", "qwen3 moe in every other layer"])
def test_both_layouts_of_experts_are_read(name: str, original: bool, tmp_path: Path) -> None:
    """Checkpoints have a tensor for each expert's matrix; transformers 5 can also save them as it joins them."""
    model = model_of(dtype=torch.float32, **MODELS[name])
    model.save_pretrained(tmp_path, save_original_format=original)
    tiny_tokenizer().save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any(".experts.2." in key for key in file.keys()) == original  # noqa: SIM118  (a handle is no dict)
    target = load_target(tmp_path, implementation="native")
    assert_near(prefilled(target, text(20))[1][0], theirs(model, text(20))[0][-1])


def test_a_second_target_of_a_model_shares_its_weights() -> None:
    model = model_of("llama", attention_bias=True)
    first, second = NativeTarget(model, None), NativeTarget(model, None)
    for a, b in zip(first.native.layers, second.native.layers, strict=True):
        for name in ("qkv", "qkv_bias", "gate_up"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.data_ptr() == y.data_ptr() and torch.equal(x, y)
    assert_near(prefilled(second, text(9))[1], prefilled(first, text(9))[1], 0)


# -- models that it does not compute ------------------------------------------------------------------------------


class Quantized(nn.Module):
    """A layer that looks like those of quantization libraries."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.register_buffer("qweight", linear.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.qweight.T


class Adapted(nn.Linear):
    """A subclass of a linear layer that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def quantize(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.down_proj = Quantized(model.model.layers[1].mlp.down_proj)


def adapt(model: PreTrainedModel) -> None:
    attention = model.model.layers[1].self_attn
    adapted = Adapted(*reversed(attention.q_proj.weight.shape), bias=False)
    adapted.weight = attention.q_proj.weight
    attention.q_proj = adapted


def patch_linear(model: PreTrainedModel) -> None:
    projection = model.model.layers[1].self_attn.o_proj
    forward = nn.Linear.forward
    projection.forward = lambda x: forward(projection, x) * 2


def patch_norm(model: PreTrainedModel) -> None:
    norm = model.model.norm
    norm.forward = lambda x: x * norm.weight


def hook_layer(model: PreTrainedModel) -> None:
    model.model.layers[2].register_forward_hook(lambda _module, _given, out: out * 2)


def hook_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_pre_hook(lambda _module, given: (given[0] * 2,))


def replace_norm(model: PreTrainedModel) -> None:
    model.model.layers[0].input_layernorm = nn.LayerNorm(32, dtype=torch.float64)


CHANGES = {
    quantize: "model.layers.1.mlp.down_proj was replaced by a Quantized",
    adapt: "model.layers.1.self_attn.q_proj was replaced by a Adapted",
    patch_linear: "model.layers.1.self_attn.o_proj has a forward method of its own",
    patch_norm: "model.norm has a forward method of its own",
    hook_layer: "model.layers.2 has forward hooks",
    hook_head: "lm_head has forward hooks",
    replace_norm: "model.layers.0.input_layernorm was replaced by a LayerNorm",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_was_changed_is_computed_by_transformers(change: Any) -> None:
    """It falls back with a reason that names the cause, and generates what the changed model generates."""
    model = model_of("llama")
    plain = model(torch.tensor([text(9)])).logits
    change(model)
    same = torch.allclose(model(torch.tensor([text(9)])).logits, plain, rtol=1e-2)
    assert same == (change is quantize), "the change has no effect"
    expected = greedy_by_transformers(model, text(9), 8)
    refused(model, CHANGES[change])
    engine = load(model, tokenizer=tiny_tokenizer())
    assert engine.generate(text(9), max_new_tokens=8).tokens == expected


def refused(model: PreTrainedModel, reason: str) -> None:
    """The native implementation raises with the reason and the cure, and auto is transformers with the reason."""
    with pytest.raises(ValueError) as error:
        target_of(model, tiny_tokenizer(), implementation="native")
    assert reason in str(error.value) and str(error.value).endswith("; use the implementation transformers")
    target = target_of(model, tiny_tokenizer())
    assert type(target) is TransformersTarget
    assert target.implementation.startswith("transformers, since ") and reason in target.implementation
    assert target_of(model, tiny_tokenizer(), implementation="transformers").implementation == "transformers"


def test_other_activations_are_refused() -> None:
    refused(model_of("llama", hidden_act="gelu"), "its activation is gelu, and the native MLP computes silu")


@pytest.mark.parametrize("family", ["GPT2", "Gemma2", "Olmoe", "Granite"])
def test_other_architectures_are_refused(family: str) -> None:
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
                 num_key_value_heads=2, vocab_size=400, pad_token_id=0, bos_token_id=None, eos_token_id=1)  # fmt: skip
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**sizes))
    refused(model, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'} is not one of the supported")


def test_a_class_of_the_same_name_is_refused() -> None:
    model = model_of("llama")
    model.__class__ = type("LlamaForCausalLM", (type(model),), {"__module__": "elsewhere"})
    refused(model, "LlamaForCausalLM is not one of the supported architectures")


def test_models_without_values_or_in_several_places_are_refused() -> None:
    refused(model_of("llama").to("meta"), "its weights are on the meta device")
    model = model_of("llama")
    model.model.layers[1].to("meta")
    refused(model, "its weights are on several devices")


def test_weights_of_several_dtypes_are_refused() -> None:
    model = model_of("llama")
    model.model.layers[1].to(torch.float32)
    refused(model, "its weights have several dtypes")


def test_a_class_that_was_patched_is_noticed_by_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    forward = nn.Module.__getattribute__(model.model.norm, "forward").__func__
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: forward(self, x).roll(1, -1))
    target = target_of(model, tiny_tokenizer())
    assert target.implementation == "transformers, since its logits differ from the model's by 141%"
    with pytest.raises(
        ValueError, match="its logits differ from the model's by 141%; use the implementation transformers"
    ):
        target_of(model, tiny_tokenizer(), implementation="native")


def test_what_transformers_and_fledge_change_themselves_is_no_reason() -> None:
    """transformers leaves hooks where hidden states were asked for, and fledge replaces the linear layers' forward."""
    model = model_of("llama")
    model(torch.tensor([text(4)]), output_hidden_states=True)
    TransformersTarget(model, tiny_tokenizer())
    assert model.model.layers[0]._forward_hooks and "forward" in vars(model.lm_head)
    for _ in range(2):
        assert target_of(model, tiny_tokenizer()).implementation == "native"


def test_the_implementation_is_chosen_by_name(tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=2)
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    for implementation, found in (("auto", "native"), ("native", "native"), ("transformers", "transformers")):
        assert load_target(tmp_path, implementation=implementation).implementation == found
        assert load(tmp_path, target_impl=implementation, device="cpu").target.implementation == found
    with pytest.raises(ValueError, match="'torch' is none of auto, native, transformers"):
        load_target(tmp_path, implementation="torch")
