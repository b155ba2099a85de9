"""The common base of all draft models: a vocabulary, the target's or a separate embedding, a head, RoPE."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fledge.config import DraftConfig
from fledge.drafts.layers import Rotary
from fledge.ops.linear import linear, version
from fledge.types import Features


class Draft(nn.Module):
    """A draft model: from the target's hidden states at token t and from token t + 1, it predicts token t + 2 and more.

    A subclass is the network of a method (`fledge.drafts.registry`): `build` makes the modules, and training and
    decoding call the same forward computation. Parameters have the names of the method's checkpoint format. The
    embedding is the target's, shared and frozen, unless `config.own_embeddings`. `implementations` are the names of
    --impl by which training can compute the network. Raises ValueError if the network has a head and its method borrows
    the target's, or if neither is so.
    """

    implementations: tuple[str, ...] = ("eager",)

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config, self.family = config, config.family
        self.build(config)
        if hasattr(self, "lm_head") == self.family.borrows_head:
            has, says = ("a", "borrows") if self.family.borrows_head else ("no", "does not borrow")
            raise ValueError(f"{type(self).__name__} has {has} lm_head, and its method {says} the target's head")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None
        self.rotary = Rotary(config)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        else:
            self.d2t = None
        self._shared: dict[str, Tensor] = {}  # the target's weights; not parameters of the draft
        self._shared_at: list[Any] = []  # addresses, versions, devices and dtypes when `_shared` was made
        self._shared_from: list[weakref.ref[Tensor]] = []  # the target's own tensors

    def build(self, config: DraftConfig) -> None:
        """Makes the network's modules and parameters, on the current device, which is "meta" where a draft is loaded: a
        buffer that is not saved must be made under `with torch.device("cpu")`. A network has a `lm_head` unless its
        method borrows the target's head."""
        raise NotImplementedError

    def initialize(self, last_layer: Mapping[str, Tensor], head_VD: Tensor, embedding_VD: Tensor) -> None:
        """Initializes the weights of a new draft from its target's.

        `last_layer` has the weights of the target's last decoder layer and final norm by Llama's names
        ("q_proj.weight", "input_layernorm.weight", "norm.weight", ..., see `Target.last_layer_weights`).
        """
        raise NotImplementedError

    @classmethod
    def to_file(cls, config: DraftConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a state dict by their names in the weights file, in the file's order."""
        return dict(state)

    @classmethod
    def from_file(cls, tensors: dict[str, Tensor], config: DraftConfig) -> dict[str, Tensor]:
        """The tensors of a weights file by their names in a state dict, without tensors that a draft does not have."""
        return {name: x for name, x in tensors.items() if name != "t2d"}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def set_vocabulary(self, ids_W: Tensor) -> None:
        """Sets the target ids of the draft's vocabulary: ascending and distinct, int64 [W]. Raises ValueError for
        others."""
        W, V = self.config.draft_vocab_size, self.config.vocab_size
        if ids_W.numel() != W or (W > 1 and not bool((ids_W[1:] > ids_W[:-1]).all())):
            raise ValueError(f"a draft vocabulary of {W} needs {W} ascending distinct ids, got {ids_W.numel()} ids")
        if ids_W.min() < 0 or ids_W.max() >= V:
            raise ValueError(
                f"the vocabulary map has ids {ids_W.min()}..{ids_W.max()} outside the target's vocabulary 0..{V - 1}"
            )
        if self.d2t is not None:
            self.d2t.copy_(ids_W - torch.arange(W))

    def target_ids(self) -> Tensor:
        """The target id of every draft id, int64 [W]."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.device)
        return ids if self.d2t is None else ids + self.d2t

    def share_target_weights(self, embedding_VE: Tensor, head_VE: Tensor | None = None) -> None:
        """Sets the target's embedding, used unless the draft has an embedding, and head, used by drafts without a head.
        The weights are copied only if their device or dtype differs from the draft's, and not again while no weight is
        moved or changed."""
        used = {"embedding": embedding_VE} if self.embed_tokens is None else {}
        used |= {"head": head_VE} if self.family.borrows_head else {}
        places = [(x.data_ptr(), version(x), x.device, x.dtype, self.device, self.dtype) for x in used.values()]
        # an address alone may be the address of freed weights of another target
        if places == self._shared_at and [id(ref()) for ref in self._shared_from] == [id(x) for x in used.values()]:
            return
        self._shared = {name: x.detach().to(self.device, self.dtype) for name, x in used.items()}
        self._shared_at, self._shared_from = places, [weakref.ref(x) for x in used.values()]

    def __getstate__(self) -> dict[str, Any]:
        """The state without weak references, which cannot be pickled."""
        return self.__dict__ | {"_shared_at": [], "_shared_from": []}

    def embed(self, token_S: Tensor) -> Tensor:
        """The embeddings [S, E] of target token ids."""
        return nn.functional.embedding(token_S, self.embedding)

    @property
    def embedding(self) -> Tensor:
        """The embedding's weight, [V, E]: the draft's parameter, or the target's weight."""
        if self.embed_tokens is not None:
            return self.embed_tokens.weight
        assert "embedding" in self._shared, "share_target_weights was not called"
        return self._shared["embedding"]

    @property
    def head(self) -> Tensor:
        """The head's weight, [W, E]: the draft's parameter, or the target's weight."""
        return self._shared["head"] if self.family.borrows_head else self.lm_head.weight

    def logits(self, head_input_SE: Tensor) -> Tensor:
        """The logits [S, W] over the draft's vocabulary."""
        return linear(head_input_SE, self.head)

    def rows_per_slot(self, K: int) -> int:
        """The number of rows that a slot has in the layers at once, in the training of K steps."""
        return 1

    def select_states(self, features: Features) -> Tensor:
        """The target's hidden states that this draft reads, [T, A, D]: those of the captured layers, or only the final
        state (A = 1)."""
        return features.aux_TAD if self.family.reads_layers else features.last_TD[:, None]
