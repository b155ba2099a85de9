"""A target made of a transformers causal language model."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fledge.ops.attention_prompt import grouped_attention, mask_repeats, prepare_mask, without_cudnn_sdpa
from fledge.ops.device import to_device
from fledge.ops.linear import packed_model
from fledge.targets import checks
from fledge.targets.cache import RecurrentCache, TargetCache
from fledge.targets.interface import DecodingTarget, ReferenceDecoding, TrainingTarget
from fledge.targets.parts import TargetParts
from fledge.targets.structure import cache_argument, computing_with
from fledge.types import Features, Packed, Prompt, Tree, group_documents

# tokens of a forward pass over packed documents: the cost of transformers' packed mask grows with their square, while
# each pass has the cost of its kernel launches
PASS_TOKENS = {"cpu": 1024, "cuda": 4096}
ATTENTION = "fledge"  # the name under which transformers knows `attend`
# above this number of queries, a mask repeated for each head of a key-value group is no longer small beside the keys
MAX_QUERIES = 128


def run_in_passes(
    row: Packed, width: int, device: torch.device,
    run: Callable[[Tensor, Tensor, Sequence[tuple[int, int]]], Features],
) -> Features:  # fmt: skip
    """The features of a packed row, those of filler zeros, from passes over adjacent documents of at most `width`
    tokens together; 0: each document is a pass. `run(token_T, position_T, documents)` computes a pass from int64 tokens
    and positions, and the documents' [start, end) ranges within the pass."""
    # transformers' models expect int64
    token, position = to_device([row.token_T.long(), row.position_T.long()], device)
    documents, whole, T = row.without_filler(), None, token.numel()
    for a, b in group_documents(documents, width):
        inside = [(start - a, end - a) for start, end in documents if a <= start < b]
        part = run(token[a:b], position[a:b], inside)
        if b - a == T:
            return part
        if whole is None:
            whole = Features(*(x.new_zeros(T, *x.shape[1:]) for x in (part.aux_TAD, part.last_TD)))
        whole.aux_TAD[a:b], whole.last_TD[a:b] = part.aux_TAD, part.last_TD
    return whole


