"""How well a draft guesses texts that were decoded without it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from fledge.decode.propose import UNREAD, Proposer
from fledge.decode.state import RoundState
from fledge.kernels.implementations import current_device
from fledge.targets.interface import DecodingTarget

TOKENS = 1024  # the most tokens of a text that are read


@torch.inference_mode()
def probe(
    target: DecodingTarget, proposer: Proposer, layers: Sequence[int], texts: Sequence[tuple[Sequence[int], int]]
) -> tuple[int, int]:  # fmt: skip
    """The number of the draft's greedy guesses that are the next token of a text, and the number of guesses: for each
    text and its number of `new` tokens, one for each of the last `new` tokens, or of the last UNREAD - 1.

    Target and draft read all texts, or their ends, in a pass each. `proposer` has no requests, before and after.
    `layers` are the target's layers that the draft reads.
    """
    ends = [(list(text[-TOKENS:]), new) for text, new in texts]
    given = [(text, min(new + 1, UNREAD, len(text) - 1)) for text, new in ends if min(new, len(text) - 2) > 0]
    if not given:
        return 0, 0
    cache, draft_cache = target.separate_cache([len(text) for text, _ in given]), None
    try:
        draft_cache = proposer.new_cache([len(text) + proposer.scratch for text, _ in given])
        with current_device(target.device):
            final = not proposer.draft.family.reads_layers
            _, features = target.prefill([text[:-1] for text, _ in given], cache, layers, final)
            aux_BRAD = [proposer.draft.select_states(f) for f in features]
        reads = [len(text) - 1 - fresh for text, fresh in given]
        with current_device(proposer.draft.device):
            known = [text[1 : 1 + read] for (text, _), read in zip(given, reads, strict=True)]
            proposer.read(draft_cache, known, [aux[:read] for aux, read in zip(aux_BRAD, reads, strict=True)])
            proposer.append(draft_cache)
            device, most = aux_BRAD[0].device, max(fresh for _, fresh in given)
            tokens = [text[-fresh:] + [0] * (most - fresh) for text, fresh in given]
            count_B, length_B, token_BR = (
                torch.tensor(x, device=device)
                for x in ([fresh for _, fresh in given], [len(text) - 1 for text, _ in given], tokens)
            )
            fresh_BRAD = pad_sequence([aux[read:] for aux, read in zip(aux_BRAD, reads, strict=True)], batch_first=True)
            state = RoundState(token_BR, fresh_BRAD, count_B, torch.zeros_like(token_BR), length_B)
            _, right_B, made_B = proposer.read_along(state, most - 1)
            right, made = torch.stack([right_B.sum(), made_B.sum()]).tolist()
            return right, made
    finally:
        cache.select([])
        if proposer.source.cache.segments:
            proposer.select([])
        elif draft_cache is not None:
            draft_cache.select([])
