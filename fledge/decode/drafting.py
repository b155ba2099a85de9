"""How an engine drafts: the proposer for a draft, and the shapes of the drafted trees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from fledge.config import DraftConfig
from fledge.decode.draft_size import DraftSize, SizeChooser
from fledge.decode.propose import BlockProposer, MaskedProposer, Proposer, StepProposer
from fledge.decode.shapes import Chain, DynamicTree, FixedTree, LikeliestTree, Shape
from fledge.drafts.block import BlockDraft
from fledge.drafts.draft import Draft
from fledge.drafts.registry import NETWORKS
from fledge.methods import METHODS, MOST_DEPTH, MOST_NODES, Method
from fledge.types import Sampling, TreeShape, check_type

MODES = ("chain", "tree", "parallel")
DEPTH = 5  # tokens drafted a round where neither the caller nor the draft's config says
AUTO = "auto"
DEPTHS = (1, 2, 3, 5, 7, 10, 14)  # depths that "auto" chooses from, up to FAR or twice the trained depth
FAR = 10
WIDTH = 10  # children of a node where the caller does not say
NODES = (8, 16, 32, 60)  # numbers of tree nodes that "auto" chooses from
MANY_NODES = (8, 16, 32, 64, 128, 256)  # the same, of trees that are drafted in one pass
FIRST_NODES = 32  # those that "auto" begins with
NO_TREES = (
    "this draft chooses each token given the token before it (its candidate selector), and a tree in one pass holds "
    "tokens that do not depend on each other; leave the tree out to draft a chain"
)


@dataclass(frozen=True)
class Drafting:
    """How an engine drafts.

    `mode` "chain" drafts a chain of `depth` tokens, one per pass; "parallel" a chain in one pass, for methods that
    can (P-EAGLE); "tree" drafts a tree of `nodes`, the root included, with paths of at most `depth` tokens, or a tree
    of a fixed `shape`. A tree of a method that drafts in one pass holds the likeliest prefixes (`LikeliestTree`), other
    trees are EAGLE-2's with at most `width` children a node (None: WIDTH). `mode` None is a chain, in one pass if the
    method can. `depth` None is the trained depth of the draft. `depth` or `nodes` "auto" chooses the number while
    decoding, and drafts nothing while that is faster (`decode/draft_size.py`). With `confidence` above 0 a chain is
    drafted only while the draft's probability of the chain is at least `confidence`. `stable` False caches keys and
    values of accepted tokens as computed in drafting. `sizes` are the candidate draft sizes, of which a round uses
    one, the initial size first; `for_draft` sets them. Raises TypeError for a wrong type, and ValueError for values
    out of range or in contradiction.
    """

    depth: int | str | None = None
    mode: str | None = None
    confidence: float = 0.0
    nodes: int | str = 60
    width: int | None = None
    shape: TreeShape | None = None
    stable: bool = True
    sizes: tuple[DraftSize, ...] = ()

    def __post_init__(self) -> None:
        check_type("depth", self.depth, Integral | str | None, f"an integer or {AUTO!r}")
        check_type("nodes", self.nodes, Integral | str, f"an integer or {AUTO!r}")
        check_type("width", self.width, Integral | None, "an integer")
        check_type("confidence", self.confidence, Real, "a number")
        check_type("stable", self.stable, bool, "True or False")
        check_type("shape", self.shape, TreeShape | None, "a fledge.TreeShape")
        if not 0 <= self.confidence < 1:
            raise ValueError(f"confidence {self.confidence} is outside [0, 1); 0 drafts the whole depth every round")
        if self.mode is not None and self.mode not in MODES:
            raise ValueError(f"draft mode {self.mode!r} is none of {', '.join(MODES)}")
        if self.tree and self.confidence:
            raise ValueError("confidence ends chains early and has no effect on trees; leave it out")
        for name, value in (("depth", self.depth), ("number of nodes", self.nodes)):
            if isinstance(value, str) and value != AUTO:
                raise ValueError(f"the {name} {value!r} is neither a number nor {AUTO}")
        if self.tree and self.nodes != AUTO and self.nodes < 2:
            raise ValueError(f"a tree of {self.nodes} nodes drafts nothing; use at least 2 nodes")
        if self.tree and self.width is not None and self.width < 1:
            raise ValueError(f"a tree with a width of {self.width} drafts nothing; use a width of at least 1")
        if self.shape is not None and not self.tree:
            raise ValueError("a fixed shape needs mode 'tree'")
        if self.shape is not None and (self.nodes, self.width) != (Drafting.nodes, Drafting.width):
            raise ValueError("a fixed shape has its own nodes and width; leave nodes and width out")
        if not self.tree and (self.nodes, self.width) != (Drafting.nodes, Drafting.width):
            raise ValueError("nodes and width have no effect in a chain; give mode 'tree', or leave them out")
        if self.depth not in (None, AUTO) and self.depth < 1:
            raise ValueError(f"a depth of {self.depth} drafts nothing; use 1 or more")
        for name, value, most in (("depth", self.depth, MOST_DEPTH), ("number of nodes", self.nodes, MOST_NODES)):
            if isinstance(value, Integral) and value > most:
                raise ValueError(f"the {name} {value} is above {most}, the most that is drafted in a round")
        if self.automatic:
            for given, what in (
                (self.shape is not None, "a fixed shape has its own depth and nodes"),
                (not self.stable, "changing the depth needs the stable draft cache"),
                (self.confidence > 0, "a confidence ends chains early"),
            ):
                if given:
                    raise ValueError(f"{what}; leave it or {AUTO!r} out")

    @classmethod
    def from_options(cls, options: Mapping[str, Any], has_draft: bool = True) -> Drafting:
        """A `Drafting` of `options`. Raises TypeError for a name that is not a field, and ValueError like `Drafting`
        and for options without a draft."""
        known = [f.name for f in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"{unknown[0]} is not an option of drafting; the options are {', '.join(known)}")
        drafting = cls(**options)
        if drafting.shape is not None and drafting.depth is not None:  # here, since `for_draft` sets a depth
            raise ValueError("a fixed shape has its own depth; leave depth out")
        if not has_draft and drafting != cls():
            given = [name for name in options if getattr(drafting, name) != getattr(cls, name)]
            raise ValueError(f"{' and '.join(given)} has no effect without a draft; give draft=, or leave it out")
        return drafting

    @property
    def tree(self) -> bool:
        return self.mode == "tree"

    @property
    def automatic(self) -> bool:
        """Whether the draft size is chosen while decoding."""
        return self.depth == AUTO or (self.tree and self.nodes == AUTO)

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises ValueError if `sampling` draws drafted tokens and the shape is a tree."""
        if self.tree and sampling.samples_draft:
            raise ValueError("sampled drafts need a chain, since a tree drafts the likeliest tokens; leave tree out")

    def for_method(self, method: Method) -> Drafting:
        """The same drafting with the mode and width of a method. Raises ValueError for a mode, cache or width that the
        method lacks."""
        if method.one_pass and not self.stable:
            raise ValueError(
                f"the draft cache of {method.title} is always stable, since masked slots are no accepted tokens; leave "
                "the unstable cache out"
            )
        if self.mode == "parallel" and not method.one_pass:
            able = ", ".join(m.title for m in METHODS.values() if m.one_pass)
            raise ValueError(f"draft mode parallel needs a draft of {able}; use chain or tree")
        if method.one_pass and self.width is not None:
            raise ValueError(
                f"a tree of {method.title} has no width: it holds the most likely prefixes, whatever the number of "
                "children of a node; leave the width out"
            )
        if not self.tree:
            return replace(self, mode="parallel" if method.one_pass else "chain")
        return self if method.one_pass or self.shape is not None else replace(self, width=self.width or WIDTH)

    def for_draft(self, config: DraftConfig) -> Drafting:
        """The same drafting with the mode, depth and sizes of a draft. Raises ValueError like `for_method`."""
        if self.tree and config.candidate_selector:
            raise ValueError(NO_TREES)
        trained = config.provenance.depth or DEPTH
        resolved = replace(self.for_method(config.family), depth=self.depth or trained)
        depth = resolved.depth if self.shape is None else len(self.shape.levels()) - 1
        if issubclass(NETWORKS[config.method], BlockDraft) and depth not in (AUTO, *range(trained + 1)):
            raise ValueError(
                f"a depth of {depth} is above {trained}, the tokens of a block in the draft's training; "
                f"use at most {trained}"
            )
        return replace(resolved, sizes=resolved._sizes(trained, config.family.one_pass))

    def _sizes(self, trained: int, one_pass: bool) -> tuple[DraftSize, ...]:
        """The candidate draft sizes, the initial size first: with a tree of any number of nodes FIRST_NODES, else the
        size of the trained depth. In one pass, a deeper tree of as many nodes takes no longer, and is accepted further:
        all trees have the trained depth."""
        if self.shape is not None:
            return (DraftSize(len(self.shape.levels()) - 1, len(self.shape.parents)),)
        many: tuple[int, ...] = MANY_NODES if one_pass else NODES
        depths: list[Any]
        most = trained if one_pass else max(2 * trained, FAR)
        if self.depth != AUTO:
            depths = [self.depth]
        elif one_pass and self.tree:
            depths = [trained]
        else:
            depths = sorted({trained, *(d for d in DEPTHS if d <= most and (d <= FAR or d + 1 != trained))})
        if self.tree and self.nodes == AUTO:
            if self.depth == AUTO and not one_pass:  # depth and nodes grow together
                depths = [math.ceil(trained * i / len(many)) for i in range(1, len(many) + 1)]
            else:
                depths = depths * len(many)
            sizes = [DraftSize(d, n) for d, n in zip(depths, many, strict=True)]
            first = next(s for s in sizes if s.nodes == FIRST_NODES)
        else:
            sizes = [DraftSize(d, self.nodes if self.tree else d + 1) for d in depths]
            first = next((s for s in sizes if s.depth >= trained), sizes[-1])
        return (first, *(s for s in sizes if s != first))

    @property
    def deepest(self) -> int:
        """The most tokens of a drafted path, of resolved drafting (`for_draft`)."""
        return max(s.depth for s in self.sizes)

    @property
    def verified(self) -> int:
        """The most tokens of a request in one verification, of resolved drafting (`for_draft`)."""
        return max(s.nodes for s in self.sizes)

    def record(self) -> dict[str, Any]:
        """The drafting's values as plain data, without values that have no effect."""
        how = {"mode": self.mode, "draft_cache": "stable" if self.stable else "unstable"}
        if not self.tree:
            return how | {"depth": self.depth, "confidence": self.confidence}
        if self.shape is not None:
            return how | {"shape": asdict(self.shape)}
        tree = how | {"depth": self.depth, "nodes": self.nodes}
        return tree if self.width is None else tree | {"width": self.width}

    def proposer(self, draft: Draft) -> Proposer:
        """A new proposer, of resolved drafting (`for_draft`). Raises ValueError for trees of drafts with a selector."""
        if self.tree and isinstance(draft, BlockDraft) and draft.selector() is not None:
            raise ValueError(NO_TREES)  # of a network from elsewhere, whose config does not say it
        shapes = {size: self._shape(draft, size) for size in self.sizes}
        if isinstance(draft, BlockDraft):
            return BlockProposer(draft, shapes)
        if draft.family.one_pass:
            return MaskedProposer(draft, shapes)
        return StepProposer(draft, shapes, self.stable)

    def chooser(self) -> SizeChooser | None:
        """The chooser among the sizes while decoding, of resolved drafting; None unless depth or nodes are "auto"."""
        nested = self.tree and self.width is None  # see `LikeliestTree`; a fixed shape has one size
        return SizeChooser(self.sizes, nested) if self.automatic else None

    def _shape(self, draft: Draft, size: DraftSize) -> Shape:
        if not self.tree:
            return Chain(size.depth, self.confidence, draft.device)
        if self.shape is not None:
            return FixedTree(self.shape, draft)
        if draft.family.one_pass:
            return LikeliestTree(size.depth, size.nodes, draft)
        assert self.width is not None  # see `for_method`
        return DynamicTree(size.depth, size.nodes, self.width, draft)
