"""Causal attention of several sequences whose rows are packed one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.attention import causal_attention
from fledge.ops.sdpa import without_cudnn_sdpa
from fledge.ops.transfer import to_device

SHORT = 64  # rows; sequences of at most so many attend together, whatever their lengths


@dataclass(frozen=True)
class _Group:
    """Sequences that attend in one call, as rows of equal length N. int64: `row_BN` are their rows and `slot_BN` the
    slots of their keys, both padded with a sequence's last."""

    row_BN: Tensor
    slot_BN: Tensor


class PackedAttention:
    """Attention of M rows, `counts[b]` of each sequence after its first `lengths[b]` tokens, to all tokens of their
    sequence up to their own.

    Sequence b has the slots from `starts[b]` on. `slot_M` are those of the rows, and `position_M` their places in their
    sequences, int64 on the device. `place_M` are the rows' places among the results of all calls, one after the other,
    which are `in_order` if only the last one has padding. By definition each sequence attends by itself
    (`causal_attention`). With `grouped`, those without earlier tokens attend in groups of similar lengths, with one
    call of torch's attention for each: they are padded at the end, which no other row sees, so that no mask is needed.
    None: on a GPU, where a call takes as long as its launch; a CPU computes the padding too.
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
        self.in_order = torch.equal(place_M, rows)
        indices = [position_M, position_M + start_M, place_M, *(x for group in groups for x in self._indices(group))]
        self.position_M, self.slot_M, self.place_M, *indices = to_device(indices, device)
        self.groups = [_Group(*indices[i : i + 2]) for i in range(0, len(indices), 2)]

    def _groups(self) -> list[list[int]]:
        """The sequences of each group of two or more, with at most half of each one's rows as padding where they are
        not SHORT."""
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
        """The place of each sequence's first row among the results: the groups' one after the other, with their
        padding, then those of the sequences that attend alone."""
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
        if not groups or self.in_order:
            return whole[: len(q_MHd)]  # without the padding of the last sequence
        return whole[self.place_M]


def _attend(q_MHd: Tensor, keys_GPd: Tensor, values_GPd: Tensor, group: _Group, scale: float | None) -> Tensor:
    q_BHNd = q_MHd[group.row_BN].transpose(1, 2)
    keys_BGNd, values_BGNd = (x[:, group.slot_BN].transpose(0, 1) for x in (keys_GPd, values_GPd))
    shared = q_BHNd.shape[1] != keys_BGNd.shape[1]
    with without_cudnn_sdpa(q_MHd.device):
        out_BHNd = F.scaled_dot_product_attention(
            q_BHNd, keys_BGNd, values_BGNd, is_causal=True, scale=scale, enable_gqa=shared
        )
    return out_BHNd.transpose(1, 2)
