"""Targets: loading and refusals, features compared with transformers', isolation of documents, logits, rollback."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM

from fledge.config import DraftConfig, RopeConfig, default_aux_layers
from fledge.data.documents import Document
from fledge.data.pack import make_row
from fledge.decode.load import load
from fledge.io.formats import config_from_hf, config_to_hf
from fledge.targets.cache import RecurrentCache, TargetCache
from fledge.targets.compatibility import resolve_layers
from fledge.targets.interface import UNLIMITED
from fledge.targets.loading import load_target
from fledge.targets.source import LiveFeatures
from fledge.targets.structure import CACHE_ARGUMENTS, cache_argument
from fledge.targets.transformers import TransformersTarget
from fledge.types import Features, Prompt, Tree
from support.chats import tiny_chats
from support.files import reconfigure
from support.targets import greedy_by_transformers, tiny_draft, tiny_target, tiny_target_directory, tiny_tokenizer

SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    vocab_size=100, max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=1,
)  # fmt: skip
# families that scale, cap or normalise their logits or states in different ways
HEADS = {
    "Granite": dict(logits_scaling=8.0, residual_multiplier=0.5, embedding_multiplier=3.0, attention_multiplier=0.3),
    "Cohere": dict(logit_scale=0.25),
    "Gemma2": dict(final_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=4),
}
LAYERS = (1, 2, 3)  # the targets made here have four layers
# families whose layers, some or all, keep a running state of the past
STATEFUL = {
    "Mamba": dict(state_size=4),
    "Qwen3Next": dict(
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "Jamba": dict(num_experts=2, attn_layer_period=2, attn_layer_offset=1),
    "FalconH1": dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=16),
    "RecurrentGemma": dict(lru_width=32, block_types=["recurrent", "recurrent", "attention"]),
}


def build(family: str, seed: int = 0, scale: float = 4.0, **config) -> torch.nn.Module:
    """A small model of a transformers family, with weights scaled up so that its output depends on the context."""
    torch.manual_seed(seed)
    hf = getattr(transformers, f"{family}Config")(**{**SHAPE, **config})
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(scale)
    return model


def target_of(family: str, **config) -> TransformersTarget:
    max_length = config.pop("max_length", None)
    return TransformersTarget(build(family, **config), None, name=f"tiny {family}", max_length=max_length)


def some_tokens(n: int, seed: int = 0, vocab: int = 100) -> torch.Tensor:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed))


def row_of(*lengths: int, length: int):
    documents = [some_tokens(n, seed=i) for i, n in enumerate(lengths)]
    return make_row([Document(t.int().numpy(), torch.zeros_like(t).int().numpy()) for t in documents], length)


# -- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A target directory written by save_pretrained."""
    path, target = tmp_path_factory.mktemp("target") / "good", tiny_target()
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def damaged(directory, tmp_path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "bad"))


def refused(path, match: str) -> None:
    with pytest.raises(ValueError, match=match) as error:
        load_target(path)
    assert "\n" not in str(error.value)


def test_a_saved_target_is_loaded(directory):
    loaded, made = load_target(directory, max_length=64), tiny_target()
    assert loaded.dtype == torch.float32 and loaded.max_length == 64 and loaded.num_layers == 8
    assert torch.equal(loaded.embedding, made.embedding) and loaded.stop_ids == {1}
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert load_target(directory, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load_target(directory).max_length == 512


def test_missing_targets_are_refused(tmp_path, monkeypatch):
    refused(tmp_path / "none", "none does not exist; it is a directory or a hub id")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"holds no config\.json; a target is a directory as save_pretrained writes it")
    monkeypatch.chdir(tmp_path)
    refused("owner/nothing", "the target owner/nothing cannot be loaded: ")


@pytest.mark.parametrize("keep", [0, 5000, -50], ids=["empty", "header cut", "end cut"])
def test_cut_weights(damaged, keep):
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(damaged, "cannot be loaded: .* truncated or damaged: copy or download it again")


