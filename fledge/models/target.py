"""Any transformers causal language model as a target: features by hooks, a cache that rolls back, its own logits."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from fledge.config import RopeConfig, default_aux_layers
from fledge.kernels.any_length import any_length
from fledge.kernels.transfer import to_device
from fledge.models.attention import group_heads
from fledge.models.kv_cache import TargetCache
from fledge.models.layers import Linear
from fledge.types import Features, Packed, Tree, group_documents

# tokens of a pass over packed documents: transformers' packed mask costs their square, a pass costs its launches
PIECE = {"cpu": 1024, "cuda": 4096}


class Target:
    """A frozen causal language model, its tokenizer, and the layers a draft reads.

    `aux_layers` counts as transformers' `hidden_states` does (id i is the input of layer i; id n the input of the
    final norm). Features are taken by hooks on the running modules; nothing of the model is patched, except that
    longrope's choice of frequencies is made once, for `max_length`, and that its attention to a mask ("sdpa") and on
    the CPU its `nn.Linear` modules become ours, which differ in speed, for few rows, and in rounding.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, *, name: str = "", max_length: int | None = None):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config(decoder=True)
        longest = max_length or getattr(self.config, "max_position_embeddings", None)
        if longest is None:
            raise ValueError(f"{type(model).__name__} has no max_position_embeddings in its config; give a max_length")
        self.max_length: int = longest
        self.decoder = model.get_decoder()
        self.layers, self.norm = _layers_and_norm(self.decoder, self.config.num_hidden_layers)
        self.head = model.get_output_embeddings()
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.aux_layers: tuple[int, ...] | None = None
        self.packs: bool | None = None
        self._one_logit = "logits_to_keep" in inspect.signature(model.forward).parameters
        if self.device.type == "cpu":
            for module in model.modules():
                if type(module) is nn.Linear:
                    module.__class__ = Linear
        group_heads(self.decoder)
        _fix_longrope(self.decoder, RopeConfig.from_hf(self.config.to_dict()).for_length(self.max_length))

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn: the generation config's, the model's and the tokenizer's end-of-sequence ids."""
        found: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for ids in (getattr(generation, "eos_token_id", None), self.config.eos_token_id, self._tokenizer_eos()):
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        return frozenset(found)

    def _tokenizer_eos(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    def read_layers(self, aux_layers: Sequence[int] | None) -> None:
        """Chooses the layers to capture (None: the engines' default). Raises ValueError for ids it does not have."""
        layers = default_aux_layers(self.num_layers) if aux_layers is None else tuple(sorted(aux_layers))
        if layers and (min(layers) < 0 or max(layers) > self.num_layers):
            raise ValueError(f"layers {list(layers)} are to be read, but the target has layers 0..{self.num_layers}")
        self.aux_layers = layers

    @property
    def rotary(self) -> bool:
        """Whether its positions are angles, which go on beyond its context."""
        return any(hasattr(module, "rotary_emb") for module in self.decoder.modules())

    @property
    def context(self) -> int:
        """Most tokens it reads: its positions, or those that longrope's chosen factors are for."""
        rope = RopeConfig.from_hf(self.config.to_dict()).for_length(self.max_length)
        if rope.rope_type == "longrope" and not rope.long:
            return rope.original_max_position_embeddings
        return getattr(self.config, "max_position_embeddings", self.max_length)

    def compile(self, **options: Any) -> None:
        """Compiles the norms and MLPs of its layers, once for all of them and for every length: what stands between
        their products is fused. `options` are torch.compile's."""
        for layer in self.layers:
            for part in layer.children():
                if type(part).__name__.endswith(("Norm", "MLP")):
                    part.compile(dynamic=True, **options)

    # -- running it ---------------------------------------------------------------------------------------------

    @contextmanager
    def _captured(self, layers: Sequence[int]) -> Iterator[dict[int | str, Tensor]]:
        """Collects the inputs of some layers and the output of the final norm while the model runs."""
        held: dict[int | str, Tensor] = {}

        def before(index: int):
            def hook(_module, args, kwargs):
                held[index] = args[0] if args else kwargs["hidden_states"]

            return hook

        def after(_module, _args, output):
            held["last"] = output

        hooks = [
            (self.norm if i == self.num_layers else self.layers[i]).register_forward_pre_hook(
                before(i), with_kwargs=True
            )
            for i in layers
        ]
        hooks.append(self.norm.register_forward_hook(after))
        try:
            yield held
        finally:
            for hook in hooks:
                hook.remove()

    @staticmethod
    def _features(held: dict[int | str, Tensor], layers: Sequence[int]) -> Features:
        last = held["last"].flatten(0, 1)
        aux = [held[i].flatten(0, 1) for i in layers]
        return Features(torch.stack(aux, dim=1) if aux else last.new_empty(last.shape[0], 0, last.shape[1]), last)

    @torch.no_grad()
    def features(self, row: Packed) -> Features:
        """Features of a packed row, each document seen alone, and zeros for its filler. No logits are computed.

        Many documents in one pass where `check_isolation` found that the model keeps them apart, else one at a time.
        """
        if self.packs is None:
            self.check_isolation()
        token, position = to_device([row.token_T, row.position_T], self.device)
        documents, whole = row.without_filler(), None
        for a, b in group_documents(documents, PIECE[self.device.type]) if self.packs else documents:
            lengths = {end - start for start, end in documents if a <= start < b}
            each = lengths.pop() if len(lengths) == 1 else None  # documents of one length need no mask
            part, T = self._run_decoder(token[a:b], position[a:b], each), token.numel()
            if b - a == T:
                return part
            if whole is None:
                whole = Features(*(x.new_zeros(T, *x.shape[1:]) for x in (part.aux_TAD, part.last_TD)))
            whole.aux_TAD[a:b], whole.last_TD[a:b] = part.aux_TAD, part.last_TD
        return whole

    def _run_decoder(self, token_T: Tensor, position_T: Tensor, each: int | None = None) -> Features:
        """One pass over tokens of a row, or of several of `each` tokens."""
        ids, positions = (x.view(-1, each or x.numel()) for x in (token_T, position_T))
        with self._captured(self.aux_layers) as held, any_length(self.device):
            self.decoder(input_ids=ids, position_ids=positions, use_cache=False)
        return self._features(held, self.aux_layers)

    @property
    def plain_head(self) -> bool:
        """Whether its logits are the product with its head's weight and nothing more."""
        scalings = ("logits_scaling", "logit_scale", "final_logit_softcapping")
        return getattr(self.head, "bias", None) is None and not any(getattr(self.config, s, None) for s in scalings)

    @torch.no_grad()
    def logits(self, last_ND: Tensor) -> Tensor:
        """The model's own logits [N, V] from final hidden states, with the scalings its config names."""
        logits = self.head(last_ND)
        if scale := getattr(self.config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if scale := getattr(self.config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.inference_mode()
    def forward(
        self,
        token_BN: Tensor,
        cache: TargetCache,
        *,
        tree: Tree | None = None,
        features: bool = True,
        layers: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, Features | None]:
        """Runs N tokens of each request after those in `cache`, one after the other or as the nodes of a tree, each of
        which sees its ancestors alone. Returns logits [B, N, V] (or [B, 1, V]) and, if asked, the features of B x N
        tokens, of the layers named or else of those chosen."""
        inputs = dict(input_ids=token_BN, past_key_values=cache, use_cache=True)
        if last_only and self._one_logit:
            inputs["logits_to_keep"] = 1
        if len(cache.lengths) > 1 or (tree is not None and tree.parent_BN is not None):
            inputs |= self._placed(tree or Tree(token_BN, None, token_BN.shape[1] - 1), cache)
        if not features:
            with any_length(self.device):
                logits = self.model(**inputs).logits
            return (logits[:, -1:] if last_only else logits), None
        layers = self.aux_layers if layers is None else layers
        with self._captured(layers) as held, any_length(self.device):
            logits = self.model(**inputs).logits
        return (logits[:, -1:] if last_only else logits), self._features(held, layers)

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], *, features: bool = True, layers: Sequence[int] | None = None
    ) -> tuple[Tensor, list[Features], TargetCache]:
        """Reads prompts in one pass, the shorter ones filled up at their ends, which nothing before sees. Returns the
        logits after each, [B, V], each one's features if asked, of the layers named or else of those chosen, and a
        cache of them all."""
        lengths, cache = [len(p) for p in prompts], TargetCache()
        most = max(lengths)
        ids = torch.tensor([[*p, *[0] * (most - len(p))] for p in prompts], device=self.device)
        ends = sorted(set(lengths))  # only after these a prompt's logits are wanted
        inputs = dict(input_ids=ids, past_key_values=cache, use_cache=True)
        if self._one_logit:
            at = [n - 1 for n in ends]
            inputs["logits_to_keep"] = 1 if len(ends) == 1 else torch.tensor(at, device=self.device)
        layers = (self.aux_layers if layers is None else layers) if features else ()
        with self._captured(layers) as held, any_length(self.device):
            logits = self.model(**inputs).logits
        place = [ends.index(n) - len(ends) if self._one_logit else n - 1 for n in lengths]
        logits_BV = torch.stack([rows[i] for rows, i in zip(logits, place, strict=True)])
        cache.settle(lengths)
        if not features:
            return logits_BV, [], cache
        whole = self._features(held, layers)
        parts = zip(whole.aux_TAD.split(most), whole.last_TD.split(most), lengths, strict=True)
        return logits_BV, [Features(aux_TAD[:n], last_TD[:n]) for aux_TAD, last_TD, n in parts], cache

    def _placed(self, tree: Tree, cache: TargetCache) -> dict[str, Any]:
        """Positions and masks of trees' nodes after what is in the cache; a mask for each kind of layer."""
        ancestors, lengths = tree.ancestors(), cache.lengths
        B, N = tree.token_BN.shape
        node_BN = cache.open(N) if B > 1 else torch.arange(lengths[0], lengths[0] + N, device=self.device)[None]
        depth_BN = ancestors.sum(-1) - 1
        key_position = torch.arange(max(lengths) + N, device=self.device).expand(B, -1)
        past = (key_position < node_BN[:, :1])[:, None].expand(-1, N, -1)
        visible = past.scatter(2, node_BN[:, None].expand(-1, N, -1), ancestors)
        position_BN = node_BN[:, :1] + depth_BN
        key_position = key_position.scatter(1, node_BN, position_BN)
        window = getattr(self.config, "sliding_window", None)

        def mask(kind: str) -> Tensor:
            seen = visible
            if kind == "sliding_attention" and window:
                seen = visible & (key_position[:, None] > position_BN[..., None] - window)
            return torch.zeros_like(seen, dtype=self.dtype).masked_fill_(~seen, float("-inf"))[:, None]

        kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention"])
        masks = {kind: mask(kind) for kind in sorted(kinds)}
        return dict(position_ids=position_BN, attention_mask=masks if len(masks) > 1 else next(iter(masks.values())))

    # -- what is checked before anything relies on it -----------------------------------------------------------

    @torch.no_grad()
    def check_isolation(self) -> None:
        """Finds out whether packed documents are kept apart, and that the head gives the model's own logits.

        Sets `packs`. Raises ValueError where the logits cannot be had from the captured hidden state.
        """
        if self.aux_layers is None:
            self.read_layers(None)
        generator = torch.Generator().manual_seed(0)
        vocab = self.embedding.shape[0]
        one, other, two = (torch.randint(vocab, (n,), generator=generator).to(self.device) for n in (9, 9, 7))
        position = torch.cat([torch.arange(9), torch.arange(7)]).to(self.device)
        alone = self._run_decoder(two, position[9:])
        pairs = [self._run_decoder(torch.cat([first, two]), position) for first in (one, other)]
        self.packs = all(_close(p.last_TD[9:], alone.last_TD) for p in pairs) and all(
            _close(p.aux_TAD[9:], alone.aux_TAD) for p in pairs
        )
        own = self.model(input_ids=two[None], use_cache=False).logits[0]
        if not _close(self.logits(alone.last_TD), own):
            raise ValueError(
                f"{self.name or 'the target'} computes its logits in a way fledge does not know: its output head "
                "applied to the final hidden state differs from its own logits, so a draft would be taught wrongly"
            )

    @torch.inference_mode()
    def check_rollback(self) -> None:
        """Raises ValueError unless the model, after forgetting some tokens, answers as if it had never seen them."""
        vocab = self.embedding.shape[0]
        tokens = torch.randint(vocab, (1, 12), generator=torch.Generator().manual_seed(1)).to(self.device)
        cache = TargetCache()
        why = "its state cannot be rolled back, as layers that keep a running summary of the past cannot"
        try:
            self.forward(tokens[:, :6], cache, features=False)
            self.forward(tokens[:, 8:], cache, features=False)
            cache.rollback(6)
            after, _ = self.forward(tokens[:, 6:8], cache, features=False)
            fresh = TargetCache()
            self.forward(tokens[:, :6], fresh, features=False)
            direct, _ = self.forward(tokens[:, 6:8], fresh, features=False)
        except Exception as e:  # caches without a length or without room for such layers fail as they like
            raise ValueError(f"{self.name or 'the target'} cannot verify drafts: {why} ({e})") from e
        if not _close(after, direct):
            raise ValueError(f"{self.name or 'the target'} cannot verify drafts: {why}")

    @torch.inference_mode()
    def check_masks(self, requests: int = 1) -> None:
        """Raises ValueError unless each node of a tree gets the logits that its own path gets as a chain, alone or
        beside other requests of other lengths."""
        vocab, requests = self.embedding.shape[0], min(requests, 2)
        tokens = torch.randint(vocab, (requests, 12), generator=torch.Generator().manual_seed(2)).to(self.device)
        parents = torch.tensor([-1, 0, 0, 1, 2], device=self.device).expand(requests, -1)
        name = self.name or "the target"
        why, lengths = "each node of a tree must see its own path alone", [4, 7][:requests]
        if requests > 1:
            why = "each request must see its own text alone"
        drafted = torch.stack([t[n : n + 5] for t, n in zip(tokens, lengths, strict=True)])
        try:
            _, _, cache = self.prefill([t[:n].tolist() for t, n in zip(tokens, lengths, strict=True)], features=False)
            found, _ = self.forward(drafted, cache, tree=Tree(drafted, parents, 2), features=False)
        except Exception as e:  # a mask of a kind that the model does not take fails as it likes
            raise ValueError(f"{name} cannot verify {_masked(requests)}: {why} ({e}); {_CURE[requests]}") from e
        cache.keep(lengths, [[0, 2, 4]] * requests)
        after, _ = self.forward(tokens[:, :1], cache, features=False)
        for b, n in enumerate(lengths):
            line = torch.cat([tokens[b, :n], drafted[b, [0, 2, 4]], tokens[b, :1]])
            direct, _ = self.forward(line[None], TargetCache(), features=False)
            if not _close(torch.cat([found[b, [0, 2, 4]], after[b]]), direct[0, n:]):
                raise ValueError(f"{name} cannot verify {_masked(requests)}: {why}; {_CURE[requests]}")


_CURE = {1: "draft chains", 2: "decode them one by one, in batches of 1"}


def _masked(requests: int) -> str:
    return "trees" if requests == 1 else "several requests together"


def load_target(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    max_length: int | None = None,
) -> Target:
    """Loads a model and tokenizer from a directory or a hub id.

    `dtype` None is the checkpoint's own on an accelerator and float32 on the CPU. Raises ValueError with the cause
    where the files are missing, cut short, or not a causal language model.
    """
    device = torch.device(device)
    if not Path(path).exists() and (Path(path).is_absolute() or str(path).count("/") > 1):
        raise ValueError(f"the target {path} does not exist; it is a directory or a hub id such as owner/name")
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path} holds no config.json; a target is a directory as save_pretrained writes it")
    if Path(path).exists() and '"draft_vocab_size"' in (Path(path) / "config.json").read_text(errors="replace"):
        raise ValueError(f"{path} is a draft; the target is the model that it was trained for")
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        RopeConfig.from_hf(AutoConfig.from_pretrained(path).get_text_config(decoder=True).to_dict())
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or (torch.float32 if device.type == "cpu" else "auto"), output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as e:
        if isinstance(e, ValueError) and "RoPE" in str(e):
            raise
        hub = "" if Path(path).exists() else "it is no directory here, and as a hub id: "
        raise ValueError(f"the target {path} cannot be loaded: {hub}{_first_line(e)}{_cure(e)}") from e
    finally:
        if shown:
            enable_progress_bar()
    if missing := sorted(found["missing_keys"]):  # which transformers fills with random numbers
        raise ValueError(
            f"the target {path} cannot be loaded: its weights lack {len(missing)} tensors of its model, such as "
            f"{missing[0]}; copy or download it again"
        )
    return Target(model.to(device), tokenizer, name=str(path), max_length=max_length)


