"""Ways in which a draft's weights are mixed up, each with the repair that undoes it.

Where a draft does not compute what it computed when it was trained, `fledge check` tries them: the one whose repair
computes the stored logits again is the cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fledge.check.probe import Probe, ProbeRecord, logits_error, replay, tensor_sha256
from fledge.config import DraftConfig
from fledge.drafts.weights import FLOATS, build_draft, meta_draft, tensor_problems

MOST_CHUNKS = 4  # of fc whose orders are all tried
SAME = 1e-3  # relative error of the logits up to which they are the same
ROUNDED = 0.05  # up to which they are those of weights that were rounded

Tensors = Mapping[str, Tensor]
Swap = tuple[str, Tensors]  # a cause, and the tensors without it


def replay_error(config: DraftConfig, tensors: Tensors, probe: Probe) -> float:
    """The `logits_error` of a draft on its probe, whatever its d2t; infinite if such a draft cannot be computed."""
    try:
        sized = meta_draft(config)
        known = dict(tensors) | {n: torch.zeros_like(x, device="cpu") for n, x in sized.named_buffers() if n == "d2t"}
        if tensor_problems(sized, known):
            return float("inf")
        return logits_error(replay(build_draft(config, known), probe), probe.logits_RKSJ)
    except ValueError:  # a config that contradicts the probe
        return float("inf")


def find_cause(config: DraftConfig, tensors: Tensors, probe: Probe) -> tuple[str, str] | None:
    """(cause, cure) of the first repair with which a draft computes its stored logits; None if there is none, or if
    tensors have dtypes that no draft can be computed with."""
    if any(x.is_floating_point() and x.dtype not in FLOATS for x in tensors.values()):
        return None
    recorded = replace(probe.record.draft_config, provenance=config.provenance)
    if recorded != config and replay_error(recorded, tensors, probe) <= SAME:
        return "config.json is not the one of training, and with that one the weights are right", "restore its fields"
    for base in (recorded, config) if recorded != config else (config,):
        for cause, repaired in repairs(base, tensors):
            if replay_error(base, repaired, probe) <= SAME:
                return cause, "undo this in the file, or copy the draft again"
    return None


def repairs(config: DraftConfig, tensors: Tensors) -> Iterator[Swap]:
    """The causes that can be tried on a draft with these tensors."""
    yield from _swapped(tensors)
    yield from _transposed(tensors)
    yield from _fc_orders(config, tensors)
    yield from _input_halves(config, tensors)
    yield from _rotary_pairs(config, tensors)
    yield from _norm_offsets(tensors)


def likeliest_repairs(config: DraftConfig, tensors: Tensors) -> Iterator[Swap]:
    """Those few of the repairs that are tried by decoding, where no logits are stored."""
    norms = [n for n in tensors if "norm" in n and "fc_norm." not in n]
    yield from _exchanged(tensors, itertools.combinations(norms, 2))
    yield from _fc_orders(config, tensors)


def _swapped(tensors: Tensors) -> Iterator[Swap]:
    """Two norms, or two matrices of a layer, under each other's names."""
    norms = [n for n in tensors if "norm" in n]
    pairs = [*itertools.combinations(norms, 2)]
    matrices = [n for n in tensors if n.endswith("_proj.weight")]
    for _, of_layer in itertools.groupby(
        sorted(matrices), key=lambda n: n.partition(".self_attn")[0].partition(".mlp")[0]
    ):
        pairs += itertools.combinations(of_layer, 2)
    yield from _exchanged(tensors, pairs)


def _exchanged(tensors: Tensors, pairs: Iterable[tuple[str, str]]) -> Iterator[Swap]:
    for a, b in pairs:
        if tensors[a].shape[1:] == tensors[b].shape[1:]:
            yield f"{a} and {b} are swapped", {**tensors, a: tensors[b], b: tensors[a]}


def _transposed(tensors: Tensors) -> Iterator[Swap]:
    for name, x in tensors.items():
        if x.dim() == 2 and name not in ("embed_tokens.weight", "lm_head.weight"):
            yield f"{name} is transposed", {**tensors, name: x.T.contiguous()}


def _fc_orders(config: DraftConfig, tensors: Tensors) -> Iterator[Swap]:
    """The columns of fc in another order: of the target's layers, or of embedding and hidden state (EAGLE-1)."""
    fused, fc = config.family.fuses_embedding, tensors.get("fc.weight")
    count = 2 if fused else config.num_aux_hidden_states
    if fc is None or fc.dim() != 2 or count > MOST_CHUNKS or fc.shape[1] % count:
        return
    chunks = fc.chunk(count, dim=1)
    what = "embedding and hidden state" if fused else "the target's layers"
    for order in itertools.permutations(range(count)):
        if order != tuple(range(count)):
            yield (
                f"the chunks of fc are in the wrong order: {what} are joined as {list(_inverse(order))}",
                {**tensors, "fc.weight": torch.cat([chunks[i] for i in order], dim=1)},
            )


def _inverse(order: tuple[int, ...]) -> Iterator[int]:
    return (order.index(i) for i in range(len(order)))


def _input_halves(config: DraftConfig, tensors: Tensors) -> Iterator[Swap]:
    """The first layer's projections read [hidden state ; embedding]."""
    names = [f"midlayer.self_attn.{x}_proj.weight" for x in "qkv"]
    if config.family.reads_layers and all(n in tensors and tensors[n].dim() == 2 for n in names):
        turned = {n: torch.cat(tensors[n].chunk(2, dim=1)[::-1], dim=1) for n in names}
        yield "q, k and v read the hidden state first and the embedding second", {**tensors, **turned}


def _rotary_pairs(config: DraftConfig, tensors: Tensors) -> Iterator[Swap]:
    """Queries and keys whose rotated pairs are neighbours (Meta's layout) where halves are rotated, or the reverse."""
    names = [n for n in tensors if n.endswith(("q_proj.weight", "k_proj.weight"))]
    d = config.head_dim
    if d % 2 or any(tensors[n].shape[0] % d for n in names):
        return
    neighbours = torch.arange(d).view(2, d // 2).T.flatten()
    for order, layout in ((neighbours.argsort(), "neighbours"), (neighbours, "halves")):
        turned = {n: tensors[n].unflatten(0, (-1, d))[:, order].flatten(0, 1) for n in names}
        yield f"the rows of q_proj and k_proj are ordered for RoPE on {layout}", {**tensors, **turned}


def _norm_offsets(tensors: Tensors) -> Iterator[Swap]:
    """Gains stored as their distance from 1, as in Gemma, or the reverse."""
    names = [n for n in tensors if n.endswith("norm.weight") or "fc_norm." in n]
    for offset, cause in (
        (1.0, "the norms' gains are stored as their distances from 1"),
        (-1.0, "1 was added to the norms' gains"),
    ):
        yield cause, {**tensors, **{n: tensors[n].float() + offset for n in names}}


def changed_tensors(tensors: Tensors, record: ProbeRecord) -> tuple[list[str], dict[str, str]]:
    """The tensors but d2t whose values are not those that training wrote, and of these, the name that training wrote a
    tensor's values under, if it wrote them at all."""
    now = {name: tensor_sha256(x) for name, x in tensors.items()}
    changed = [name for name in record.tensors if now.get(name) != record.tensors[name] and name != "d2t"]
    written = {sha: name for name, sha in record.tensors.items()}
    return changed, {name: written[now[name]] for name in changed if name in now and now[name] in written}
