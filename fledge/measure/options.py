"""The options of `fledge eval`, the compared ways of drafting, and the names of ways in the table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.decode.options import AUTO, DecodeOptions
from fledge.methods import MOST_DEPTH, MOST_NODES
from fledge.options import (
    SERVER_OPTIONS,
    api_key_env_option,
    columns_option,
    model_option,
    opt,
    option_fields,
    parse_template_kwargs,
    request_timeout_option,
)

if TYPE_CHECKING:
    from fledge.decode.engine import Engine


# the options that ways of drafting may differ in, and how the name of a way shows a value
COMPARED = {
    "draft": "{}", "draft_mode": "{}", "depth": "depth {}", "tree_nodes": "{} nodes", "tree_width": "width {}"
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvalOptions(DecodeOptions):
    """Decode prompts with one or more drafts and without; report acceptance, speed and identity of the outputs."""

    target: str | None = opt(
        "target model: a directory or hub id (owner/name or owner/name@revision); with --endpoint and without --draft "
        "only its tokenizer is read", None
    )  # fmt: skip
    draft: list[str] = opt("draft of the target: a directory or hub id; repeat to compare drafts", repeatable=True)
    draft_mode: list[str] = opt(
        "chain, tree (EAGLE-2's draft tree, or the most likely prefixes, for P-EAGLE and DFlash), or parallel (P-EAGLE "
        "and DFlash: the whole chain in one pass); repeat to compare modes (default: parallel if the draft can, "
        "otherwise chain)", repeatable=True,
    )  # fmt: skip
    depth: list[int | str] = opt(
        "length of a drafted chain, or depth of a tree, in tokens, or auto: chosen while decoding from acceptance and "
        "speed, with nothing drafted while that is faster; repeat to compare depths (default: as trained)",
        repeatable=True, minimum=1, maximum=MOST_DEPTH, word=AUTO,
    )  # fmt: skip
    tree_nodes: list[int | str] = opt(
        "number of nodes of a draft tree, including the root, or auto; repeat to compare sizes (default: 60)",
        repeatable=True, minimum=2, maximum=MOST_NODES, word=AUTO,
    )  # fmt: skip
    tree_width: list[int] = opt(
        "maximum number of children of a tree node; repeat to compare widths (default: 10); trees of drafts that draft "
        "in one pass, as P-EAGLE, have no width", repeatable=True, minimum=1, maximum=64,
    )  # fmt: skip
    prompts: list[str] = opt(
        "files, globs or hub ids of the prompts to decode, or mt_bench, gsm8k, humaneval, math500, alpaca, sum, qa, "
        "or a data set by name as in `fledge train --data`, e.g. ultrachat; repeatable", repeatable=True
    )  # fmt: skip
    columns: str | None = columns_option()
    limit: int | None = opt(
        "maximum number of prompts of each --prompts, evenly spaced over its files (default: all; 80 of a named set)",
        None, minimum=1,
    )  # fmt: skip
    max_new_tokens: int | None = opt(
        "maximum new tokens per prompt (default: 128, at most half of the target's context)", None, minimum=1
    )
    batch: int = opt("number of prompts decoded together, with and without the draft", 1, minimum=1)
    endpoint: str | None = opt(
        "address of a running vLLM or SGLang to measure, beside fledge's decoder if --target and --draft are given",
        None,
    )
    baseline_endpoint: str | None = opt("address of the same server without a draft, to compare with", None)
    concurrency: list[int] = opt(
        "number of requests in flight at the server; repeat to compare (default: 1)", repeatable=True, minimum=1
    )
    model: str | None = model_option()
    api_key_env: str = api_key_env_option()
    request_timeout: float = request_timeout_option()
    out: str | None = opt("also write the results to this JSON file; only an earlier result is replaced", None)
    json: bool = opt("print the results as JSON instead of a table", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.endpoint is None:
            needless = (*SERVER_OPTIONS, "baseline_endpoint", "concurrency")
            self.refuse(needless, "without --endpoint; give it, or")
        if self.endpoint is not None and not self.draft:
            self.refuse(("batch", "device", "dtype", "target_impl"), "with --endpoint unless fledge decodes too, which")


def ways(options: EvalOptions) -> list[DecodeOptions]:
    """The options of each compared way of drafting: all combinations of the given drafts, modes and depths, and for
    trees also of nodes and widths."""
    shared = {f.name: getattr(options, f.name) for f in option_fields(DecodeOptions) if f.name not in COMPARED}
    found = []
    for draft, mode, depth in itertools.product(options.draft, options.draft_mode or [None], options.depth or [None]):
        tree = mode == "tree"
        nodes = [{"tree_nodes": n} for n in options.tree_nodes if tree] or [{}]
        widths = [{"tree_width": n} for n in options.tree_width if tree] or [{}]
        way = dict(draft=draft, draft_mode=mode, depth=depth, given=frozenset())
        found += [DecodeOptions(**shared, **way, **n, **width) for n, width in itertools.product(nodes, widths)]
    return found


def names(options: EvalOptions, among: Sequence[DecodeOptions]) -> list[str]:
    """The name of each way: the values that differ between ways; empty for a single way."""
    differs = {name: text for name, text in COMPARED.items() if len(getattr(options, name)) > 1}

    def name(way: DecodeOptions) -> str:
        known = {n: text for n, text in differs.items() if way.draft_mode == "tree" or not n.startswith("tree_")}
        return " ".join(text.format(getattr(way, n)) for n, text in known.items())

    return [name(way) for way in among]


def load_engines(options: EvalOptions, among: Sequence[DecodeOptions], say: Callable[[str], None]) -> list[Engine]:
    """An engine for each way, all with the same target; each draft is loaded once."""
    from fledge.decode.load import load

    engines: list[Engine] = []
    loaded: dict[str | None, Engine] = {}
    for way in among:
        if same := loaded.get(way.draft):
            kwargs = parse_template_kwargs(options.template_kwargs)
            engine = load(same.target, same.draft, template_kwargs=kwargs, **way.drafting(way.draft_mode))
        else:
            engine = way.load_engine(way.draft, way.draft_mode, say, engines[0].target if engines else None)
        loaded.setdefault(way.draft, engine)
        engines.append(engine)
    return engines