def _cure(e: Exception) -> str:
    if "Safetensor" in type(e).__name__:
        return ". A weights file is cut short or damaged: copy or download it again"
    if isinstance(e, json.JSONDecodeError):
        return ". A JSON file of the model is damaged: copy or download it again"
    return ""


def _first_line(e: Exception) -> str:
    return next((line for line in str(e).splitlines() if line.strip()), type(e).__name__).strip()


def _layers_and_norm(decoder: nn.Module, n: int) -> tuple[nn.ModuleList, nn.Module]:
    children = dict(decoder.named_children())
    layers = [m for m in children.values() if isinstance(m, nn.ModuleList) and len(m) == n]
    norms = [m for name, m in children.items() if ("norm" in name or name.startswith("ln_")) and "embed" not in name]
    if len(layers) != 1 or not norms:
        raise ValueError(
            f"{type(decoder).__name__} does not show its {n} decoder layers and final norm as transformers' causal "
            "language models do, so its hidden states cannot be read"
        )
    return layers[0], norms[-1]


def _fix_longrope(decoder: nn.Module, rope: RopeConfig) -> None:
    """Makes transformers' rotary embedding use the list chosen for the whole run, at every length of call."""
    if rope.rope_type != "longrope":
        return
    rotary = decoder.rotary_emb
    dim = rotary.inv_freq.numel() * 2
    factors = torch.tensor(rope.long_factor if rope.long else rope.short_factor, device=rotary.inv_freq.device)
    base = rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=factors.device) / dim)
    rotary.inv_freq.copy_(1.0 / (factors * base))
    rotary.rope_type = "fixed"  # any name that dynamic_rope_update does not act on


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to what another batch shape rounds differently in the tensors' own dtype."""
    tolerance = 1e-3 if a.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((a - b).float().norm() <= tolerance * b.float().norm())
