"""EAGLE-3's draft (Li et al. 2025, arXiv:2503.01840), and EAGLE-3.1's: training calls `EagleDraft.forward`;
`drafts/draft_decoder.py` decodes with the same values up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fledge.config import DraftConfig
from fledge.drafts.draft import Draft
from fledge.drafts.layers import EAGER, Attention, Compute, EmbeddingRows, Layer, Linear, Part, RMSNorm
from fledge.io.fields import shortened

if TYPE_CHECKING:
    from fledge.ops.training import SharedProducts

SGLANG_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}
# the first layer in vLLM's names, the first layer in the names of speculators' EAGLE-1, and EAGLE-1's fusion layer
PREFIXES = {"layers.0.": "midlayer.", "transformer.": "midlayer.", "fusion_fc.": "fc."}
# the initial attention score of a slot for itself in the head of `_attend_to_own_token`; about 0 for other slots. With
# q and k norms, it is √d instead.
OWN_TOKEN_SCORE = 4.0
# attend(layer index, q [T, H, d], k [T, G, d], v [T, G, d]) -> [T, H, d]; the caller provides the earlier keys and
# values. k and v are None if the layer computes queries only.
LayerAttend = Callable[[int, Tensor, Tensor | None, Tensor | None], Tensor]


class LayersOutput(NamedTuple):
    """`state_SE` is the output of the last layer, or its input if the last layer computes keys and values only. `keys`
    are the (k, v) of each layer that computed them, each [T, G, d]."""

    state_SE: Tensor
    keys: list[tuple[Tensor, Tensor]]


class EagleDraft(Draft):
    """One or more decoder layers, of which the first reads a token's embedding beside a state.

    Parameters have the names of the checkpoint format that vLLM and SGLang read.
    """

    implementations = ("eager", "flex", "triton")

    def build(self, config: DraftConfig) -> None:
        D, A = config.target_hidden_size, config.num_aux_hidden_states
        if config.norm_before_fc:
            self.input_norm = RMSNorm(A * D, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(D, config.rms_norm_eps) for _ in range(A))
        self.build_fc(config)
        self.midlayer = self.first_layer(config)
        if config.num_hidden_layers > 1:
            self.layers = nn.ModuleDict({str(i): Layer(config) for i in range(1, config.num_hidden_layers)})
        self.build_head(config)

    def build_fc(self, config: DraftConfig) -> None:
        """Makes `fc`, which joins the hidden states of the target's layers."""
        width = config.num_aux_hidden_states * config.target_hidden_size
        self.fc = Linear(width, config.hidden_size, bias=False)

    def first_layer(self, config: DraftConfig) -> Layer:
        return Layer(config, reads_embedding=True)

    def build_head(self, config: DraftConfig) -> None:
        """Makes the final norm and the head."""
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    @torch.no_grad()
    def initialize(self, last_layer: Mapping[str, Tensor], head_VD: Tensor, embedding_VD: Tensor) -> None:
        """Initializes the draft from the target's weights as far as shapes agree; see `Draft.initialize`. Draft weights
        without a counterpart of the same shape are normal(0, 0.02), and norms 1.

        The head gets the rows of the target's head for the draft's vocabulary. `fc` is the identity on the last
        captured layer, so that the draft's residual stream starts as the target's. Attention (on the state half of its
        input), MLP and norms are those of the target's last layer. If the draft has several key-value heads, the first
        one attends to the slot's own token instead (`_attend_to_own_token`).
        """
        self.draw_weights()
        E, layer = self.config.hidden_size, self.midlayer
        if self.config.target_hidden_size == E:
            self.lm_head.weight.copy_(head_VD[self.target_ids().to(head_VD.device)])
            if self.embed_tokens is not None:
                self.embed_tokens.weight.copy_(embedding_VD)
            _copy_last_layer(self, last_layer)
        if layer.self_attn.kv_heads > 1:
            _attend_to_own_token(layer.self_attn, E)

    def draw_weights(self) -> None:
        """Draws the weights of all linear layers."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.02)

    @classmethod
    def to_file(cls, config: DraftConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Draft.to_file`. The input norm of layers after the first is also written as `hidden_norm`, the name that
        SGLang reads."""
        tensors: dict[str, Tensor] = {}
        for name, x in state.items():
            tensors[name] = x
            if name.startswith("layers.") and name.endswith("input_layernorm.weight"):
                tensors[name.replace("input_layernorm", "hidden_norm")] = x.clone()
        return tensors

    @classmethod
    def from_file(cls, tensors: dict[str, Tensor], config: DraftConfig) -> dict[str, Tensor]:
        """See `Draft.from_file`. The names may be those of any engine or trainer, and fused projections (`qkv_proj`,
        `gate_up_proj`) are split. Leaves out tensors that engines write or accept but a draft does not use. Raises
        ValueError for a tensor that occurs twice, and for a fused projection whose rows do not fit the config."""
        out: dict[str, Tensor] = {}
        for given, tensor in tensors.items():
            name = given.removeprefix("model.")
            name = next((name.replace(p, ours, 1) for p, ours in PREFIXES.items() if name.startswith(p)), name)
            name = SGLANG_NORMS.get(name, name)
            duplicate = name.startswith("layers.") and name.endswith("hidden_norm.weight")  # see `to_file`
            if name == "t2d" or name.endswith("rotary_emb.inv_freq") or duplicate:
                continue
            for part, rows in _split_fused(name, tensor, config).items():
                if part in out:
                    raise ValueError(f"{shortened(given)} is in the file twice, under two names")
                rows = rows.reshape(1, 1, -1) if part == "mask_hidden" else rows  # vLLM accepts several shapes
                out[part] = rows.to(torch.int64) if rows.dtype == torch.int32 else rows  # some trainers' d2t is int32
        return out

    @property
    def blocks(self) -> list[Layer]:
        return [self.midlayer, *(self.layers.values() if self.config.num_hidden_layers > 1 else ())]

    def fuse(self, aux_TAD: Tensor, compute: Compute = EAGER) -> Tensor:
        """The draft's input state [T, E] from `select_states`: fc(concatenation of the A layers' states)."""
        if self.config.fc_norm:
            aux_TAD = torch.stack([norm(aux_TAD[:, i]) for i, norm in enumerate(self.fc_norm)], dim=1)
        flat = aux_TAD.flatten(1)
        return compute.products(self.input_norm(flat) if self.config.norm_before_fc else flat, self.fc)[0]

    def mask_inputs(self, compute: Compute = EAGER) -> tuple[Tensor, Tensor] | None:
        """The token, int64 [1], and state [1, E] that steps from 1 on read in place of the previous step's results.
        None if steps read the previous step's results."""
        return None

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
        rotation = self.rotary(position_T, self.dtype)
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
        """The first layer's embedding (None without one), and the layer's state."""
        if isinstance(token_T, EmbeddingRows):
            return token_T, state_TE
        return self.embed(token_T), state_TE

    def shared_embedding(self, token_N: Tensor, compute: Compute) -> SharedProducts | None:
        """The first layer's products of the embeddings of N tokens, for several steps; None as in `Compute.share`."""
        return compute.share(self.midlayer, self.embed(token_N))

    def split_output(self, out_SE: Tensor, compute: Compute = EAGER) -> tuple[Tensor, Tensor]:
        """The input state of the next step and the head's input, each [S, E], from the last layer's output.

        EAGLE-3 feeds back the output without the norm, or with it if `norm_output` (EAGLE-3.1); the head reads the
        normed output.
        """
        normed, out_SE = compute.norm(self.norm, out_SE)
        return (normed if self.config.norm_output else out_SE), normed


