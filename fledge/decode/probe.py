"""How well a draft guesses a text that was decoded without it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fledge.decode.propose import UNREAD, Proposer
from fledge.decode.state import RoundState
from fledge.kernels.implementations import current_device
from fledge.targets.interface import DecodingTarget

TOKENS = 1024  # the most tokens of a text that are read


@torch.inference_mode()
def probe(
    target: DecodingTarget, proposer: Proposer, layers: Sequence[int], text: Sequence[int], new: int
) -> tuple[int, int]:  # fmt: skip
    """The number of the draft's greedy guesses that are the next token of the text, and the number of guesses: one for
    each of the last `new` tokens, or of the last UNREAD - 1.

    Target and draft read the text, or its end, in a pass each. `proposer` has no requests, before and after. `layers`
    are the target's layers that the draft reads.
    """
    text = list(text[-TOKENS:])
    fresh = min(new + 1, UNREAD, len(text) - 1)
    if fresh < 2:
        return 0, 0
    cache, draft_cache = target.new_cache([len(text)]), None
    try:
        draft_cache = proposer.new_cache([len(text) + proposer.scratch])
        with current_device(target.device):
            _, [features] = target.prefill([text[:-1]], cache, layers)
            aux_RAD = proposer.draft.select_states(features)
        read = len(text) - 1 - fresh
        with current_device(proposer.draft.device):
            proposer.read(draft_cache, [text[1 : 1 + read]], [aux_RAD[:read]])
            proposer.append(draft_cache)
            token_BR = torch.tensor([text[-fresh:]], device=aux_RAD.device)
            count_B, length_B = (torch.tensor([n], device=aux_RAD.device) for n in (fresh, len(text) - 1))
            state = RoundState(token_BR, aux_RAD[None, read:], count_B, torch.zeros_like(token_BR), length_B)
            _, right_B, made_B = proposer.read_along(state, fresh - 1)
            return tuple(torch.cat([right_B, made_B]).tolist())
    finally:
        cache.select([])
        if proposer.source.cache.segments:
            proposer.select([])
        elif draft_cache is not None:
            draft_cache.select([])
