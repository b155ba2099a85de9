"""Speculative decoding of one sequence: propose, verify, commit, until the turn ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fledge.data.template import ChatTemplate
from fledge.decode.propose import ChainProposer, FixedTreeProposer, TreeProposer
from fledge.decode.text import TextStream
from fledge.decode.verify import Chooser, accept_rejection, accept_walk, accepted_path
from fledge.models.draft import Draft
from fledge.models.kv_cache import TargetCache
from fledge.models.target import Target, load_target
from fledge.models.weights import fit, load_draft, read_draft_config
from fledge.types import Round, Sampling, Trace, TreeShape

Prompt = str | Sequence[dict[str, Any]]


@dataclass
class Completion:
    """What was generated: `tokens` through the stop, its `text` without it, why it `finish`ed (stop or length)."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = "length"
    trace: Trace = field(default_factory=Trace)


MODES = ("chain", "tree")


def check_drafting(mode: str, confidence: float, nodes: int, width: int, sampling: Sampling | None = None) -> None:
    """Raises ValueError for a way of drafting that there is not, or options that contradict each other."""
    if not 0 <= confidence < 1:
        raise ValueError(f"confidence {confidence} is outside [0, 1); 0 drafts the whole depth every round")
    if mode not in MODES:
        raise ValueError(f"draft mode {mode!r} is none of {', '.join(MODES)}")
    if mode == "tree" and confidence:
        raise ValueError("confidence ends chains early; a tree follows what is likely by itself, leave it out")
    if mode == "tree" and (nodes < 2 or width < 1):
        raise ValueError(f"a tree of {nodes} nodes, {width} wide, drafts nothing; 2 nodes and a width of 1 are least")
    if mode == "tree" and sampling is not None and sampling.draft == "sample" and not sampling.greedy:
        raise ValueError("a tree's tokens are the draft's likeliest; sampled drafts need --draft-mode chain")


