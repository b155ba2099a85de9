"""Model families whose configs name sizes differently: each decodes, trains a draft, and decodes the same with it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import fledge
from fledge.config import DraftConfig, llama_names
from fledge.targets.interface import UNLIMITED
from fledge.targets.loading import target_of
from support.chats import tiny_chats
from support.targets import greedy_by_transformers, tiny_draft, tiny_tokenizer

LLAMA = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512,
)  # fmt: skip
NEOX = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "head_dim")}
GPT = dict(n_embd=32, n_layer=8, n_head=4, n_positions=512)
OPT = dict(hidden_size=32, ffn_dim=64, num_hidden_layers=8, num_attention_heads=4, max_position_embeddings=512)
FALCON = dict(hidden_size=32, num_hidden_layers=8, num_attention_heads=4)
# config class, sizes, and (MLP width, query heads and key heads of the draft, context length of the target)
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, int, int, int]]] = {
    "GPT-2": ("GPT2", GPT, (128, 4, 4, 512)),
    "GPT-2 with an inner size": ("GPT2", GPT | dict(n_inner=80), (80, 4, 4, 512)),
    "GPTBigCode": ("GPTBigCode", GPT, (128, 4, 1, 512)),
    "GPT-J": ("GPTJ", GPT | dict(rotary_dim=4), (128, 4, 4, 512)),
    "CodeGen": ("CodeGen", GPT | dict(rotary_dim=4), (128, 4, 4, 512)),
    "GPT-Neo": (
        "GPTNeo",
        dict(hidden_size=32, num_layers=8, num_heads=4, attention_types=[[["global", "local"], 4]], window_size=16,
             max_position_embeddings=512),
        (128, 4, 4, 512),
    ),
    "GPT-NeoX": ("GPTNeoX", NEOX, (48, 4, 4, 512)),
    "OPT": ("OPT", OPT | dict(word_embed_proj_dim=32), (64, 4, 4, 512)),
    "Falcon, one key head": ("Falcon", FALCON, (128, 4, 1, 2048)),
    "Falcon, grouped": ("Falcon", FALCON | dict(new_decoder_architecture=True, num_kv_heads=2), (128, 4, 2, 2048)),
    "Falcon, ALiBi": ("Falcon", FALCON | dict(alibi=True, multi_query=False), (128, 4, 4, 2048)),
    "Bloom": ("Bloom", dict(hidden_size=32, n_layer=8, n_head=4), (128, 4, 4, UNLIMITED)),
    "Bloom with a length": ("Bloom", dict(hidden_size=32, n_layer=8, n_head=4, seq_length=256), (128, 4, 4, 256)),
    "MPT": ("Mpt", dict(d_model=32, n_layers=8, n_heads=4, max_seq_len=512), (128, 4, 4, 512)),
    "XGLM": (
        "XGLM", dict(d_model=32, ffn_dim=64, num_layers=8, attention_heads=4, max_position_embeddings=512),
        (64, 4, 4, 512),
    ),
    "Phi": ("Phi", NEOX, (48, 4, 4, 512)),
    "StableLM": ("StableLm", LLAMA, (48, 4, 2, 512)),
    "StarCoder 2": ("Starcoder2", LLAMA, (48, 4, 2, 512)),
    "Llama 4": ("Llama4Text", LLAMA | dict(num_local_experts=2, intermediate_size_mlp=48), (48, 4, 2, 512)),
    "Gemma 4": ("Gemma4Text", LLAMA | dict(global_head_dim=8, hidden_size_per_layer_input=0), (48, 4, 2, 512)),
    "Gemma 4 with inputs of layers": (
        "Gemma4Text",
        LLAMA | dict(global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=400,
                     num_kv_shared_layers=0),
        (48, 4, 2, 512),
    ),
    "LFM2": ("Lfm2", LLAMA | dict(layer_types=["full_attention"] * 8), (48, 4, 2, 512)),
}  # fmt: skip
# this model has no final norm and narrower embeddings: it decodes, but no draft can read its hidden states
OPT_350M = ("OPT", OPT | dict(word_embed_proj_dim=16, do_layer_norm_before=False))


def config_of(family: str, sizes: dict[str, Any]) -> transformers.PreTrainedConfig:
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this transformers has no {family}")
    ids = dict(vocab_size=400, pad_token_id=0, bos_token_id=None, eos_token_id=1, tie_word_embeddings=False)
    return getattr(transformers, f"{family}Config")(**ids, **sizes)


def dtype_of(family: str) -> torch.dtype:
    """float64, in which rounding in another batch shape changes no token; XGLM's attention needs float32."""
    return torch.float32 if family == "XGLM" else torch.float64


