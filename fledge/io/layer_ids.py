"""The ids of the target's hidden states, as fledge and each engine number them.

fledge numbers them as transformers' `hidden_states`: id i is the input of layer i, i.e. the output of layer i - 1, and
0 is the embedding. vLLM, speculators and SafeAILab's code do the same. SGLang and DeepSpec number the layers whose
outputs are read, so each id is one less.
"""

from __future__ import annotations

from collections.abc import Iterable

OFFSETS = {"vllm": 0, "speculators": 0, "safeailab": 0, "sglang": -1, "deepspec": -1}  # an engine's id minus fledge's


def to_engine(ids: Iterable[int], engine: str) -> list[int]:
    """fledge's ids in an engine's numbering; `engine` is a key of OFFSETS."""
    return [i + OFFSETS[engine] for i in ids]


def from_engine(ids: Iterable[int], engine: str) -> list[int]:
    """An engine's ids in fledge's numbering; `engine` is a key of OFFSETS."""
    return [i - OFFSETS[engine] for i in ids]
