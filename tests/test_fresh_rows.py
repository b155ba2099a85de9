"""The rows of a draft's first pass, against lists."""

from __future__ import annotations

import torch

from fledge.ops.trees import FreshRows, fresh_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows_of(counts: list[int], R: int, **options: int) -> FreshRows:
    B = len(counts)
    token_BR, count_B = torch.arange(B * R, device=DEVICE).view(B, R) + 100, torch.tensor(counts, device=DEVICE)
    start_B, length_B = torch.arange(B, device=DEVICE) * 1000, torch.arange(B, device=DEVICE) * 7 + 3
    return fresh_rows(token_BR, count_B, start_B, length_B, **options)


def test_what_rows_are() -> None:
    rows = rows_of([2, 1], 3, masked=2, mask_token=5)
    assert rows.token_Bn.tolist() == [[100, 101, 5, 5, 5], [103, 5, 5, 5, 5]]
    assert rows.state_Bn.tolist() == [[0, 1, 6, 6, 6], [3, 6, 6, 6, 6]]
    assert rows.asked_BS.tolist() == [[1, 2, 3], [0, 1, 2]] and rows.root_B.tolist() == [101, 103]
    assert rows.slot_Bn.tolist() == [[3, 4, 5, 6, 7], [1010, 1011, 1012, 1013, 1014]]
    assert rows.position_M.tolist() == [3, 4, 5, 6, 7, 10, 11, 12, 13, 14]
    rows = rows_of([2, 1], 2, levels=3, expanded=4)
    assert rows.token_Bn.tolist() == [[100, 101], [102, 103]] and rows.state_Bn is None
    assert rows.asked_BS.tolist() == [[1], [0]] and rows.root_B.tolist() == [101, 102]
    assert rows.slot_BJ.tolist() == [[5, 6, 7, 8], [1011, 1012, 1013, 1014]]
    assert rows.position_M.tolist() == [3, 4, 10, 11, 5, 11, 6, 12, 7, 13]  # of rows, then of levels
    assert rows.slot_BJ[:, 1:2].flatten().data_ptr() == rows.slot_BJ[:, 1:].data_ptr(), "without a copy"


def test_a_request_without_tokens() -> None:
    """The root is then the first row, a token that nothing reads."""
    rows = rows_of([0, 4], 4, masked=1, mask_token=5)
    assert rows.token_Bn.tolist() == [[5] * 5, [104, 105, 106, 107, 5]]
    assert rows.asked_BS.tolist() == [[0, 1], [3, 4]] and rows.root_B.tolist() == [100, 107]
