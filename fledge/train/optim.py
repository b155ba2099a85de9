"""AdamW with float32 master weights, and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class MasterAdamW:
    """AdamW (Loshchilov & Hutter 2019) on float32 master weights of parameters that may be 16-bit.

    `accumulate` adds the gradients of a backward pass, which are sums over slots, to float32 sums. `step` scales the
    sums, clips them by their global norm, updates the master weights and copies them to the parameters. Weight decay
    applies to matrices only.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], betas: tuple[float, float], weight_decay: float):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.parameters]
        decays = [m for m in self.masters if sum(n > 1 for n in m.shape) > 1]
        rest = [m for m in self.masters if sum(n > 1 for n in m.shape) <= 1]
        groups = [dict(params=decays, weight_decay=weight_decay), dict(params=rest, weight_decay=0.0)]
        gpu = any(m.is_cuda for m in self.masters)
        variant = dict(fused=True) if gpu else dict(foreach=True)  # the fused kernel needs no temporary tensors
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, eps=1e-8, **variant)

    def accumulate(self) -> None:
        """Adds the parameters' gradients to those of the master weights, and clears them."""
        for p, m in zip(self.parameters, self.masters, strict=True):
            if p.grad is not None:
                g = p.grad.float()
                m.grad = g if m.grad is None else m.grad.add_(g)
                p.grad = None

    @torch.no_grad()
    def step(self, lr: float, scale: float | Tensor, max_norm: float) -> Tensor:
        """Updates the parameters with the summed gradients times `scale`, a scalar.

        Returns the gradients' global norm after scaling and before clipping, a float32 scalar.
        """
        grads = [m.grad for m in self.masters if m.grad is not None]
        torch._foreach_mul_(grads, scale)
        norm = nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, (max_norm / norm.clamp_min(1e-12)).clamp_max(1.0))
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        for p, m in zip(self.parameters, self.masters, strict=True):
            p.copy_(m)
        return norm

    def state_dict(self) -> dict:
        return {"masters": self.masters, "adamw": self.adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Restores a state from `state_dict`. Raises ValueError, KeyError or TypeError for any other value."""
        for p, m, saved in zip(self.parameters, self.masters, state["masters"], strict=True):
            _check_shape("a weight", saved, m)
            m.copy_(saved)
            p.copy_(m)
        self.adamw.load_state_dict(state["adamw"])
        for m, moments in self.adamw.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                _check_shape(name, moments[name], m)


def _check_shape(name: str, saved: Tensor, expected: Tensor) -> None:
    if saved.shape != expected.shape:  # copy_ would broadcast
        raise ValueError(f"{name} has shape {list(saved.shape)} instead of {list(expected.shape)}")


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """The learning rate of a step (from 0): linear warmup to `peak`, then a cosine to 1% of it at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(steps - 1 - warmup, 1)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