def model_of(family: str, sizes: dict[str, Any]) -> transformers.PreTrainedModel:
    """A random model with clear differences between its largest logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, sizes), dtype=torch.float32).to(dtype_of(family))
    embeddings = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, p.shape[-1] ** -0.5)
        for weight in (*embeddings, model.get_output_embeddings().weight):
            weight.normal_()
    return model.eval()


def saved(model: transformers.PreTrainedModel, parent: Path) -> Path:
    model.save_pretrained(parent / "target")
    tiny_tokenizer().save_pretrained(parent / "target")
    return parent / "target"


PROMPT = [5, 200, 77, 31, 9, 350, 44, 12]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_draft_has_the_targets_sizes(name: str) -> None:
    family, sizes, (mlp, heads, key_heads, context) = FAMILIES[name]
    shape = llama_names(config_of(family, sizes))
    draft = DraftConfig.for_target(shape, max_length=64)
    assert (draft.hidden_size, draft.vocab_size, draft.head_dim) == (32, 400, 8)
    assert (draft.intermediate_size, draft.num_attention_heads, draft.num_key_value_heads) == (mlp, heads, key_heads)
    assert shape.get("max_position_embeddings", UNLIMITED) == context
    assert draft.max_position_embeddings == (64 if context == UNLIMITED else context)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_decodes_trains_a_draft_and_decodes_the_same_with_it(name: str, tmp_path: Path) -> None:
    family, sizes, _ = FAMILIES[name]
    model = model_of(family, sizes)
    theirs = greedy_by_transformers(model, PROMPT, 40)
    assert len(set(theirs)) > 3
    directory = saved(model, tmp_path)
    alone = fledge.load(directory, dtype=dtype_of(family))
    assert alone.generate(PROMPT, max_new_tokens=40).tokens == theirs
    trained = fledge.train_draft(
        target=directory, data=tiny_chats(tmp_path / "chats.jsonl", 12), out=tmp_path / "run", steps=2, depth=2,
        max_length=64, row_length=128, dtype=str(dtype_of(family)).removeprefix("torch."), device="cpu",
    )  # fmt: skip
    engine = fledge.load(alone.target, draft=trained.draft)
    fast = engine.generate(PROMPT, max_new_tokens=40)
    assert fast.tokens == theirs and fast.trace.rounds
    assert engine.generate([PROMPT, PROMPT[:3]], max_new_tokens=40)[0].tokens == theirs


GEMMA_3N = LLAMA | dict(
    intermediate_size=[48] * 8, layer_types=["sliding_attention", "full_attention"] * 4, num_kv_shared_layers=2,
    activation_sparsity_pattern=[0.0] * 8, laurel_rank=4, altup_num_inputs=2, vocab_size_per_layer_input=400,
    hidden_size_per_layer_input=8,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2)
MLA = LLAMA | EXPERTS | dict(num_key_value_heads=4, head_dim=4, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
                             kv_lora_rank=8, q_lora_rank=8)  # fmt: skip
DEEPSEEK_V32 = MLA | dict(
    n_group=1, topk_group=1, first_k_dense_replace=1, index_n_heads=2, index_head_dim=8, index_topk=64
)
MINIMAX = LLAMA | dict(num_local_experts=2, layer_types=["linear_attention", "full_attention"] * 4)
OTHER_STATES = r"keeps states other than the keys and values of attention, which fledge cannot roll back"


def trained(target: Path, fledge: Any, parent: Path) -> Any:
    """The result of a training of two steps on the command line."""
    sizes = "--steps 2 --depth 2 --max-length 64 --row-length 128 --device cpu".split()
    chats = tiny_chats(parent / "chats.jsonl", 12)
    return fledge("train", "--target", target, "--data", chats, "--out", parent / "run", *sizes)


@pytest.mark.parametrize(("family", "sizes"), [("Gemma3nText", GEMMA_3N)])
def test_a_family_of_several_states_per_token_trains_no_draft(
    family: str, sizes: dict[str, Any], tmp_path: Path, fledge: Any
) -> None:
    target = saved(model_of(family, sizes).float(), tmp_path)
    went = trained(target, fledge, tmp_path)
    assert went.code == 2 and len(went.err.splitlines()) == 1, went.err
    assert "no draft can be trained for" in went.err and "a draft reads one hidden state per token" in went.err
    assert fledge("generate", "--target", target, "--prompt", "a", "--max-new-tokens", 3, "--device", "cpu").code == 0


@pytest.mark.parametrize(("family", "sizes"), [("MiniMax", MINIMAX), ("DeepseekV32", DEEPSEEK_V32)])
def test_a_family_of_another_cache_trains_a_draft_that_fledge_does_not_decode_with(
    family: str, sizes: dict[str, Any], tmp_path: Path, fledge: Any
) -> None:
    target = saved(model_of(family, sizes).float(), tmp_path)
    went = trained(target, fledge, tmp_path)
    assert went.code == 0 and f"{family}ForCausalLM {OTHER_STATES}" in went.err, went.err
    words = ["--target", target, "--prompt", "a", "--max-new-tokens", 3, "--device", "cpu"]
    assert fledge("generate", *words).code == 0
    refused = fledge("generate", *words, "--draft", tmp_path / "run" / "draft")
    assert refused.code == 2 and OTHER_STATES in refused.err and "recurrent" not in refused.err


def test_a_family_that_takes_no_masks_is_refused_with_the_reason(tmp_path: Path, fledge: Any) -> None:
    """Bloom makes its biases of positions from a mask of two dimensions."""
    target = saved(model_of("Bloom", FAMILIES["Bloom"][1]).float(), tmp_path)
    assert trained(target, fledge, tmp_path).code == 0
    words = ["--target", target, "--draft", tmp_path / "run" / "draft", "--device", "cpu", "--max-new-tokens", 3]
    tree = fledge("generate", *words, "--prompt", "a", "--draft-mode", "tree")
    batch = fledge("eval", *words, "--prompts", tmp_path / "chats.jsonl", "--batch", 3)
    for went, what in ((tree, "trees: each node"), (batch, "several requests together: each request")):
        assert went.code == 2 and f"cannot verify {what}" in went.err, went.err
        assert "BloomForCausalLM does not take an attention mask for that" in went.err


WINDOW = 16  # tokens, less than the texts below
# how a family is given a window of attention, and whether it then decodes several requests, and trees
WINDOWS: dict[str, tuple[dict[str, Any], bool]] = {
    "GPT-Neo": (dict(window_size=WINDOW), False),  # applies its window itself, by rules that no mask can follow
    "Llama 4": (dict(attention_chunk_size=WINDOW), True),
    "StarCoder 2": (dict(sliding_window=WINDOW), True),
    "Gemma 4": (dict(sliding_window=WINDOW), True),
    "StableLM": (dict(sliding_window=WINDOW), True),  # ignores it, as Llama does
}


@pytest.mark.parametrize("name", WINDOWS)
def test_requests_and_trees_see_what_a_request_alone_sees(name: str) -> None:
    """Of layers with windows, in texts that are longer; or they are refused with the reason."""
    (family, sizes, _), (given, works) = FAMILIES[name], WINDOWS[name]
    target = target_of(model_of(family, sizes | given), tiny_tokenizer())
    texts = [torch.randint(2, 400, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 40, 90)]
    engine = fledge.load(target, tiny_draft(target), depth=3)
    alone = [engine.generate(t, max_new_tokens=24, speculate=False).tokens for t in texts]
    ids = list(texts[1])
    while len(ids) < len(texts[1]) + len(alone[1]):  # without a cache, since that of `generate` may have a window too
        ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert alone[1] == ids[len(texts[1]) :]
    assert [engine.generate(t, max_new_tokens=24).tokens for t in texts] == alone
    assert [c.tokens for c in engine.generate_all(texts, max_new_tokens=24)] == alone, "one by one if need be"

    def trees() -> fledge.Engine:
        return fledge.load(target, engine.draft, mode="tree", nodes=12, width=4, depth=3)

    if works:
        assert [c.tokens for c in engine.generate_all(texts, batch=3, max_new_tokens=24)] == alone
        assert [trees().generate(t, max_new_tokens=24).tokens for t in texts] == alone
        return
    with pytest.raises(ValueError, match="cannot verify several requests together: each request must see only its own"):
        engine.generate_all(texts, batch=3, max_new_tokens=24)
    with pytest.raises(ValueError, match="cannot verify trees: each node of a tree must see only its own path"):
        trees()


def give_class_of(module: str, decoder: torch.nn.Module) -> None:
    """Gives a decoder a class that is made of its own, in another module, as FSDP does."""
    decoder.__class__ = type(f"Made{type(decoder).__name__}", (type(decoder),), {"__module__": module})


@pytest.mark.parametrize(("name", "window"), [("StarCoder 2", WINDOW), ("StableLM", None)])
def test_a_window_is_found_in_the_code_of_the_model(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a sharded one. The config of a model whose code cannot be read is believed."""
    family, sizes, _ = FAMILIES[name]
    monkeypatch.setitem(sys.modules, "session", ModuleType("session"))  # as an interactive one, without a file
    for module, found in ((None, window), ("torch.distributed.fsdp", window), ("session", WINDOW)):
        target = target_of(model_of(family, sizes | dict(sliding_window=WINDOW)), tiny_tokenizer())
        if module is not None:
            give_class_of(module, target.decoder)
        assert target._window == found


