"""Block drafts, by the method of docs/adding-a-method.md and by another network: training computes what decoding
computes, the text is the target's own, and drafts are saved, loaded and checked."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fledge import load, train_draft
from fledge.config import DraftConfig
from fledge.data.documents import Document
from fledge.decode.propose import BlockProposer
from fledge.drafts import registry
from fledge.drafts.block import BlockAttend, BlockDraft
from fledge.drafts.draft import Draft
from fledge.drafts.draft_decoder import DraftDecoder
from fledge.drafts.eagle import EagleDraft
from fledge.drafts.layers import EAGER, Compute, Layer, Linear
from fledge.drafts.peagle import ParallelDraft
from fledge.drafts.weights import load_draft, save_draft
from fledge.engines.support import ENGINES, unsupported
from fledge.methods import EAGLE3, METHODS, Method
from fledge.ops.attention_block import block_attention
from fledge.targets.transformers import TransformersTarget
from fledge.train import row_pass as passes_module
from fledge.train.objective import ttt
from fledge.train.row_pass import Implementation, Objective, row_pass
from fledge.types import Features, Packed, Sampling
from support.chats import tiny_chats
from support.commands import Ran
from support.decoding import assert_same, both, prompts
from support.dense import is_live
from support.losses import gradients
from support.methods import documented_method, registered
from support.mutations import replace_function
from support.rows import DOCUMENTS, document, live_by_definition, row_of
from support.targets import exact_target, features_for, read_alone, tiny_draft, tiny_target_directory
from support.trees import proposer_of, state_of

K = 4


@pytest.fixture
def queries(tmp_path: Path) -> Iterator[ModuleType]:
    with registered():
        yield documented_method(tmp_path)


@pytest.fixture
def pair(queries: ModuleType) -> tuple[TransformersTarget, BlockDraft]:
    target = exact_target()
    draft = tiny_draft(target, method="queries", draft_vocab_size=130)
    assert isinstance(draft, queries.QueriesDraft) and draft.dtype == torch.float64
    return target, draft


# -- training is decoding ---------------------------------------------------------------------------------------------


def trained_logits(
    draft: BlockDraft, target: TransformersTarget, row: Packed, slots: int | None = None
) -> dict[tuple[int, int], Tensor]:
    """The logits of each live slot (of the row) and step in training."""
    passes = row_pass(draft, row, features_for(draft, target, row), Objective(depth=K), Implementation(slots=slots))
    found = {}
    for part in passes.slot_chunks():
        chunk = passes.chunk(part)
        for k, of_step in enumerate(part):
            found |= {(t, k): draft.logits(chunk.head_inputs[k][i]) for i, t in enumerate(of_step.tolist())}
    return found


def decoded_logits(
    draft: BlockDraft, target: TransformersTarget, d: Document, stride: int
) -> dict[tuple[int, int], Tensor]:
    """The same of one document in decoding, of slots of the document; each round adds `stride` slots."""
    tokens, found = torch.from_numpy(d.tokens).long(), {}
    _, features = read_alone(target, tokens.tolist(), layers(draft, target))
    aux = draft.select_states(features)
    for first in range(stride):
        proposer, begin = proposer_of(draft, depth=K), 0
        proposer.append(proposer.new_cache([256]))
        for slot in range(first, len(tokens) - 1, stride):
            _, logits = proposer.begin(state_of(tokens[begin + 1 : slot + 2], aux[begin : slot + 1]))
            begin = slot + 1
            found |= {(slot, k): logits[0, k] for k in range(K)}
    return found


def layers(draft: BlockDraft, target: TransformersTarget) -> tuple[int, ...]:
    from fledge.targets.compatibility import layers_of

    return layers_of(draft.config, target)


@torch.no_grad()
def difference(draft: BlockDraft, target: TransformersTarget, slots: int | None = None) -> float:
    """The largest difference between training and decoding on DOCUMENTS, packed in one row and each alone."""
    worst, compared, start = 0.0, 0, 0
    packed = trained_logits(draft, target, row_of(DOCUMENTS, filler=3), slots)
    for d in DOCUMENTS:
        live = live_by_definition(d, K)
        alone = trained_logits(draft, target, row_of([d]), slots) if live else {}
        decoded = decoded_logits(draft, target, d, 3) if live else {}
        for t, k in live:
            for found in (packed[start + t, k], alone[t, k]):
                worst = max(worst, float((found - decoded[t, k]).abs().nan_to_num(nan=torch.inf).max()))
            compared += 1
        start += len(d.tokens)
    assert compared == len(packed) > 20
    return worst


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slots", [None, 5])
def test_training_is_decoding(pair: tuple[TransformersTarget, BlockDraft], causal: bool, slots: int | None) -> None:
    """Both kinds of blocks, packed documents, chunks, and rounds that add several tokens."""
    target, draft = pair
    draft.causal = causal
    assert difference(draft, target, slots) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_a_shorter_draft_is_the_start_of_the_trained_block(
    pair: tuple[TransformersTarget, BlockDraft], causal: bool
) -> None:
    """Where fewer tokens are drafted than in training, the rows of the others stay: rows may see them."""
    target, draft = pair
    draft.causal, draft.config = causal, draft.config.with_provenance(depth=K)
    _, features = read_alone(target, list(range(20)), layers(draft, target))
    found = []
    for depth in (K, 2, 1):
        proposer = proposer_of(draft, depth=depth)
        proposer.append(proposer.new_cache([64]))
        found.append(proposer.begin(state_of(torch.arange(1, 9), features.aux_TAD[:8]))[1])
        torch.testing.assert_close(found[-1], found[0][:, :depth], rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=f"a depth of 9 is above {K}, the tokens of a block"):
        proposer_of(draft, depth=9)


def other_direction(attend: Callable[..., Tensor], *args: Any, causal: bool, **more: Any) -> Tensor:
    return attend(*args, causal=not causal, **more)


def a_token_more(attend: Callable[..., Tensor], *args: Any, **more: Any) -> Tensor:
    *given, start, end = args
    return attend(*given, start, (end + 1).clamp_max(given[3].shape[0]), **more)


def other_documents(attend: Callable[..., Tensor], *args: Any, **more: Any) -> Tensor:
    *given, start, end = args
    return attend(*given, torch.zeros_like(start), end, **more)


def a_position_early(inputs: Callable[..., tuple[Tensor, Tensor]], *args: Any) -> tuple[Tensor, Tensor]:
    token, position = inputs(*args)
    return token, position - 1


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("block_attention", other_direction),
        ("block_attention", a_token_more),
        ("block_attention", other_documents),
        ("step_inputs", a_position_early),
    ],
)
def test_a_mistake_in_training_is_noticed(
    pair: tuple[TransformersTarget, BlockDraft], name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block's direction, the anchor's own state or another document in the context, and positions off by one."""
    target, draft = pair
    replace_function(monkeypatch, passes_module, name, mistake)
    assert difference(draft, target) > 1e-4


