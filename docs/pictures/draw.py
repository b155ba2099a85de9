"""Draws the pictures of "What speculative decoding is" from fledge's own objects.

    python docs/pictures/draw.py [DIRECTORY]

writes chain.svg, tree.svg, steps.svg, block.svg and round.svg, by default beside this file. `tests/test_docs.py` checks
that the committed files are what this script draws. Colours are of middle lightness and the background is transparent,
so that the pictures can be read on light and dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from fledge.ops.attention_block import block_attention
from fledge.ops.attention_tree import Visible, pack_bits
from fledge.ops.attention_ttt import visible
from fledge.ops.trees import accept_own
from fledge.train.plan import plan_steps
from fledge.types import Packed, Tree, TreeShape

TEXT, LINE = "#757d87", "#8b949e"
TARGET, DRAFT, ACCEPTED, REJECTED = "#3b8eea", "#c9822b", "#2f9e77", "#d0584f"

matplotlib.rcParams.update(
    {
        "svg.hashsalt": "fledge",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": TEXT,
        "savefig.transparent": True,
    }
)


def chain() -> Figure:
    """A chain of five drafted tokens: `Tree.chain`."""
    tokens = ["the", "cat", "sat", "on", "the", "mat"]
    tree = Tree.chain(torch.arange(6)[None])
    figure, axes = _canvas(8.4, 1.6)
    depths = tree.depths()[0].tolist()
    for n, depth in enumerate(depths):
        _box(axes, depth, 0, tokens[n], TARGET if n == 0 else DRAFT)
        axes.text(depth, -0.42, "root" if n == 0 else f"token {depth}", ha="center", va="top", fontsize=9)
        if n:
            _arrow(axes, (depth - 1 + 0.36, 0), (depth - 0.36, 0))
    _frame(axes, (-0.5, 5.5), (-0.75, 0.4))
    return figure


def tree() -> Figure:
    """A tree of nine nodes, and which of them each one sees: `TreeShape.from_paths`, `Tree.ancestors`, `Visible`."""
    shape = TreeShape.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]])
    tokens = ["the", "cat", "dog", "sat", "ran", "sat", "on", "by", "off"]
    levels = shape.levels()
    drafted = Tree(torch.arange(len(tokens))[None], torch.tensor([shape.parents]), len(levels) - 1)
    seen = Visible(drafted.ancestors())
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 4.0), width_ratios=[1.25, 1])
    rows = {6: 3.0, 7: 2.0, 3: 2.5, 8: 1.0, 4: 1.0, 1: 1.75, 5: 0.0, 2: 0.0, 0: 0.9}  # heights, so that no lines cross
    for depth, nodes in enumerate(levels):
        for n in nodes:
            if n:
                _arrow(left, (depth - 1 + 0.38, rows[shape.parents[n]]), (depth - 0.38, rows[n]))
            _box(left, depth, rows[n], f"{n}  {tokens[n]}", TARGET if n == 0 else DRAFT)
    left.set_title("the tree", fontsize=11)
    _frame(left, (-0.5, len(levels) - 0.5), (-0.4, 3.4))
    _mask(right, seen.mask_BSJ[0], [f"{n} {t}" for n, t in enumerate(tokens)], range(len(tokens)))
    right.set_title("which node (row) sees which (column)", fontsize=11)
    assert int(pack_bits(seen.mask_BSJ)[0, -1, 0]) == sum(1 << n for n in (0, 1, 4, 8))  # as the kernel reads it
    return figure


def steps() -> Figure:
    """What the live slots of two documents read at each of three steps of training-time test: `Packed.live`,
    `plan_steps`, and `visible`, the mask by which the attention is defined."""
    spans = [-1, -1, 0, 0, 0, 0, 0, -1, 1, 1, 1, 1]
    documents = [0] * 7 + [1] * 5
    positions = [*range(7), *range(5)]
    tokens = range(len(spans))
    row = Packed(*(torch.tensor(list(x), dtype=torch.int32) for x in (tokens, spans, positions, documents)))
    live = row.live(3)
    T = int(live[0][-1]) + 1  # keys of later tokens are read by no slot
    figure, all_axes = plt.subplots(1, 3, figsize=(8.6, 2.4), width_ratios=[T, T + 1.4, T + 2.4])
    for k, (step, axes) in enumerate(zip(plan_steps(row, live, 0, torch.device("cpu")), all_axes, strict=True)):
        shown = [slot for slot in live[0].tolist() if slot in live[k]]
        own = step.queries.own_row_JS.shape[0]
        for i, t in visible(step.queries, slice(None), range(T)).nonzero().tolist():
            _cell(axes, t, live[0].tolist().index(shown[i]), TARGET)
        for j in range(own):
            for slot in shown:
                _cell(axes, T + 0.5 + j, live[0].tolist().index(slot), DRAFT)
        _grid(axes, T + (own + 0.5 if own else 0), live[0].numel())
        axes.set_title(f"step {k}: drafts token {k + 1}", fontsize=10)
        axes.set_yticks(range(live[0].numel()), [f"slot {s}" if k == 0 else "" for s in live[0].tolist()], fontsize=9)
        axes.set_xticks(
            [*range(T), *(T + 0.5 + j for j in range(own))], [*range(T), *(f"s{j + 1}" for j in range(own))]
        )
        axes.tick_params(colors=TEXT, labelsize=8.5, pad=1)
    return figure


def block() -> Figure:
    """What the rows of two blocks see in a packed row of two documents, by `block_attention`: equal scores and a value
    for each key show the keys that have a weight."""
    anchors, starts, T, Q = [3, 8], [0, 6], 12, 4
    start_N, end_N = torch.tensor(starts), torch.tensor(anchors)
    value_NQ1d = torch.eye(T + Q)[T:].expand(2, Q, T + Q)[:, :, None]
    context_T1d = torch.eye(T + Q)[:T, None]
    nothing = torch.zeros(2, Q, 1, T + Q)
    figure, all_axes = plt.subplots(1, 2, figsize=(9.2, 2.9))
    for causal, axes in zip((False, True), all_axes, strict=True):
        keys = torch.zeros_like(context_T1d)
        weight_NQ1d = block_attention(nothing, nothing, value_NQ1d, keys, context_T1d, start_N, end_N, causal=causal)
        for n, q, _, key in weight_NQ1d.nonzero().tolist():
            _cell(axes, key + 0.5 * (key >= T), n * Q + q, DRAFT if key >= T else TARGET)
        _grid(axes, T + Q + 0.5, 2 * Q)
        axes.set_title("each row sees the rows up to itself" if causal else "each row sees all rows", fontsize=10)
        rows = [f"{a}" if q == 0 else f"mask {a + q}" for a in anchors for q in range(Q)]
        axes.set_yticks(range(2 * Q), [] if causal else rows, fontsize=9)
        axes.set_xticks([*range(T), *(T + 0.5 + q for q in range(Q))], [*range(T), *(f"r{q}" for q in range(Q))])
        axes.tick_params(colors=TEXT, labelsize=8.5, pad=1)
    return figure


def round_of_decoding() -> Figure:
    """A round: a chain is drafted, the target's choices are compared with it (`accept_own`), and tokens are
    committed."""
    drafted, chosen = ["the", "cat", "sat", "on", "a", "hat"], ["cat", "sat", "on", "the", "mat", "."]
    words = sorted({*drafted, *chosen})
    tree = Tree.chain(torch.tensor([[words.index(w) for w in drafted]]))
    verdict = accept_own(tree, torch.tensor([[words.index(w) for w in chosen]]))
    ((path, committed),) = verdict.to_lists()
    figure, axes = _canvas(9.6, 3.6)
    for n, word in enumerate(drafted):
        accepted = n in path
        _box(axes, n, 2, word, TARGET if n == 0 else ACCEPTED if accepted else REJECTED, dashed=n and not accepted)
        _arrow(axes, (n, 1.72), (n, 1.28))
        _box(axes, n, 1, chosen[n], LINE if n > len(path) - 1 else TARGET)
    for n, token in enumerate(committed, 1):
        _box(axes, n, 0, words[token], ACCEPTED if n < len(committed) else TARGET)
    for y, label in ((2, "1  draft"), (1, "2  verify"), (0, "3  commit")):
        axes.text(-1.75, y, label, ha="left", va="center", fontsize=12)
    axes.text(-0.45, 1.5, "one pass", ha="right", va="center", fontsize=9)
    _frame(axes, (-1.8, 5.5), (-0.4, 2.4))
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    return plt.subplots(figsize=(width, height))


def _frame(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    axes.axis("off")


def _box(axes: Axes, x: float, y: float, text: str, colour: str, dashed: bool = False) -> None:
    style = dict(boxstyle="round,pad=0.02,rounding_size=0.08", fc=colour + "1a", ec=colour, lw=1.5)
    axes.add_patch(FancyBboxPatch((x - 0.33, y - 0.24), 0.66, 0.48, ls="--" if dashed else "-", **style))
    axes.text(x, y, text, ha="center", va="center")


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=LINE, lw=1.2, shrinkA=0, shrinkB=0)
    )


def _mask(axes: Axes, mask_NN: torch.Tensor, names: Sequence[str], columns: Sequence[int]) -> None:
    """A square for each True entry."""
    for row, column in mask_NN.nonzero().tolist():
        _cell(axes, column, row, TARGET if column == 0 else DRAFT)
    n = len(names)
    _grid(axes, n, n)
    axes.set_yticks(range(n), names, fontsize=9, color=TEXT)
    axes.set_xticks(range(n), [str(c) for c in columns], fontsize=9, color=TEXT)


def _cell(axes: Axes, x: float, y: float, colour: str) -> None:
    axes.add_patch(Rectangle((x - 0.42, y - 0.42), 0.84, 0.84, fc=colour + "b0", ec="none"))


def _grid(axes: Axes, width: float, height: int) -> None:
    axes.set_xlim(-0.6, width - 0.4)
    axes.set_ylim(height - 0.4, -0.6)
    axes.set_aspect("equal")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_color(LINE)


PICTURES = {"chain": chain, "tree": tree, "steps": steps, "block": block, "round": round_of_decoding}


def main(directory: Path) -> None:
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(directory / f"{name}.svg", bbox_inches="tight", pad_inches=0.05, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
