"""Any transformers causal language model as a target: features by hooks, a cache that rolls back, its own logits."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from fledge.config import RopeConfig, default_aux_layers, llama_names
from fledge.hub import split_revision
from fledge.kernels.sdpa import without_cudnn_sdpa
from fledge.kernels.transfer import to_device
from fledge.models.attention import group_heads
from fledge.models.kv_cache import TargetCache
from fledge.models.layers import Linear
from fledge.models.running import RunningState
from fledge.types import Features, Packed, Tree, group_documents

# tokens of a pass over packed documents: transformers' packed mask costs their square, a pass costs its launches
PIECE = {"cpu": 1024, "cuda": 4096}
UNLIMITED = sys.maxsize  # the context of a target whose positions have no end, as with ALiBi


class Target:
    """A frozen causal language model, its tokenizer, and the layers a draft reads.

    `shape` is its text config by Llama's names, with the vocabulary that its embeddings have: a draft's is made of it.
    `aux_layers` counts as transformers' `hidden_states` does (id i is the input of layer i; id n the input of the
    final norm). Features are taken by hooks on the running modules; nothing of the model is patched, except that
    longrope's choice of frequencies is made once, for `max_length`, and that its attention to a mask ("sdpa") and on
    the CPU its `nn.Linear` modules become ours, which differ in speed, for few rows, and in rounding.
    `trust_remote_code` records whether code of the model's own was allowed to run.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        name: str = "",
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.trust_remote_code = trust_remote_code
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = _decoder(model, self.config.num_hidden_layers)
        self.head = model.get_output_embeddings()
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.shape = llama_names(self.config) | {"vocab_size": self.embedding.shape[0]}
        self.max_length: int = max_length or self.shape.get("max_position_embeddings", UNLIMITED)
        self.aux_layers: tuple[int, ...] | None = None
        self.packs: bool | None = None
        self._one_logit = "logits_to_keep" in inspect.signature(model.forward).parameters
        if self.device.type == "cpu":
            for module in model.modules():
                if type(module) is nn.Linear:
                    module.__class__ = Linear
        group_heads(self.decoder)
        _fix_longrope(self.decoder, RopeConfig.from_hf(self.shape).for_length(self.max_length))

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def num_layers(self) -> int:
        return len(self.layers)

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

    @functools.cached_property
    def layers(self) -> nn.ModuleList:
        """Its decoder layers. Raises ValueError, as `norm` does, where the model does not show them; then it decodes
        all the same, without a draft."""
        return _layers_and_norm(self.decoder, self.config.num_hidden_layers)[0]

    @functools.cached_property
    def norm(self) -> nn.Module:
        """Its final norm, whose output the head reads."""
        return _layers_and_norm(self.decoder, self.config.num_hidden_layers)[1]

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
        """Most tokens it reads: its positions, or those that longrope's chosen factors are for. `UNLIMITED` where its
        config names no limit."""
        rope = RopeConfig.from_hf(self.shape).for_length(self.max_length)
        if rope.rope_type == "longrope" and not rope.long:
            return rope.original_max_position_embeddings
        return self.shape.get("max_position_embeddings", UNLIMITED)

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
        with self._captured(self.aux_layers) as held, without_cudnn_sdpa(self.device):
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
        cache: TargetCache | RunningState,
        *,
        tree: Tree | None = None,
        features: bool = True,
        layers: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, Features | None]:
        """Runs N tokens of each request after those in `cache`, one after the other or as the nodes of a tree, each of
        which sees its ancestors alone. Returns logits [B, N, V] (or [B, 1, V]) and, if asked, the features of B x N
        tokens, of the layers named or else of those chosen."""
        inputs: dict[str, Any] = {}
        if last_only and self._one_logit:
            inputs["logits_to_keep"] = 1
        if len(cache.lengths) > 1 or (tree is not None and tree.parent_BN is not None):
            inputs |= self._placed(tree or Tree(token_BN, None, token_BN.shape[1] - 1), cache)
        if not features:
            with without_cudnn_sdpa(self.device):
                logits = self._run(token_BN, cache, inputs)
            return (logits[:, -1:] if last_only else logits), None
        layers = self.aux_layers if layers is None else layers
        with self._captured(layers) as held, without_cudnn_sdpa(self.device):
            logits = self._run(token_BN, cache, inputs)
        return (logits[:, -1:] if last_only else logits), self._features(held, layers)

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], *, features: bool = True, layers: Sequence[int] | None = None
    ) -> tuple[Tensor, list[Features], TargetCache | RunningState]:
        """Reads prompts in one pass, the shorter ones filled up at their ends, which nothing before sees. Returns the
        logits after each, [B, V], each one's features if asked, of the layers named or else of those chosen, and a
        cache of them all; a target that cannot roll back reads one prompt, without features, into a `RunningState`."""
        lengths, cache = [len(p) for p in prompts], self._new_cache()
        most = max(lengths)
        ids = torch.tensor([[*p, *[0] * (most - len(p))] for p in prompts], device=self.device)
        ends = sorted(set(lengths))  # only after these a prompt's logits are wanted
        inputs: dict[str, Any] = {}
        if self._one_logit:
            at = [n - 1 for n in ends]
            inputs["logits_to_keep"] = 1 if len(ends) == 1 else torch.tensor(at, device=self.device)
        layers = self.aux_layers if layers is None else layers
        capture = self._captured(layers) if features else nullcontext()
        with capture as held, without_cudnn_sdpa(self.device):
            logits = self._run(ids, cache, inputs)
        place = [ends.index(n) - len(ends) if self._one_logit else n - 1 for n in lengths]
        logits_BV = torch.stack([rows[i] for rows, i in zip(logits, place, strict=True)])
        cache.settle(lengths)
        if not features:
            return logits_BV, [], cache
        whole = self._features(held, layers)
        parts = zip(whole.aux_TAD.split(most), whole.last_TD.split(most), lengths, strict=True)
        return logits_BV, [Features(aux_TAD[:n], last_TD[:n]) for aux_TAD, last_TD, n in parts], cache

    def _new_cache(self) -> TargetCache | RunningState:
        if not self.rollback_problem:
            return TargetCache()
        return RunningState(recompute=not self._steps_exactly)

    def _run(self, token_BN: Tensor, cache: TargetCache | RunningState, inputs: dict[str, Any]) -> Tensor:
        """Logits of tokens that follow those in a cache, which then holds them too."""
        if isinstance(cache, RunningState):
            if self._one_logit:
                inputs = {"logits_to_keep": token_BN.shape[1], **inputs}
            return cache.run(self.model, token_BN, **inputs)
        return self.model(input_ids=token_BN, past_key_values=cache, use_cache=True, **inputs).logits

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

    def check_numbers(self, computed: Tensor) -> None:
        """Raises ValueError where logits or states that it computed are NaN, or infinite above (below, logits say
        never)."""
        if bool((computed.isnan() | computed.isposinf()).any()):
            raise ValueError(
                f"{self.name or 'the target'} computes NaN or infinite values in {str(self.dtype).split('.')[-1]}: its "
                "weights are damaged, or the dtype is too narrow for them; try the dtype float32, or copy it again"
            )

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
        self.check_numbers(own)
        if not _close(self.logits(alone.last_TD), own):
            raise ValueError(
                f"{self.name or 'the target'} computes its logits in a way fledge does not know: its output head "
                "applied to the final hidden state differs from its own logits, so a draft would be taught wrongly"
            )

    def check_rollback(self) -> None:
        """Raises ValueError unless the model, after forgetting some tokens, answers as if it had never seen them."""
        if self.rollback_problem:
            raise ValueError(
                f"{self.name or 'the target'} cannot verify drafts: {self.rollback_problem}. Decode without a draft, "
                "or serve the draft with an engine that can restore such states"
            )

    @functools.cached_property
    @torch.inference_mode()
    def rollback_problem(self) -> str:
        """Why tokens that the model has seen cannot be forgotten; empty where they can. Found out by trying, once."""
        tokens, cache = self._random_tokens(12, seed=1), TargetCache()
        direct = self._run(tokens[:, :8], RunningState(recompute=True), {})[:, 6:]
        self.check_numbers(direct)
        problem = "its state cannot be rolled back, as that of layers with a running summary of the past cannot"
        try:
            self.forward(tokens[:, :6], cache, features=False)
            self.forward(tokens[:, 8:], cache, features=False)
            cache.rollback(6)
            after, _ = self.forward(tokens[:, 6:8], cache, features=False)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # caches without a length or without room for such layers fail as they like
            return problem
        return "" if _close(after, direct) else problem

    @functools.cached_property
    @torch.inference_mode()
    def _steps_exactly(self) -> bool:
        """Whether the model's own cache, token by token, gives the logits that all tokens at once give."""
        tokens, own, anew = self._random_tokens(12, seed=3), RunningState(), RunningState(recompute=True)
        with without_cudnn_sdpa(self.device):
            whole = self._run(tokens, anew, {})
            try:
                parts = [self._run(part, own, {}) for part in tokens.split([6, *[1] * 6], dim=1)]
            except Exception:  # a model without a cache of its own fails as it likes
                return False
        return bool(own.held) and _close(torch.cat(parts, dim=1), whole)

    def _random_tokens(self, n: int, seed: int) -> Tensor:
        """Token ids [1, n], the same for the same seed."""
        vocab = self.embedding.shape[0]
        return torch.randint(vocab, (1, n), generator=torch.Generator().manual_seed(seed)).to(self.device)

    @torch.inference_mode()
    def check_masks(self, requests: int = 1) -> None:
        """Raises ValueError unless each node of a tree gets the logits that its own path gets as a chain, alone or
        beside other requests of other lengths."""
        vocab, requests = self.embedding.shape[0], min(requests, 2)
        tokens = torch.randint(vocab, (requests, 12), generator=torch.Generator().manual_seed(2)).to(self.device)
        parents = torch.tensor([-1, 0, 0, 1, 2], device=self.device).expand(requests, -1)
        name = self.name or "the target"
        if self.rollback_problem:
            raise ValueError(f"{name} cannot verify {_masked(requests)}: {self.rollback_problem}; {_CURE[requests]}")
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
            self.check_numbers(direct)
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
    trust_remote_code: bool = False,
) -> Target:
    """Loads a model and tokenizer from a directory or a hub id, which may end in a revision (owner/name@revision).

    `dtype` None is the checkpoint's own on an accelerator and float32 on the CPU. Code that comes with the model runs
    only with `trust_remote_code`. Raises ValueError with the cause where the files are missing, cut short, not a
    causal language model, or need such code.
    """
    device = torch.device(device)
    name, revision = split_revision(path)
    if not Path(path).exists() and (Path(path).is_absolute() or name.count("/") > 1):
        raise ValueError(f"the target {path} does not exist; it is a directory or a hub id such as owner/name")
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path} holds no config.json; a target is a directory as save_pretrained writes it")
    if Path(path).exists() and '"draft_vocab_size"' in (Path(path) / "config.json").read_text(errors="replace"):
        raise ValueError(f"{path} is a draft; the target is the model that it was trained for")
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        # said each time, because transformers would otherwise ask on standard input, where prompts come from
        trusted = dict(revision=revision, trust_remote_code=trust_remote_code)
        RopeConfig.from_hf(llama_names(AutoConfig.from_pretrained(name, **trusted).get_text_config(decoder=True)))
        model, found = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype or (torch.float32 if device.type == "cpu" else "auto"), output_loading_info=True,
            **trusted,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(name, **trusted)
        tokenizer("The tokenizer's files are read in full at its first use.")
    except Exception as e:
        if "trust_remote_code" in str(e):
            raise ValueError(
                f"the target {path} comes with code of its own, which fledge does not run unasked; read it, and if you "
                "trust it, give --trust-remote-code (in Python trust_remote_code=True)"
            ) from e
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
    return Target(
        model.to(device), tokenizer, name=str(path), max_length=max_length, trust_remote_code=trust_remote_code
    )


