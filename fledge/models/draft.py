"""The draft model of every method in `fledge.methods`. Training and decoding both call it, so that a draft computes in
decoding what it was trained to compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fledge.config import DraftConfig
from fledge.kernels.linear import linear
from fledge.models.layers import EAGER, Compute, EmbeddingRows, Layer, Linear, Part, RMSNorm, Rotary, SharedEmbedding
from fledge.types import Features

# attend(layer index, q [S, H, d], k [T, G, d], v [T, G, d]) -> [S, H, d]; the caller holds the context
LayerAttend = Callable[[int, Tensor, Tensor | None, Tensor | None], Tensor]


class LayersOutput(NamedTuple):
    """`hidden_SE`: the state that leaves the last layer, or enters it where that makes keys alone; `keys`: each
    layer's (k, v) [T, G, d], of layers that computed them."""

    hidden_SE: Tensor
    keys: list[tuple[Tensor, Tensor]]


class Draft(nn.Module):
    """One decoder layer (or more) that predicts the token after next from a target's hidden states.

    Parameters are named as the engines' portable file names them, so `state_dict` is that file. The embedding is the
    target's, shared and frozen, unless the config says that the draft owns one; so is EAGLE-1's head, always.
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
        if family.one_pass:  # read in place of the target's hidden states that are not known yet
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
        self._shared: dict[str, Tensor] = {}  # the target's weights, which are no parameters of the draft's

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
        """Makes the draft predict these target ids: ascending and distinct, int64 [W]."""
        W, V = self.config.draft_vocab_size, self.config.vocab_size
        if ids_W.numel() != W or (W > 1 and not bool((ids_W[1:] > ids_W[:-1]).all())):
            raise ValueError(f"a draft vocabulary of {W} needs that many ascending distinct ids, got {ids_W.numel()}")
        if ids_W.min() < 0 or ids_W.max() >= V:
            raise ValueError(
                f"the vocabulary map names ids {ids_W.min()}..{ids_W.max()} outside the target's 0..{V - 1}"
            )
        if self.d2t is not None:
            self.d2t.copy_(ids_W - torch.arange(W))

    def target_ids(self) -> Tensor:
        """Target id of every draft id, int64 [W]."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.device)
        return ids if self.d2t is None else ids + self.d2t

    def to_target(self, draft_id: Tensor) -> Tensor:
        """Draft ids to target ids, same shape."""
        return draft_id if self.d2t is None else draft_id + self.d2t[draft_id]

    def share(self, embedding_VE: Tensor, head_VE: Tensor | None = None) -> None:
        """Uses the target's embedding where the draft has none of its own, and the target's head where the method
        borrows it. The tensors are shared, not copied, where device and dtype allow."""
        wanted = {"embedding": embedding_VE} if self.embed_tokens is None else {}
        wanted |= {"head": head_VE} if self.family.borrows_head else {}
        self._shared = {name: x.detach().to(self.device, self.dtype) for name, x in wanted.items()}

    def embed(self, token_S: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(token_S)
        assert "embedding" in self._shared, "share was not called"
        return nn.functional.embedding(token_S, self._shared["embedding"])

    @property
    def head(self) -> Tensor:
        """The head's weight, [W, E]: the draft's own parameter, or the target's weight where the method borrows it."""
        return self._shared["head"] if self.family.borrows_head else self.lm_head.weight

    def logits(self, read_SE: Tensor) -> Tensor:
        """Logits [S, W] of the head's input, which is the second result of `read`."""
        return linear(read_SE, self.head) if self.family.borrows_head else self.lm_head(read_SE)

    # -- the computation ----------------------------------------------------------------------------------------

    def reads(self, features: Features) -> Tensor:
        """The target's hidden states that this draft reads, [T, A, D]: the captured layers, or the final state alone
        (A = 1)."""
        return features.aux_TAD if self.family.reads_layers else features.last_TD[:, None]

    def fuse(self, aux_TAD: Tensor, compute: Compute = EAGER) -> Tensor:
        """The draft's hidden state [T, E] from the target's: fc(concatenation of the A layers' states), or the final
        state itself."""
        if not self.family.reads_layers:
            return aux_TAD[:, 0]
        if self.config.fc_norm:
            aux_TAD = torch.stack([norm(aux_TAD[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        flat = aux_TAD.flatten(1)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat, compute)

    def masked(self, compute: Compute = EAGER) -> tuple[Tensor, Tensor]:
        """The token and hidden state that a one-pass draft reads at depths whose token and state are not known: int64
        [1] and [1, E], the same at every depth."""
        states = self.mask_hidden.view(1, self.config.num_aux_hidden_states, -1)
        return torch.full((1,), self.config.mask_token_id, device=self.device), self.fuse(states, compute)

    def step(
        self, token_T: Tensor | EmbeddingRows, hidden_TE: Tensor, position_T: Tensor, attend: LayerAttend,
        compute: Compute = EAGER, *, rows: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """One draft step of T slots, or of some `rows` of them: the last layer's output, [S, E]; see `forward`."""
        return self(token_T, hidden_TE, position_T, attend, compute, rows=rows).hidden_SE

    def forward(
        self, token_T: Tensor | EmbeddingRows, hidden_TE: Tensor, position_T: Tensor, attend: LayerAttend,
        compute: Compute = EAGER, *, rows: Tensor | None = None, first: int = 0, part: Part = "all",
    ) -> LayersOutput:  # fmt: skip
        """Token x_{t+1} (or its row among `shared_embedding`) and hidden state of slot t to the output of the last
        layer at slot t. One row of both stands for as many as there are positions.

        In the last layer, `rows` (int64 [S]) are the only ones whose output is computed, since only theirs are wanted;
        `part` "keys" computes no output there, "queries" no keys. `first` is the layer that `hidden_TE` enters.
        """
        rotation = self.rotary(position_T, self.dtype, compute)
        blocks, keys = self.blocks, []
        for i in range(first, len(blocks)):
            layer, last = blocks[i], i + 1 == len(blocks)
            embedding, state_TE = self._embedded(token_T, hidden_TE, compute) if i == 0 else (None, hidden_TE)
            through = layer
            if part == "keys" and not last and compute.recompute:
                # of the whole row's first pass, nothing but what enters a layer is held for the backward pass
                through = partial(checkpoint, layer, use_reentrant=False)
            only = dict(rows=rows, part=part) if last else {}
            out, k, v = through(state_TE, embedding, rotation, partial(attend, i), compute, **only)
            if k is not None:
                keys.append((k, v))
            hidden_TE = hidden_TE if out is None else out
        return LayersOutput(hidden_TE, keys)

    def _embedded(
        self, token_T: Tensor | EmbeddingRows, hidden_TE: Tensor, compute: Compute
    ) -> tuple[Tensor | EmbeddingRows | None, Tensor]:
        """The first layer's embedding and hidden state; no embedding where `fc` fuses it into the state."""
        if isinstance(token_T, EmbeddingRows):
            return token_T, hidden_TE
        embedded = self.embed(token_T)
        if self.family.fuses_embedding:
            return None, self.fc(torch.cat((embedded, hidden_TE), dim=-1), compute)
        return embedded, hidden_TE

    def shared_embedding(self, token_N: Tensor, compute: Compute) -> SharedEmbedding | None:
        """The embeddings of tokens that many slots read; the first layer projects them once for all steps. None where
        that is not supported: "eager" layers, biases, or an embedding that `fc` fuses."""
        if self.family.fuses_embedding or not compute.fused or self.config.attention_bias:
            return None
        return SharedEmbedding(self.embed(token_N))

    def read(self, out_SE: Tensor, compute: Compute = EAGER) -> tuple[Tensor, Tensor]:
        """Splits a step's output into the hidden state of the next step and the head's input, each [S, E].

        EAGLE-3 feeds back the output itself, and with 3.1's `norm_output` the normed output. A borrowed head reads the
        output without a norm.
        """
        if self.family.borrows_head:
            return out_SE, out_SE
        normed, out_SE = self.norm.with_input(out_SE, compute)
        return (normed if self.config.norm_output else out_SE), normed
