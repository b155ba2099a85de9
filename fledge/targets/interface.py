"""The interface of target models.

Training needs features and logits (`TrainingTarget`). Decoding needs a cache with rollback (`DecodingTarget`). A target
may implement one or both. Nothing outside `fledge.targets` depends on the implementation.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fledge.types import Features, Packed, Prompt, Tree

UNLIMITED = sys.maxsize  # the context of a target without a maximum position, such as one with ALiBi


class Target(ABC):
    """The properties of a target that are needed to create, initialize and check a draft.

    `name`: the directory or hub id that the target was loaded from, for messages and records; may be empty.
    `tokenizer`: the transformers tokenizer; None only in tests.
    `implementation`: the target's forward pass, as text for messages and records: "native" (fledge's forward pass), or
    "transformers", which may be followed by the reason.
    `trust_remote_code`: whether code from the target's files was allowed to run.
    `shape`: the text config with Llama's field names; `vocab_size` is the number of rows of the embedding.
    `num_layers`: the number n of decoder layers. Raises ValueError if the layers cannot be identified.
    `max_length`: the longest sequence to be used, in tokens; selects longrope's factors.
    `context`: the maximum number of tokens of a sequence; `UNLIMITED` if the config has no limit.
    `stop_ids`: the ids of the tokens that end a turn.
    `rotary`: whether the target uses rotary embeddings, which exist beyond the context; False: a table of positions.
    `device`, `dtype`: the device and dtype of the weights and of returned features.
    `embedding`: the token embeddings [V, D]. `head_weight`: the weight of the output head [V, D].
    `plain_head`: whether logits are the final hidden states times `head_weight`, without bias, scaling or cap.
    """

    name: str
    tokenizer: Any
    implementation: str
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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} in {str(self.dtype).removeprefix('torch.')} on {self.device}>"

    @abstractmethod
    def last_layer_weights(self) -> dict[str, Tensor]:
        """The weights of the last decoder layer and the final norm by Llama's names: "q_proj.weight", "k_proj.weight",
        "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight",
        "input_layernorm.weight", "post_attention_layernorm.weight" and "norm.weight".

        A weight is left out if the target has no module that computes the same as Llama's module of the same name.
        """

    def check_numbers(self, values: Tensor) -> None:
        """Raises ValueError if logits or hidden states of the target contain NaN or +inf. -inf is a valid logit."""
        if bool((values.isnan() | values.isposinf()).any()):
            raise ValueError(
                f"{self.name or 'the target'} computes NaN or infinite values in {str(self.dtype).split('.')[-1]}: its "
                "weights are damaged, or the dtype is too narrow for them; try the dtype float32, or copy it again"
            )


class TrainingTarget(Target):
    """A target that a draft can be trained for.

    `packs`: whether the documents of a packed row are computed in one pass, without seeing each other; False: each
    document is a pass of its own.
    """

    packs: bool

    @abstractmethod
    def features(self, row: Packed, layers: Sequence[int]) -> Features:
        """The features of a packed row. Documents do not see each other. The features of filler are zeros.

        `layers` are the ids of the hidden states to return, ascending: id i is the input of decoder layer i, and id
        `num_layers` is the input of the final norm. If `layers` is empty, `aux_TAD` is [T, 0, D].
        """

    @abstractmethod
    def logits(self, last_ND: Tensor) -> Tensor:
        """The target's logits [N, V] from final hidden states [N, D], as in `Features.last_TD`."""

    @abstractmethod
    def check_logits(self) -> None:
        """Raises ValueError unless `logits` of the final states in `features` equal the logits of the target's own
        forward pass."""


class Cache(Protocol):
    """A target's cache of several sequences, one or none."""

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence."""

    def keep(self, path_BR: Tensor | None, count_B: Tensor) -> None:
        """Commits the accepted nodes after a verification, and removes all other nodes.

        The accepted nodes of sequence b are the first `count_B[b]` of `path_BR[b]` (int64, ascending node indices, the
        root first), or without paths the first `count_B[b]` nodes.
        """

    def select(self, sequences: Sequence[int]) -> None:
        """Keeps only the sequences with the given indices, in the given order."""

    def append(self, other: Any) -> None:
        """Appends the sequences of another cache of the same target, which is not used afterwards."""


class DecodingTarget(Target):
    """A target that can decode.

    `rollback_problem`: the reason why the cache cannot be rolled back, as text for a message; empty if rollback works.
    A target without rollback decodes one request at a time, without a draft.
    `pads`: whether all sequences of a cache take as many slots as the longest.
    `prefills_in_parts`: whether `prefill` may be called several times for the parts of a prompt.
    `moves`: how often `prepare_decoding` has found the weights at another place in memory, or in another dtype.
    """

    rollback_problem: str
    pads: bool = True
    prefills_in_parts: bool = False
    moves: int = 0

    @property
    def shared(self) -> object:
        """What targets of the same weights share: engines of such targets run in turns."""
        return self

    def prepare_decoding(self) -> None:
        """Called before requests are decoded: finds weights that were moved, and updates copies of weights that the
        target decodes with."""

    @abstractmethod
    def new_cache(self, sizes: Sequence[int]) -> Cache:
        """A cache of empty sequences, with `sizes` the most tokens of each sequence, nodes of trees included."""

    def separate_cache(self, sizes: Sequence[int]) -> Cache:
        """`new_cache` with separate memory: no other cache grows to make room."""
        return self.new_cache(sizes)

    @abstractmethod
    def prefill(
        self, prompts: Sequence[Prompt], cache: Cache, layers: Sequence[int] | None = None, final: bool = True
    ) -> tuple[Tensor, list[Features]]:
        """Runs the prompts, or parts of prompts, of the B sequences of a cache, and adds the prompts to the cache.
        Returns the logits after each prompt, [B, V], and the features of each prompt. `layers` are as in
        `TrainingTarget.features`; None: the list of features is empty. Without `final`, features have the final state
        of each prompt's last token only, [1, D], which may take less time."""

    @abstractmethod
    def verify(self, tree: Tree, cache: Cache, layers: Sequence[int] | None = None) -> tuple[Tensor, Features | None]:
        """Runs the B x N nodes of trees (or chains) after the sequences in `cache`. A node attends to the sequence and
        to the node's ancestors.

        Returns the logits [B, N, V], and the features of all nodes, [B N, ...] (None if `layers` is None). All nodes
        are in the cache until `Cache.keep` is called.
        """

    @abstractmethod
    def check_masks(self, requests: int = 1) -> None:
        """Raises ValueError unless each node of a tree gets the logits of its own path. With `requests` above 1, checks
        this for several requests of different lengths in one pass."""

    def check_rollback(self) -> None:
        """Raises ValueError unless the cache can be rolled back (see `rollback_problem`)."""
        if self.rollback_problem:
            raise ValueError(
                f"{self.name or 'the target'} cannot verify drafts: {self.rollback_problem}. Decode without a draft, "
                "or use the draft with an engine that can restore such states"
            )


class ReferenceDecoding(ABC):
    """A target whose framework has a greedy decoder, as a reference for the speed of fledge's baseline."""

    @abstractmethod
    def reference_generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """The new tokens of the framework's greedy decoding, which uses no code of fledge's decoder."""
