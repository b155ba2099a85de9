"""Helpers that depend on the machine: whether there is a GPU, and whether Triton runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.drafts.draft import Draft
from fledge.ops.device import computed_by
from fledge.targets.compatibility import connect_draft
from fledge.targets.transformers import TransformersTarget


def on_device(target: TransformersTarget, draft: Draft) -> None:
    """Moves target and draft to the GPU if there is one, because compiled Triton kernels do not take CPU tensors."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target.model.to(device), draft.to(device)
    connect_draft(draft, target)


def by_both(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """The results of an operation's kernel and of its definition."""
    found = []
    for implementation in ("triton", "definition"):
        with computed_by(implementation):
            found.append(function(*arguments, **options))
    return found[0], found[1]


def needs_triton() -> None:
    """Skips the test if Triton is not installed, or if its interpreter is needed and does not work (Triton 3.6 with
    numpy 2.4, where it converts a one-element array to a number)."""
    pytest.importorskip("triton", reason="Triton is not installed; it exists only for Linux")
    from fledge.ops.loss import LossOptions, Teacher, loss_and_gradients
    from fledge.ops.training_triton import silu_mul

    if torch.cuda.is_available():
        return
    try:
        silu_mul(torch.ones(2, 2), torch.ones(2, 2))
        teacher = Teacher(lambda s: torch.ones(1, 3), [torch.zeros(1).long()], torch.arange(3), 3)
        loss_and_gradients([torch.ones(1, 2)], torch.ones(3, 2), teacher, [1.0], LossOptions(impl="triton"))
    except Exception as e:
        if "0-dimensional" not in str(e):
            raise
        pytest.skip("the interpreter of this Triton does not work with this numpy", allow_module_level=True)


def distance(a: Tensor, b: Tensor) -> float:
    """The relative distance of two tensors in norm; infinite if one contains NaN."""
    off = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
    return off if off == off else float("inf")
