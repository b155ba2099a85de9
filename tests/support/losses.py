"""Test cases of the loss with reference values, and comparison of gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.drafts.draft import Draft
from fledge.ops.loss import KINDS, LossOptions, Scores, Teacher, loss_and_gradients, loss_reference
from fledge.ops.training import Fp32Accumulator


def gradients(draft: Draft, loss: Tensor) -> dict[str, Tensor]:
    """The gradients of the draft's parameters, zeros if missing. If the loss has no autograd graph, as that of `ttt`,
    returns and clears the gradients that were added to the parameters."""
    parameters = dict(draft.named_parameters())
    if not loss.requires_grad:
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
        draft.zero_grad()
        return found
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), found, strict=True)}


def assert_same_gradients(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    """Compares gradients: the largest difference is at most `tolerance` times the largest entry of the expected one."""
    assert a.keys() == b.keys()
    for name, expected in b.items():
        assert torch.isfinite(a[name]).all(), name
        size = max(float(expected.abs().max()), 1e-6)
        assert float((a[name] - expected).abs().max()) <= tolerance * size, name


class Made(torch.autograd.Function):
    """Makes a loss with known gradients differentiable by autograd."""

    @staticmethod
    def forward(ctx, loss, gradients, *inputs):
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx, dloss):
        return None, None, *(g * dloss.to(g.dtype) for g in ctx.saved_tensors)


# kinds of loss at temperatures: all kinds at 1, and those that may have another
WAYS = [*((kind, 1.0) for kind in KINDS), ("ce", 2.0), ("kl", 0.7), ("kl", 3.0)]


@dataclass
class LossCase:
    hidden: list[Tensor]
    head: Tensor
    rows: list[Tensor]
    teacher: Tensor
    ids: Tensor
    weights: list[float]
    labels: Tensor

    def __call__(self, **options) -> tuple[Tensor, Scores]:
        """The loss, differentiable with respect to `hidden` and `head`, and its scores."""
        gradients = torch.is_grad_enabled()
        head_sum = Fp32Accumulator(self.head) if gradients else None
        teacher = Teacher(lambda s: self.teacher[s], self.rows, self.ids, self.teacher.shape[1], self.labels)
        loss, scores, dhead_inputs = loss_and_gradients(
            self.hidden, self.head, teacher, self.weights, LossOptions(**options), head_sum=head_sum,
            gradients=gradients,
        )  # fmt: skip
        if gradients:
            loss = Made.apply(loss, [head_sum.total().to(self.head.dtype), *dhead_inputs], self.head, *self.hidden)
        return loss, scores

    def reference(self, kind: str = "ce", temperature: float = 1.0) -> Tensor:
        return loss_reference(
            self.hidden, self.head, self.rows, self.teacher, self.ids, self.weights, kind, self.labels, temperature
        )

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, [self.head, *self.hidden])


def loss_case(W: int, dtype: torch.dtype = torch.float64, V: int = 37, P: int = 50) -> LossCase:
    """A case of three steps with P teacher rows; the second step has no slots and the third has four. Half of the
    labels are the teacher's likeliest token."""
    g = torch.Generator().manual_seed(W)
    rows = [torch.arange(0, P, 2), torch.arange(0), torch.tensor([1, 2, 30, P - 1])]
    ids = torch.linspace(0, V - 1, W).round().long() if W < V else torch.arange(V)
    hidden = [torch.randn(r.numel(), 11, generator=g).to(dtype).requires_grad_() for r in rows]
    head = torch.randn(W, 11, generator=g).to(dtype).requires_grad_()
    teacher = (3 * torch.randn(P, V, generator=g)).to(dtype)
    labels = torch.where(torch.rand(P, generator=g) < 0.5, teacher.argmax(-1), torch.randint(V, (P,), generator=g))
    return LossCase(hidden, head, rows, teacher, ids, [1.0, 0.8, 0.64], labels)
