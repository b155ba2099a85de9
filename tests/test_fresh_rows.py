"""The rows of a draft's first pass: the kernel against its definition, and this against lists."""

from __future__ import annotations

import pytest
import torch

from fledge.ops.device import computed_by
from fledge.ops.trees import FreshRows, fresh_rows
from support.devices import needs_triton

needs_triton()

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows_of(counts: list[int], R: int, impl: str, strided: bool = False, **options: int) -> FreshRows:
    B = len(counts)
    token_BR, count_B = torch.arange(B * R, device=DEVICE).view(B, R) + 100, torch.tensor(counts, device=DEVICE)
    token_BR = token_BR.T.contiguous().T if strided else token_BR
    start_B, length_B = torch.arange(B, device=DEVICE) * 1000, torch.arange(B, device=DEVICE) * 7 + 3
    with computed_by(impl):
        return fresh_rows(token_BR, count_B, start_B, length_B, **options)


@pytest.mark.parametrize("options", [{}, dict(masked=6, mask_token=5), dict(levels=7, expanded=70), dict(levels=1)])
@pytest.mark.parametrize(("counts", "R"), [([1], 1), ([3], 8), ([2, 1, 5], 5), ([0, 4], 4)])
def test_the_kernel(counts: list[int], R: int, options: dict[str, int]) -> None:
    """Equal for contiguous and strided tokens, with requests that have no tokens."""
    for strided in (False, True):
        ours, exact = (vars(rows_of(counts, R, impl, strided, **options)) for impl in ("triton", "definition"))
        for name, x in exact.items():
            assert x is ours[name] is None or (torch.equal(ours[name], x) and ours[name].dtype == x.dtype), name


@pytest.mark.parametrize("impl", ["definition", "triton"])
def test_what_rows_are(impl: str) -> None:
    rows = rows_of([2, 1], 3, impl, masked=2, mask_token=5)
    assert rows.token_Bn.tolist() == [[100, 101, 5, 5, 5], [103, 5, 5, 5, 5]]
    assert rows.state_Bn.tolist() == [[0, 1, 6, 6, 6], [3, 6, 6, 6, 6]]
    assert rows.asked_BS.tolist() == [[1, 2, 3], [0, 1, 2]] and rows.root_B.tolist() == [101, 103]
    assert rows.slot_Bn.tolist() == [[3, 4, 5, 6, 7], [1010, 1011, 1012, 1013, 1014]]
    assert rows.position_M.tolist() == [3, 4, 5, 6, 7, 10, 11, 12, 13, 14]
    rows = rows_of([2, 1], 2, impl, levels=3, expanded=4)
    assert rows.token_Bn.tolist() == [[100, 101], [102, 103]] and rows.state_Bn is None
    assert rows.asked_BS.tolist() == [[1], [0]] and rows.root_B.tolist() == [101, 102]
    assert rows.slot_BJ.tolist() == [[5, 6, 7, 8], [1011, 1012, 1013, 1014]]
    assert rows.position_M.tolist() == [3, 4, 10, 11, 5, 11, 6, 12, 7, 13]  # of rows, then of levels
    if impl == "triton":  # without a copy
        assert rows.slot_BJ[:, 1:2].flatten().data_ptr() == rows.slot_BJ[:, 1:].data_ptr()
