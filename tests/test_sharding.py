"""A draft whose layers are sharded with torch's fully_shard trains as in a single process."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fledge.drafts.draft import Draft
from fledge.targets.transformers import TransformersTarget
from fledge.train.objective import ttt
from fledge.train.ranks import Ranks
from fledge.train.row_pass import Objective
from support.ranks import spawn
from support.rows import document, row_of
from support.targets import P_EAGLE, features_for, tiny_draft, tiny_target

ROWS = [
    [document(21, (5, 11), (13, 21), seed=3), document(2, (0, 2), seed=5)],
    [document(13, (1, 13), seed=6), document(9, (0, 4), (4, 9), seed=8)],
]
VARIANTS = {
    "eagle3": dict(num_hidden_layers=2),
    "eagle3.1": dict(fc_norm=True, norm_output=True),
    "peagle": dict(num_hidden_layers=2, **P_EAGLE),
    "eagle1": dict(method="eagle1"),
}


def pair(method: str) -> tuple[TransformersTarget, Draft]:
    target = tiny_target(tokenizer=False, dtype=torch.float64)
    return target, tiny_draft(target, **VARIANTS[method])


def train_step(target: TransformersTarget, draft: Draft, rows: list, method: str, world: int = 1) -> None:
    """One AdamW step on this process's rows; gradients are summed over `world` processes and divided by the number of
    scored slots."""
    objective = Objective(depth=1 if method == "eagle1" else 3, gamma=1.0)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2, foreach=False)
    scored = torch.zeros((), dtype=torch.int64)
    for documents in rows:
        row = row_of(documents)
        scored += ttt(draft, row, features_for(draft, target, row), target.logits, objective).scored_K.sum()
    if world > 1:
        dist.all_reduce(scored)
    for p in draft.parameters():
        if world > 1 and not isinstance(p, DTensor):  # parameters outside the layers, which are replicated
            dist.all_reduce(p.grad)
        p.grad /= scored.item()
    optimizer.step()


def train_sharded(ranks: Ranks, directory: Path) -> None:
    for method in VARIANTS:
        target, draft = pair(method)
        for layer in draft.blocks:
            fully_shard(layer, mesh=ranks.mesh)
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
        assert any(isinstance(p, DTensor) for p in draft.parameters())
        train_step(target, draft, [ROWS[ranks.rank]], method, ranks.size)
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in draft.named_parameters()}
        if ranks.leads:
            torch.save({n: p.detach() for n, p in whole.items()}, directory / method)
    dist.barrier()  # gloo aborts a rank that exits while another still communicates with it


def test_sharded_layers_train_as_one_process(tmp_path: Path) -> None:
    """Two ranks with one row each and `fully_shard` on every layer have, after a step, the parameters of one process
    that trains on both rows, in float64, for the draft of each method."""
    spawn(train_sharded, 2, tmp_path)
    for method in VARIANTS:
        sharded: dict[str, Tensor] = torch.load(tmp_path / method)
        target, draft = pair(method)
        before = {n: p.detach().clone() for n, p in draft.named_parameters()}
        train_step(target, draft, ROWS, method)
        assert sharded.keys() == before.keys()
        for name, p in draft.named_parameters():
            torch.testing.assert_close(sharded[name], p.detach(), rtol=1e-10, atol=1e-10, msg=f"{method} {name}")
            assert (p - before[name]).abs().max() > 1e-4, f"{method} {name} did not change"