def test_attention_is_a_softmax_over_what_a_row_sees() -> None:
    generator = torch.Generator().manual_seed(0)
    N, Q, H, G, d, P = 70, 3, 4, 2, 6, 90  # of several parts
    q, k, v, context_k, context_v = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((N, Q, H, d), (N, Q, G, d), (N, Q, G, d), (P, G, d), (P, G, d))
    )
    end, start = torch.arange(N) + 5, (torch.arange(N) // 30) * 20
    for causal, window in itertools.product((False, True), (None, 3, 12)):
        rows = []
        for n in range(N):
            for i in range(Q):
                own, first = slice(0, i + 1 if causal else Q), int(start[n])
                if window is not None:
                    first = max(first, int(end[n]) + i - window + 1)
                keys = torch.cat([context_k[first : end[n]], k[n, own]]).repeat_interleave(H // G, 1)
                values = torch.cat([context_v[first : end[n]], v[n, own]]).repeat_interleave(H // G, 1)
                weights = (torch.einsum("hd,khd->hk", q[n, i], keys) / d**0.5).softmax(-1)
                rows.append(torch.einsum("hk,khd->hd", weights, values))
        expected = torch.stack(rows).view(N, Q, H, d)
        found = block_attention(q, k, v, context_k, context_v, start, end, causal=causal, window=window)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        weight = torch.randn(found.shape, generator=generator, dtype=torch.float64)
        of = (q, k, v, context_k, context_v)
        pairs = zip(
            torch.autograd.grad((found * weight).sum(), of), torch.autograd.grad((expected * weight).sum(), of),
            strict=True,
        )  # fmt: skip
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_the_whole_row(pair: tuple[TransformersTarget, BlockDraft]) -> None:
    """In chunks, the sums of loss, gradients and hits are those of autograd over all slots at once."""
    target, draft = pair
    row = row_of(DOCUMENTS, filler=2)
    features, objective = features_for(draft, target, row), Objective(depth=K, gamma=0.7)
    logits = logits_by_definition(draft, row, features)
    loss = sum(
        0.7**k * _cross_entropy(said, target.logits(features.last_TD[t + 1 + k]), draft)
        for (t, k), said in logits.items()
    )
    expected = gradients(draft, loss)
    for slots in (None, 4):
        draft.zero_grad(set_to_none=True)
        step = ttt(draft, row, features, target.logits, objective, Implementation(slots=slots, chunk=3))
        assert float(step.loss) == pytest.approx(float(loss), rel=1e-10)
        assert int(step.live_K.sum()) == len(logits)
        for name, p in draft.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-9, atol=1e-11, msg=name)


def logits_by_definition(draft: BlockDraft, row: Packed, features: Features) -> dict[tuple[int, int], Tensor]:
    """The logits of each live slot and step, one block at a time, with a dense softmax."""
    position = row.position_T.long()
    contexts, found = draft.context(draft.select_states(features), position), {}
    for t in range(row.token_T.numel()):
        live = [k for k in range(K) if is_live(row, t, k)]
        if not live:
            continue
        seen = [i for i in range(t + 1) if row.doc_T[i] == row.doc_T[t]]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, seen: list[int] = seen) -> Tensor:
            keys, values = (torch.cat([x[seen], own[0]]) for x, own in zip(contexts[layer], (k, v), strict=True))
            keys, values = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in (keys, values))
            weights = (torch.einsum("qhd,khd->hqk", q[0], keys) * q.shape[-1] ** -0.5).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, values)[None]

        block_KE = draft.block(row.token_T[t + 1, None].long(), position[t, None] + 1, K, attend)[0]
        found |= {(t, k): draft.logits(block_KE[k]) for k in live}
    return found