class TransformersTarget(TargetParts, TrainingTarget, DecodingTarget, ReferenceDecoding):
    """A target that transformers computes. `options` are as in `TargetParts`.

    Hidden states are captured by forward hooks. The model is modified as `TargetParts` says, and an "sdpa" attention is
    replaced by `attend`. On a CPU, linear layers compute with copies of their weights
    (`ops.linear`) while requests are decoded. Both change speed and rounding only.
    """

    implementation = "transformers"

    def __init__(self, model: nn.Module, tokenizer: Any, **options: Any):
        super().__init__(model, tokenizer, **options)
        self._heads_per_key = heads_per_key(self.config) if install_attention(self.decoder) else 1
        self._cache_argument = cache_argument(model, self.decoder)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters  # can skip early logits
        self._copies: dict[nn.Linear, Tensor] = {}  # by layer, aliases of weights that have copies

    @property
    def shared(self) -> object:
        return self.model

    @property
    def pass_tokens(self) -> int:
        """The tokens of a forward pass over packed documents."""
        return PASS_TOKENS[self.device.type]

    @torch.no_grad()
    def features(self, row: Packed, layers: Sequence[int]) -> Features:

        def run(token_T: Tensor, position_T: Tensor, documents: Sequence[tuple[int, int]]) -> Features:
            lengths = {end - start for start, end in documents}
            # documents of equal length are a batch without mask
            return self.run_decoder(token_T, position_T, layers, lengths.pop() if len(lengths) == 1 else None)

        return run_in_passes(row, self.pass_tokens if self.packs else 0, self.device, run)

    def run_decoder(
        self, token_T: Tensor, position_T: Tensor, layers: Sequence[int], length: int | None = None
    ) -> Features:
        """The features of one forward pass over packed documents, or over a batch of documents of `length` tokens."""
        ids, positions = (x.view(-1, length or x.numel()) for x in (token_T, position_T))
        with self._capture(layers) as states, without_cudnn_sdpa(self.device):
            self.decoder(input_ids=ids, position_ids=positions, use_cache=False)
        return self._features(states, layers)

    @contextmanager
    def _capture(self, layers: Sequence[int] | None) -> Iterator[dict[int | str, Tensor]]:
        """Captures hidden states of forward passes within the block: the inputs of `layers` by id, and the final norm's
        output as "last". With None, captures nothing."""
        states: dict[int | str, Tensor] = {}
        if layers is None:
            yield states
            return

        def capture(name: int | str):
            def hook(_module, args, kwargs, *output):
                states[name] = output[0] if output else args[0] if args else kwargs["hidden_states"]

            return hook

        norm = self.norm
        inputs = {i: norm if i == self.num_layers else self.layers[i] for i in layers}
        hooks = [m.register_forward_pre_hook(capture(i), with_kwargs=True) for i, m in inputs.items()]
        hooks.append(norm.register_forward_hook(capture("last"), with_kwargs=True))
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    def _features(self, states: dict[int | str, Tensor], layers: Sequence[int]) -> Features:
        """Captured states as features, with batch and sequence flattened to one axis. Raises ValueError if layers pass
        on something else than one hidden state per token."""
        for i in layers:
            if states[i].shape != states["last"].shape:
                kind = type(self.decoder).__name__
                raise ValueError(
                    f"no draft can be trained for {self.name or 'the target'}: the layers of {kind} pass on states of "
                    f"shape {list(states[i].shape)}, where a draft reads one hidden state per token, "
                    f"{list(states['last'].shape)}"
                )
        last, *aux = (states[i].flatten(0, 1).to(self.device) for i in ("last", *layers))
        return Features(torch.stack(aux, dim=1) if aux else last.new_empty(last.shape[0], 0, last.shape[1]), last)

    def prepare_decoding(self) -> None:
        """On a CPU, linear layers decode with copies of their weights, made again if the weights have changed."""
        self.follow_weights()
        self._copies = {}  # frees the old copies before new ones are made
        if layers := self.few_row_layers:
            aliases = packed_model(self, [layer.weight for layer in layers], self.parameters, list)
            self._copies = {} if aliases is None else dict(zip(layers, aliases, strict=True))

    def __getstate__(self) -> dict[str, Any]:
        """Without copies of weights, which can be neither copied nor pickled."""
        return self.__dict__ | {"_copies": {}}

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Prompt], cache: Any, layers: Sequence[int] | None = None, final: bool = True
    ) -> tuple[Tensor, list[Features]]:
        """One pass over all prompts with right padding, which a causal model's earlier tokens do not see. A target
        without rollback takes one prompt, and returns no features."""
        lengths = [len(p) for p in prompts]
        longest = max(lengths)
        ids = torch.tensor([[*p.ids, *[0] * (longest - len(p))] for p in prompts], device=self.device)
        ends = sorted(set(lengths))  # logits are needed only after these numbers of tokens
        inputs: dict[str, Any] = {}
        if self._keeps_logits:
            last = [n - 1 for n in ends]
            # a list, since accelerate would move a tensor to the first device, which may not be the last layer's
            inputs["logits_to_keep"] = 1 if len(ends) == 1 else last
        with self._capture(layers) as states, without_cudnn_sdpa(self.device):
            logits = self.run(ids, cache, **inputs)
        index = [ends.index(n) - len(ends) if self._keeps_logits else n - 1 for n in lengths]
        logits_BV = torch.stack([rows[i] for rows, i in zip(logits, index, strict=True)])
        cache.trim_padding(lengths)
        if layers is None:
            return logits_BV, []
        whole = self._features(states, layers)
        parts = zip(whole.aux_TAD.split(longest), whole.last_TD.split(longest), lengths, strict=True)
        return logits_BV, [Features(aux_TAD[:n], last_TD[0 if final else n - 1 : n]) for aux_TAD, last_TD, n in parts]

    def new_cache(self, sizes: Sequence[int] = ()) -> Any:
        """A `TargetCache`, which grows as needed, or a `RecurrentCache`."""
        if not self.rollback_problem:
            return TargetCache()
        return RecurrentCache(recompute=not self._cache_is_exact)

    @torch.inference_mode()
    def verify(self, tree: Tree, cache: Any, layers: Sequence[int] | None = None) -> tuple[Tensor, Features | None]:
        """Uses transformers' own causal mask for a chain of one request, and otherwise fledge's masks and positions."""
        inputs: dict[str, Any] = {}
        cache.committed = cache.lengths
        if len(cache.lengths) > 1 or tree.parent_BN is not None:
            inputs = self._positions_and_masks(tree, cache)
        with self._capture(layers) as states, without_cudnn_sdpa(self.device):
            logits = self.run(tree.token_BN, cache, **inputs)
        return logits, None if layers is None else self._features(states, layers)

    def run(self, token_BN: Tensor, cache: TargetCache | RecurrentCache, **inputs: Any) -> Tensor:
        """Runs tokens after the tokens in a cache, and adds the new tokens. Returns the model's logits [B, N, V]."""
        with computing_with(self._copies):
            if isinstance(cache, RecurrentCache):
                if self._keeps_logits:
                    inputs = {"logits_to_keep": token_BN.shape[1], **inputs}
                return cache.run(self.model, token_BN, self._cache_argument, **inputs).to(self.device)
            inputs = {self._cache_argument: cache, **inputs}
            return self.model(input_ids=token_BN, use_cache=True, **inputs).logits.to(self.device)

    def _positions_and_masks(self, tree: Tree, cache: TargetCache) -> dict[str, Any]:
        """The model's inputs for tree nodes after the sequences in the cache: positions, and an attention mask, or a
        dict of masks if the layers are of several kinds (full and sliding-window attention)."""
        ancestors, lengths = tree.ancestors(), cache.lengths
        B, N = tree.token_BN.shape
        if B > 1:
            node_BN = cache.allocate(N).to(self.device)
        else:
            node_BN = torch.arange(lengths[0], lengths[0] + N, device=self.device)[None]
        depth_BN = ancestors.sum(-1) - 1
        key_position = torch.arange(max(lengths) + N, device=self.device).expand(B, -1)
        past = (key_position < node_BN[:, :1])[:, None].expand(-1, N, -1)
        visible = past.scatter(2, node_BN[:, None].expand(-1, N, -1), ancestors)
        position_BN = node_BN[:, :1] + depth_BN
        key_position = key_position.scatter(1, node_BN, position_BN)

        def mask(kind: str) -> Tensor:
            seen, key_B1T, query_BN1 = visible, key_position[:, None], position_BN[..., None]
            if kind == "sliding_attention" and self._window:
                seen = visible & (key_B1T > query_BN1 - self._window)
            elif kind == "chunked_attention":  # Llama 4
                chunk = self.config.attention_chunk_size
                seen = visible & (key_B1T // chunk == query_BN1 // chunk)
            return to_attention_mask(seen[:, None], self._heads_per_key, self.dtype)

        kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention"])
        masks = {kind: mask(kind) for kind in sorted(kinds)}
        return dict(position_ids=position_BN, attention_mask=masks if len(masks) > 1 else next(iter(masks.values())))

    @functools.cached_property
    def _window(self) -> int | None:
        """The window of the layers with sliding-window attention, in tokens; None without a window. A config may name a
        window that the model ignores, as Llama's config does. Unless the config lists the layers' types, a window
        counts only if the model's code mentions `sliding_window` too."""
        window = getattr(self.config, "sliding_window", None)
        if getattr(self.config, "layer_types", None) or window is None:
            return window
        # skips FSDP's class, which sharding derives from the model's class
        own = next(c for c in type(self.decoder).__mro__ if not c.__module__.startswith("torch."))
        try:
            code = inspect.getsource(sys.modules[own.__module__])
        except (OSError, TypeError):  # a model without source code, from an interactive session: trusts the config
            return window
        return window if "sliding_window" in code else None

    def reference_generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Decodes by transformers' `generate`."""
        ids = torch.tensor([prompt], device=self.device)
        greedy = dict(do_sample=False, temperature=None, top_p=None, top_k=None, repetition_penalty=1.0)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.stop_ids) or None, pad_token_id=0, **greedy,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    packs = functools.cached_property(checks.isolates_documents)
    rollback_problem = functools.cached_property(checks.rollback_problem)
    _cache_is_exact = functools.cached_property(checks.cache_matches_full_pass)

    check_masks = checks.check_masks

    @functools.cached_property
    def _logits_problem(self) -> str:
        """The reason why `logits` differ from the model's own; empty if they do not."""
        return checks.logits_problem(self)

    def check_logits(self) -> None:
        """Raises ValueError also if the model's logits are NaN or infinite."""
        if self._logits_problem:
            raise ValueError(f"{self.name or 'the target'} {self._logits_problem}")


