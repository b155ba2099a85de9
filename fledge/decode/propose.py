"""Proposers draft trees: the draft's logits at a root, then at the nodes that a shape (`decode/shapes.py`) expands.

`StepProposer` drafts one level of a tree per pass, as EAGLE does. A `OnePass` proposer (P-EAGLE, blocks) has the logits
of all levels after one pass. A proposer holds the draft's cache for the requests that are decoded together. A stable
cache is rebuilt from the target's hidden states where tokens were accepted, which is what training saw. An unstable
cache keeps the keys and values of accepted tokens as drafting computed them, which costs fewer rows and drifts from
training.

All shapes are static, and only `read` synchronizes the device, so that a round can be captured as a CUDA graph.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.decode.draft_size import NOTHING, DraftSize
from fledge.decode.rounds import RoundState
from fledge.decode.sampling import BatchSampling
from fledge.drafts.block import BlockDraft
from fledge.drafts.decode_layer import Rotation
from fledge.drafts.draft import Draft
from fledge.drafts.draft_decoder import DraftDecoder, block_decoder
from fledge.drafts.eagle import EagleDraft
from fledge.drafts.kv_cache import KVCache, PromptRows, SlotPool, TreeRows
from fledge.drafts.peagle import ParallelDraft
from fledge.ops.attention_prompt import without_cudnn_sdpa
from fledge.ops.attention_tree import Visible, VisibleChain
from fledge.ops.device import to_device
from fledge.ops.sampling import TOKEN, coupled
from fledge.ops.trees import FreshRows, fresh_rows
from fledge.types import Tree

if TYPE_CHECKING:
    from fledge.decode.shapes import Shape


@dataclass(frozen=True)
class Front:
    """The nodes of one level, F of each request's tree, that are expanded together.

    `token_BF` are the nodes' target ids, int64. `above_BF` are the nodes' parents, as rows of the last pass, grouped by
    request (int64; None: node f's parent is node f). `visible` are the expanded nodes below the root that each node
    sees, this level's included, in the order of expansion (None: all of them, as in a chain).
    """

    token_BF: Tensor
    above_BF: Tensor | None = None
    visible: Visible | None = None


class Proposer:
    """A draft and its cache for the requests that are decoded together. Drafts trees of one of the `shapes`, the first
    shape until `use` chooses another. `sampling` are the requests' options, on the draft's device; None drafts
    greedily. Where requests sample, the logits have the target's noise (`coupled`), unless drafted tokens are drawn
    independently of the target's draws.

    `levels` are the most tokens of a drafted path; `most_levels` are those of the largest shape. `most_nodes` are the
    nodes of the largest tree, the root included. `rows` are the most tokens of a request that the draft has not read
    before a round: as many as a round can commit.
    """

    sequential: bool  # whether each level costs a pass, so that stopping early saves time

    def __init__(self, draft: Draft, shapes: Mapping[DraftSize, Shape]):
        self.draft, self.shapes, config = draft, shapes, draft.config
        self.device, self.dtype = draft.device, draft.dtype
        self.most_levels = max(shape.levels for shape in shapes.values())
        self.most_nodes = max(shape.nodes for shape in shapes.values())
        self.rows = self.most_levels + 1
        self.pool = SlotPool(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, self.device, self.dtype
        )
        self.cache = KVCache(self.pool)
        self.target_id_W = draft.target_ids()
        self.sampling: BatchSampling | None = None
        self.count_N = torch.arange(0, device=self.device)  # see `_counts`
        self.use(next(iter(shapes)))

    def use(self, size: DraftSize) -> None:
        """Sets the size of the trees drafted in the next rounds."""
        self.size, self.shape = size, self.shapes[size]
        self.levels = self.shape.levels

    @torch.inference_mode()
    def propose(self, state: RoundState) -> Tree:
        """Adds each request's new slots to the draft's cache, and drafts a tree from the last slot. The keys and values
        of new slots stay in the cache; the keys and values of drafted nodes are forgotten."""
        root_B, logits_BKW = self.begin(state.to(self.device))
        tree, slot_BN = self.shape.grow(self, root_B, logits_BKW)
        self.end(slot_BN)
        return tree

    @property
    def capturable(self) -> bool:
        """Whether drafting can be captured as a CUDA graph: drafting then asks the device nothing."""
        return not (self.sequential and self.shape.ends_early)

    @property
    def scratch(self) -> int:
        """The most slots of the draft's cache that a round writes after the committed slots."""
        shapes = self.shapes.values()
        return self.rows + max(max(s.levels, s.expanded, self.pass_slots(s.levels)) for s in shapes)

    def pass_slots(self, depth: int) -> int:
        """The maximum number of slots that a pass for `depth` levels writes after the slots of fresh tokens."""
        return depth

    def set_sampling(self, sampling: BatchSampling) -> None:
        """Sets how the drafted tokens of each request are drawn."""
        self.sampling = sampling.to(self.device)

    def new_cache(self, sizes: Sequence[int]) -> KVCache:
        """An empty cache of sequences of `sizes` slots each, for `read` and then `append`."""
        return KVCache(self.pool, sizes)

    @torch.inference_mode()
    def read(self, cache: KVCache, tokens: Sequence[Sequence[int]], aux: Sequence[Tensor]) -> None:
        """Adds the next R slots of each prompt to a cache of `pool`. For each sequence, `tokens` has the R tokens after
        the slots, and `aux` the target's hidden states [R, A, D] at the slots. R differs by sequence and may be 0."""
        counts = [len(t) for t in tokens]
        if not sum(counts):
            return
        rows = PromptRows(cache, counts)
        token_M, count_B = torch.tensor([*itertools.chain(*tokens)]), torch.tensor(counts)
        token_M, count_B = to_device([token_M, count_B], self.device)
        self._read(token_M, torch.cat([a.to(self.device, self.dtype) for a in aux]), rows)
        rows.commit(count_B)

    def _read(self, token_M: Tensor, states_MAD: Tensor, rows: PromptRows) -> None:
        """`read` for all prompts' slots, one after the other."""
        raise NotImplementedError

    def to_target(self, draft_id: Tensor) -> Tensor:
        """Converts draft ids to target ids, of any shape."""
        return draft_id if self.draft.d2t is None else self.target_id_W[draft_id]

    def append(self, cache: KVCache) -> None:
        """Adds the sequences of another cache of `pool` to the decoded sequences."""
        self.cache.append(cache)

    def select(self, staying: Sequence[int]) -> None:
        """Keeps the requests with these indices only."""
        self.cache.select(staying)

    def tensors(self) -> list[Tensor]:
        """The tensors, with one entry for each request, that a round reads and changes."""
        return self.cache.tensors()

    def lengths(self) -> list[Tensor]:
        """The members of `tensors` that are lengths of caches."""
        return [self.cache.length_B]

    def buffers(self) -> list[Tensor]:
        """The buffer of the draft's cache. A cache that grows gets a new buffer."""
        return [self.pool.buffer]

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Replaces `tensors` by others."""
        self.cache.start_B, self.cache.length_B = tensors

    def idle(self, spare: KVCache, size: int) -> Proposer:
        """A proposer of the same draft for `size` requests that do not exist, which share the segment of a cache."""
        other = copy.copy(self)
        other.cache = spare.repeated(size)
        return other

    def begin(self, state: RoundState) -> tuple[Tensor, Tensor]:
        """Adds each request's fresh slots to the cache. Returns the roots' tokens, int64 [B], and logits [B, K, W] of
        the first K levels, at least 1: the level after the roots, and all levels known after the same pass."""
        raise NotImplementedError

    def expand(self, front: Front) -> Tensor:
        """The logits after the nodes of the next level, [B, F, W], or [B, 1, W] where all nodes of a level have equal
        logits."""
        raise NotImplementedError

    def rest_of_chain(self, token_B1: Tensor, levels: int) -> Tensor | None:
        """The likeliest tokens of the `levels` levels after the first level, whose tokens are `token_B1`: target ids,
        int64 [B, levels], the same as by `expand`, level by level. None without a faster way."""
        return None

    def end(self, slot_BN: Tensor) -> None:
        """Forgets the drafted nodes. `slot_BN` is the index of each tree node among the expanded nodes, counted from 0
        below the root; -1 for nodes that were not expanded."""
        raise NotImplementedError

    def _fresh(self, state: RoundState, **more: int) -> FreshRows:
        """The rows of the fresh tokens. `more` are keyword arguments of `fresh_rows`."""
        return fresh_rows(state.token_BR, state.count_B, self.cache.start_B, self.cache.length_B, **more)

    def _states(self, position_BS: Tensor) -> Tensor | None:
        """The random states of the target's draws of tokens at `position_BS`, int64 [B, S]; None unless drafting is
        coupled."""
        sampling = self.sampling
        return sampling.keys(position_BS, TOKEN) if sampling is not None and sampling.couples else None

    def _states_after_root(self, levels: int) -> Tensor | None:
        """`_states` of the tokens of each level below the root, [B, levels], once the fresh slots are in the cache."""
        return self._states(self.cache.length_B[:, None] + 1 + self._counts(levels))

    def _coupled(self, logits_BSW: Tensor, state_BS: Tensor | None) -> Tensor:
        """Logits with the noise of the target's draws, whose random states are `state_BS`; None adds no noise."""
        if state_BS is None:
            return logits_BSW
        ids_W = None if self.draft.d2t is None else self.target_id_W
        return coupled(logits_BSW, state_BS, self.sampling.temperature_B, ids_W)

    def _counts(self, n: int) -> Tensor:
        """0 to n - 1, int64 [n]; cached, since each operation of a round costs the device a launch."""
        if self.count_N.numel() < n:
            self.count_N = torch.arange(n, device=self.count_N.device)
        return self.count_N[:n]


class EagleProposer(Proposer):
    """Candidates from an `EagleDraft`. `DraftDecoder` computes every slot from a token and a hidden state."""

    def __init__(self, draft: EagleDraft, shapes: Mapping[DraftSize, Shape]):
        super().__init__(draft, shapes)
        self.decoder = DraftDecoder(draft)

    def _read(self, token_M: Tensor, states_MAD: Tensor, rows: PromptRows) -> None:
        state = self.decoder.fuse(states_MAD)
        with without_cudnn_sdpa(self.device):
            self.decoder.read(token_M, state, self.decoder.rotation(rows.position_M), rows)

    def _run(
        self, rows: FreshRows, state_ME: Tensor, rotation: Rotation, asked_BS: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The last layer's output at S of the n rows of each request, [B S, E], and the norm of the output, as
        `DraftDecoder.step`. `state_ME` are the rows' input states. Each row sees the rows before it."""
        (B, n), cache = rows.token_Bn.shape, self.cache
        asked_Q = asked_BS.flatten()
        if B > 1:
            asked_Q = (asked_BS + torch.arange(0, B * n, n, device=asked_BS.device)[:, None]).flatten()
        attend = asked = TreeRows(cache, n, VisibleChain(asked_BS, n), slot_Bn=rows.slot_Bn, asked_Q=asked_Q)
        if len(self.decoder.layers) > 1:  # the layers before the last one compute all rows
            every = VisibleChain(self._counts(n).expand(B, n), n)
            attend = TreeRows(cache, n, every, slot_Bn=rows.slot_Bn)
        row_M = None if rows.state_Bn is None else rows.state_Bn.flatten()
        return self.decoder.step(rows.token_Bn.flatten(), state_ME, rotation, attend, asked, row_M)


class StepProposer(EagleProposer):
    """One pass per level: the draft reads each node's token and its own output at the node's parent (EAGLE)."""

    sequential = True

    def __init__(self, draft: EagleDraft, shapes: Mapping[DraftSize, Shape], stable: bool = True):
        super().__init__(draft, shapes)
        self.stable, self.expanded = stable, max(shape.expanded for shape in shapes.values())
        # of the last trees, see `end`
        self.slot_BN = torch.empty(0, self.most_nodes, dtype=torch.int64, device=self.device)

    def append(self, cache: KVCache) -> None:
        super().append(cache)
        self.slot_BN = torch.cat([self.slot_BN, self._no_slots(len(cache.segments))])

    def _no_slots(self, requests: int) -> Tensor:
        return self.slot_BN.new_full((requests, self.slot_BN.shape[1]), -1)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.slot_BN]

    def bind(self, tensors: Sequence[Tensor]) -> None:
        *others, self.slot_BN = tensors
        super().bind(others)

    def idle(self, spare: KVCache, size: int) -> Proposer:
        other = super().idle(spare, size)
        other.slot_BN = self._no_slots(size)
        return other

    def select(self, staying: Sequence[int]) -> None:
        super().select(staying)
        self.slot_BN = self.slot_BN[torch.tensor(staying, dtype=torch.int64).to(self.slot_BN.device)]

    def begin(self, state: RoundState) -> tuple[Tensor, Tensor]:
        if not self.stable:
            state = self._keep_drafted(state)
        rows = self._fresh(state, levels=self.most_levels - 1, expanded=self.expanded)
        rotation, self.rotation = self._rotations(rows)  # of the rows, and of the later levels
        state_ME = self.decoder.fuse(state.aux_BRAD.to(self.dtype).flatten(0, 1))
        out = self._run(rows, state_ME, rotation, rows.asked_BS)
        self.cache.keep(None, state.count_B)
        self.level = self.used = 0
        self.slot_BJ, self.state_BL = rows.slot_BJ, self._states_after_root(self.most_levels)
        return rows.root_B, self._logits(out, rows.root_B.numel())

    def _rotations(self, rows: FreshRows) -> tuple[Rotation, Rotation]:
        """cos and sin at the positions of the rows, and at the positions of all later levels, [levels B, rotated]."""
        at, (cos, sin) = rows.token_Bn.numel(), self.decoder.rotation(rows.position_M)
        return (cos[:at], sin[:at]), (cos[at:], sin[at:])

    def _keep_drafted(self, state: RoundState) -> RoundState:
        """Keeps the cached keys and values of the accepted nodes of the last trees. Returns the state of the tokens
        without cached keys and values: the last token, and also the token before if its node was not expanded."""
        path_BK, last_B1 = state.path_BR[:, 1:], state.count_B[:, None] - 1
        slot_BK = self.slot_BN.gather(1, path_BK) if path_BK.shape[1] else path_BK
        place_K = self._counts(path_BK.shape[1])
        kept_B = ((slot_BK >= 0) & (place_K < last_B1)).sum(1)  # a node that was not expanded has no child
        if path_BK.shape[1]:
            self.cache.keep(torch.where(place_K < kept_B[:, None], slot_BK, place_K), kept_B)
        R = min(2, state.token_BR.shape[1])
        rest_BR = (kept_B[:, None] + self._counts(R)).clamp_max(state.token_BR.shape[1] - 1)
        aux_BRAD = state.aux_BRAD.gather(1, rest_BR[..., None, None].expand(-1, -1, *state.aux_BRAD.shape[2:]))
        return replace(
            state, token_BR=state.token_BR.gather(1, rest_BR), aux_BRAD=aux_BRAD, count_B=state.count_B - kept_B
        )

    def expand(self, front: Front) -> Tensor:
        B, F = front.token_BF.shape
        end = self.used + F
        visible = front.visible
        if visible is None:
            visible = VisibleChain(self._counts(end)[end - 1 :].expand(B, F), end, sees_all=True)
        attend = TreeRows(self.cache, F, visible, slot_Bn=self.slot_BJ[:, self.used : end])
        row_M = None if front.above_BF is None else front.above_BF.flatten()
        cos, sin = (x[self.level * B : (self.level + 1) * B] for x in self.rotation)
        out = self.decoder.step(front.token_BF.flatten(), self.fed_back, (cos, sin), attend, row_M=row_M)
        self.level, self.used = self.level + 1, end
        return self._logits(out, B)

    def rest_of_chain(self, token_B1: Tensor, levels: int) -> Tensor | None:
        K, B = levels, token_B1.shape[0]
        rotation = self.rotation[0][: K * B], self.rotation[1][: K * B]
        noise = None if self.state_BL is None else (self.state_BL[:, 1 : K + 1].T, self.sampling.temperature_B)
        given = token_B1[:, 0], self.fed_back, rotation, self.cache, self.slot_BJ[:, :K].T
        return self.decoder.rest_of_chain(*given, noise)

    def end(self, slot_BN: Tensor) -> None:
        if not self.stable:
            self.slot_BN = F.pad(slot_BN, (0, self.slot_BN.shape[1] - slot_BN.shape[1]), value=-1)

    def _logits(self, out: tuple[Tensor, Tensor | None], requests: int) -> Tensor:
        self.fed_back, logits_MW = self.decoder.predict(*out)
        state_B1 = None if self.state_BL is None else self.state_BL[:, self.level, None]
        return self._coupled(logits_MW.unflatten(0, (requests, -1)), state_B1)


class OnePass(Proposer):
    """One pass for all levels below a root, in `begin`. All nodes of a level share their logits."""

    sequential = False

    def _said(self, logits_BKW: Tensor) -> Tensor:
        """The logits of all levels, from which tokens are chosen, once the fresh slots are in the cache."""
        self.logits_BKW, self.level = self._coupled(logits_BKW, self._states_after_root(self.levels)), 0
        return self.logits_BKW

    def expand(self, front: Front) -> Tensor:
        self.level += 1
        return self.logits_BKW[:, self.level, None]

    def end(self, slot_BN: Tensor) -> None:
        """Nothing was added to the cache but the fresh slots."""


class MaskedProposer(OnePass, EagleProposer):
    """After the fresh slots, levels - 1 masked slots read a mask token and a learned state in place of unknown tokens
    and states (P-EAGLE, Hui et al. 2026, arXiv:2602.01469)."""

    draft: ParallelDraft

    @torch.inference_mode()
    def begin(self, state: RoundState) -> tuple[Tensor, Tensor]:
        K, draft = self.levels, self.draft
        rows = self._fresh(state, masked=K - 1, mask_token=draft.config.mask_token_id)
        aux_MAD = state.aux_BRAD.to(self.dtype).flatten(0, 1)
        if K > 1:  # one product for the states of the fresh tokens and the mask's states after them
            aux_MAD = torch.cat([aux_MAD, draft.mask_states])
        rotation = self.decoder.rotation(rows.position_M)
        out = self._run(rows, self.decoder.fuse(aux_MAD), rotation, rows.asked_BS)
        self.cache.keep(None, state.count_B)
        logits_BKW = self.decoder.predict(*out)[1].unflatten(0, (-1, K))
        return rows.root_B, self._said(logits_BKW)


class BlockProposer(OnePass):
    """A block of rows after the context of the accepted tokens (`BlockDraft`). The keys and values of a block are not
    kept. With a selector, the logits of a level are the scores of its candidates, given the token chosen at the level
    above, and -inf for other tokens."""

    draft: BlockDraft

    def __init__(self, draft: BlockDraft, shapes: Mapping[DraftSize, Shape]):
        super().__init__(draft, shapes)
        self.trained = draft.config.provenance.depth or self.most_levels
        self.decoder = block_decoder(draft)

    def pass_slots(self, depth: int) -> int:
        return self.draft.block_rows(self._block_depth(depth))

    def _block_depth(self, depth: int) -> int:
        """The number of tokens of the block that is computed for so many levels: in a block whose rows see each other,
        as many as in training, since a row would differ without the rows after it."""
        return depth if self.draft.causal else self.trained

    def _read(self, token_M: Tensor, states_MAD: Tensor, rows: PromptRows) -> None:
        self.decoder.write_context(states_MAD, rows.position_M, rows.slot_M, self.pool)

    @torch.inference_mode()
    def begin(self, state: RoundState) -> tuple[Tensor, Tensor]:
        K, causal, cache = self.levels, self.draft.causal, self.cache
        fresh = self._fresh(state)
        states_MAD = state.aux_BRAD.to(self.dtype).flatten(0, 1)
        self.decoder.write_context(states_MAD, fresh.position_M, fresh.slot_Bn.flatten(), self.pool)
        cache.keep(None, state.count_B)
        (B,), whole = fresh.root_B.shape, self._block_depth(K)
        Q = self.draft.block_rows(whole)
        position_BQ = cache.length_B[:, None] + self._counts(Q)
        last_BQ = self._counts(Q).expand(B, Q) if causal else fresh.root_B.new_full((B, Q), Q - 1)
        rows = TreeRows(cache, Q, VisibleChain(last_BQ, Q, sees_all=not causal), position_BQ)
        head_input_BKE = self.decoder.block(fresh.root_B, position_BQ, whole, rows)[:, :K]
        logits_BKW = self.decoder.logits(head_input_BKE.flatten(0, 1)).unflatten(0, (B, K))
        if self.draft.selector() is None:
            return fresh.root_B, self._said(logits_BKW)
        self.head_input_BKE, self.logits_BKW, self.level = head_input_BKE, logits_BKW, 0
        self.state_BK = self._states_after_root(K)
        return fresh.root_B, self._selected(fresh.root_B)

    @torch.inference_mode()
    def expand(self, front: Front) -> Tensor:
        if self.draft.selector() is None:
            return super().expand(front)
        self.level += 1
        return self._selected(front.token_BF[:, 0])  # a chain's: `Drafting.for_draft` allows no trees

    def _selected(self, before_B: Tensor) -> Tensor:
        """The logits of the level after tokens `before_B`, [B, 1, W]."""
        selector, k = self.draft.selector(), self.level
        assert selector is not None
        ids_BC, logit_BC = selector.candidates(self.logits_BKW[:, k])
        score_BC = logit_BC + selector.pairs(self.head_input_BKE[:, k], before_B, ids_BC)
        nowhere_BW = score_BC.new_full(self.logits_BKW[:, k].shape, -torch.inf)
        state_B1 = None if self.state_BK is None else self.state_BK[:, k, None]
        return self._coupled(nowhere_BW.scatter(1, ids_BC, score_BC)[:, None], state_B1)


class NoDrafter:
    """A proposer for decoding without a draft. Trees have a root only, and a round commits one token. The baseline thus
    has the same sampler, cache and loop as decoding with a draft."""

    draft: Draft | None = None
    device: torch.device | None = None
    levels = scratch = most_levels = 0
    most_nodes = rows = 1
    size, shapes = NOTHING, (NOTHING,)
    capturable = True

    def nothing(self, *given: Any) -> None:
        """Does nothing."""

    new_cache = read = append = select = set_sampling = bind = use = nothing

    def tensors(self) -> list[Tensor]:
        """No tensors, as nothing is drafted."""
        return []

    lengths = buffers = tensors

    def idle(self, spare: Any, size: int) -> NoDrafter:
        """The same object, as a `NoDrafter` holds no requests."""
        return self

    def propose(self, state: RoundState) -> Tree:
        """Trees of the root only: each request's last committed token."""
        return Tree(state.token_BR[:, :1], None, 0)
