"""Attention of training-time test: each slot reads its document's past and its own drafted steps.

For slot t at step k the keys are K0 of the slots s <= t of the same document, made from target features, and the
slot's own keys of steps 1 .. k (EAGLE-3, section 3.2; the causal part never shrinks with k):

    out = softmax(d^-1/2 [q . K0_s for s <= t in doc(t) ; q . k_1 ; .. ; q . k_k]) [V0 ; v_1 ; .. ; v_k]

Scores and softmax are at least float32, whatever the inputs are. `ttt_attention` computes it in one of three ways,
with the values and gradients of `ttt_attention_reference`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.precision import at_least_float32
from fledge.types import group_documents

IMPLS = ("eager", "flex", "triton")

# keys of a dense block of the eager way: a block costs its square, each block costs its launches
BLOCK = {"cpu": 512, "cuda": 2048}


class OwnSteps(list[tuple[Tensor, Tensor]]):
    """The keys and values [P_j, G, d] that slots made at their own steps, in order. One list for all the steps of
    some slots, each appending its own before it asks, lets the backward pass sum in one place what they send to a
    key: one pass, which must reach them all, and no checkpoint around any of them."""

    def __init__(self, steps: Iterable[tuple[Tensor, Tensor]] = ()):
        super().__init__(steps)
        self.gradients = OwnGradients()


class OwnGradients:
    """Gradients of own keys and values, each summed where it lies over the steps that read them: the last of those to
    come back hands them on. (It holds no key: what the backward pass keeps would lead around to itself.)"""

    def __init__(self) -> None:
        self.readers: Counter[int] = Counter()
        self.sums: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, steps: int) -> None:
        """Counts a reader of the first so many steps."""
        self.readers.update(range(steps))

    def place(self, step: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Where a step's gradients are summed."""
        assert self.readers[step], "a backward pass came twice; the sums of the first are gone"
        if step not in self.sums:
            self.sums[step] = torch.zeros_like(keys), torch.zeros_like(values)
        return self.sums[step]

    def done(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Counts a reader that has added its share; of the last, the sums."""
        self.readers[step] -= 1
        return (None, None) if self.readers[step] else self.sums.pop(step)


@dataclass(frozen=True)
class Queries:
    """Who asks at a step, and what each may read. int32, on the device: `slot_S` is the key a query stands at,
    `first_S` the first key of its document, both ascending, and `at_JS` its row among the own keys of steps 1 .. J.
    `blocks` (first query, end query, first key, end key), on the host, hold between them every query with all it may
    read, as `document_blocks` makes them."""

    slot_S: Tensor
    first_S: Tensor
    at_JS: Tensor
    blocks: Sequence[tuple[int, int, int, int]]


def ttt_attention(
    q_SHd: Tensor,
    k0_TGd: Tensor,
    v0_TGd: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    queries: Queries,
    impl: str = "eager",
) -> Tensor:
    """Attention of S queries over T keys and J own steps, each (k, v) of shape [P_j, G, d]. Returns [S, H, d]; rows of
    q beyond the queries' come out as zeros.

    `impl`: "eager" in dense blocks of documents, "flex" by FlexAttention, "triton" by our kernels; the last two need
    a GPU. Raises ValueError for another.
    """
    S, beyond = queries.slot_S.numel(), q_SHd.shape[0] - queries.slot_S.numel()
    if impl == "eager":
        return F.pad(_eager(q_SHd[:S], k0_TGd, v0_TGd, own, queries), (0, 0, 0, 0, 0, beyond))
    if impl == "flex":
        from fledge.kernels.ttt_attention_flex import ttt_attention_flex

        out = ttt_attention_flex(q_SHd[:S], k0_TGd, v0_TGd, own, queries.at_JS, queries.slot_S, queries.first_S)
        return F.pad(out, (0, 0, 0, 0, 0, beyond))
    if impl == "triton":
        from fledge.kernels.ttt_attention_triton import ttt_attention_triton

        return ttt_attention_triton(q_SHd, k0_TGd, v0_TGd, own, queries.at_JS, queries.slot_S, queries.first_S)
    raise ValueError(f"attention {impl!r} is none of {', '.join(IMPLS)}")


def visible(queries: Queries, rows: slice, keys: range) -> Tensor:
    """Which keys of a range some of the queries may read, bool [S, N]: the same document, not later than itself."""
    key = torch.arange(keys.start, keys.stop, device=queries.slot_S.device)
    return (key >= queries.first_S[rows, None]) & (key <= queries.slot_S[rows, None])


def ttt_attention_reference(
    q_SHd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], queries: Queries
) -> Tensor:
    """The definition, dense over the whole row."""
    near = [(k[at], v[at]) for (k, v), at in zip(own, queries.at_JS, strict=True)]
    return _attend(q_SHd, k0_TGd, v0_TGd, near, visible(queries, slice(None), range(k0_TGd.shape[0])))


def _eager(
    q_SHd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], queries: Queries
) -> Tensor:
    """A block of whole documents at a time, so that the cost follows their lengths and not the row's."""
    S = q_SHd.shape[0]  # where there are as many own keys, every one is asked about, in order
    near = [(k, v) if k.shape[0] == S else (k[at], v[at]) for (k, v), at in zip(own, queries.at_JS, strict=True)]
    out = []
    for q0, q1, n0, n1 in queries.blocks:
        mask = visible(queries, slice(q0, q1), range(n0, n1))
        block = [(k[q0:q1], v[q0:q1]) for k, v in near]
        out.append(_attend(q_SHd[q0:q1], k0_TGd[n0:n1], v0_TGd[n0:n1], block, mask))
    return torch.cat(out) if out else torch.zeros_like(q_SHd)


def document_blocks(
    slots: Tensor, documents: Sequence[tuple[int, int]], width: int = 512
) -> list[tuple[int, int, int, int]]:
    """Cuts a row into blocks of whole documents of at most `width` tokens, a longer one into stretches of `width`
    queries that read its keys so far. Each block names its queries and keys; one without queries is left out.

    `slots` is ascending and on the CPU.
    """
    groups = group_documents(documents, width)
    cuts = torch.searchsorted(slots, torch.tensor([e for _, e in groups], dtype=slots.dtype)).tolist()
    blocks = []
    for q0, q1, (n0, n1) in zip([0, *cuts][: len(cuts)], cuts, groups, strict=True):
        if n1 - n0 <= width:
            blocks += [(q0, q1, n0, n1)] if q1 > q0 else []
        else:
            ends = [min(q + width, q1) for q in range(q0, q1, width)]
            blocks += [(q, e, n0, int(slots[e - 1]) + 1) for q, e in zip(range(q0, q1, width), ends, strict=True)]
    return blocks


def _attend(q_SHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    S, H, d = q_SHd.shape
    G = k_NGd.shape[1]
    q = q_SHd.view(S, G, H // G, d)
    past = torch.einsum("sgrd,ngd->grsn", q, k_NGd)
    past = at_least_float32(past).masked_fill(~mask, float("-inf"))
    near = [at_least_float32(torch.einsum("sgrd,sgd->grs", q, k))[..., None] for k, _ in own]
    weights = torch.cat([past, *near], dim=-1).mul(d**-0.5).softmax(-1).to(q.dtype)
    n = k_NGd.shape[0]
    out = torch.einsum("grsn,ngd->sgrd", weights[..., :n], v_NGd)
    for j, (_, v) in enumerate(own):
        out = out + weights[..., n + j].permute(2, 0, 1)[..., None] * v[:, :, None]
    return out.reshape(S, H, d)
