"""`hash_keys`, `gumbel_argmax` and `coupled` in Triton: the states of all keys in one kernel, noise and argmax in one
pass over the scores, in float64 as in the definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.ops.device import with_unit_stride

BLOCK = 2048  # scores of a chunk
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
SECOND = tl.constexpr(0x94D049BB133111EB - (1 << 64))
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _fold(x, BY: tl.constexpr):
    return ((x >> BY) & ((1 << (64 - BY)) - 1)) ^ x


@triton.jit
def _mix(x):
    """SplitMix64's finaliser on int64."""
    x = _fold(x, 30) * FIRST
    x = _fold(x, 27) * SECOND
    return _fold(x, 31)


@triton.jit
def _hash_keys(
    seed_ptr, request_ptr, position_ptr, out_ptr, n, X, s0, s1, r0, r1, p0, p1,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // X, i % X
    seed = tl.load(seed_ptr + row * s0 + column * s1, mask=i < n, other=0)
    request = tl.load(request_ptr + row * r0 + column * r1, mask=i < n, other=0)
    position = tl.load(position_ptr + row * p0 + column * p1, mask=i < n, other=0)
    state = _mix(seed + GOLDEN)
    state = _mix(state + GOLDEN + request)
    state = _mix(state + GOLDEN + position)
    tl.store(out_ptr + i, _mix(state + GOLDEN + PURPOSE), mask=i < n)


@triton.jit
def _minus_noise(state, token):
    """The negative Gumbel variates of a state at tokens, int64."""
    bits = (_mix((token + 1) * GOLDEN + state) >> 12) & ((1 << 52) - 1)
    return tl.log(-tl.log((bits.to(tl.float64) + 0.5) * (1.0 / (1 << 52))))


@triton.jit
def _best_of_chunk(x_ptr, state_ptr, value_ptr, place_ptr, sx, V, BLOCK: tl.constexpr):
    """The largest score plus noise of a chunk, and its place; of equal ones, the first."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(x_ptr + row * sx + i, mask=i < V, other=float("-inf")).to(tl.float64)
    value = score - _minus_noise(tl.load(state_ptr + row), i.to(tl.int64))
    best = tl.max(value, 0)
    at = row * tl.num_programs(0) + chunk
    tl.store(value_ptr + at, best)
    tl.store(place_ptr + at, tl.min(tl.where((value == best) & (i < V), i, NOWHERE), 0))


@triton.jit
def _best_of_row(value_ptr, place_ptr, out_ptr, chunks, CHUNKS: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    value = tl.load(value_ptr + row * chunks + c, mask=c < chunks, other=float("-inf"))
    place = tl.load(place_ptr + row * chunks + c, mask=c < chunks, other=NOWHERE)
    best = tl.min(tl.where(value == tl.max(value, 0), place, NOWHERE), 0)
    tl.store(out_ptr + row, tl.where(best == NOWHERE, 0, best).to(tl.int64))


@triton.jit
def _coupled(x_ptr, state_ptr, temperature_ptr, ids_ptr, out_ptr, sx, W, S, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr):
    i, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    x = tl.load(x_ptr + row * sx + i, mask=i < W, other=0.0).to(tl.float64)
    temperature = tl.load(temperature_ptr + row // S)
    if temperature > 0:
        token = tl.load(ids_ptr + i, mask=i < W, other=0) if HAS_IDS else i.to(tl.int64)
        x = x / temperature - _minus_noise(tl.load(state_ptr + row), token)
    tl.store(out_ptr + row * W + i, x.to(tl.float32), mask=i < W)


def hash_keys_triton(seed: Tensor, request: Tensor, position: Tensor, purpose: int) -> Tensor:
    """`hash_keys` of tensors with at most two dimensions."""
    parts = torch.broadcast_tensors(seed, request, position)
    shape = parts[0].shape
    seed, request, position = (x.expand(1, 1) if x.dim() == 0 else x[None] if x.dim() == 1 else x for x in parts)
    out = torch.empty(shape, dtype=torch.int64, device=seed.device)
    if n := out.numel():
        strides = *seed.stride(), *request.stride(), *position.stride()
        _hash_keys[(triton.cdiv(n, 128),)](
            seed, request, position, out, n, seed.shape[1], *strides, PURPOSE=purpose, BLOCK=128, num_warps=1
        )
    return out


def gumbel_argmax_triton(scores: Tensor, state: Tensor) -> Tensor:
    """`gumbel_argmax` of rows without NaN. Of a row with only NaN, the result is a valid index that means nothing."""
    rows = with_unit_stride(scores.reshape(-1, scores.shape[-1]))
    (M, V), device = rows.shape, rows.device
    chunks = triton.cdiv(V, BLOCK)
    out = torch.empty(scores.shape[:-1], dtype=torch.int64, device=device)
    if M:
        value = torch.empty(M * chunks, dtype=torch.float64, device=device)
        place = torch.empty(M * chunks, dtype=torch.int32, device=device)
        states = state.broadcast_to(scores.shape[:-1]).contiguous()
        _best_of_chunk[(chunks, M)](rows, states, value, place, rows.stride(0), V, BLOCK=BLOCK, num_warps=4)
        _best_of_row[(M,)](value, place, out, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    return out


def coupled_triton(logits_BSW: Tensor, state_BS: Tensor, temperature_B: Tensor, ids_W: Tensor | None) -> Tensor:
    """See `coupled`."""
    B, S, W = logits_BSW.shape
    rows = with_unit_stride(logits_BSW.reshape(B * S, W))
    out = torch.empty(B, S, W, dtype=torch.float32, device=rows.device)
    if B * S:
        states = state_BS.expand(B, S).contiguous()
        ids = states if ids_W is None else ids_W
        _coupled[(triton.cdiv(W, BLOCK), B * S)](
            rows, states, temperature_B, ids, out, rows.stride(0), W, S, HAS_IDS=ids_W is not None, BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
    return out