def test_missing_weights(damaged):
    (damaged / "model.safetensors").unlink()
    refused(damaged, r"cannot be loaded: Error no file named model\.safetensors")


def test_missing_tensors_are_refused(damaged):
    """transformers fills missing tensors with random numbers and only warns; fledge refuses."""
    reconfigure(damaged, num_hidden_layers=9)
    refused(damaged, r"its files lack 9 of the model.s tensors, such as model\.layers\.8\.input_layernorm\.weight")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("vocab_size", r"lm_head\.weight has shape \[400, 32\] .* asks for \[416, 32\] \(the first of 2"),
        ("intermediate_size", r"down_proj\.weight has shape \[32, 48\] .* asks for \[32, 416\] \(the first of 24"),
    ],
)
def test_tensors_of_other_sizes_than_in_the_config_are_named(damaged, fledge, field, words):
    reconfigure(damaged, **{field: 416})
    told = fledge("generate", "--target", damaged, "--prompt", "a", "--device", "cpu")
    assert told.code == 2 and re.search(words, told.err.splitlines()[-1]), told.err
    assert "Correct config.json" in told.err and "ignore_mismatched_sizes" not in told.err


ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "owner/base"}


def test_an_adapter_is_named_with_the_cure(tmp_path, fledge):
    """Also beside a config.json, or with a config of its own that says nothing."""
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    words = ["--target", tmp_path, "--data", tmp_path / "none.jsonl", "--out", tmp_path / "run"]
    for more in ((), ("config.json",)):
        for name in more:
            (tmp_path / name).write_text("{}")
        told = fledge("train", *words)
        assert told.code == 2 and f"{tmp_path} is a LORA adapter of owner/base, not a whole model" in told.err, told.err
        assert ".merge_and_unload().save_pretrained(" in told.err and len(told.err.splitlines()) == 1
    (tmp_path / "adapter_config.json").write_text("[")
    refused(tmp_path, "is a PEFT adapter of another model, not a whole model")


def test_a_model_in_gguf_format_is_named_with_the_cure(tmp_path, fledge):
    """As a directory, beside a config.json, and as a file; another file is no model at all."""
    (file := tmp_path / "bird-Q4_K_M.gguf").touch()
    for path in (tmp_path, file):
        told = fledge("generate", "--target", path, "--prompt", "a")
        words = f"the target {path} holds a model in GGUF format ({file.name}), which fledge does not read"
        assert told.code == 2 and words in told.err and f"gguf_file='{file.name}'" in told.err, told.err
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "in GGUF format")
    refused(tmp_path / "config.json", "is a file; give the directory")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_damaged_json(damaged, file):
    (damaged / file).write_text('{"model_ty')
    refused(damaged, "cannot be loaded: .*JSON")


def test_models_that_are_not_causal_language_models_are_refused(damaged, tmp_path):
    reconfigure(damaged, model_type="t5", architectures=["T5ForConditionalGeneration"])
    refused(damaged, "cannot be loaded: Unrecognized configuration class .*AutoModelForCausalLM")
    with pytest.raises(ValueError, match="BertModel does not have its 4 decoder layers and final norm"):
        resolve_layers(None, TransformersTarget(build("Bert", is_decoder=True), None))


def test_dynamic_rope_is_refused_with_the_reason(damaged):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    reconfigure(damaged, rope_parameters=rope)
    refused(damaged, "RoPE type 'dynamic' is refused: it changes the frequencies with the length of a call")
    with pytest.raises(ValueError, match="RoPE type 'dynamic' is refused"):
        TransformersTarget(build("Llama", rope_parameters=rope), None)


def test_a_config_without_a_longest_length():
    """A state-space model's config has no longest length, so its context is unlimited; only its rollback is refused."""
    model = build("Mamba", **STATEFUL["Mamba"])
    del model.config.max_position_embeddings
    target = TransformersTarget(model, None)
    assert target.context == target.max_length == UNLIMITED
    with pytest.raises(ValueError, match="cannot verify drafts"):
        target.check_rollback()


