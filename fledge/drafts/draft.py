"""The draft model of all methods in `fledge.methods`. Training calls it; `drafts/draft_decoder.py` decodes with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fledge.config import DraftConfig
from fledge.drafts.layers import EAGER, Compute, EmbeddingRows, Layer, Linear, Part, RMSNorm, Rotary, SharedEmbedding
from fledge.ops.linear import linear
from fledge.ops.packed_weight import version
from fledge.ops.products import linear_products
from fledge.types import Features

# attend(layer index, q [T, H, d], k [T, G, d], v [T, G, d]) -> [T, H, d]; the caller provides the earlier keys and
# values. k and v are None if the layer computes queries only.
LayerAttend = Callable[[int, Tensor, Tensor | None, Tensor | None], Tensor]


class LayersOutput(NamedTuple):
    """`state_SE` is the output of the last layer, or its input if the last layer computes keys and values only. `keys`
    are the (k, v) of each layer that computed them, each [T, G, d]."""

    state_SE: Tensor
    keys: list[tuple[Tensor, Tensor]]


class Draft(nn.Module):
    """One or more decoder layers. From the target's hidden states at token t and from token t + 1, it predicts token
    t + 2.

    Parameters have the names of the checkpoint format that vLLM and SGLang read. The embedding is the target's, shared
    and frozen, unless `config.own_embeddings`. EAGLE-1's head is always the target's.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        E, D, A = config.hidden_size, config.target_hidden_size, config.num_aux_hidden_states
        eps = config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = RMSNorm(A * D, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(D, eps) for _ in range(A))
        family = self.family = config.family
        if family.one_pass:  # the input in place of the target's hidden states at depths where they are unknown
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, A * D))
        self.fc = Linear(2 * E, E, bias=config.fc_bias) if family.fuses_embedding else Linear(A * D, E, bias=False)
        self.midlayer = Layer(config, first=True)
        if config.num_hidden_layers > 1:
            self.layers = nn.ModuleDict(
                {str(i): Layer(config, first=False) for i in range(1, config.num_hidden_layers)}
            )
        if not family.borrows_head:
            self.norm = RMSNorm(E, eps)
            self.lm_head = Linear(E, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, E) if config.own_embeddings else None
        self.rotary = Rotary(config)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        else:
            self.d2t = None
        self._shared: dict[str, Tensor] = {}  # the target's weights; not parameters of the draft
        self._shared_at: list[Any] = []  # where they were, and where the draft was
        self._shared_from: list[weakref.ref[Tensor]] = []  # the target's own tensors

    @property
    def blocks(self) -> list[Layer]:
        return [self.midlayer, *(self.layers.values() if self.config.num_hidden_layers > 1 else ())]

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    # -- vocabulary ---------------------------------------------------------------------------------------------

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

    def to_target(self, draft_id: Tensor) -> Tensor:
        """Converts draft ids to target ids, of any shape."""
        return draft_id if self.d2t is None else draft_id + self.d2t[draft_id]

    def share_target_weights(self, embedding_VE: Tensor, head_VE: Tensor | None = None) -> None:
        """Sets the target's embedding (used unless the draft has its own) and head (used by EAGLE-1 only). They are
        copied only if their device or dtype differs from the draft's, and not again while nothing is moved or changed.
        """
        used = {"embedding": embedding_VE} if self.embed_tokens is None else {}
        used |= {"head": head_VE} if self.family.borrows_head else {}
        places = [(x.data_ptr(), version(x), x.device, x.dtype, self.device, self.dtype) for x in used.values()]
        # an address alone may be that of a target's weights that are gone
        if places == self._shared_at and [id(ref()) for ref in self._shared_from] == [id(x) for x in used.values()]:
            return
        self._shared = {name: x.detach().to(self.device, self.dtype) for name, x in used.items()}
        self._shared_at, self._shared_from = places, [weakref.ref(x) for x in used.values()]

    def __getstate__(self) -> dict[str, Any]:
        """Without references that cannot be pickled."""
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
        """The head's weight, [W, E]: the draft's parameter, or for EAGLE-1 the target's weight."""
        return self._shared["head"] if self.family.borrows_head else self.lm_head.weight

    def logits(self, head_input_SE: Tensor, compute: Compute = EAGER) -> Tensor:
        """The logits [S, W] over the draft's vocabulary; see `split_output` for the head's input."""
        if compute.uses_triton:
            return linear_products(head_input_SE, self.head, gradients=compute.gradients)[0]
        return linear(head_input_SE, self.head)

    # -- the computation ----------------------------------------------------------------------------------------

    def select_states(self, features: Features) -> Tensor:
        """The target's hidden states that this draft reads, [T, A, D]: those of the captured layers, or only the final
        state (A = 1)."""
        return features.aux_TAD if self.family.reads_layers else features.last_TD[:, None]

    def fuse(self, aux_TAD: Tensor, compute: Compute = EAGER) -> Tensor:
        """The draft's input state [T, E] from `select_states`: fc(concatenation of the A layers' states), or for
        EAGLE-1 the final state itself."""
        if not self.family.reads_layers:
            return aux_TAD[:, 0]
        if self.config.fc_norm:
            aux_TAD = torch.stack([norm(aux_TAD[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        flat = aux_TAD.flatten(1)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat, compute)

    def mask_inputs(self, compute: Compute = EAGER) -> tuple[Tensor, Tensor]:
        """The inputs of a one-pass draft at depths from 1 on: the mask token, int64 [1], and the fused mask state
        [1, E]. They are the same at every depth."""
        return torch.full((1,), self.config.mask_token_id, device=self.device), self.fuse(self.mask_states, compute)

    @property
    def mask_states(self) -> Tensor:
        """What a one-pass draft reads in place of the target's hidden states where they are unknown, [1, A, D]."""
        return self.mask_hidden.view(1, self.config.num_aux_hidden_states, -1)

    def step(
        self, token_T: Tensor | EmbeddingRows, state_TE: Tensor, position_T: Tensor, attend: LayerAttend,
        compute: Compute = EAGER,
    ) -> Tensor:  # fmt: skip
        """One draft step of T slots: the last layer's output, [T, E]. Arguments as in `forward`."""
        return self(token_T, state_TE, position_T, attend, compute).state_SE

    def forward(
        self, token_T: Tensor | EmbeddingRows, state_TE: Tensor, position_T: Tensor, attend: LayerAttend,
        compute: Compute = EAGER, *, first: int = 0, part: Part = "all",
    ) -> LayersOutput:  # fmt: skip
        """Runs the decoder layers for T slots.

        Slot t reads token x_{t+1} (its id, or its row of a `shared_embedding`) and an input state: `fuse` at step 0,
        later the state fed back by `split_output`. A single row of tokens and states is used at all positions. `part`
        "keys" computes only keys and values in the last layer, and "queries" only its output. `first` is the index of
        the layer that `state_TE` is the input of.
        """
        rotation = self.rotary(position_T, self.dtype, compute)
        blocks, keys = self.blocks, []
        for i in range(first, len(blocks)):
            layer, last = blocks[i], i + 1 == len(blocks)
            embedding, input_TE = self._layer_input(token_T, state_TE, compute) if i == 0 else (None, state_TE)
            run = layer
            if part == "keys" and not last and compute.recompute:
                # the first pass over the whole row then keeps only each layer's input for the backward pass
                run = partial(checkpoint, layer, use_reentrant=False)
            options = dict(part=part) if last else {}
            out, k, v = run(input_TE, embedding, rotation, partial(attend, i), compute, **options)
            if k is not None:
                keys.append((k, v))
            state_TE = state_TE if out is None else out
        return LayersOutput(state_TE, keys)

    def _layer_input(
        self, token_T: Tensor | EmbeddingRows, state_TE: Tensor, compute: Compute
    ) -> tuple[Tensor | EmbeddingRows | None, Tensor]:
        """The first layer's embedding and state; no embedding if `fc` has joined it with the state (EAGLE-1)."""
        if isinstance(token_T, EmbeddingRows):
            return token_T, state_TE
        embedded = self.embed(token_T)
        if self.family.fuses_embedding:
            return None, self.fc(torch.cat((embedded, state_TE), dim=-1), compute)
        return embedded, state_TE

    def shared_embedding(self, token_N: Tensor, compute: Compute) -> SharedEmbedding | None:
        """The embeddings of N tokens that several steps read, so that the first layer projects them once. None if this
        is not supported: for eager layers, for projections with biases, and for EAGLE-1."""
        if self.family.fuses_embedding or not compute.uses_triton or self.config.attention_bias:
            return None
        return SharedEmbedding(self.embed(token_N))

    def split_output(self, out_SE: Tensor, compute: Compute = EAGER) -> tuple[Tensor, Tensor]:
        """The input state of the next step and the head's input, each [S, E], from the last layer's output.

        EAGLE-3 feeds back the output without the norm, or with it if `norm_output` (EAGLE-3.1); the head reads the
        normed output. EAGLE-1 has no norm, and uses the output for both.
        """
        if self.family.borrows_head:
            return out_SE, out_SE
        normed, out_SE = self.norm.with_input(out_SE, compute)
        return (normed if self.config.norm_output else out_SE), normed
