"""Tiny targets of real architectures, their tokenizer and drafts, made without any download."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from fledge.config import DraftConfig
from fledge.drafts.draft import Draft
from fledge.drafts.registry import new_draft
from fledge.targets.compatibility import connect_draft, layers_of
from fledge.targets.interface import DecodingTarget, Target, TrainingTarget
from fledge.targets.native import NativeTarget
from fledge.targets.transformers import TransformersTarget
from fledge.types import Features, Packed, Tree

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# an assistant's turn in a channel, in special tokens, as in gpt-oss
CHANNEL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}<|channel|>final<|message|>"
    "{% else %}\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
CHANNEL_TOKENS = ("<|channel|>", "<|message|>")
IN_CHANNEL = "<|channel|>final<|message|>A heron.<|im_end|>"
ASKED = {"role": "user", "content": "Which bird?"}


FAMILIES = {
    "llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "phi3": Phi3Config, "mistral": MistralConfig,
    "mixtral": MixtralConfig, "qwen2_moe": Qwen2MoeConfig, "qwen3_moe": Qwen3MoeConfig,
}  # fmt: skip


SLIDING: dict[str, dict[str, Any]] = {
    "mistral": dict(family="mistral", sliding_window=16),
    "qwen3 by turns": dict(family="qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=4),
    "full": dict(family="llama"),
}


P_EAGLE = dict(method="peagle", mask_token_id=399)
DFLASH = dict(
    method="dflash", mask_token_id=399, num_hidden_layers=2, aux_layers=(2, 4, 7), num_aux_hidden_states=3
)  # fmt: skip

# a test with an argument `native` runs with both implementations of the target
BOTH_IMPLEMENTATIONS = pytest.mark.parametrize("native", [False, True], ids=["transformers", "native"])


@functools.cache
def tiny_tokenizer(template: str | None = CHATML, vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few sentences; id 0 is padding and id 1 is <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = "The young bird tries its wings, falls, and tries again until it can fly. system user assistant tool"
    tokenizer.train_from_iterator([text] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = template
    return fast


def tiny_target(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, vocab_size: int = 400, seed: int = 0,
    scale: float = 4.0, max_length: int | None = None, tokenizer: bool = True, native: bool = False, **config,
) -> TransformersTarget:  # fmt: skip
    """A random model of 8 layers, computed by transformers or, if `native`, by fledge. The weights are scaled so that
    its next-token distributions are peaked and depend on the context; with `scale` 4, matrices preserve the size of
    their input."""
    shape = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=vocab_size, max_position_embeddings=512, pad_token_id=0, bos_token_id=None,
        eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    hf = FAMILIES[family](**{**shape, **config})
    # transformers' default, a grouped product, has no float64
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and ("embed" in name or "lm_head" in name):
                p.normal_(0, 1)
            elif p.dim() > 1:
                p.normal_(0, 0.25 * scale * p.shape[-1] ** -0.5)
            elif "norm" in name:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.normal_(0, 0.1)
    # transformers keeps the rotary frequencies in float32, as the draft does
    model = model.to(dtype)
    fast = tiny_tokenizer(vocab_size=vocab_size) if tokenizer else None
    kind = NativeTarget if native else TransformersTarget
    return kind(model, fast, name=f"tiny {family}", max_length=max_length)


@functools.cache
def _exact_target(native: bool) -> TransformersTarget:
    return tiny_target(dtype=torch.float64, native=native)


def exact_target(native: bool = False) -> TransformersTarget:
    """A target in float64. Both implementations have the same weights."""
    return _exact_target(native)


def read_alone(
    target: DecodingTarget, tokens: Sequence[int], layers: Sequence[int] | None = None
) -> tuple[Tensor, Features | None]:
    """The logits after each token of a text, [n, V], and its features, from one pass with an empty cache."""
    cache = target.new_cache([len(tokens)])
    logits_BNV, features = target.verify(Tree.chain(torch.tensor([list(tokens)], device=target.device)), cache, layers)
    cache.select([])
    return logits_BNV[0], features


def tiny_target_directory(parent: Path, **config: Any) -> Path:
    """Saves a tiny target with its tokenizer by `save_pretrained`, and returns the directory."""
    target = tiny_target(**config)
    target.model.save_pretrained(parent / "target")
    target.tokenizer.save_pretrained(parent / "target")
    return parent / "target"


def scripted_target_directory(parent: Path, template: str, answer: str, special: Sequence[str] = ()) -> Path:
    """Saves a target that gives one answer to every chat: the next token depends on the last token alone. `special` are
    additional special tokens. Returns the directory."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = template
    prompt = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    ids, script = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
    chain = [ids[-1], *script]
    assert len(set(chain[:-1])) == len(script), "the next token must follow from the last one"
    model = tiny_target(vocab_size=len(tokenizer), hidden_size=256, tie_word_embeddings=False, tokenizer=False).model
    table = torch.randn(len(tokenizer), 256).sign()
    with torch.no_grad():
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.zero_()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for before, after in pairwise(chain):
            model.lm_head.weight[after] += table[before] / 16
    for part in (model, tokenizer):
        part.save_pretrained(parent / "scripted")
    return parent / "scripted"


def greedy_by_transformers(model: PreTrainedModel, prompt: list[int], n: int, **options: Any) -> list[int]:
    """The tokens that transformers' greedy `generate` gives after a prompt."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False, **options)[
        0, len(prompt) :
    ].tolist()


def tiny_draft(target: Target, *, seed: int = 1, draft_vocab_size: int | None = None, **overrides) -> Draft:
    """A random draft connected to a target; its vocabulary is spread evenly over the target's."""
    vocab = target.embedding.shape[0]
    W = draft_vocab_size or vocab
    config = DraftConfig.for_target(target.shape, max_length=target.max_length, draft_vocab_size=W, **overrides)
    torch.manual_seed(seed)
    draft = new_draft(config)
    with torch.no_grad():
        for p in draft.parameters():
            if p.dim() > 1:
                p.normal_(0, p.shape[-1] ** -0.5)
            else:
                p.add_(0.1 * torch.randn_like(p))
    draft.set_vocabulary(torch.linspace(0, vocab - 1, W).round().long())
    draft = draft.to(target.dtype)
    connect_draft(draft, target)
    return draft


def features_for(draft: Draft, target: TrainingTarget, row: Packed) -> Features:
    """The target's features of a row, at the layers that the draft reads."""
    return target.features(row, layers_of(draft.config, target))