@pytest.mark.parametrize("missing", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"])
def test_a_config_without_a_size_that_a_draft_needs_is_refused(missing):
    hf = {k: v for k, v in SHAPE.items() if k != missing}
    with pytest.raises(ValueError, match=f"the target's config has no {missing}"):
        DraftConfig.for_target(hf, max_length=64)


# -- stop tokens and layers -------------------------------------------------------------------------------------------


def test_every_stop_token_of_model_and_tokenizer_counts():
    target = tiny_target()
    target.model.generation_config.eos_token_id = [7, 9]
    target.config.eos_token_id = 5
    assert target.stop_ids == {1, 5, 7, 9}


@pytest.mark.parametrize(("n", "layers"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (32, (2, 16, 29))])
def test_default_layers(n, layers):
    assert default_aux_layers(n) == layers


@pytest.mark.parametrize("n", range(2, 7))
def test_default_layers_of_shallow_targets(n):
    """The default is three existing layers, listed in the config; the last layer's output, which SGLang cannot capture,
    is used only by targets of two layers."""
    layers = default_aux_layers(n)
    assert len(set(layers)) == 3 and sorted(layers) == list(layers) and layers[0] >= 0 and layers[-1] <= n
    assert layers[-1] < n or n == 2
    target = target_of("Llama", num_hidden_layers=n)
    assert resolve_layers(None, target) == layers
    draft = tiny_draft(target, aux_layers=layers)
    assert target.features(row_of(9, length=9), layers).aux_TAD.shape == (9, 3, 32)
    written = config_to_hf(draft.config.with_provenance(target_layers=n))
    assert written["eagle_aux_hidden_state_layer_ids"] == list(layers)
    assert config_from_hf(written).aux_layers == layers


def test_a_draft_of_a_shallow_target_must_list_its_layers():
    with pytest.raises(ValueError, match=r"has 6, too few for the engines' default; list them as eagle_aux_hidden"):
        tiny_draft(target_of("Llama", num_hidden_layers=6))


def test_a_target_of_one_layer_has_no_default_layers():
    with pytest.raises(ValueError, match=r"a target of one layer has .* use fledge train --method eagle1"):
        default_aux_layers(1)


def test_missing_layers_are_refused():
    target = target_of("Llama")
    for layers in ([1, 2, 5], [-1, 2, 3]):
        with pytest.raises(ValueError, match=r"were requested, but the target has layers 0\.\.4"):
            resolve_layers(layers, target)
    assert resolve_layers([4, 0, 2], target) == (0, 2, 4)
    assert resolve_layers(None, target) == (1, 2, 3)
    assert resolve_layers((), target) == ()


def test_without_layers_only_the_final_state_is_returned():
    """An empty tuple captures no layers, in training and in decoding. None, in decoding, returns no features at all."""
    target, tokens = target_of("Llama"), some_tokens(9)
    features = target.features(row_of(9, length=9), ())
    assert features.aux_TAD.shape == (9, 0, 32) and features.last_TD.shape == (9, 32)
    cache = target.new_cache()
    _, (read,) = target.prefill([Prompt(tokens.tolist())], cache, ())
    assert read.aux_TAD.shape == (9, 0, 32)
    torch.testing.assert_close(read.last_TD, features.last_TD)
    _, (ended,) = target.prefill([Prompt(tokens.tolist())], target.new_cache(), (), final=False)
    torch.testing.assert_close(ended.last_TD, features.last_TD[-1:])
    assert target.verify(Tree.chain(tokens[None]), cache, ())[1].aux_TAD.shape == (9, 0, 32)
    _, none = target.prefill([Prompt(tokens.tolist())], cache := target.new_cache())
    assert none == [] and target.verify(Tree.chain(tokens[None]), cache)[1] is None


# -- features ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Granite"])
def test_features_are_transformers_hidden_states(family):
    """Id i is `hidden_states[i]`: 0 is the embeddings, n is the input of the final norm; last_TD is after that norm.

    transformers' hidden_states[n] is after the norm, so the test compares it with norm(features[n]).
    """
    target = target_of(family, **HEADS.get(family, {}))
    tokens = some_tokens(9)
    out = target.model(input_ids=tokens[None], output_hidden_states=True, use_cache=False)
    features = target.run_decoder(tokens, torch.arange(9), range(5))
    assert features.aux_TAD.shape == (9, 5, 32)
    for i in range(4):
        torch.testing.assert_close(features.aux_TAD[:, i], out.hidden_states[i][0], rtol=0, atol=0)
    torch.testing.assert_close(features.last_TD, out.hidden_states[-1][0], rtol=0, atol=0)
    torch.testing.assert_close(target.norm(features.aux_TAD[:, 4]), features.last_TD, rtol=0, atol=0)
    assert not torch.equal(features.aux_TAD[:, 4], features.last_TD)


def test_decoding_gives_the_same_features_and_logits_as_one_pass():
    target, tokens, cache = target_of("Llama"), some_tokens(12), TargetCache()
    whole = target.features(make_row([Document(tokens.int().numpy(), torch.zeros(12).int().numpy())], 12), (1, 2, 4))
    logits = target.model(input_ids=tokens[None]).logits[0]
    for a, b in ((0, 5), (5, 6), (6, 12)):
        own, features = target.verify(Tree.chain(tokens[None, a:b]), cache, (1, 2, 4))
        torch.testing.assert_close(own[0], logits[a:b], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features.aux_TAD, whole.aux_TAD[a:b], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features.last_TD, whole.last_TD[a:b], rtol=1e-4, atol=1e-4)
    last, none = target.prefill([Prompt(tokens.tolist())], target.new_cache())
    assert none == [] and last.shape == (1, 100)
    torch.testing.assert_close(last, logits[-1:], rtol=1e-4, atol=1e-4)


def test_layers_on_several_devices(monkeypatch):
    """States, logits and features are returned on the embedding's device wherever the layers are. That device is here
    one without values, and a hook in place of accelerate's moves what the first layer reads."""
    target = tiny_target()
    model = target.model.model
    # transformers' masks ask for values
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    model.embed_tokens.to("meta"), model.rotary_emb.to("meta")
    target.embedding = model.embed_tokens.weight

    def move(module, args, kwargs):
        return tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device="cpu"), (args, kwargs))

    for layer in target.layers:
        layer.register_forward_pre_hook(move, with_kwargs=True)
    layers, cache = (1, 4, 6), TargetCache()
    with torch.inference_mode():
        logits_BV, features = target.prefill([Prompt([5, 6, 7]), Prompt([8, 9])], cache, layers)
        found = [logits_BV, *vars(features[1]).values()]
        root_BN = torch.tensor([[5, 6], [7, 8]], device="meta")
        for tree in (Tree.chain(root_BN), Tree(root_BN, torch.tensor([[-1, 0], [-1, 0]], device="meta"), 1)):
            logits_BNV, features = target.verify(tree, cache, layers)
            cache.keep(None, torch.tensor([1, 1]))
            found += [logits_BNV, *vars(features).values()]
    assert [x.shape[-1] for x in found] == [400, 32, 32] * 3
    assert {x.device.type for x in found} == {"meta"} and cache.layers[0].keys.device.type == "cpu"


