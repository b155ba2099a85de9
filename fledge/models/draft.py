"""The drafts of EAGLE-3 (Li et al. 2025, arXiv:2503.01840) with its 3.1 norms, of P-EAGLE (Hui et al. 2026,
arXiv:2602.01469), which drafts in one pass, and of EAGLE-1 (Li et al. 2024, arXiv:2401.15077): where training and
decoding meet."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fledge.config import DraftConfig
from fledge.kernels.linear import SharedProducts, linear
from fledge.models.layers import Joined, Layer, Linear, RMSNorm, Rotary, Words
from fledge.types import Features

# attend(layer index, q [S, H, d], k [T, G, d], v [T, G, d]) -> [S, H, d]; the caller holds the context
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


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
        self.eagle1 = config.method == "eagle1"
        self.peagle = config.method == "peagle"
        if self.peagle:  # what stands for the target's states that are not known yet
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, A * D))
        self.fc = Linear(2 * E, E, bias=config.fc_bias) if self.eagle1 else Linear(A * D, E, bias=False)
        self.midlayer = Layer(config, first=True)
        if config.num_hidden_layers > 1:
            self.layers = nn.ModuleDict(
                {str(i): Layer(config, first=False) for i in range(1, config.num_hidden_layers)}
            )
        if not self.eagle1:
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
        """Uses the target's embedding where it has none of its own, and for EAGLE-1 its head; the tensors are shared
        where the device allows."""
        wanted = {"embedding": embedding_VE} if self.embed_tokens is None else {}
        wanted |= {"head": head_VE} if self.eagle1 else {}
        self._shared = {name: x.detach().to(self.device, self.dtype) for name, x in wanted.items()}

    def embed(self, token_S: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(token_S)
        assert "embedding" in self._shared, "share was not called"
        return nn.functional.embedding(token_S, self._shared["embedding"])

    @property
    def head(self) -> Tensor:
        """The head's weight, [W, E]: a parameter, or in EAGLE-1 the target's."""
        return self._shared["head"] if self.eagle1 else self.lm_head.weight

    def logits(self, read_SE: Tensor) -> Tensor:
        """Of what `read` says the head reads: [S, W]."""
        return linear(read_SE, self.head) if self.eagle1 else self.lm_head(read_SE)

    def compute(self, impl: str, *, recompute: bool = False) -> None:
        """Chooses how the layers compute: "eager" in plain torch, "triton" with fewer kernels and less held for the
        backward pass, whose MLP is computed again there with `recompute`."""
        if impl not in ("eager", "triton"):
            raise ValueError(f"layers {impl!r} are computed neither as 'eager' nor as 'triton'")
        for module in self.modules():
            if isinstance(module, Linear):
                module.accumulates = impl == "triton"
            elif isinstance(module, RMSNorm | Rotary):
                module.impl = impl
        for layer in self.blocks:
            layer.self_attn.impl = layer.mlp.impl = impl
            layer.mlp.recompute = recompute

    # -- the computation ----------------------------------------------------------------------------------------

    def reads(self, features: Features) -> Tensor:
        """The target's states that this draft reads, [T, A, D]: the captured layers, or in EAGLE-1 the last state."""
        return features.last_TD[:, None] if self.eagle1 else features.aux_TAD

    def fuse(self, aux_TAD: Tensor) -> Tensor:
        """Target features to the draft's hidden state, [T, E]: g = fc(concat of A states), or in EAGLE-1 the state
        itself."""
        if self.eagle1:
            return aux_TAD[:, 0]
        if self.config.fc_norm:
            aux_TAD = torch.stack([norm(aux_TAD[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        flat = aux_TAD.flatten(1)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)

    def masked(self) -> tuple[Tensor, Tensor]:
        """What a P-EAGLE draft reads where neither token nor state is known: int64 [1] and [1, E], for every depth."""
        states = self.mask_hidden.view(1, self.config.num_aux_hidden_states, -1)
        return torch.full((1,), self.config.mask_token_id, device=self.device), self.fuse(states)

    def step(
        self,
        token_T: Tensor | Words,
        hidden_TE: Tensor,
        position_T: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """One draft step: token x_{t+1} (or its place among `shared_words`) and hidden state of slot t to the layer
        output `a` of slot t. One row of both stands for as many as there are positions.

        Every row gives keys and values to `attend`; with `rows` (int64 [S]) only those rows are computed further in
        the last layer, since only their outputs are wanted. Returns [S, E] (or [T, E]).
        """
        rotary = self.rotary(position_T, self.dtype)
        blocks = self.blocks
        for i, layer in enumerate(blocks):
            x, residual = self.inputs(i, token_T, hidden_TE)
            if rows is None or i < len(blocks) - 1:
                q, k, v = layer.self_attn.projections(x, rotary)
            else:
                k, v = layer.self_attn.keys_values(x, rotary)
                residual = residual[rows]
                q = layer.self_attn.queries(x[rows], (rotary[0][rows], rotary[1][rows]))
            attended = attend(i, q, k, v)
            hidden_TE = layer.close(attended, residual.expand(attended.shape[0], -1))
        return hidden_TE

    def inputs(self, layer: int, token_T: Tensor | Words, hidden_TE: Tensor) -> tuple[Tensor | Joined, Tensor]:
        """What a layer's projections read, and its residual, of the state that enters it: [T, 2E or E] and [T, E]."""
        block = self.blocks[layer]
        if layer > 0:
            return block.input_layernorm.beside(hidden_TE)
        if self.eagle1:
            x = self.fc(torch.cat((self.embed(token_T), hidden_TE), dim=-1))
            return x, x
        normed, hidden_TE = block.hidden_norm.beside(hidden_TE)
        residual = normed if self.config.norm_before_residual else hidden_TE
        if isinstance(token_T, Words):
            return Joined(token_T, normed), residual
        return torch.cat((block.input_layernorm(self.embed(token_T)), normed), dim=-1), residual

    def shared_words(self, token_N: Tensor) -> SharedProducts | None:
        """The embedding's share of the first layer's projections, for tokens that many slots read; None where the
        layers compute as "eager" or have biases, nothing is learnt, or the draft is EAGLE-1's, of one step."""
        attention = self.midlayer.self_attn
        if self.eagle1 or not attention.q_proj.fused:
            return None
        embedded = self.midlayer.input_layernorm(self.embed(token_N))
        return SharedProducts(embedded, *(p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)))

    def read(self, out_SE: Tensor) -> tuple[Tensor, Tensor]:
        """Splits a step's output into what is fed back as the next hidden state and what `lm_head` reads.

        EAGLE-3 feeds back the output itself; 3.1's `norm_output` feeds back the normed one; EAGLE-1 knows no norm.
        """
        if self.eagle1:
            return out_SE, out_SE
        normed, out_SE = self.norm.beside(out_SE)
        return (normed if self.config.norm_output else out_SE), normed