def install_attention(decoder: nn.Module) -> bool:
    """Replaces "sdpa" by `attend` in a decoder. Returns whether it was replaced.

    It is not if the decoder uses another implementation, does not support a choice, or if its code compares the
    implementation's name with "sdpa".
    """
    can_choose = getattr(decoder, "_can_set_attn_implementation", lambda: False)
    if getattr(getattr(decoder, "config", None), "_attn_implementation", None) != "sdpa" or not can_choose():
        return False
    if '"sdpa"' in inspect.getsource(sys.modules[type(decoder).__module__]):
        return False
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, make_mask)
    decoder.set_attn_implementation(ATTENTION)
    return True


def heads_per_key(config: Any) -> int:
    """The number of query heads per key-value head in a transformers config; 1 if it differs between layers."""
    heads, key_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return heads // key_heads if isinstance(heads, int) and isinstance(key_heads, int) else 1


def to_attention_mask(visible_B1SL: Tensor, heads_per_key: int, dtype: torch.dtype) -> Tensor:
    """Converts a bool mask (True: visible) to an additive mask for `attend`, once for all layers.

    The mask is prepared for `grouped_attention` if heads share keys and there are at most MAX_QUERIES queries; else it
    is an additive mask [B, 1, S, L] for "sdpa".
    """
    if heads_per_key > 1 and visible_B1SL.shape[2] <= MAX_QUERIES:
        return prepare_mask(visible_B1SL, heads_per_key, dtype)
    return torch.zeros_like(visible_B1SL, dtype=dtype).masked_fill_(~visible_B1SL, float("-inf"))