def _cross_entropy(said_W: Tensor, taught_V: Tensor, draft: BlockDraft) -> Tensor:
    """Of the target's distribution within the draft's vocabulary; 0 where its likeliest token is outside."""
    ids = draft.target_ids()
    if not bool((ids == taught_V.argmax()).any()):
        return said_W.sum() * 0
    return -(taught_V[ids].softmax(-1) * said_W.log_softmax(-1)).sum()


# -- decoding ---------------------------------------------------------------------------------------------------------

WAYS = {
    "chain": dict(),
    "short chain": dict(depth=2),
    "tree": dict(mode="tree", nodes=12, depth=K),
    "auto": dict(depth="auto"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_that_of_the_target(pair: tuple[TransformersTarget, BlockDraft], way: str) -> None:
    """Greedy and sampled, one request and several."""
    target, draft = pair
    engine = load(target, draft, **WAYS[way])
    asked = prompts(6, seed=4)
    for sampling in (Sampling(), Sampling(temperature=0.9, seed=5)):
        assert_same(*both(engine, asked[0], max_new_tokens=24, sampling=sampling))
        together = engine.generate_all(asked, max_new_tokens=24, sampling=sampling, batch=3)
        alone = load(target).generate_all(asked, max_new_tokens=24, sampling=sampling)
        assert [c.tokens for c in together] == [c.tokens for c in alone]


def test_rounds_keep_the_context_alone(pair: tuple[TransformersTarget, BlockDraft]) -> None:
    """After a round, the cache is as long as the tokens that the draft has read."""
    target, draft = pair
    _, features = read_alone(target, list(range(20)), layers(draft, target))
    proposer = proposer_of(draft, depth=K)
    proposer.append(proposer.new_cache([64]))
    assert isinstance(proposer, BlockProposer)
    proposer.propose(state_of(torch.arange(1, 8), features.aux_TAD[:7]))
    proposer.propose(state_of(torch.arange(8, 11), features.aux_TAD[7:10]))
    assert proposer.cache.lengths == [10]


# -- the method as users have it --------------------------------------------------------------------------------------


def test_a_method_of_one_file_is_trained_checked_and_loaded(
    queries: ModuleType, tmp_path: Path, fledge: Callable[..., Ran]
) -> None:
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 40)
    trained = train_draft(
        target=str(target), data=str(chats), out=str(tmp_path / "run"), method="queries", steps=40, depth=K, lr=1e-2,
        max_length=64, draft_vocab=200, device="cpu", eval_tokens=8,
    )  # fmt: skip
    assert trained.metrics["loss"] < 60 and trained.metrics["tau"] >= 1
    ran = fledge("check", "--draft", trained.draft, "--target", target, "--device", "cpu")
    assert ran.code == 0 and "The draft is sound." in ran.out + ran.err
    assert fledge("inspect", trained.draft).code == 0
    draft = load_draft(trained.draft)
    assert isinstance(draft, queries.QueriesDraft) and draft.config.provenance.depth == K
    save_draft(draft, tmp_path / "copy", torch.bfloat16)
    again = load_draft(tmp_path / "copy")
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in draft.state_dict().items())
    engine = load(str(target), draft=str(trained.draft), device="cpu")
    assert engine.drafting.mode == "parallel"
    assert_same(*both(engine, [5, 6, 7], max_new_tokens=16))
    for name in ENGINES:
        assert "does not know the method" in unsupported(draft.config, name)
    assert fledge("export", "--draft", trained.draft, "--to", "vllm", "--out", tmp_path / "exported").code == 2


