"""Speculative decoding of one request or many: propose, verify, commit, until each one's turn ends."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from fledge.data.template import ChatTemplate
from fledge.decode.batch import Batch, NoDrafter
from fledge.decode.parallel import ParallelFixedProposer, ParallelProposer, ParallelTreeProposer
from fledge.decode.propose import ChainProposer, Drafter, FixedTreeProposer, TreeProposer
from fledge.decode.request import Completion, Request
from fledge.decode.text import TextStream
from fledge.decode.verify import Chooser
from fledge.models.draft import Draft
from fledge.models.target import Target, load_target
from fledge.models.weights import fit, load_draft, read_draft_config
from fledge.types import Sampling, TreeShape

Prompt = str | Sequence[dict[str, Any]] | Sequence[int]  # text to go on with, chat messages, or token ids
MODES = ("chain", "tree", "parallel")
BATCH = 16  # requests decoded together where nobody says


def check_drafting(
    mode: str | None, confidence: float, nodes: int, width: int, sampling: Sampling | None = None
) -> None:
    """Raises ValueError for a way of drafting that there is not, or options that contradict each other."""
    if not 0 <= confidence < 1:
        raise ValueError(f"confidence {confidence} is outside [0, 1); 0 drafts the whole depth every round")
    if mode is not None and mode not in MODES:
        raise ValueError(f"draft mode {mode!r} is none of {', '.join(MODES)}")
    if mode == "tree" and confidence:
        raise ValueError("confidence ends chains early; a tree follows what is likely by itself, leave it out")
    if mode == "tree" and (nodes < 2 or width < 1):
        raise ValueError(f"a tree of {nodes} nodes, {width} wide, drafts nothing; 2 nodes and a width of 1 are least")
    if mode == "tree" and sampling is not None and sampling.draws:
        raise ValueError("a tree's tokens are the draft's likeliest; sampled drafts need a chain, leave tree out")


def mode_of(method: str, mode: str | None, stable: bool) -> str:
    """The way of drafting that a method's draft has: its own where none is asked for. P-EAGLE's chain comes of one
    pass. Raises ValueError for a way that it has not."""
    if method == "peagle" and not stable:
        raise ValueError("what a P-EAGLE draft makes of masks is no cache of words; its draft cache is stable")
    if method == "peagle":
        return "tree" if mode == "tree" else "parallel"
    if mode == "parallel":
        raise ValueError("draft mode parallel is for drafts of P-EAGLE; use chain or tree")
    return mode or "chain"


class Engine:
    """A target, and a draft that speeds it up without changing what it says.

    `depth` is the number of tokens drafted a round, in a tree the longest path; None takes the depth the draft was
    trained to. `mode` "chain" drafts one token after the other, "parallel" a P-EAGLE draft's chain in one pass, and
    with `confidence` above 0 only while the draft gives its chain at least that probability. "tree" drafts EAGLE-2's
    tree of `nodes`, the root included, at most `width` children each, or a tree of a fixed `shape`. None is "parallel"
    for a draft of P-EAGLE, else "chain". The draft's cache is `stable`, or keeps what it made itself of
    accepted tokens. Raises ValueError where draft and target do not belong together, the target cannot do what
    verification needs, or the options contradict each other.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        *,
        depth: int | None = None,
        mode: str | None = None,
        confidence: float = 0.0,
        nodes: int = 60,
        width: int = 10,
        shape: TreeShape | None = None,
        stable: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ):
        check_drafting(mode, confidence, nodes, width)
        if shape is not None and mode != "tree":
            raise ValueError("a shape is a tree's; use mode tree with it")
        if depth is not None and depth < 1:
            raise ValueError(f"a depth of {depth} drafts nothing; 1 is least")
        self.mode, self.confidence, self.nodes, self.width, self.shape = mode, confidence, nodes, width, shape
        self.stable = stable
        self.target, self.draft = target, draft
        if draft is not None:
            self.mode = mode_of(draft.config.method, mode, stable)
            fit(draft, target)
            self.layers = target.aux_layers  # another engine may have the target read others
            target.check_rollback()
            if self.mode == "tree":
                target.check_masks()
            template_kwargs = {**draft.config.provenance.template_kwargs, **(template_kwargs or {})}
        self.depth = depth or (draft.config.provenance.depth if draft else None) or 5
        self.template = ChatTemplate(target.tokenizer, target.stop_ids, template_kwargs)

    @property
    def verified(self) -> int:
        """Most tokens that go through the target together."""
        if self.mode != "tree":
            return self.depth + 1
        return self.nodes if self.shape is None else len(self.shape.parents) + 1

    def drafting(self) -> dict[str, Any]:
        """How it drafts, for a record."""
        how = {"mode": self.mode, "draft_cache": "stable" if self.stable else "unstable"}
        if self.mode != "tree":
            return how | {"depth": self.depth, "confidence": self.confidence}
        if self.shape is not None:
            return how | {"shape": asdict(self.shape)}
        return how | {"depth": self.depth, "nodes": self.nodes, "width": self.width}

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """Decodes to the end of the turn. Options are those of `stream`."""
        completion = Completion()
        for _ in self.stream(prompt, into=completion, **options):
            pass
        return completion

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        *,
        batch: int | None = None,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        speculate: bool = True,
        request: int | Sequence[int] = 0,
        answered: Callable[[int], None] = lambda place: None,
    ) -> list[Completion]:
        """Decodes many prompts, at most `batch` together (None: 16, or one by one where the target keeps requests apart
        no other way); where one ends, the next takes its place. Each answer is what the prompt alone would get, as
        request number `request`, + 1, + 2 .. (or those given), with logits processors of its own, copies of those
        given, since they may remember what they saw. `answered` is told of each prompt's place when its answer is over.
        Other options are those of `stream`. Raises ValueError, before any is decoded, where a prompt is empty or does
        not fit."""
        if batch is not None and batch < 1:
            raise ValueError(f"a batch of {batch} decodes nothing; 1 is least")
        if batch != 1 and (refusal := self._refusal):
            if batch:
                raise ValueError(refusal)
            batch = 1
        sampling = sampling or Sampling()
        numbers = range(request, request + len(prompts)) if isinstance(request, int) else request
        requests = []
        for number, prompt in zip(numbers, prompts, strict=True):
            own = replace(sampling, processors=copy.deepcopy(sampling.processors))
            requests.append(self._request(prompt, number, max_new_tokens=max_new_tokens, sampling=own, stop=stop))
        places = {asked: place for place, asked in enumerate(requests)}
        for asked in self._decode(requests, batch or BATCH, speculate):
            asked.say()
            if asked.over:
                answered(places[asked])
        for asked in requests:
            asked.close()
        return [asked.done for asked in requests]

    @functools.cached_property
    def _refusal(self) -> str:
        """Why the target does not decode several requests together; empty where it does."""
        try:
            self.target.check_masks(requests=2)
        except ValueError as e:
            return str(e)
        return ""

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        speculate: bool = True,
        request: int = 0,
        into: Completion | None = None,
    ) -> Iterator[str]:
        """Yields text as it is committed, for a raw string, chat messages, or token ids.

        `stop` are strings that end the text before themselves. `request` numbers requests that share a seed.
        `speculate` False decodes token by token, the baseline. `into` receives tokens, text and trace.
        Raises ValueError for a prompt that is empty or does not fit the target's context.
        """
        asked = self._request(
            prompt, request, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, into=into
        )  # fmt: skip
        for _ in self._decode([asked], 1, speculate):
            if piece := asked.say():
                yield piece
        if rest := asked.close():
            yield rest

    def _request(
        self, prompt: Prompt, number: int, *, max_new_tokens: int = 256, sampling: Sampling | None = None,
        stop: Sequence[str] = (), into: Completion | None = None,
    ) -> Request:  # fmt: skip
        ids = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], int)
        prefix = list(prompt if ids else self.template.prompt_ids(prompt))
        self.check_length(len(prefix), max_new_tokens)
        vocabulary = self.target.embedding.shape[0]
        if not 0 <= min(prefix) <= max(prefix) < vocabulary:
            raise ValueError(f"the prompt has token ids outside 0..{vocabulary - 1}, the target's vocabulary")
        stop = (stop,) if isinstance(stop, str) else stop
        return Request(
            number, prefix, Chooser(sampling or Sampling(), number), TextStream(self.target.tokenizer, stop),
            max_new_tokens, self.target.stop_ids, into if into is not None else Completion(),
        )  # fmt: skip

    def check_length(self, prompt: int, new: int) -> None:
        """Raises ValueError where so many tokens and so many new ones are not what the target reads."""
        limit = self.target.context
        if prompt == 0:
            raise ValueError("the prompt is empty")
        if new < 1:
            raise ValueError(f"max_new_tokens is {new}; ask for at least one")
        if prompt + new > limit:
            fewer = f", or ask for at most {limit - prompt} new tokens" if prompt < limit else ""
            raise ValueError(
                f"the prompt has {prompt} tokens and {new} are to be generated, but {self.target.name or 'the target'} "
                f"reads at most {limit}; shorten the prompt{fewer}"
            )

    def _decode(self, requests: Sequence[Request], batch: int, speculate: bool) -> Iterator[Request]:
        """Yields a request whenever something was committed to it, until it is over: its reader has it `say` that."""
        if not requests:
            return
        drafts = speculate and self.draft is not None
        proposer = self._proposer(requests[0].chooser.sampling) if drafts else NoDrafter()
        most = max(len(r.prefix) + r.limit for r in requests)
        if drafts and not self.target.rotary and most + self.depth > self.target.context:
            raise ValueError(
                f"{self.target.name or 'the target'} knows {self.target.context} positions and no more, and drafts of "
                f"{self.depth} may go as many beyond the {most} tokens asked for; ask for fewer, or draft fewer"
            )
        together = Batch(self.target, proposer, self.layers if drafts else None)
        waiting = deque(requests)
        while waiting or together.running:
            free = min(batch - len(together.running), len(waiting))
            yield from together.enter([waiting.popleft() for _ in range(free)])
            if together.running:
                together.round()
                yield from together.running
                together.dismiss()

    def _proposer(self, sampling: Sampling) -> Drafter:
        if self.mode == "chain":
            return ChainProposer(self.draft, self.depth, sampling, self.confidence, stable=self.stable)
        if self.mode == "parallel":
            return ParallelProposer(self.draft, self.depth, sampling, self.confidence)
        check_drafting(self.mode, self.confidence, self.nodes, self.width, sampling)
        if self.draft.peagle and self.shape is not None:
            return ParallelFixedProposer(self.draft, self.shape)
        if self.draft.peagle:
            return ParallelTreeProposer(self.draft, self.depth, self.nodes, self.width)
        if self.shape is not None:
            return FixedTreeProposer(self.draft, self.shape, stable=self.stable)
        return TreeProposer(self.draft, self.depth, self.nodes, self.width, stable=self.stable)


