"""What a target model is, and what training and decoding ask of it.

Training needs features and logits (`TrainingTarget`); decoding needs a cache it can roll back (`DecodingTarget`). A
target may be one or both. Nothing outside `fledge.targets` depends on how it computes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fledge.types import Features, Packed, Tree

UNLIMITED = sys.maxsize  # the context of a target without a longest position, as with ALiBi


class Target(ABC):
    """What a target is. A draft is shaped, initialised and checked by this alone.

    `name`: the directory or hub id it was loaded from, for messages and records; may be empty.
    `tokenizer`: its transformers tokenizer; None only in tests.
    `trust_remote_code`: whether code that came with its files was allowed to run.
    `shape`: its text config by Llama's field names; `vocab_size` is the number of rows of its embedding.
    `num_layers`: the number n of its decoder layers. Raises ValueError where the model does not show them.
    `max_length`: the longest sequence it is configured for, in tokens; selects longrope's factors.
    `context`: the most tokens it reads; `UNLIMITED` where its config names no limit.
    `stop_ids`: the tokens that end a turn.
    `rotary`: whether positions are rotary angles, which continue beyond the context; False: a table of positions.
    `device`, `dtype`: of its weights, and of the features it returns.
    `embedding`: token embeddings [V, D]. `head_weight`: the weight of its output head [V, D].
    `plain_head`: whether its logits are the product of the final states with `head_weight` and nothing more.
    """

    name: str
    tokenizer: Any
    trust_remote_code: bool
    shape: dict[str, Any]
    num_layers: int
    max_length: int
    context: int
    stop_ids: frozenset[int]
    rotary: bool
    device: torch.device
    dtype: torch.dtype
    embedding: Tensor
    head_weight: Tensor
    plain_head: bool

    @abstractmethod
    def last_layer_weights(self) -> dict[str, Tensor]:
        """Weights of the last decoder layer and the final norm by Llama's names: "q_proj.weight", "k_proj.weight",
        "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight",
        "input_layernorm.weight", "post_attention_layernorm.weight" and "norm.weight".

        Only what computes as Llama's part of that name does; the others are left out.
        """

    def check_numbers(self, computed: Tensor) -> None:
        """Raises ValueError where logits or states that it computed are NaN or +inf. -inf is a valid logit."""
        if bool((computed.isnan() | computed.isposinf()).any()):
            raise ValueError(
                f"{self.name or 'the target'} computes NaN or infinite values in {str(self.dtype).split('.')[-1]}: its "
                "weights are damaged, or the dtype is too narrow for them; try the dtype float32, or copy it again"
            )


class TrainingTarget(Target):
    """What training asks of a target.

    `packs`: whether the documents of a packed row are read together, each unaffected by the others; False: the target
    reads them one at a time.
    """

    packs: bool

    @abstractmethod
    def features(self, row: Packed, layers: Sequence[int]) -> Features:
        """Features of a packed row, each document seen alone and zeros for its filler; no logits are computed.

        `layers` are the ids of the hidden states to return, ascending: id i is the input of decoder layer i, id
        `num_layers` the input of the final norm. Empty: `aux_TAD` is [T, 0, D] and only the final states are returned.
        """

    @abstractmethod
    def logits(self, last_ND: Tensor) -> Tensor:
        """The target's own logits [N, V] from final hidden states [N, D] as in `Features.last_TD`."""

    @abstractmethod
    def check_logits(self) -> None:
        """Raises ValueError unless `logits` of the final states in `features` are the logits that the target itself
        computes, which a draft is taught to predict."""


class Cache(Protocol):
    """What a target has read of one sequence or several. Sequences are numbered from 0 in the order of their prompts.

    `select` and `append` are needed only of targets that verify several sequences together.
    """

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""

    def keep(self, lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """After a verification keeps the first `lengths` tokens of each sequence, which were there before, and behind
        them the nodes of its path (ascending node numbers, the root first); forgets the other nodes."""

    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only these sequences, in this order."""

    def append(self, others: Sequence[Any]) -> None:
        """Adds the sequences of other caches of the same target after its own."""


class DecodingTarget(Target):
    """What decoding asks of a target.

    `rollback_problem`: why tokens it has read cannot be forgotten, in words; empty where they can. A target that
    cannot forget decodes one request at a time, without a draft.
    `weight_bytes`: bytes of the weights that one forward pass reads.
    """

    rollback_problem: str
    weight_bytes: int

    @abstractmethod
    def prefill(
        self, prompts: Sequence[Sequence[int]], layers: Sequence[int] | None = None
    ) -> tuple[Tensor, list[Features], Cache]:
        """Reads B prompts of token ids. Returns the logits after each, [B, V], the features of each prompt's tokens,
        and a cache of all of them. `layers` are as in `TrainingTarget.features`; None: an empty list of features."""

    @abstractmethod
    def verify(self, tree: Tree, cache: Cache, layers: Sequence[int] | None = None) -> tuple[Tensor, Features | None]:
        """Runs the B x N nodes of trees (or chains) after the sequences in `cache`, each node seeing its sequence and
        its own ancestors. Returns logits [B, N, V] and the features of all nodes, [B N, ...], or None where `layers` is
        None. The cache then holds the nodes until `Cache.keep` says which of them stay."""

    @abstractmethod
    def check_masks(self, requests: int = 1) -> None:
        """Raises ValueError unless each node of a tree gets the logits of its own path, alone or beside other
        requests (`requests` above 1) of other lengths."""

    def check_rollback(self) -> None:
        """Raises ValueError unless tokens it has read can be forgotten (see `rollback_problem`)."""
        if self.rollback_problem:
            raise ValueError(
                f"{self.name or 'the target'} cannot verify drafts: {self.rollback_problem}. Decode without a draft, "
                "or serve the draft with an engine that can restore such states"
            )


class ReferenceDecoding(ABC):
    """A target whose framework has a greedy decoder of its own, with which ours can be compared."""

    @abstractmethod
    def reference_generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The new tokens of the framework's own greedy decoding, without any code of fledge's decoder."""