class Engine:
    """A target, and a draft that speeds it up without changing what it says.

    `depth` is the number of tokens drafted a round, in a tree the longest path; None takes the depth the draft was
    trained to. `mode` "chain" drafts one token after the other, and with `confidence` above 0 only while the draft
    gives its chain at least that probability. "tree" drafts EAGLE-2's tree of `nodes`, the root included, at most
    `width` children each, or a tree of a fixed `shape`. The draft's cache is `stable`, or keeps what it made itself of
    accepted tokens. Raises ValueError where draft and target do not belong together, the target cannot do what
    verification needs, or the options contradict each other.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None = None,
        *,
        depth: int | None = None,
        mode: str = "chain",
        confidence: float = 0.0,
        nodes: int = 60,
        width: int = 10,
        shape: TreeShape | None = None,
        stable: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ):
        check_drafting(mode, confidence, nodes, width)
        self.mode, self.confidence, self.nodes, self.width, self.shape = mode, confidence, nodes, width, shape
        self.stable = stable
        self.target, self.draft = target, draft
        if draft is not None:
            fit(draft, target)
            self.layers = target.aux_layers  # another engine may have the target read others
            target.check_rollback()
            if mode == "tree":
                target.check_tree()
            template_kwargs = {**draft.config.provenance.template_kwargs, **(template_kwargs or {})}
        self.depth = depth or (draft.config.provenance.depth if draft else None) or 5
        self.template = ChatTemplate(target.tokenizer, target.stop_ids, template_kwargs)

    @property
    def verified(self) -> int:
        """Most tokens that go through the target together."""
        if self.mode == "chain":
            return self.depth + 1
        return self.nodes if self.shape is None else len(self.shape.parents) + 1

    def drafting(self) -> dict[str, Any]:
        """How it drafts, for a record."""
        how = {"mode": self.mode, "draft_cache": "stable" if self.stable else "unstable"}
        if self.mode == "chain":
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
        """Yields text as it is committed, for a raw string or chat messages.

        `stop` are strings that end the text before themselves. `request` numbers requests that share a seed.
        `speculate` False decodes token by token, the baseline. `into` receives tokens, text and trace.
        Raises ValueError for a prompt that is empty or does not fit the target's context.
        """
        sampling = sampling or Sampling()
        done = into if into is not None else Completion()
        prefix = list(self.template.prompt_ids(prompt))
        self._check_length(len(prefix), max_new_tokens)
        text = TextStream(self.target.tokenizer, stop)
        began = time.perf_counter()
        rounds = self._speculative if speculate and self.draft is not None else self._vanilla
        for tokens in rounds(prefix, sampling, request, done.trace):
            tokens = tokens[: max_new_tokens - len(done.tokens)]
            end = next((i for i, token in enumerate(tokens) if token in self.target.stop_ids), len(tokens))
            seen = len(text.tokens)
            piece = text.add(tokens[:end])
            done.tokens += text.tokens[seen:]
            if end < len(tokens) and not text.stopped:
                done.tokens.append(tokens[end])  # the stop token is said, but is no text
                done.finish = "stop"
            done.trace.t_total = time.perf_counter() - began
            if piece:
                yield piece
            if text.stopped or done.finish == "stop" or len(done.tokens) >= max_new_tokens:
                break
        if rest := text.finish():
            yield rest
        done.text = text.text
        if text.stopped:
            done.finish = "stop"

    def _check_length(self, prompt: int, new: int) -> None:
        limit = self.target.context
        if prompt == 0:
            raise ValueError("the prompt is empty")
        if new < 1:
            raise ValueError(f"max_new_tokens is {new}; ask for at least one")
        if prompt + new > limit:
            raise ValueError(
                f"the prompt has {prompt} tokens and {new} are to be generated, but {self.target.name or 'the target'} "
                f"reads at most {limit}; shorten the prompt or ask for at most {max(limit - prompt, 0)} new tokens"
            )

    def _vanilla(self, prefix: list[int], sampling: Sampling, request: int, trace: Trace) -> Iterator[list[int]]:
        """Token by token, the baseline; the same chooser, cache and loop."""
        chooser, cache = Chooser(sampling, request), TargetCache()
        fed, prefix, began = prefix, list(prefix), time.perf_counter()
        while True:
            logits, _ = self.target.forward(self._ids(fed), cache, features=False, last_only=True)
            fed = accept_walk(chooser, prefix, (), logits)
            prefix.extend(fed)
            trace.t_prefill = trace.t_prefill or time.perf_counter() - began
            yield fed

    def _speculative(self, prefix: list[int], sampling: Sampling, request: int, trace: Trace) -> Iterator[list[int]]:
        """Rounds of drafting and verifying; each yields what it committed. The prefill and its token are no round."""
        target, chooser, cache = self.target, Chooser(sampling, request), TargetCache()
        proposer = self._proposer(sampling, request)
        began = time.perf_counter()
        logits, features = target.forward(self._ids(prefix), cache, layers=self.layers, last_only=True)
        committed = accept_walk(chooser, prefix, (), logits)
        slots, aux = self._ids([*prefix[1:], *committed]), self.draft.reads(features)
        prefix = prefix + committed
        trace.t_prefill = time.perf_counter() - began
        path: list[int] = []
        yield committed
        while True:
            clock = _Clock(target.device)
            tree = proposer.propose(slots, aux, path).to(target.device)
            clock.tick()
            logits, features = target.forward(tree.token_N, cache, tree=tree, layers=self.layers)
            (_, *drafted), (_, *parents) = tree.on_host()
            if tree.q_KW is None:
                committed = accept_walk(chooser, prefix, drafted, logits, parents)
            else:
                committed = accept_rejection(chooser, prefix, drafted, self._scatter(tree.q_KW), logits)
            path = accepted_path(committed, drafted, parents)
            cache.keep(len(prefix) - 1, path)
            slots, aux = self._ids(committed), self.draft.reads(features)[path]
            prefix.extend(committed)
            trace.rounds.append(Round(tree.levels, len(committed) - 1, *clock.read()))
            yield committed

    def _proposer(self, sampling: Sampling, request: int) -> ChainProposer | TreeProposer | FixedTreeProposer:
        if self.mode == "chain":
            return ChainProposer(self.draft, self.depth, sampling, request, self.confidence, stable=self.stable)
        check_drafting(self.mode, self.confidence, self.nodes, self.width, sampling)
        if self.shape is not None:
            return FixedTreeProposer(self.draft, self.shape, stable=self.stable)
        return TreeProposer(self.draft, self.depth, self.nodes, self.width, stable=self.stable)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, device=self.target.device)

    def _scatter(self, q_KW: Tensor) -> Tensor:
        """Draft distributions over the target's vocabulary: zeros outside the draft's."""
        q_KV = q_KW.new_zeros(q_KW.shape[0], self.draft.config.vocab_size)
        q_KV[:, self.draft.target_ids()] = q_KW
        return q_KV


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
    """Loads a target (or takes one), and a draft for it, from directories or hub ids.

    `device` "auto" is the GPU where there is one; `draft_device` None is the target's. `dtype` None is float32 on the
    CPU and the checkpoint's own elsewhere. `drafting` are `Engine`'s options. Raises ValueError with the cause where
    something is missing, damaged, or does not fit.
    """
    device = resolve_device(device) if isinstance(target, str) else target.device
    config = read_draft_config(draft) if draft else None
    longrope = config is not None and config.rope.rope_type == "longrope"
    loaded = target
    if isinstance(target, str):
        most = config.provenance.max_length if longrope else None
        loaded = load_target(target, device=device, dtype=dtype, max_length=most)
    if config is None:
        return Engine(loaded, template_kwargs=template_kwargs)
    made = load_draft(draft, device=draft_device or device, dtype=loaded.dtype)
    return Engine(loaded, made, template_kwargs=template_kwargs, **drafting)


def resolve_device(device: str) -> str:
    """ "auto" to what this machine has. Raises ValueError where a device is asked for that is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this machine shows no CUDA device; use --device cpu")
    return device


class _Clock:
    """Seconds of drafting and of verification, by device events where there are any."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def read(self) -> tuple[float, float]:
        self.tick()
        a, b, c = self.marks
        if not self.cuda:
            return b - a, c - b
        c.synchronize()
        return a.elapsed_time(b) / 1e3, b.elapsed_time(c) / 1e3