def target_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, max_length: int | None = None
) -> Target:
    """A target made of a loaded transformers model, which is used in place and frozen.

    `tokenizer` None is the one that lies where the model came from. Raises ValueError where there is none, and for a
    model that is no causal language model.
    """
    name = model.config.name_or_path
    if model.get_output_embeddings() is None or model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is no causal language model; load one by AutoModelForCausalLM")
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as e:
            where = f"in {name}, where the model is from" if name else "since the model does not say where it is from"
            raise ValueError(f"no tokenizer can be loaded {where}; give load(model, tokenizer=..) one") from e
    return Target(model, tokenizer, name=name or type(model).__name__, max_length=max_length)


def _cure(e: Exception) -> str:
    if "Safetensor" in type(e).__name__:
        return ". A weights file is cut short or damaged: copy or download it again"
    if isinstance(e, json.JSONDecodeError):
        return ". A JSON file of the model is damaged: copy or download it again"
    return ""


def _first_line(e: Exception) -> str:
    return next((line for line in str(e).splitlines() if line.strip()), type(e).__name__).strip()


def _decoder(model: nn.Module, n: int) -> nn.Module:
    """What transformers calls the decoder, or where that does not show n layers and a final norm, the first module that
    does (Llama 4's decoder is the whole model, ModernBERT's its head)."""
    shown = next((m for m in (model.get_decoder(), *model.modules()) if all(_shown(m, n))), None)
    return model.get_decoder() if shown is None else shown


def _shown(module: nn.Module, n: int) -> tuple[list[nn.ModuleList], list[nn.Module]]:
    """Its lists of n layers and what is named as a final norm, each empty where there is none."""
    children = dict(module.named_children())
    layers = [m for m in children.values() if isinstance(m, nn.ModuleList) and len(m) == n]
    return layers, [m for name, m in children.items() if _names_final_norm(name)]


def _names_final_norm(child: str) -> bool:
    """Whether a decoder's child of this name is its final norm (LFM2's is "embedding_norm") and no norm of embeddings
    (Bloom's, Bart's)."""
    return child == "embedding_norm" or (("norm" in child or child.startswith("ln_")) and "embed" not in child)


def _layers_and_norm(decoder: nn.Module, n: int) -> tuple[nn.ModuleList, nn.Module]:
    """Raises ValueError where the decoder does not show them."""
    layers, norms = _shown(decoder, n)
    if len(layers) != 1 or not norms:
        raise ValueError(
            f"{type(decoder).__name__} does not show its {n} decoder layers and final norm as transformers' causal "
            "language models do, so its hidden states cannot be read; it decodes, but no draft can be trained for it"
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
