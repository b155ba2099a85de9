"""What depends on the machine: whether there is a GPU, and whether Triton runs."""

from __future__ import annotations

import pytest
import torch

from fledge.models.draft import Draft
from fledge.targets.compatibility import connect_draft
from fledge.targets.transformers import TransformersTarget


def on_device(target: TransformersTarget, draft: Draft) -> None:
    """Moves a pair to the GPU where there is one: there Triton compiles, and takes nothing of the CPU's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target.model.to(device), draft.to(device)
    connect_draft(draft, target)


def needs_triton() -> None:
    """Skips, with the reason, where Triton is not installed, or its interpreter is to run and does not (3.6 beside
    numpy 2.4: it takes the only element of an array for a number)."""
    pytest.importorskip("triton", reason="Triton is not installed; it is there on Linux alone")
    from fledge.kernels.elementwise import silu_mul
    from fledge.kernels.loss import LossOptions, Teacher, loss_and_gradients

    if torch.cuda.is_available():
        return
    try:
        silu_mul(torch.ones(2, 2), torch.ones(2, 2))
        teacher = Teacher(lambda s: torch.ones(1, 3), [torch.zeros(1).long()], torch.arange(3), 3)
        loss_and_gradients([torch.ones(1, 2)], torch.ones(3, 2), teacher, [1.0], LossOptions(impl="triton"))
    except Exception as e:
        if "0-dimensional" not in str(e):
            raise
        pytest.skip("this Triton's interpreter does not run with this numpy", allow_module_level=True)