def make_mask(*args: Any, config: Any, dtype: torch.dtype, **options: Any) -> Tensor | None:
    """transformers' mask function for "sdpa", which it calls once per pass and kind of layer. The mask is prepared for
    `grouped_attention` if `attend` will use that."""
    mask = sdpa_mask(*args, config=config, dtype=dtype, **options)
    group = heads_per_key(config)
    if mask is None or group == 1 or mask.shape[1] != 1 or mask.shape[2] > MAX_QUERIES:
        return mask
    return prepare_mask(mask, group, dtype)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface, for few queries with a mask by `grouped_attention`: q [B, H, S, d], k and v
    [B, G, L, d] to ([B, S, H, d], None).

    The mask is [B, 1, S, L], or prepared for `grouped_attention`, [B, 1, n S, L] with its S rows repeated n times. Uses
    "sdpa" for options that `grouped_attention` does not support, and for more than MAX_QUERIES queries.
    """
    (_, H, S, _), (_, G, L, _) = query.shape, key.shape
    mask = attention_mask
    if mask is not None and mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[3] == L and mask.shape[2] % S == 0:
        plain = not dropout and all(more.get(name) is None for name in ("softcap", "position_bias", "cache"))
        if G < H and S <= MAX_QUERIES and plain:
            if mask.dtype != query.dtype or mask.shape[2] != S * mask_repeats(mask.device, H // G):
                mask = prepare_mask(mask[:, :, :S], H // G, query.dtype)  # it was made for layers with another H / G
            return grouped_attention(query, key, value, mask, scaling).contiguous(), None
        mask = mask[:, :, :S]
    return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **more)