@pytest.mark.parametrize("name", ["GPT-2", "GPT-J", "CodeGen"])
def test_a_table_of_positions_ends_with_the_context(name: str) -> None:
    """The last positions are left to drafted tokens, also where the table is one of rotations."""
    family, sizes, _ = FAMILIES[name]
    target = target_of(model_of(family, sizes | dict(n_positions=64)), tiny_tokenizer())
    engine = fledge.load(target, tiny_draft(target), depth=3)
    assert len(engine.generate([7] * 20, max_new_tokens=44, speculate=False).tokens) == 44
    with pytest.raises(ValueError, match="a context of 64 tokens, the last 3 of which are for drafted tokens"):
        engine.generate([7] * 20, max_new_tokens=44)
    most = [engine.generate([7] * 20, max_new_tokens=41, speculate=s).tokens for s in (True, False)]
    assert most[0] == most[1] and len(most[0]) == 41


def test_a_model_without_a_final_norm_decodes_but_trains_no_draft(tmp_path: Path) -> None:
    model = model_of(*OPT_350M)
    theirs = greedy_by_transformers(model, PROMPT, 40)
    directory = saved(model, tmp_path)
    engine = fledge.load(directory, dtype=torch.float64)
    assert engine.generate(PROMPT, max_new_tokens=40).tokens == theirs
    with pytest.raises(ValueError, match=r"OPTDecoder does not have .* no draft can be trained for it"):
        fledge.train_draft(target=directory, data="not read", out=tmp_path / "run", max_length=64, device="cpu")


