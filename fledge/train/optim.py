"""AdamW and Muon with float32 master weights, which several ranks may share, and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fledge.ops.training import zeros_fp32
from fledge.train.ranks import ALONE, Ranks

MOMENTS, BETAS = ("exp_avg", "exp_avg_sq"), (0.9, 0.95)  # of AdamW
MOMENTUM = 0.95  # of Muon
MUON_SCALE = 0.2  # the root mean square of AdamW's updates, about, which lets Muon use the same learning rates
# Newton-Schulz iterations and their coefficients (Jordan 2024), which bring singular values near 1 in few iterations
ITERATIONS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
# the ends of names of matrices with a row for each token, which Muon leaves to AdamW
VOCABULARY = ("lm_head", "embed_tokens", "predecessor_codebook", "successor_codebook")


class MasterOptimizer:
    """AdamW (Loshchilov & Hutter 2019) on float32 master weights of parameters that may be 16-bit (float64 masters of
    float64 parameters). With `kind` "muon", Muon for the matrices of the draft's layers (Jordan 2024; with the scale of
    Liu et al. 2025, arXiv:2502.16982, for which AdamW's learning rates and weight decay fit), and AdamW for the rest:
    the head, embeddings, codebooks, norms and biases.

    `accumulate` adds the gradients of a backward pass, which are sums over slots, to float32 sums. `step` adds up the
    sums of all ranks, scales and clips the gradients by the global norm, updates the master weights and copies them to
    the parameters. A parameter without a gradient has a gradient of zeros. Weight decay applies to matrices only.

    With ranks that shard (`Ranks.shards`), master weights and moments are DTensors split over the ranks, as in ZeRO
    stage 2 (Rajbhandari et al. 2020, arXiv:1910.02054): for 16-bit parameters, the split tensors are 12 of the 14 bytes
    per parameter that training keeps between steps (8 of 10 for Muon's matrices). The parameters stay whole on every
    rank, since a training step reads parameters in many small parts. Every rank computes Muon's updates.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, ranks: Ranks = ALONE, kind: str = "adamw"
    ):  # fmt: skip
        trained = [(name, p) for name, p in named if p.requires_grad]
        self.names, self.parameters, self.ranks = [n for n, _ in trained], [p for _, p in trained], ranks
        wide = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self.parameters]
        self.masters = [ranks.distribute(x) for x in wide]
        self.sums: list[Tensor | None] = [None] * len(self.parameters)
        self.weight_decay = weight_decay
        self.momentum = {
            name: torch.zeros_like(m)
            for name, m in zip(self.names, self.masters, strict=True)
            if _by_muon(name, m, kind)
        }
        others = [m for name, m in zip(self.names, self.masters, strict=True) if name not in self.momentum]
        decays, rest = [m for m in others if _is_matrix(m)], [m for m in others if not _is_matrix(m)]
        groups = [dict(params=decays, weight_decay=weight_decay), dict(params=rest, weight_decay=0.0)]
        gpu = any(m.is_cuda for m in self.masters)
        variant = dict(fused=True) if gpu else dict(foreach=True)  # the fused kernel needs no temporary tensors
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=BETAS, eps=1e-8, **variant)
        for m in others:  # moments exist before the first step, since reading a checkpoint overwrites them
            steps = torch.zeros((), dtype=torch.float32, device=m.device if gpu else "cpu")
            self.adamw.state[m] = {"step": steps, **{name: torch.zeros_like(m) for name in MOMENTS}}

    def accumulate(self) -> None:
        """Adds the parameters' gradients to the float32 sums, and clears the gradients."""
        for i, p in enumerate(self.parameters):
            if p.grad is not None:
                g = p.grad.to(torch.promote_types(p.dtype, torch.float32))
                self.sums[i] = g if self.sums[i] is None else self.sums[i].add_(g)
                p.grad = None

    @torch.no_grad()
    def step(self, lr: float, scale: float | Tensor, max_norm: float) -> Tensor:
        """Updates the parameters with the summed gradients times `scale`, a scalar.

        Returns the gradients' global norm after scaling and before clipping, a scalar.
        """
        sums = [zeros_fp32(p) if g is None else g for p, g in zip(self.parameters, self.sums, strict=True)]
        self.sums = [None] * len(sums)
        grads = self.ranks.reduced(sums)
        del sums  # only the shards are needed
        torch._foreach_mul_(grads, scale)
        norm = nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch._foreach_mul_(grads, (max_norm / norm.clamp_min(1e-12)).clamp_max(1.0))
        for name, m, g in zip(self.names, self.masters, grads, strict=True):
            if name in self.momentum:
                self._update_matrix(m, g, self.momentum[name], lr)
            else:
                m.grad = g
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self._copy_to_parameters()
        return norm

    def _update_matrix(self, master: Tensor, grad: Tensor, momentum: Tensor, lr: float) -> None:
        momentum.lerp_(grad, 1 - MOMENTUM)
        # in bfloat16 on a GPU: the iterations need no more precision
        dtype = torch.bfloat16 if master.is_cuda else master.dtype
        update = orthogonalized(self.ranks.whole(grad.lerp(momentum, MOMENTUM), dtype)).to(master.dtype)
        master.mul_(1 - lr * self.weight_decay)
        master.add_(self.ranks.distribute(update), alpha=-lr * MUON_SCALE * max(master.shape) ** 0.5)

    def state(self) -> dict[str, Tensor]:
        """The tensors that the next step depends on, by name: master weights, moments and numbers of steps. The tensors
        are not copies: after overwriting the tensors, call `restored`."""
        tensors = {f"{name}.master": m for name, m in zip(self.names, self.masters, strict=True)}
        for name, m in zip(self.names, self.masters, strict=True):
            tensors |= {f"{name}.{key}": x for key, x in self.adamw.state.get(m, {}).items()}
        return tensors | {f"{name}.momentum": x for name, x in self.momentum.items()}

    @torch.no_grad()
    def restored(self) -> None:
        """Continues with the values that were written into the tensors of `state`."""
        self._copy_to_parameters()

    def _copy_to_parameters(self) -> None:
        for p, m in zip(self.parameters, self.masters, strict=True):
            p.copy_(self.ranks.whole(m, p.dtype))


def orthogonalized(matrix_MN: Tensor) -> Tensor:
    """About the nearest matrix whose singular values are all 1 (between 0.7 and 1.2, except for tiny singular values).

    ITERATIONS steps of Newton and Schulz, X <- a X + (b X X' + c (X X')²) X, from a matrix of norm 1.
    """
    a, b, c = COEFFICIENTS
    x = matrix_MN if matrix_MN.shape[0] <= matrix_MN.shape[1] else matrix_MN.T
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if matrix_MN.shape[0] <= matrix_MN.shape[1] else x.T


def state_bytes(draft: nn.Module, kind: str) -> int:
    """The bytes of a draft's master weights and of the optimizer's moments, in float32."""
    trained = [(name, p) for name, p in draft.named_parameters() if p.requires_grad]
    return 4 * sum(p.numel() * (2 if _by_muon(name, p, kind) else 3) for name, p in trained)


def _by_muon(name: str, x: Tensor, kind: str) -> bool:
    """Whether Muon updates a parameter; else AdamW does."""
    return kind == "muon" and _is_matrix(x) and not name.removesuffix(".weight").endswith(VOCABULARY)


def _is_matrix(x: Tensor) -> bool:
    return x.dim() == 2 and min(x.shape) > 1


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """The learning rate of a step (from 0): linear warmup to `peak`, then a cosine to 1% of it at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(steps - 1 - warmup, 1)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))
