"""`linear` for few rows equals `F.linear` in every shape, and the target's and the draft's linear layers use it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fledge.drafts.layers import Linear
from fledge.ops import linear as linear_module
from fledge.ops.linear import linear, strided_linear
from support.targets import tiny_draft, tiny_target


@pytest.fixture(params=[0, 8], ids=["Intel", "others"])
def few_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of an Intel CPU and those of others, whatever this one is."""
    monkeypatch.setattr(linear_module, "FEW_ROWS_ON_CPU", request.param)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (2, 8), (8, 8), (9, 8), (1, 3, 8), (2, 3, 8), (0, 8), (8,)])
def test_products_of_few_rows(shape: tuple[int, ...], bias: bool, few_rows: None) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(shape, requires_grad=True), torch.randn(5, 8, requires_grad=True), torch.randn(5)
    ours, plain = linear(x, w, b if bias else None), F.linear(x, w, b if bias else None)
    torch.testing.assert_close(ours, plain)
    assert ours.is_contiguous()
    weights = torch.randn_like(plain)
    for a, c in zip(
        torch.autograd.grad(ours, (x, w), weights), torch.autograd.grad(plain, (x, w), weights), strict=True
    ):
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 9])
def test_products_plus_a_residual(rows: int, bias: bool, few_rows: None) -> None:
    torch.manual_seed(0)
    x, w, b, residual = torch.randn(rows, 8), torch.randn(5, 8), torch.randn(5), torch.randn(rows, 5)
    b = b if bias else None
    torch.testing.assert_close(strided_linear(x, w, b, residual), residual + F.linear(x, w, b))
    torch.testing.assert_close(strided_linear(x, w, b), F.linear(x, w, b))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    x, w = torch.randn(3, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    assert torch.equal(linear(x, w), F.linear(x, w))


def test_target_and_draft_use_this_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    draft = tiny_draft(target)
    theirs, ours = ([m for m in model.modules() if isinstance(m, nn.Linear)] for model in (target.model, draft))
    assert theirs and all("forward" in vars(m) for m in theirs)
    assert ours and all(type(m) is Linear for m in ours)
    ids, logits = torch.arange(3, 10)[None], []
    for rows in (0, 8):
        monkeypatch.setattr(linear_module, "FEW_ROWS_ON_CPU", rows)
        logits.append(target.model(ids).logits)
    torch.testing.assert_close(*logits)
