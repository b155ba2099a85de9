"""Rows come with their own features, in order, wherever and whenever those are made."""

from __future__ import annotations

import pytest
import torch
from conftest import break_on_purpose, document, row_of

from fledge.train import ahead
from fledge.types import Features, Packed

ROWS = [row_of([document(8, seed=i)]) for i in range(9)]


def sums(device: str, begun: list[int], *, one_ahead: bool) -> list[int]:
    """What is read of each row's features, late; `begun` says how many rows' were begun by then."""
    made = 0

    def features(row: Packed) -> Features:
        nonlocal made
        made += 1
        if device == "cuda":
            torch.cuda._sleep(5_000_000)
        token_T = row.token_T.to(device, torch.int64, non_blocking=True)
        return Features(token_T.expand(100_000, -1).clone(), token_T.clone())

    found = []
    for row, given in ahead.with_features(iter(ROWS), features, torch.device(device), ahead=one_ahead):
        begun.append(made)
        assert row is ROWS[len(found)]
        if device == "cuda":
            torch.cuda._sleep(20_000_000)
        found.append(given.aux_TAD.sum() - 99_999 * given.last_TD.sum())
        del given
    return torch.stack(found).tolist()


EXPECTED = [int(row.token_T.sum()) for row in ROWS]


def test_one_after_the_other() -> None:
    begun: list[int] = []
    assert sums("cpu", begun, one_ahead=False) == EXPECTED
    assert begun == list(range(1, 10)), "none is made before it is asked for"


@pytest.mark.gpu
@pytest.mark.parametrize("without", ["", "stream.wait_stream(torch.cuda.current_stream(device))"])
def test_one_row_ahead(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made while the row before is still in use, and never in the place of one that is."""
    if without:
        break_on_purpose(monkeypatch, ahead, "with_features", without, "pass")
    begun: list[int] = []
    assert (sums("cuda", begun, one_ahead=True) == EXPECTED) != bool(without)
    assert begun == [2, 3, 4, 5, 6, 7, 8, 9, 9]
