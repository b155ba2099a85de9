"""Drafting: a source of candidates and the shape of what is drafted from them, chosen by `Drafting`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fledge.config import DraftConfig
from fledge.decode.sampling import BatchSampling
from fledge.decode.shapes import Chain, DynamicTree, FixedTree, Shape
from fledge.decode.sources import OnePassSource, Source, StepSource
from fledge.decode.state import RoundState
from fledge.methods import METHODS, Method
from fledge.models.draft import Draft
from fledge.models.kv_cache import KVCache
from fledge.types import Sampling, Tree, TreeShape

MODES = ("chain", "tree", "parallel")
DEPTH = 5  # tokens drafted a round where neither the caller nor the draft's config says


class Proposer:
    """Drafts for the requests that are decoded together, from one source in one shape."""

    def __init__(self, source: Source, shape: Shape):
        self.source, self.shape = source, shape

    @property
    def draft(self) -> Draft:
        return self.source.draft

    @property
    def levels(self) -> int:
        """The most tokens of a drafted path."""
        return self.shape.levels

    @property
    def nodes(self) -> int:
        """The most nodes of a tree, the root included."""
        return self.shape.nodes

    @property
    def scratch(self) -> int:
        """The most slots that a round writes after the committed ones in the draft's cache."""
        return self.levels + 1 + max(self.levels, self.shape.expanded)

    def new_cache(self, sizes: Sequence[int]) -> KVCache:
        """An empty cache of sequences of these sizes, in slots, for `read` and then `append`."""
        return KVCache(self.source.pool, sizes)

    def read(self, cache: KVCache, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor]) -> None:
        """Adds slots of prompts to a cache; see `Source.read`."""
        self.source.read(cache, tokens, aux)

    def append(self, cache: KVCache) -> None:
        """Adds requests, with the cache of their prompts."""
        self.source.append(cache)

    def select(self, staying: Sequence[int]) -> None:
        """Keeps the requests with these indices only."""
        self.source.select(staying)

    def set_sampling(self, sampling: BatchSampling) -> None:
        """Sets how the drafted tokens of the requests are drawn, in their order. Without it, drafting is greedy."""
        same = sampling.seed_B.device == self.draft.device
        self.source.sampling = sampling if same else sampling.to(self.draft.device)

    @property
    def capturable(self) -> bool:
        """Whether drafting asks the device nothing, so that it can be captured as a CUDA graph."""
        return not (self.source.sequential and self.shape.ends_early)

    def tensors(self) -> list[Tensor]:
        """The tensors, with one entry for each request, that drafting reads and changes."""
        return self.source.tensors()

    def buffers(self) -> list[Tensor]:
        """The buffers of the draft's cache, which is another one after it has grown."""
        return [self.source.pool.buffer]

    def lengths(self) -> list[Tensor]:
        """Those of `tensors` that are lengths of caches."""
        return [self.source.cache.length_B]

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Replaces `tensors` by others."""
        self.source.bind(tensors)

    def idle(self, spare: KVCache, size: int) -> Proposer:
        """A proposer of the same draft for `size` requests that do not exist, which share the segment of a cache."""
        return Proposer(self.source.idle(spare, size), self.shape)

    @torch.inference_mode()
    def propose(self, state: RoundState) -> Tree:
        """Adds each request's new slots to the draft's cache, and drafts from the last one. The new slots' keys and
        values stay in the cache; those of drafted nodes are forgotten."""
        root_B, logits_B1W = self.source.begin(state.to(self.draft.device))
        tree, slot_BN = self.shape.grow(self.source, root_B, logits_B1W)
        self.source.end(slot_BN)
        return tree


@dataclass(frozen=True)
class Drafting:
    """How an engine drafts.

    `mode` "chain" drafts a chain of `depth` tokens, one per pass; "parallel" a chain in one pass, for methods that can
    (P-EAGLE); "tree" drafts EAGLE-2's tree of `nodes`, the root included, with at most `width` children a node and
    paths of at most `depth` tokens, or a tree of a fixed `shape`. None is the method's own way, a chain. `depth` None
    is the depth that the draft was trained to. With `confidence` above 0 a chain is drafted only while the draft gives
    it at least that probability. `stable` False keeps in the draft's cache what drafting computed for accepted tokens.
    Raises ValueError for values out of range or that contradict each other.
    """

    depth: int | None = None
    mode: str | None = None
    confidence: float = 0.0
    nodes: int = 60
    width: int = 10
    shape: TreeShape | None = None
    stable: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.confidence < 1:
            raise ValueError(f"confidence {self.confidence} is outside [0, 1); 0 drafts the whole depth every round")
        if self.mode is not None and self.mode not in MODES:
            raise ValueError(f"draft mode {self.mode!r} is none of {', '.join(MODES)}")
        if self.tree and self.confidence:
            raise ValueError("confidence ends chains early and has no effect on trees; leave it out")
        if self.tree and (self.nodes < 2 or self.width < 1):
            raise ValueError(
                f"a tree of {self.nodes} nodes with a width of {self.width} drafts nothing; use at least 2 nodes and a "
                "width of 1"
            )
        if self.shape is not None and not self.tree:
            raise ValueError("a fixed shape needs mode 'tree'")
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"a depth of {self.depth} drafts nothing; use 1 or more")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Drafting:
        """The drafting with these fields. Raises TypeError for a name that is not a field, and ValueError as above."""
        known = [f.name for f in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"{unknown[0]} is not an option of drafting; the options are {', '.join(known)}")
        return cls(**options)

    @property
    def tree(self) -> bool:
        return self.mode == "tree"

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises ValueError where drafted tokens are to be drawn and the shape is a tree."""
        if self.tree and sampling.samples_draft:
            raise ValueError("sampled drafts need a chain, since a tree drafts the likeliest tokens; leave tree out")

    def for_method(self, method: Method) -> Drafting:
        """The same with the mode that a method has. Raises ValueError for a mode or cache that it lacks."""
        if method.one_pass and not self.stable:
            raise ValueError(
                f"the draft cache of {method.title} is always stable, since masked slots are no accepted tokens; leave "
                "the unstable cache out"
            )
        if self.mode == "parallel" and not method.one_pass:
            able = ", ".join(m.title for m in METHODS.values() if m.one_pass)
            raise ValueError(f"draft mode parallel needs a draft of {able}; use chain or tree")
        return replace(self, mode="tree" if self.tree else "parallel" if method.one_pass else "chain")

    def for_draft(self, config: DraftConfig) -> Drafting:
        """The same with the mode and depth of a draft. Raises ValueError as `for_method`."""
        resolved = self.for_method(config.family)
        return replace(resolved, depth=self.depth or config.provenance.depth or DEPTH)

    @property
    def verified(self) -> int:
        """Most tokens of a request in one verification."""
        if not self.tree:
            return self.depth + 1
        return self.nodes if self.shape is None else len(self.shape.parents)

    def record(self) -> dict[str, Any]:
        """Its values as plain data, without those that have no effect."""
        how = {"mode": self.mode, "draft_cache": "stable" if self.stable else "unstable"}
        if not self.tree:
            return how | {"depth": self.depth, "confidence": self.confidence}
        if self.shape is not None:
            return how | {"shape": asdict(self.shape)}
        return how | {"depth": self.depth, "nodes": self.nodes, "width": self.width}

    def proposer(self, draft: Draft) -> Proposer:
        """A new proposer, of resolved drafting (`for_draft`)."""
        shape = self._shape(draft)
        one_pass = draft.family.one_pass
        source = (
            OnePassSource(draft, shape.levels)
            if one_pass
            else StepSource(draft, shape.nodes, shape.expanded, shape.levels, self.stable)
        )
        return Proposer(source, shape)

    def _shape(self, draft: Draft) -> Shape:
        if not self.tree:
            return Chain(self.depth, self.confidence, draft.device)
        if self.shape is None:
            return DynamicTree(self.depth, self.nodes, self.width)
        return FixedTree(self.shape, draft)
