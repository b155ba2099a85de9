"""Tree shapes, and helpers that draft one tree and read its paths."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fledge.decode.engine import Engine
from fledge.decode.propose import Drafting, Proposer
from fledge.models.draft import Draft
from fledge.targets.cache import TargetCache
from fledge.targets.compatibility import resolve_layers
from fledge.targets.transformers import TransformersTarget
from fledge.types import Tree, TreeShape
from support.decoding import fit_head, prompts, spoken
from support.targets import exact_target, tiny_draft

SHAPES = {
    "chain": TreeShape((-1, 0, 1, 2), (0, 0, 0, 0)),
    "bush": TreeShape((-1, 0, 0, 0, 0), (0, 3, 0, 1, 2)),
    "mixed": TreeShape.from_paths([[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0, 0]]),
}


@functools.cache
def good_pair(vocabulary: int = 400) -> tuple[TransformersTarget, Draft, list[list[int]]]:
    """A target, a draft whose head is fitted to the target's answers so that some drafts are accepted, and prompts."""
    target = exact_target()
    draft = tiny_draft(target, draft_vocab_size=vocabulary, hidden_size=256, intermediate_size=256)
    asked = [p for p in prompts(8, longest=12, seed=13) if len(p) > 1]
    documents = [spoken(Engine(target), p, 40)[0] for p in asked]
    fit_head(target, draft, documents, 4)
    return target, draft, asked


def slots_of(target: TransformersTarget, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The first input of a proposer: the token after each slot, and the target's hidden states at the slots."""
    chain = Tree.chain(torch.tensor([tokens[:-1]]))
    _, features = target.verify(chain, TargetCache(), resolve_layers(None, target))
    return torch.tensor(tokens[1:]), features.aux_TAD


def proposer_of(draft: Draft, **drafting: Any) -> Proposer:
    """A proposer as an engine with this drafting makes it."""
    return Drafting(**drafting).for_draft(draft.config).proposer(draft)


def propose_one(proposer: Proposer, token_R: Tensor, aux_RAD: Tensor, path: Sequence[int] = ()) -> Tree:
    """The tree that a proposer drafts for a single request; the first call admits the request."""
    if proposer.source.cache is None:
        proposer.admit([([], aux_RAD)])
    return proposer.propose([token_R.tolist()], [aux_RAD], [path])


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """The path of every node but the root: the tokens from the root's child to the node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(*tree.to_lists()[0], strict=True))[1:]:
        paths.append((*paths[parent], token))
    return paths[1:]