def _copy_last_layer(draft: EagleDraft, last_layer: Mapping[str, Tensor]) -> None:
    """Copies the weights of the same shape, and adds the identity to `fc`."""
    E, layer = draft.config.hidden_size, draft.midlayer
    draft.fc.weight[:, -E:] += torch.eye(E)
    attention, mlp = layer.self_attn, layer.mlp
    draft_weights = {
        "norm": draft.norm.weight,
        "input_layernorm": layer.hidden_norm.weight,
        "post_attention_layernorm": layer.post_attention_layernorm.weight,
        "q_proj": attention.q_proj.weight[:, E:],
        "k_proj": attention.k_proj.weight[:, E:],
        "v_proj": attention.v_proj.weight[:, E:],
        "o_proj": attention.o_proj.weight,
        "gate_proj": mlp.gate_proj.weight,
        "up_proj": mlp.up_proj.weight,
        "down_proj": mlp.down_proj.weight,
    }
    for name, weight in draft_weights.items():
        target_weight = last_layer.get(f"{name}.weight")
        if target_weight is not None and target_weight.shape == weight.shape:
            weight.copy_(target_weight)


def _attend_to_own_token(attention: Attention, width: int) -> None:
    """Makes the first key-value head and its query heads attend to slots with the same token, and return its embedding.

    The residual stream starts as the target's state before that token. With weights near zero, the token would hardly
    reach it, and the draft would first have to learn which token it continues.
    """
    d = attention.head_dim
    heads = attention.heads // attention.kv_heads
    match, copy = (nn.init.orthogonal_(torch.empty(d, width)) for _ in range(2))
    match *= (OWN_TOKEN_SCORE / d**0.5) ** 0.5  # d entries of about 1 in q and in k, and the score divides by √d
    rows_of = (attention.q_proj, match.repeat(heads, 1)), (attention.k_proj, match), (attention.v_proj, copy)
    for projection, rows in rows_of:
        projection.weight[: len(rows)] = F.pad(rows, (0, projection.in_features - width))
    attention.o_proj.weight[:, : heads * d].normal_(0, 0.02)


def _split_fused(name: str, tensor: Tensor, config: DraftConfig) -> dict[str, Tensor]:
    """The parts of a fused projection, by name; a tensor that is no fused projection stays whole."""
    keys, inner = config.num_key_value_heads * config.head_dim, config.intermediate_size
    fused = {
        "self_attn.qkv_proj.": {"q_proj": config.num_attention_heads * config.head_dim, "k_proj": keys, "v_proj": keys},
        "mlp.gate_up_proj.": {"gate_proj": inner, "up_proj": inner},
    }
    for key, parts in fused.items():
        if key not in name:
            continue
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows != sum(parts.values()):
            raise ValueError(f"{shortened(name)} has {rows} rows, but the config requires {sum(parts.values())}")
        module = key.split(".")[0]
        names = (name.replace(key, f"{module}.{part}.") for part in parts)
        return dict(zip(names, tensor.split(list(parts.values())), strict=True))
    return {name: tensor}