def load(
    target: str | Target,
    draft: str | None = None,
    *,
    device: str = "auto",
    draft_device: str | None = None,
    dtype: torch.dtype | None = None,
    template_kwargs: dict[str, Any] | None = None,
    **drafting: Any,
) -> Engine:
    """Loads a target (or takes one), from a directory or hub id, and a draft for it from a directory.

    `device` "auto" is the GPU where there is one; `draft_device` None is the target's. `dtype` None is float32 on the
    CPU and the checkpoint's own elsewhere. `drafting` are `Engine`'s options. Raises ValueError with the cause where
    something is missing, damaged, or does not fit.
    """
    device = resolve_device(device) if isinstance(target, str) else target.device
    draft_device = resolve_device(draft_device) if draft_device else device
    config = read_draft_config(draft) if draft else None
    longrope = config is not None and config.rope.rope_type == "longrope"
    loaded = target
    if isinstance(target, str):
        most = config.provenance.max_length if longrope else None
        loaded = load_target(target, device=device, dtype=dtype, max_length=most)
    if config is None:
        return Engine(loaded, template_kwargs=template_kwargs, **drafting)
    made = load_draft(draft, device=draft_device, dtype=loaded.dtype)
    return Engine(loaded, made, template_kwargs=template_kwargs, **drafting)


def resolve_device(device: str) -> str:
    """ "auto" to what this machine has. Raises ValueError for a device that is no CPU or CUDA GPU, or is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        named = torch.device(device)
    except RuntimeError as e:
        raise ValueError(f"{device!r} is no device; use auto, cpu, cuda, cuda:1, ..") from e
    if named.type not in ("cpu", "cuda"):
        raise ValueError(f"fledge runs on CPUs and CUDA GPUs, not on {device}; use auto, cpu, cuda, cuda:1, ..")
    there = torch.cuda.device_count()
    if named.type == "cuda" and (named.index or 0) >= there:
        shows = f"{there} of them, from cuda:0 on" if there else "no CUDA device; use cpu"
        raise ValueError(f"device {device}: this machine shows {shows}")
    return device