def test_no_hook_is_left_behind():
    target = target_of("Llama")
    with pytest.raises(IndexError):
        target.run_decoder(torch.tensor([1000]), torch.arange(1), LAYERS)
    target.run_decoder(some_tokens(3), torch.arange(3), LAYERS)
    modules = [target.norm, *target.layers]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


# -- isolation --------------------------------------------------------------------------------------------------------


def alone(target: TransformersTarget, row) -> Features:
    """The features of each document of a row, computed by transformers on that document alone."""
    aux, last = [], []
    for a, b in row.documents():
        out = target.model(input_ids=row.token_T[None, a:b], output_hidden_states=True, use_cache=False)
        aux.append(torch.stack([out.hidden_states[i][0] for i in LAYERS], dim=1))
        last.append(out.hidden_states[-1][0])
    return Features(torch.cat(aux), torch.cat(last))


def same_features(a: Features, b: Features) -> bool:
    pairs = ((a.aux_TAD, b.aux_TAD), (a.last_TD, b.last_TD))
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in pairs)


def leak(target: TransformersTarget, monkeypatch) -> list[int]:
    """Makes a pass over several documents mix them, as some architectures do; returns a list of its call lengths."""
    run, calls = target.run_decoder, []

    def mixing(token_T, position_T, layers, each=None):
        calls.append(len(token_T))
        return run(token_T, torch.arange(len(token_T)), layers, each)

    monkeypatch.setattr(target, "run_decoder", mixing)
    return calls


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma2"])
def test_packed_documents_do_not_see_each_other(family):
    target = target_of(family, **HEADS.get(family, dict(sliding_window=4)))
    row = row_of(9, 7, 12, length=32)
    features = target.features(row, LAYERS)
    assert target.packs is True
    assert same_features(features, alone(target, row))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma2"])
