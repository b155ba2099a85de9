"""Fingerprints of tokenizers, chat templates, vocabularies and weights, which drafts are recorded and compared by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

SAMPLE = 2**16  # values of each tensor that a fingerprint of weights reads


def tokenizer_sha256(tokenizer: Any) -> str:
    """A hash of the vocabulary and of the token ids of a probe text. Tokenizers with equal hashes are
    interchangeable."""
    probe = "def f(x):\n    return  x+1 # 12345 Ünïcødé 你好\n\n\tThe quick brown fox."
    content = [sorted(tokenizer.get_vocab().items()), tokenizer(probe, add_special_tokens=False)["input_ids"]]
    return _sha256(json.dumps(content))


def template_sha256(tokenizer: Any) -> str | None:
    """A hash of the chat template; None without one."""
    template = tokenizer.chat_template
    return None if template is None else _sha256(json.dumps(template, sort_keys=True))


def target_sha256(embedding_VD: Tensor, head_VD: Tensor, last_layer: Mapping[str, Tensor]) -> str:
    """A hash of a sample of a target's weights: up to SAMPLE values of the embedding, the head, and each weight of the
    last decoder layer, rounded to bfloat16, so that it is the same in each dtype that a target is loaded in."""
    return _sample_sha256((embedding_VD, head_VD, *(last_layer[name] for name in sorted(last_layer))))


def draft_sha256(tensors: Mapping[str, Tensor]) -> str:
    """A hash of a sample of a draft's weights, by the names of its state dict, as `target_sha256`. It is the same for
    all layouts of the draft's files, which may have a copy of the target's embedding or none."""
    weights = (x for name, x in sorted(tensors.items()) if name != "embed_tokens.weight" and x.is_floating_point())
    return _sample_sha256(weights)


def _sample_sha256(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for x in tensors:
        sample = x.detach().reshape(-1)[:: max(1, x.numel() // SAMPLE)].to(torch.bfloat16)
        digest.update(sample.view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


def vocabulary_sha256(ids_W: Tensor) -> str:
    """A hash of the target ids of a draft's vocabulary."""
    return hashlib.sha256(ids_W.to("cpu", torch.int64).numpy().tobytes()).hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
