"""Tree shapes, and helpers that draft one tree and read its paths."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fledge.decode.drafting import Drafting
from fledge.decode.load import load
from fledge.decode.propose import Proposer
from fledge.decode.rounds import RoundState
from fledge.drafts.draft import Draft
from fledge.targets.compatibility import resolve_layers
from fledge.targets.transformers import TransformersTarget
from fledge.types import Tree, TreeShape
from support.decoding import fit_head, prompts, spoken
from support.targets import exact_target, read_alone, tiny_draft

SHAPES = {
    "chain": TreeShape((-1, 0, 1, 2), (0, 0, 0, 0)),
    "bush": TreeShape((-1, 0, 0, 0, 0), (0, 3, 0, 1, 2)),
    "mixed": TreeShape.from_paths([[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0, 0]]),
}


def tree_lists(tree: Tree) -> list[tuple[list[int], list[int]]]:
    """The tokens and parents of each request, without padding."""
    B, N = tree.token_BN.shape
    counts = [N] * B if tree.count_B is None else tree.count_B.tolist()
    parents = [[*range(-1, N - 1)]] * B if tree.parent_BN is None else tree.parent_BN.tolist()
    return [(t[:n], p[:n]) for t, p, n in zip(tree.token_BN.tolist(), parents, counts, strict=True)]


@functools.cache
def _fitted_draft(vocabulary: int) -> tuple[Draft, list[list[int]]]:
    target = exact_target()
    draft = tiny_draft(target, draft_vocab_size=vocabulary, hidden_size=256, intermediate_size=256)
    asked = [p for p in prompts(8, longest=12, seed=13) if len(p) > 1]
    documents = [spoken(load(target), p, 40)[0] for p in asked]
    fit_head(target, draft, documents, 4)
    return draft, asked


def good_pair(vocabulary: int = 400, native: bool = False) -> tuple[TransformersTarget, Draft, list[list[int]]]:
    """A target, a draft whose head is fitted to the target's answers so that some drafts are accepted, and prompts."""
    draft, asked = _fitted_draft(vocabulary)
    return exact_target(native), draft, [list(prompt) for prompt in asked]


def slots_of(target: TransformersTarget, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The first input of a proposer: the token after each slot, and the target's hidden states at the slots."""
    _, features = read_alone(target, tokens[:-1], resolve_layers(None, target))
    return torch.tensor(tokens[1:]), features.aux_TAD


def proposer_of(draft: Draft, **drafting: Any) -> Proposer:
    """A proposer as an engine with this drafting makes it."""
    return Drafting(**drafting).for_draft(draft.config).proposer(draft)


def state_of(token_R: Tensor, aux_RAD: Tensor) -> RoundState:
    """The state of a single request whose draft has not read these tokens, none of which was drafted."""
    R = token_R.numel()
    count_B, path_BR = torch.tensor([R]), torch.zeros(1, R, dtype=torch.int64)
    return RoundState(token_R[None], aux_RAD[None], count_B, path_BR, count_B).to(aux_RAD.device)


def propose_one(proposer: Proposer, token_R: Tensor, aux_RAD: Tensor, slots: int = 256) -> Tree:
    """The tree that a proposer drafts for a single request; the first call gives the request this number of slots."""
    if not proposer.cache.segments:
        proposer.append(proposer.new_cache([slots]))
    return proposer.propose(state_of(token_R, aux_RAD))


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """The path of every node but the root: the tokens from the root's child to the node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(*tree_lists(tree)[0], strict=True))[1:]:
        paths.append((*paths[parent], token))
    return paths[1:]