def test_documents_of_one_length_run_as_a_batch(family, monkeypatch):
    """Documents of one length run as a batch, which needs no mask, and do not see each other."""
    target = target_of(family, **HEADS.get(family, dict(sliding_window=4)))
    row, seen = row_of(9, 9, 9, length=36), []
    assert target.packs
    run = target.run_decoder
    monkeypatch.setattr(target, "run_decoder", lambda *a: seen.append(a[3]) or run(*a))
    assert same_features(target.features(row, LAYERS), alone(target, row)) and seen == [9]
    assert same_features(target.features(row_of(9, 8, length=32), LAYERS), alone(target, row_of(9, 8, length=32)))
    assert seen == [9, None]


def test_filler_is_not_read(monkeypatch):
    """The target does not run on filler at a row's end; its features are zeros."""
    target, sizes = target_of("Llama"), []
    assert target.packs
    run = target.run_decoder
    monkeypatch.setattr(target, "run_decoder", lambda *a: sizes.append(a[0].numel()) or run(*a))
    row = row_of(9, 7, length=500)
    features = target.features(row, LAYERS)
    assert sizes == [16] and not features.last_TD[16:].any() and not features.aux_TAD[16:].any()
    assert same_features(target.features(row_of(9, length=9), LAYERS), alone(target, row_of(9, length=9)))


def test_a_target_that_mixes_documents_runs_them_one_at_a_time(monkeypatch):
    target = target_of("Llama")
    row = row_of(9, 7, 12, length=32)
    calls = leak(target, monkeypatch)
    assert not same_features(target.run_decoder(row.token_T, row.position_T, LAYERS), alone(target, row)), "no mixing"
    assert target.packs is False
    calls.clear()
    assert same_features(target.features(row, LAYERS), alone(target, row)) and calls == [9, 7, 12]


def test_recurrent_layers_are_found_to_mix():
    target = target_of("Mamba", **STATEFUL["Mamba"])
    row = row_of(9, 7, length=16)
    torch.testing.assert_close(target.features(row, LAYERS).last_TD, alone(target, row).last_TD, rtol=1e-4, atol=1e-4)
    assert target.packs is False


