"""The ways of drafting that `fledge eval` compares, and their names in its table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.commands.decoding import DecodeOptions
from fledge.options import default_of, option_fields, parse_template_kwargs

if TYPE_CHECKING:
    from fledge.commands.evaluate import EvalOptions
    from fledge.decode.engine import Engine


@dataclass(frozen=True)
class Way:
    """A draft, the mode in which it drafts (None: its own), and the depth (None: as trained) of its chain or tree. The
    nodes and width are those of trees."""

    draft: str
    mode: str | None
    depth: int | str | None
    nodes: int | str
    width: int

    def options(self, asked: EvalOptions) -> DecodeOptions:
        """The options of a command that decodes in this way alone."""
        values = {f.name: getattr(asked, f.name) for f in option_fields(DecodeOptions)}
        values |= dict(draft=self.draft, draft_mode=self.mode)
        values |= dict(depth=self.depth, tree_nodes=self.nodes, tree_width=self.width)
        return DecodeOptions(**values, given=frozenset())


def ways(options: EvalOptions) -> list[Way]:
    """All combinations of what was given; for chains, which have no nodes and no width, one each."""
    defaults = {f.name: default_of(f) for f in option_fields(DecodeOptions)}
    chain = defaults["tree_nodes"], defaults["tree_width"]
    trees = list(itertools.product(options.tree_nodes or chain[:1], options.tree_width or chain[1:]))
    found = itertools.product(options.draft, options.draft_mode or [None], options.depth or [None])
    return [
        Way(draft, mode, depth, *shape)
        for draft, mode, depth in found
        for shape in (trees if mode == "tree" else [chain])
    ]


def names(options: EvalOptions, among: Sequence[Way]) -> list[str]:
    """What differs between the ways, for each of them; empty if there is one."""

    def name(way: Way) -> str:
        tree = way.mode == "tree"
        parts = (
            (len(options.draft) > 1, way.draft),
            (len(options.draft_mode) > 1, way.mode),
            (len(options.depth) > 1, f"depth {way.depth}"),
            (tree and len(options.tree_nodes) > 1, f"{way.nodes} nodes"),
            (tree and len(options.tree_width) > 1, f"width {way.width}"),
        )
        return " ".join(str(text) for differs, text in parts if differs)

    return [name(way) for way in among]


def load_engines(options: EvalOptions, among: Sequence[Way], say: Callable[[str], None]) -> list[Engine]:
    """An engine for each way, all with the same target; each draft is loaded once."""
    from fledge.decode.engine import Engine

    engines: list[Engine] = []
    loaded: dict[str, Engine] = {}
    for way in among:
        single = way.options(options)
        if same := loaded.get(way.draft):
            kwargs = parse_template_kwargs(options.template_kwargs)
            engine = Engine(same.target, same.draft, template_kwargs=kwargs, **single.drafting(way.mode))
        else:
            engine = single.load_engine(way.draft, way.mode, say, engines[0].target if engines else None)
        loaded.setdefault(way.draft, engine)
        engines.append(engine)
    return engines
