"""Attention of training-time test (TTT, EAGLE-3, arXiv:2503.01840, section 3.2).

At step k, slot t attends to the keys K0 of all slots s <= t of the same document, which step 0 computes from target
features, and to the slot's own keys of steps 1 .. k, which are computed from the draft's own hidden states. The causal
part is the same at every step:

    out = softmax(d^-1/2 [q . K0_s for s <= t in doc(t) ; q . k_1 ; .. ; q . k_k]) [V0 ; v_1 ; .. ; v_k]

Scores and softmax are computed in at least float32. `ttt_attention` has three implementations with the values and
gradients of `ttt_attention_reference`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.device import at_least_float32
from fledge.types import group_documents

IMPLS = ("eager", "flex", "triton")
# keys in a dense block of the eager implementation; larger blocks compute more masked scores, smaller ones launch more
BLOCK = {"cpu": 512, "cuda": 2048}
FLEX_BLOCK = 128  # queries and keys of a block of FlexAttention
MIN_HEAD_DIM = 16  # FlexAttention's minimum head size; smaller heads are padded
# not the decoding kernel that torch selects for few queries: it has no tiles for about 100 queries of several heads
OPTIONS = {"BACKEND": "TRITON"}


class OwnSteps(list[tuple[Tensor, Tensor]]):
    """The (keys, values) of the slots' own steps 1 .. J, each [P_j, G, d].

    All steps of a chunk of slots share one list: each step appends its keys and values and then attends. The backward
    pass can therefore sum the gradients of each step's keys in one tensor (`OwnGradients`). This requires a single
    backward pass through all steps, without activation checkpointing around a step.
    """

    def __init__(self, steps: Iterable[tuple[Tensor, Tensor]] = ()):
        super().__init__(steps)
        self.gradients = OwnGradients()


class OwnGradients:
    """Sums the gradients of own keys and values over the attention calls that read them.

    The backward pass that runs last for a step returns the sum to autograd. The keys are not stored here, which would
    be a reference cycle with the tensors that autograd saves.
    """

    def __init__(self) -> None:
        self.readers: Counter[int] = Counter()
        self.sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add_reader(self, steps: int) -> None:
        """Registers an attention call that reads the first `steps` own steps."""
        self.readers.update(range(steps))

    def buffers(self, step: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors in which the gradients of a step's keys and values are summed."""
        assert self.readers[step], "the backward pass ran twice; the sums of the first one are gone"
        if step not in self.sums:
            self.sums[step] = torch.zeros_like(keys), torch.zeros_like(values)
        return self.sums[step]

    def finish_reader(self, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Marks a reader's gradient as added. Returns the sums for the last reader, and (None, None) before."""
        self.readers[step] -= 1
        return (None, None) if self.readers[step] else self.sums.pop(step)


@dataclass(frozen=True)
class Queries:
    """The S queries of a step and the keys that each may read; the tensors are int32 on the device.

    Query i reads the keys first_S[i] .. slot_S[i] of the row; `first_S` is the first slot of its document. Both are
    ascending. `own_row_JS` is the row of each query in the own keys of steps 1 .. J. `blocks` are Python tuples (first
    query, end query, first key, end key) that cover every query with all keys it may read (`document_blocks`).
    """

    slot_S: Tensor
    first_S: Tensor
    own_row_JS: Tensor
    blocks: Sequence[tuple[int, int, int, int]]


def document_blocks(
    slots: Tensor, documents: Sequence[tuple[int, int]], width: int = 512
) -> list[tuple[int, int, int, int]]:
    """Splits a row into blocks (first query, end query, first key, end key) for `Queries.blocks`.

    A block has complete documents of at most `width` tokens together. A longer document is split into blocks of `width`
    queries, each with the document's keys up to its last query. Blocks without queries are left out. `slots` are the
    slots of the queries, ascending, on the CPU; `documents` are [start, end) token ranges.
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


def ttt_attention(
    q_SHd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], queries: Queries,
    impl: str = "eager",
) -> Tensor:  # fmt: skip
    """Attention of S queries over T keys and their own keys of J steps. Returns a tensor of the shape of `q_SHd`.

    `own` has the (keys, values) of each own step, of shape [P_j, G, d]; `queries.own_row_JS` selects the row of each
    query. `q_SHd` may have more rows than `queries` has queries; the result is zero in those padding rows.

    `impl` is "eager" (plain torch, in dense blocks of documents), "flex" (FlexAttention) or "triton" (fledge's Triton
    kernels). "flex" needs a GPU; "triton" needs a GPU or Triton's interpreter. Raises ValueError for any other value.
    """
    S, padding = queries.slot_S.numel(), q_SHd.shape[0] - queries.slot_S.numel()
    if impl == "eager":
        return F.pad(ttt_attention_eager(q_SHd[:S], k0_TGd, v0_TGd, own, queries), (0, 0, 0, 0, 0, padding))
    if impl == "flex":
        return F.pad(ttt_attention_flex(q_SHd[:S], k0_TGd, v0_TGd, own, queries), (0, 0, 0, 0, 0, padding))
    if impl == "triton":
        from fledge.ops.attention_ttt_triton import ttt_attention_triton

        own = own if isinstance(own, OwnSteps) else OwnSteps(own)
        return ttt_attention_triton(q_SHd, k0_TGd, v0_TGd, own, queries)
    raise ValueError(f"attention {impl!r} must be one of {', '.join(IMPLS)}")


def visible(queries: Queries, rows: slice, keys: range) -> Tensor:
    """The attention mask of some queries and a range of N keys, bool [S, N]: same document, and causal."""
    key = torch.arange(keys.start, keys.stop, device=queries.slot_S.device)
    return (key >= queries.first_S[rows, None]) & (key <= queries.slot_S[rows, None])


def ttt_attention_reference(
    q_SHd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], queries: Queries
) -> Tensor:
    """The definition: dense attention over all keys of the row."""
    own_rows = [(k[at], v[at]) for (k, v), at in zip(own, queries.own_row_JS, strict=True)]
    return _attend(q_SHd, k0_TGd, v0_TGd, own_rows, visible(queries, slice(None), range(k0_TGd.shape[0])))


def ttt_attention_eager(
    q_SHd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], queries: Queries
) -> Tensor:
    """Attention in dense blocks of complete documents, whose cost depends on the documents' lengths, not the row's."""
    S = q_SHd.shape[0]  # a step with S own keys has one for each query, in order: no gather is needed
    own_rows = [
        (k, v) if k.shape[0] == S else (k[at], v[at]) for (k, v), at in zip(own, queries.own_row_JS, strict=True)
    ]
    out = []
    for q0, q1, n0, n1 in queries.blocks:
        mask = visible(queries, slice(q0, q1), range(n0, n1))
        block = [(k[q0:q1], v[q0:q1]) for k, v in own_rows]
        out.append(_attend(q_SHd[q0:q1], k0_TGd[n0:n1], v0_TGd[n0:n1], block, mask))
    return torch.cat(out) if out else torch.zeros_like(q_SHd)


def _attend(q_SHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    S, H, d = q_SHd.shape
    G = k_NGd.shape[1]
    q = q_SHd.view(S, G, H // G, d)
    scores = torch.einsum("sgrd,ngd->grsn", q, k_NGd)
    scores = at_least_float32(scores).masked_fill(~mask, float("-inf"))
    own_scores = [at_least_float32(torch.einsum("sgrd,sgd->grs", q, k))[..., None] for k, _ in own]
    weights = torch.cat([scores, *own_scores], dim=-1).mul(d**-0.5).softmax(-1).to(q.dtype)
    n = k_NGd.shape[0]
    out = torch.einsum("grsn,ngd->sgrd", weights[..., :n], v_NGd)
    for j, (_, v) in enumerate(own):
        out = out + weights[..., n + j].permute(2, 0, 1)[..., None] * v[:, :, None]
    return out.reshape(S, H, d)


@functools.cache
def compiled_flex_attention():
    """flex_attention, compiled once for all lengths."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def ttt_attention_flex(
    q_SHd: Tensor, k0_TGd: Tensor, v0_TGd: Tensor, own: Sequence[tuple[Tensor, Tensor]], queries: Queries
) -> Tensor:
    """`ttt_attention_reference` by FlexAttention over the row's keys, merged with the own keys by its log-sum-exp, on a
    GPU. Returns [S, H, d].

    Raises ValueError on a CPU, where FlexAttention has no backward pass.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if q_SHd.device.type == "cpu":
        raise ValueError("attention 'flex' has no backward pass on a CPU; use 'eager'")
    (S, H, d), (T, G, _), slot_S, first_S = q_SHd.shape, k0_TGd.shape, queries.slot_S, queries.first_S
    if not S:
        return q_SHd
    mask = create_block_mask(
        lambda b, h, q, k: (k >= first_S[q]) & (k <= slot_S[q]), None, None, S, T, device=q_SHd.device,
        BLOCK_SIZE=FLEX_BLOCK,
    )  # fmt: skip
    q, k, v = (x.transpose(0, 1)[None] for x in (q_SHd, k0_TGd, v0_TGd))
    if d < MIN_HEAD_DIM:
        q, k, v = (F.pad(x, (0, MIN_HEAD_DIM - d)) for x in (q, k, v))
    how = dict(block_mask=mask, enable_gqa=H != G, scale=d**-0.5, return_lse=True, kernel_options=OPTIONS)
    past, lse = compiled_flex_attention()(q, k, v, **how)
    past = past[0, ..., :d].transpose(0, 1)
    if not own:
        return past
    rows = [
        (keys.index_select(0, at), values.index_select(0, at))
        for (keys, values), at in zip(own, queries.own_row_JS, strict=True)
    ]
    q = q_SHd.view(S, G, H // G, d)
    own_scores = [at_least_float32(torch.einsum("sgrd,sgd->sgr", q, keys)) * d**-0.5 for keys, _ in rows]
    lse = lse[0].T.view(S, G, H // G)
    weights = torch.stack([lse, *own_scores], dim=-1).softmax(-1).to(q.dtype)
    out = weights[..., :1] * past.reshape(S, G, H // G, d)
    for j, (_, values) in enumerate(rows):
        out = out + weights[..., j + 1 : j + 2] * values[:, :, None]
    return out.view(S, H, d)