# -- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", HEADS)
def test_logits_are_the_models_own(family):
    target, tokens = target_of(family, **HEADS[family]), some_tokens(9)
    own = target.model(input_ids=tokens[None], use_cache=False).logits[0]
    last = target.run_decoder(tokens, torch.arange(9), ()).last_TD
    torch.testing.assert_close(target.logits(last), own, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(target.head(last), own, rtol=1e-2), "the family's own scaling has no effect here"
    target.check_logits()


def test_a_head_with_a_bias():
    target = target_of("Phi", intermediate_size=64)
    torch.nn.init.normal_(target.head.bias)
    target.check_logits()


def test_an_unknown_transformation_of_the_logits_is_refused(monkeypatch):
    target = target_of("Llama")
    forward = target.model.forward

    def shifted(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out

    target_of("Llama").check_logits()
    monkeypatch.setattr(target.model, "forward", shifted)
    for refuse in (target.check_logits, lambda: LiveFeatures(target, LAYERS)):
        with pytest.raises(ValueError, match="tiny Llama computes its logits in a way fledge does not know"):
            refuse()


def test_a_head_of_another_vocabulary_than_the_embedding_is_refused():
    """Moshi has an embedding of one token more than its head."""
    target = target_of("Llama")
    target.model.lm_head = target.head = torch.nn.Linear(target.embedding.shape[1], target.embedding.shape[0] - 1)
    vars(target).pop("head_weight", None)
    with pytest.raises(
        ValueError, match=r"tiny Llama reads [\d,]+ tokens and predicts [\d,]+, and fledge trains drafts"
    ):
        LiveFeatures(target, LAYERS)


# -- longrope ---------------------------------------------------------------------------------------------------------


LONGROPE = dict(
    rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[4.0, 3.0, 2.0, 5.0]
    ),
    original_max_position_embeddings=32,
)


@pytest.mark.parametrize(("max_length", "chosen"), [(32, "short_factor"), (33, "long_factor"), (None, "long_factor")])
def test_longrope_is_chosen_once_for_every_length_of_call(max_length, chosen):
    """fledge chooses the factors by max_length. transformers chooses by the length of each call, so the features of a
    prefix change with the text that follows."""
    target = target_of("Phi3", max_length=max_length, **LONGROPE)
    tokens = some_tokens(48)
    features = [target.run_decoder(tokens[:n], torch.arange(n), LAYERS) for n in (8, 48, 8)]
    assert all(torch.allclose(f.last_TD[:8], features[0].last_TD, rtol=1e-4, atol=1e-4) for f in features[1:])
    factors = torch.tensor(LONGROPE["rope_parameters"][chosen])
    expected = 1 / (factors * 1e4 ** (torch.arange(0, 8, 2) / 8))
    torch.testing.assert_close(target.decoder.rotary_emb.inv_freq, expected)
    assert RopeConfig.from_hf(target.config.to_dict()).for_length(target.max_length).long == (chosen == "long_factor")


def test_longrope_of_transformers_changes_with_the_length_of_a_call():
    model, tokens = build("Phi3", **LONGROPE), some_tokens(48)
    short, long = (
        model(input_ids=tokens[None, :n], output_hidden_states=True, use_cache=False).hidden_states[-1][0, :8]
        for n in (8, 48)
    )
    assert not torch.allclose(short, long, rtol=1e-2, atol=1e-2)


# -- rollback ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "config"), [("Llama", {}), ("Mistral", dict(sliding_window=4)), ("Gemma2", {})])
def test_caches_that_roll_back_are_accepted(family, config):
    target_of(family, **{**HEADS.get(family, {}), **config}).check_rollback()


@pytest.mark.parametrize("family", STATEFUL)
def test_running_states_cannot_be_rolled_back(family):
    target = target_of(family, **STATEFUL[family])
    with pytest.raises(ValueError, match=f"tiny {family} cannot verify drafts: its state cannot be rolled back"):
        target.check_rollback()


# -- running states ---------------------------------------------------------------------------------------------------


UNSTOPPED = dict(eos_token_id=None, pad_token_id=0)


def target_that_speaks(family: str, monkeypatch) -> TransformersTarget:
    """A target with a tokenizer and without stop tokens."""
    monkeypatch.setattr(TransformersTarget, "stop_ids", frozenset())
    return TransformersTarget(
        build(family, seed=1, vocab_size=400, **STATEFUL[family]), tiny_tokenizer(), name=f"tiny {family}"
    )


@pytest.mark.parametrize("recompute", [False, True], ids=["as found", "recomputing"])
@pytest.mark.parametrize("family", STATEFUL)
def test_a_running_state_decodes_as_transformers_does(family, recompute, monkeypatch):
    target, prompt = target_that_speaks(family, monkeypatch), some_tokens(7, seed=3, vocab=400).tolist()
    if recompute:
        monkeypatch.setattr(TransformersTarget, "_cache_is_exact", False)
    done = load(target).generate(prompt, max_new_tokens=24)
    assert done.tokens == greedy_by_transformers(target.model, prompt, 24, **UNSTOPPED) and len(set(done.tokens)) > 4


def test_a_cache_that_is_not_exact_is_not_used(monkeypatch):
    target = target_of("Qwen3Next", **STATEFUL["Qwen3Next"])
    assert target._cache_is_exact
    run = RecurrentCache.run

    def forgetful(self, *args, **inputs):
        self.state = None if self.lengths[0] == 8 else self.state
        return run(self, *args, **inputs)

    monkeypatch.setattr(RecurrentCache, "run", forgetful)
    assert not target_of("Qwen3Next", **STATEFUL["Qwen3Next"])._cache_is_exact
    assert target_of("RecurrentGemma", **STATEFUL["RecurrentGemma"])._cache_is_exact is False, "it has no cache"


class NamedOutput(dict):
    __getattr__ = dict.__getitem__


def rename_cache(model: torch.nn.Module, name: str) -> None:
    """Gives the model's forward pass and output the cache by the given name, and by no other."""
    forward, own = model.forward, cache_argument(model, model.get_decoder())

    def renamed(**inputs: Any) -> NamedOutput:
        assert all(k == name for k in inputs if k in CACHE_ARGUMENTS), [*inputs]
        out = forward(**{own if k == name else k: v for k, v in inputs.items()})
        return NamedOutput({name if k == own else k: v for k, v in out.items()})

    arguments = ("input_ids", "attention_mask", "position_ids", name, "use_cache")
    renamed.__signature__ = inspect.Signature([inspect.Parameter(a, inspect.Parameter.KEYWORD_ONLY) for a in arguments])
    model.forward = renamed


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
def test_a_cache_is_passed_by_the_name_that_the_model_has_for_it(name: str) -> None:
    """`cache` since transformers 5.24, past_key_values or cache_params before."""
    llama, mamba = build("Llama"), build("Mamba", **STATEFUL["Mamba"])
    for model in (llama, mamba):
        rename_cache(model, name)
    assert not TransformersTarget(llama, None).rollback_problem
    assert TransformersTarget(mamba, None)._cache_is_exact


def test_a_cache_is_passed_through_a_wrapper_by_the_name_that_the_decoder_has() -> None:
    model = build("Llama")
    forward = model.forward
    rename_cache(model.get_decoder(), "cache_params")
    model.forward = lambda **inputs: forward(**inputs)
    assert cache_argument(model, model.get_decoder()) == "cache_params"
    model.get_decoder().forward = lambda **inputs: forward(**inputs)
    assert cache_argument(model, model.get_decoder()) == "past_key_values"


@pytest.mark.parametrize("family", ["Llama", *HEADS, *STATEFUL])
def test_no_cache_is_passed_by_a_deprecated_name(family: str, recwarn: pytest.WarningsRecorder) -> None:
    target = target_of(family, **{**HEADS, **STATEFUL}.get(family, {}))
    assert bool(target.rollback_problem) == (family in STATEFUL)
    assert target._cache_is_exact == (family != "RecurrentGemma")
    told = [str(w.message) for w in recwarn]
    assert not [line for line in told if any(f"`{name}`" in line for name in CACHE_ARGUMENTS)]


def test_running_states_are_decoded_one_by_one(monkeypatch):
    target = target_that_speaks("Qwen3Next", monkeypatch)
    prompts = [some_tokens(n, seed=n, vocab=400).tolist() for n in (5, 9, 7)]
    together = load(target).generate_all(prompts, max_new_tokens=8)
    assert [d.tokens for d in together] == [greedy_by_transformers(target.model, p, 8, **UNSTOPPED) for p in prompts]
    with pytest.raises(ValueError, match=r"its state cannot be rolled back.*; decode them one by one"):
        load(target).generate_all(prompts, batch=2)


@pytest.fixture(scope="module")
def stateful(tmp_path_factory) -> Path:
    """A directory with chats and a target that keeps a running state."""
    root = tmp_path_factory.mktemp("stateful")
    model = build(
        "Qwen3Next", vocab_size=400, num_hidden_layers=8, max_position_embeddings=512, **STATEFUL["Qwen3Next"]
    )
    model.save_pretrained(root / "target")
    tiny_tokenizer().save_pretrained(root / "target")
    tiny_chats(root / "chats.jsonl", 200)
    return root


def test_a_running_state_on_the_command_line(stateful, fledge, tmp_path):
    """The target generates alone; its draft is trained, described by inspect and refused for decoding; options that
    measure τ are refused before training."""
    target = load_target(stateful / "target")
    alone = fledge("generate", "--target", stateful / "target", "--raw", "--prompt", "the bird", "--max-new-tokens", 20)
    own = greedy_by_transformers(target.model, target.tokenizer("the bird")["input_ids"], 20, **UNSTOPPED)
    own = own[: next((i for i, t in enumerate(own) if t in target.stop_ids), 20)]
    assert alone.code == 0 and alone.out == target.tokenizer.decode(own) + "\n", alone.err
    words = ["train", "--target", stateful / "target", "--data", stateful / "chats.jsonl", "--out", tmp_path / "run"]
    words += "--max-length 64 --row-length 128 --steps 2 --depth 2 --draft-vocab 200".split()
    for flags in (["--eval-every", 1], ["--eval-prompts", stateful / "chats.jsonl"]):
        refused = fledge(*words, *flags)
        assert refused.code == 2 and f"{flags[0]} measures τ by decoding, but" in refused.err, refused.err
        assert "to train without measuring τ" in refused.err and not (tmp_path / "run").exists()
    went = fledge(*words)
    assert went.code == 0, went.err
    assert "its state cannot be rolled back" in went.err and "serve it with an engine" in went.err
    assert "200 records" in went.err, "no record is held out, because τ is not measured"
    draft = tmp_path / "run" / "draft"
    refused = fledge("generate", "--target", stateful / "target", "--draft", draft, "--prompt", "the bird")
    assert refused.code == 2 and "cannot verify drafts: its state cannot be rolled back" in refused.err
    assert len(refused.err.splitlines()) == 1 and "Decode without a draft" in refused.err


def test_a_cache_that_forgets_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(TargetCache, "rollback", lambda self, length: None)
    with pytest.raises(ValueError, match="cannot verify drafts"):
        target_of("Llama").check_rollback()


# -- files that are wrong ---------------------------------------------------------------------------------------------


def test_a_damaged_generation_config_is_refused(tmp_path) -> None:
    """It may name the only token that ends an answer. A missing one is fine."""
    directory = tiny_target_directory(tmp_path)
    config = directory / "generation_config.json"
    config.write_text("{")
    for weights in (True, False):
        with pytest.raises(ValueError, match=r"generation_config\.json' is not a valid JSON file\. A JSON file"):
            load_target(directory, weights=weights)
    config.unlink()
    assert load_target(directory.rename(tmp_path / "a JSON file")).stop_ids


def test_a_target_without_a_tokenizer(tmp_path) -> None:
    directory = tiny_target_directory(tmp_path)
    for file in directory.glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"has no files of a tokenizer .* copy them from where the model is from"):
        load_target(directory)


@pytest.mark.parametrize("name", ["target/config.json", "./none", "../none/here"])
def test_paths_that_are_no_directory(name: str, tmp_path, monkeypatch) -> None:
    """They are not taken for ids of the hub, which would be asked."""
    tiny_target_directory(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is a file; give the directory that it is in|does not exist"):
        load_target(name)