def test_a_model_whose_layers_read_no_tokens_decodes_but_trains_no_draft(tmp_path: Path) -> None:
    """CPM-Ant, whose encoder of layers and norm reads embeddings. Its config has no end-of-sequence token."""
    if not hasattr(transformers, "CpmAntConfig"):
        pytest.skip("this transformers has no CPM-Ant")
    sizes = dict(hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48, num_hidden_layers=8, vocab_size=400)
    model = AutoModelForCausalLM.from_config(transformers.CpmAntConfig(**sizes), dtype=torch.float32)
    target = target_of(model, tiny_tokenizer())
    assert target.stop_ids == {1}
    assert len(fledge.load(target).generate(PROMPT, max_new_tokens=3).tokens) == 3
    with pytest.raises(ValueError, match=r"CpmAntModel does not have .* no draft can be trained for it"):
        target.layers  # noqa: B018


def test_a_model_without_attention_gives_its_draft_heads_64_wide() -> None:
    shape = llama_names(transformers.MambaConfig(hidden_size=256, vocab_size=400))
    draft = DraftConfig.for_target(shape, max_length=64)
    assert (draft.num_attention_heads, draft.head_dim, draft.intermediate_size) == (4, 64, 512)


def test_a_rope_that_no_draft_can_use_becomes_the_default_rope() -> None:
    """Gemma 4's full attention rotates a quarter of each head; the draft rotates whole heads with the same theta."""
    shape = llama_names(config_of("Gemma4Text", LLAMA))
    rope = DraftConfig.for_target(shape, max_length=64).rope
    assert (rope.rope_type, rope.rope_theta, rope.partial_rotary_factor) == ("default", 1e6, 1.0)


def test_layers_of_full_attention_without_positions_leave_the_rope_of_the_others() -> None:
    """As in Beam's config."""
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e4}, "full_attention": None}
    config = config_of("Llama", LLAMA).to_dict() | {"rope_parameters": rope}
    shape = llama_names(SimpleNamespace(to_dict=lambda: config, attribute_map={}))
    assert DraftConfig.for_target(shape, max_length=64).rope.rope_theta == 5e4