def test_an_unknown_method_is_named(queries: ModuleType, tmp_path: Path) -> None:
    save_draft(tiny_draft(exact_target(), method="queries"), tmp_path / "draft", torch.float32)
    del METHODS["queries"]
    with pytest.raises(ValueError, match="method 'queries' is none of eagle1, eagle3, peagle, dflash"):
        load_draft(tmp_path / "draft")


def test_what_cannot_work_is_not_registered(queries: ModuleType) -> None:
    row, network = queries.QUERIES, queries.QueriesDraft
    registry.register(replace(row, title="Queries again"), network)  # as when a notebook's cell runs twice
    assert METHODS["queries"].title == "Queries again"
    for wrong, kind, reason in (
        (replace(row, name="eagle3.1"), network, "'eagle3.1' is a method of fledge"),
        (row, Draft, "Draft must be a subclass of EagleDraft or BlockDraft"),
        (replace(row, one_pass=False), network, "drafts a block of tokens a pass, and its method has one_pass=False"),
        (row, EagleDraft, "drafts one token a pass, and its method has one_pass=True"),
        (row, ParallelDraft, "reads a mask token, and its method has masks=False"),
    ):
        with pytest.raises(ValueError, match=reason):
            registry.register(wrong, kind)


def test_a_network_that_decoding_would_not_compute_is_refused() -> None:
    """A subclass of EAGLE's networks may have other modules and initial weights, but not another computation."""

    class Other(EagleDraft):
        def draw_weights(self) -> None:
            super().draw_weights()

    class Wrong(Other):
        def split_output(self, *given: Any) -> Any:
            return super().split_output(*given)

    target = exact_target()
    with registered():
        for network in (Other, Wrong):
            registry.register(replace(EAGLE3, name="other"), network)
            draft = tiny_draft(target, method="other")
            if network is Other:
                assert DraftDecoder(draft).draft is draft
            else:
                with pytest.raises(ValueError, match="Wrong has its own split_output, which decoding does not call"):
                    DraftDecoder(draft)


