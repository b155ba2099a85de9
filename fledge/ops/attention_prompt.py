"""Grouped-query attention with torch's kernels: of a few queries to many keys, of prompts, and of packed sequences."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fledge.ops.device import to_device

QUERIES = 2048  # queries of a prompt that attend together if they need a mask
SHORT = 64  # rows; sequences of at most so many attend together, whatever their lengths
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def without_cudnn_sdpa(device: torch.device) -> contextlib.AbstractContextManager:
    """Context manager: lets torch's attention use BACKENDS, so not cuDNN, on CUDA devices; no effect elsewhere.

    Setting BACKENDS takes the host longer than launching attention. If exactly BACKENDS are set already, nothing is
    done: a pass that enters the context around all layers sets BACKENDS only once.

    Torch prefers cuDNN on Hopper GPUs, but cuDNN builds a new plan for every new sequence length, and decoding and
    packed documents produce new lengths all the time. On an H200, a plan took as long as a thousand calls.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    flags = torch.backends.cuda
    others = flags.flash_sdp_enabled() and flags.mem_efficient_sdp_enabled() and flags.math_sdp_enabled()
    return contextlib.nullcontext() if others and not flags.cudnn_sdp_enabled() else sdpa_kernel(BACKENDS)


def grouped_attention(
    q_BHSd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """softmax(q kᵀ scale + mask) v, [B, S, H, d], with H / G consecutive query heads per key-value head.

    `mask` is from `prepare_mask`, for H / G heads per key and the queries' dtype and device; None if every query sees
    all keys. `scale` None is 1/√d. Keys and values are not repeated for query heads that share a key head: on the CPU,
    torch supports shared keys directly; on other devices, torch would copy shared keys if given a mask, so
    `heads_as_rows` is used.
    """
    if q_BHSd.device.type != "cpu":
        return heads_as_rows(q_BHSd, k_BGLd, v_BGLd, mask, scale)
    out = F.scaled_dot_product_attention(q_BHSd, k_BGLd, v_BGLd, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def heads_as_rows(
    q_BHSd: Tensor, k_BGLd: Tensor, v_BGLd: Tensor, mask_B1RL: Tensor | None, scale: float | None = None
) -> Tensor:
    """`grouped_attention` with the query heads of a group as further rows of one head. The mask has R = H / G · S rows,
    S for each head (`additive_mask`)."""
    B, H, S, d = q_BHSd.shape
    groups = H // k_BGLd.shape[1]
    q = q_BHSd.reshape(B, -1, groups * S, d)
    out = F.scaled_dot_product_attention(q, k_BGLd, v_BGLd, attn_mask=mask_B1RL, scale=scale)
    return out.unflatten(2, (groups, S)).permute(0, 3, 1, 2, 4).reshape(B, S, H, -1)


def prepare_mask(mask_B1SL: Tensor, heads_per_key: int, dtype: torch.dtype) -> Tensor:
    """Converts a bool mask (True: visible) or an additive mask for `grouped_attention`, once for all layers. Returns an
    additive mask, [B, 1, S, L] on the CPU and [B, 1, heads_per_key · S, L] on other devices."""
    return additive_mask(mask_B1SL, mask_repeats(mask_B1SL.device, heads_per_key), dtype)


def mask_repeats(device: torch.device, heads_per_key: int) -> int:
    """The number of times that a prepared mask repeats its S rows."""
    return 1 if device.type == "cpu" else heads_per_key


def additive_mask(mask_B1SL: Tensor, times: int, dtype: torch.dtype) -> Tensor:
    """The additive mask [B, 1, times · S, L], with its S rows repeated `times` times. The stride of the rows is a
    multiple of 8 values, so that torch's attention does not copy the mask in every layer."""
    B, _, S, L = mask_B1SL.shape
    added = torch.zeros(B, 1, times, S, -(-L // 8) * 8, dtype=dtype, device=mask_B1SL.device)[..., :L]
    if mask_B1SL.dtype == torch.bool:
        added.masked_fill_(~mask_B1SL[:, :, None], float("-inf"))
    else:
        added.copy_(mask_B1SL[:, :, None])
    return added.flatten(2, 3)


def _flash_supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's flash attention takes queries and keys of these dtypes and shapes, possibly with shared keys."""
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, q.shape[1] != k.shape[1])
    return q.is_cuda and torch.backends.cuda.can_use_flash_attention(params)


def causal_attention(
    q_SHd: Tensor, keys_GLd: Tensor, values_GLd: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention of the last S of L tokens of a sequence, [S, H, d]: each token reads itself and all earlier
    tokens, or with a window the last `window` of these."""
    (S, H, _), (G, L, _) = q_SHd.shape, keys_GLd.shape
    q, k, v = q_SHd.transpose(0, 1)[None], keys_GLd[None], values_GLd[None]
    options = dict(scale=scale, enable_gqa=H != G)
    with without_cudnn_sdpa(q.device):
        everything = window is None or window >= L
        if everything and S == L:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)[0].transpose(0, 1)
        if everything and _flash_supports(q, k, v):  # no mask has to be read
            from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, for a second

            return F.scaled_dot_product_attention(q, k, v, causal_lower_right(S, L), **options)[0].transpose(0, 1)
        parts = []
        for first in range(L - S, L, QUERIES):  # in parts, so that the mask is small
            end = min(first + QUERIES, L)
            seen = slice(max(0, first + 1 - window) if window else 0, end)
            at, key = torch.arange(first, end, device=q.device)[:, None], torch.arange(end, device=q.device)[seen]
            mask = key <= at
            if window is not None:
                mask &= key > at - window
            rows, keys, values = q[:, :, first - (L - S) : end - (L - S)], keys_GLd[:, seen], values_GLd[:, seen]
            if q.device.type != "cpu":  # on GPUs, torch's fast backends do not support shared keys with a mask
                keys, values = (x.repeat_interleave(H // G, dim=0) for x in (keys, values))
                options["enable_gqa"] = False
            parts.append(F.scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask, **options)[0])
    return torch.cat(parts, dim=1).transpose(0, 1)


@dataclass(frozen=True)
class _Group:
    """Sequences that attend in one call, padded to the equal length N. `row_BN` are the sequences' rows and `slot_BN`
    the slots of their keys, int64; the padding repeats a sequence's last row and slot."""

    row_BN: Tensor
    slot_BN: Tensor


class PackedAttention:
    """Causal attention of M rows, `counts[b]` of each sequence after the sequence's first `lengths[b]` tokens. Each row
    reads the tokens of its sequence up to and including the row's token.

    Sequence b has the slots from `starts[b]` on. `slot_M` are the rows' slots, and `position_M` the rows' positions in
    their sequences, int64 on the device. `place_M` are the rows' places among the concatenated results of all calls. By
    definition each sequence attends by itself (`causal_attention`). With `grouped`, sequences without earlier tokens
    attend in groups of similar lengths, by one call of torch's attention per group. The padding is at the end,
    invisible to all rows, so no mask is needed.
    `grouped` None is True on a GPU, where a call costs a launch, and False on a CPU, which would compute the padding.
    """

    def __init__(
        self, counts: Sequence[int], lengths: Sequence[int], starts: Sequence[int], device: torch.device,
        grouped: bool | None = None,
    ):  # fmt: skip
        self.counts, self.lengths, self.starts = list(counts), list(lengths), list(starts)
        self.firsts = [0, *itertools.accumulate(counts)]  # each sequence's first row
        rows = torch.arange(self.firsts.pop())
        groups = self._groups() if grouped or (grouped is None and device.type != "cpu") else []
        members = {b for group in groups for b in group}
        self.alone = [b for b, count in enumerate(self.counts) if count and b not in members]
        self.longest = max((self.counts[b] for b in members), default=0)
        place_B4 = torch.tensor([self.starts, self.lengths, self.firsts, self._found_at(groups)]).T
        # not by repeat_interleave, which starts all cores' threads for a few numbers
        place_M4 = torch.cat([place_4.expand(n, 4) for place_4, n in zip(place_B4, self.counts, strict=True)])
        start_M, length_M, first_M, found_M = place_M4.unbind(1)
        position_M, place_M = rows + length_M - first_M, rows + found_M - first_M
        indices = [position_M, position_M + start_M, place_M, *(x for group in groups for x in self._indices(group))]
        self.position_M, self.slot_M, self.place_M, *indices = to_device(indices, device)
        self.groups = [_Group(*indices[i : i + 2]) for i in range(0, len(indices), 2)]

    def _groups(self) -> list[list[int]]:
        """The groups of two or more sequences. In a group longer than SHORT rows, at most half of a sequence's padded
        rows are padding."""
        fresh = [b for b, count in enumerate(self.counts) if count and not self.lengths[b]]
        groups: list[list[int]] = []
        for b in sorted(fresh, key=lambda b: -self.counts[b]):
            longest = self.counts[groups[-1][0]] if groups else 0
            if groups and (longest <= SHORT or 2 * self.counts[b] >= longest):
                groups[-1].append(b)
            else:
                groups.append([b])
        return [group for group in groups if len(group) > 1]

    def _found_at(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """The place of each sequence's first row among the concatenated results: first the groups' results, with
        padding, then the results of sequences that attend alone."""
        found, end = [0] * len(self.counts), 0
        for group in groups:
            for b in group:
                found[b], end = end, end + self.counts[group[0]]
        for b in self.alone:
            found[b], end = end, end + self.counts[b]
        return found

    def _indices(self, group: Sequence[int]) -> list[Tensor]:
        """The tensors of a `_Group`."""
        count_B1, start_B1, first_B1 = (
            torch.tensor([x[b] for b in group])[:, None] for x in (self.counts, self.starts, self.firsts)
        )
        place_BN = torch.minimum(torch.arange(self.counts[group[0]]), count_B1 - 1)
        return [first_B1 + place_BN, start_B1 + place_BN]

    def __call__(
        self, q_MHd: Tensor, keys_GPd: Tensor, values_GPd: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """The heads' outputs [M, H, d]. `scale` None is d^-1/2. With a window, rows see the last `window` tokens."""
        # torch's fast attention on a GPU has no 32 bits; without it, padded groups would need the more memory
        slow = q_MHd.is_cuda and q_MHd.dtype in (torch.float32, torch.float64)
        if slow or (window is not None and window < self.longest):
            groups, alone = [], [b for b, count in enumerate(self.counts) if count]
        else:
            groups, alone = self.groups, self.alone
        found = [_attend(q_MHd, keys_GPd, values_GPd, group, scale).flatten(0, 1) for group in groups]
        for b in alone:
            rows = slice(self.firsts[b], self.firsts[b] + self.counts[b])
            slots = slice(self.starts[b], self.starts[b] + self.lengths[b] + self.counts[b])
            found.append(causal_attention(q_MHd[rows], keys_GPd[:, slots], values_GPd[:, slots], scale, window))
        if not found:
            return torch.empty_like(q_MHd)
        whole = torch.cat(found) if len(found) > 1 else found[0]
        return whole[self.place_M] if groups else whole


def _attend(q_MHd: Tensor, keys_GPd: Tensor, values_GPd: Tensor, group: _Group, scale: float | None) -> Tensor:
    """Causal attention of a padded group of sequences in one call, [B, N, H, d]. The sequences have no earlier tokens,
    so that `is_causal` suffices."""
    q_BHNd = q_MHd[group.row_BN].transpose(1, 2)
    keys_BGNd, values_BGNd = (x[:, group.slot_BN].transpose(0, 1) for x in (keys_GPd, values_GPd))
    grouped_query = q_BHNd.shape[1] != keys_BGNd.shape[1]
    with without_cudnn_sdpa(q_MHd.device):
        out_BHNd = F.scaled_dot_product_attention(
            q_BHNd, keys_BGNd, values_BGNd, is_causal=True, scale=scale, enable_gqa=grouped_query
        )
    return out_BHNd.transpose(1, 2)