class Deep(BlockDraft):
    """Two numbered layers, a row for the anchor, the final hidden state, a mask token, and the target's head."""

    def build(self, config: DraftConfig) -> None:
        E = config.hidden_size
        self.fc = Linear(E, E, bias=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def initialize(self, last_layer: Any, head_VD: Tensor, embedding_VD: Tensor) -> None:
        for p in self.parameters():
            torch.nn.init.normal_(p, 0, 0.05) if p.dim() > 1 else p.data.fill_(1)

    def block_rows(self, K: int) -> int:
        return K + 1

    def context(self, states_TAD: Tensor, position_T: Tensor, compute: Compute = EAGER) -> list[tuple[Tensor, Tensor]]:
        state, rotation = self.fc(states_TAD[:, 0]), self.rotary(position_T, self.dtype)
        return [layer.self_attn(state, state, rotation, None, compute, part="keys")[1:] for layer in self.layers]

    def block(
        self, token_N: Tensor, position_N: Tensor, K: int, attend: BlockAttend, compute: Compute = EAGER
    ) -> Tensor:
        N, Q = token_N.numel(), K + 1
        token_NQ = torch.cat([token_N[:, None], token_N.new_full((N, K), self.config.mask_token_id)], 1)
        position_NQ = position_N[:, None] + torch.arange(Q, device=position_N.device)
        state, rotation = self.embed(token_NQ.flatten()), self.rotary(position_NQ.flatten(), self.dtype)
        for i, layer in enumerate(self.layers):

            def rows(q: Tensor, k: Tensor, v: Tensor, i: int = i) -> Tensor:
                return attend(i, *(x.unflatten(0, (N, Q)) for x in (q, k, v))).flatten(0, 1)

            state, _, _ = layer(state, None, rotation, rows, compute)
        return state.unflatten(0, (N, Q))[:, 1:]


DEEP = Method(
    name="deep", title="Deep", paper="a test", architectures=("DeepDraftModel",), one_pass=True, masks=True,
    reads_layers=False, borrows_head=True, without={"draft_vocab": "it uses the target's head"},
)  # fmt: skip


@pytest.fixture
def deep() -> Iterator[None]:
    with registered():
        registry.register(DEEP, Deep)
        yield


@pytest.mark.parametrize("causal", [False, True])
def test_training_is_decoding_in_another_network(deep: None, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deep, "causal", causal)
    target = exact_target()
    draft = tiny_draft(target, method="deep", mask_token_id=399, num_hidden_layers=2, num_aux_hidden_states=0)
    assert difference(draft, target) < 1e-9 and difference(draft, target, 5) < 1e-9


def test_another_network_is_trained_continued_checked_and_described(
    deep: None, tmp_path: Path, fledge: Callable[..., Ran]
) -> None:
    target, chats = tiny_target_directory(tmp_path), tiny_chats(tmp_path / "chats.jsonl", 40)
    options = dict(target=str(target), data=str(chats), steps=3, max_length=64, device="cpu", eval_tokens=8, depth=K)
    trained = train_draft(**options, out=str(tmp_path / "run"), method="deep", layers=2)
    words = ["--target", target, "--device", "cpu"]
    for more in (words, ["--target", target, "--files-only"]):
        ran = fledge("check", "--draft", trained.draft, *more)
        assert ran.code == 0 and re.search("The draft is sound|No fault found", ran.out + ran.err), ran.err
    again = train_draft(**options, out=str(tmp_path / "again"), init_from=str(trained.draft))
    engine = load(str(target), draft=str(again.draft), device="cpu")
    assert_same(*both(engine, [5, 6, 7], max_new_tokens=16))
    assert fledge("inspect", again.draft).code == 0
    shutil.rmtree(Path(again.draft) / "fledge")  # the probe
    ran = fledge("check", "--draft", again.draft, *words)
    assert "has no such norm" not in ran.out + ran.err, ran.err
    assert fledge("train", "--dry-run", *words, "--data", chats, "--method", "deep", "--steps", 2).code == 0
    for command in ("export", "serve"):
        given = ["--to", "vllm", "--out", tmp_path / "e"] if command == "export" else ["--target", target]
        ran = fledge(command, "--draft", again.draft, *given)
        assert ran.code == 2 and "does not know the method" in ran.err, ran.err


def test_a_buffer_that_would_be_lost_is_named(deep: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Deep.build

    def with_buffer(self: Deep, config: DraftConfig) -> None:
        build(self, config)
        self.register_buffer("scales", torch.ones(3), persistent=False)

    monkeypatch.setattr(Deep, "build", with_buffer)
    shape = dict(method="deep", mask_token_id=399, num_aux_hidden_states=0)
    save_draft(tiny_draft(exact_target(), **shape), tmp_path / "draft", torch.float32)
    with pytest.raises(ValueError, match=r"Deep makes buffers that are not saved \(scales\)"):
        load_draft(tmp_path / "draft")


def test_a_head_is_the_networks_or_the_targets(deep: None, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register(replace(DEEP, borrows_head=False), Deep)
    with pytest.raises(ValueError, match="Deep has no lm_head, and its method does not borrow the target's head"):
        tiny_draft(exact_target(), method="deep", mask_token_id=399, num_aux_hidden_states=0)


def test_an_attention_that_a_block_lacks_is_refused(
    pair: tuple[TransformersTarget, BlockDraft], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    monkeypatch.setattr(type(draft), "implementations", ("eager",))
    row = row_of([document(9, (1, 9))])
    with pytest.raises(ValueError, match="Queries has no 'flex' attention; train the draft with --impl eager"):
        ttt(draft, row, features_for(draft, target, row), target.logits, Objective(2), Implementation("flex"))
