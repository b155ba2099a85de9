"""Attention of blocks by FlexAttention and by Triton kernels against plain torch, on a GPU or in Triton's interpreter,
and training steps of block drafts that use it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.drafts.draft import Draft
from fledge.ops import training
from fledge.ops.attention_block import block_attention
from fledge.targets.transformers import TransformersTarget
from fledge.train.objective import ttt
from fledge.train.plan import DrawAnchors
from fledge.train.row_pass import Implementation, Objective
from fledge.types import Features
from support.devices import distance, needs_triton
from support.losses import gradients
from support.rows import DOCUMENTS, document, row_of
from support.targets import DFLASH, features_for, tiny_draft, tiny_target

needs_triton()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
IMPLS = ["triton", pytest.param("flex", marks=GPU)]
# [start, end) of each block's context: one document, two documents, a chunk that begins within its documents' row
ONE = [(0, e) for e in (1, 2, 31, 32, 33, 40, 64, 65)]
TWO = [(0, e) for e in (3, 20, 50)] + [(50, e) for e in (51, 52, 90)]
LATE = [(40, e) for e in (41, 60, 97, 98)] + [(99, e) for e in (100, 132)]

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


def inputs(N: int, Q: int, H: int, G: int, d: int, P: int, dtype: torch.dtype) -> list[Tensor]:
    """q, keys and values of blocks and of the context."""
    generator = torch.Generator().manual_seed(0)
    shapes = (N, Q, H, d), (N, Q, G, d), (N, Q, G, d), (P, G, d), (P, G, d)
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(DEVICE, dtype).requires_grad_() for x in made]


def attended(leaves: list[Tensor], contexts: list[tuple[int, int]], **how: Any) -> list[Tensor]:
    """The output of attention, then the gradients of `leaves`."""
    start, end = (torch.tensor(x) for x in zip(*contexts, strict=True))
    out = block_attention(*leaves, start, end, **how)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("contexts", "Q", "H", "G", "d"),
    [
        (ONE, 16, 4, 1, 16),
        (ONE, 1, 2, 2, 32),
        (TWO, 5, 6, 2, 24),
        (TWO, 16, 2, 1, 80),
        (LATE, 4, 8, 2, 128),
        (LATE, 17, 8, 2, 40),
        ([(7, 8)], 3, 3, 1, 20),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_match_the_definition(
    impl: str, contexts: list[tuple[int, int]], Q: int, H: int, G: int, d: int, causal: bool
) -> None:
    """Outputs and gradients equal those of plain torch in float64: contexts of one token and of several tiles, sizes
    that are not powers of two, one to four query heads a key head, keys that no block reads, and windows."""
    if impl == "flex" and (d == 128 or d * G * 4 % 16):
        pytest.skip("FlexAttention has no float32 tile of this shape that fits a GPU's shared memory")
    leaves = inputs(len(contexts), Q, H, G, d, contexts[-1][1] + 3, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    for window in (None, Q, Q + 30):
        ours = attended(leaves, contexts, causal=causal, window=window, impl=impl)
        for a, b in zip(ours, attended(exact, contexts, causal=causal, window=window), strict=True):
            assert float((a.double() - b).detach().norm()) <= 1e-5 * max(float(b.detach().norm()), 1.0), window


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("Q", "H", "G", "d"), [(16, 32, 8, 128), (16, 8, 8, 64), (8, 8, 1, 128), (11, 28, 4, 96), (16, 4, 2, 256)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_large_blocks(impl: str, dtype: torch.dtype, Q: int, H: int, G: int, d: int, causal: bool) -> None:
    """Hundreds of blocks in two documents of thousands of tokens: in bfloat16, the errors are at most 1.5 times those
    of plain torch with bfloat16 outputs."""
    if impl == "flex" and dtype == torch.float32:
        pytest.skip("FlexAttention has no float32 tile of this shape that fits a GPU's shared memory")
    ends = torch.randperm(3000, generator=torch.Generator().manual_seed(2))[:300].sort().values + 1
    contexts = [(0 if e <= 1100 else 1100, e) for e in ends.tolist()]
    leaves = inputs(len(contexts), Q, H, G, d, 3007, dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    for window in (None, 200):
        how = dict(causal=causal, window=window)
        expected, usual = attended(exact, contexts, **how), attended(leaves, contexts, **how)
        for i, (a, b, c) in enumerate(zip(attended(leaves, contexts, **how, impl=impl), expected, usual, strict=True)):
            allowed = 1e-5 if dtype == torch.float32 else 1.5 * distance(c, b) + 3e-3
            assert distance(a, b) <= allowed, (i, window)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_blocks(impl: str) -> None:
    leaves = inputs(0, 3, 2, 1, 16, 9, torch.float32)
    empty = torch.zeros(0, dtype=torch.int64)
    out = block_attention(*leaves, empty, empty, causal=False, impl=impl)
    assert out.shape == (0, 3, 2, 16)
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), leaves, allow_unused=True) if g is not None)


def test_what_cannot_run_is_refused() -> None:
    leaves = inputs(1, 3, 2, 1, 5, 9, torch.float32)
    for impl, reason in (("triton", "5 are not; use 'eager'"), ("fast", "must be one of eager, flex, triton")):
        with pytest.raises(ValueError, match=reason):
            attended(leaves, [(0, 4)], causal=False, impl=impl)
    on_cpu = [x.detach().cpu().requires_grad_() for x in leaves]
    with pytest.raises(ValueError, match="'flex' has no backward pass on a CPU; use 'eager'"):
        attended(on_cpu, [(0, 4)], causal=False, impl="flex")


# -- training steps ---------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "both ways": {},
    "causal, windows": dict(block_causal=True, windows=(6, None)),
    "biases": dict(attention_bias=True),
    "DFlash 2": dict(block_conv=True, candidate_selector=True),
}
K = 5


def pair(**config: Any) -> tuple[TransformersTarget, Draft]:
    target = tiny_target(tokenizer=False, hidden_size=64, head_dim=16)
    return target, tiny_draft(target, **DFLASH, **config)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("kind", "slots"), [("both ways", None), ("causal, windows", 7), ("biases", None), ("DFlash 2", 7)]
)
def test_a_training_step_is_that_of_plain_torch(
    impl: str, kind: str, slots: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, hits and the gradient of every parameter, with kernels in attention, layers and loss; in chunks too, and
    with the activations of the MLP computed again."""
    monkeypatch.setattr(training, "ROW_MULTIPLE", 4 if DEVICE == "cpu" else training.ROW_MULTIPLE)
    target, draft = pair(**KINDS[kind])
    row = row_of(DOCUMENTS, filler=3)
    features = features_for(draft, target, row)
    objective = Objective(depth=K, gamma=0.7, drop=DrawAnchors(12))
    draft.share_target_weights(target.embedding, target.head_weight)
    plain = ttt(draft, row, features, target.logits, objective)
    expected = gradients(draft, plain.loss)
    target.model.to(DEVICE), draft.to(DEVICE)
    draft.share_target_weights(target.embedding, target.head_weight)
    ways = Implementation(impl, "triton", "triton", slots, recompute=slots is not None, chunk=9)
    step = ttt(draft, row, features, lambda x: target.logits(x.to(DEVICE)), objective, ways)
    torch.testing.assert_close(step.loss.cpu(), plain.loss, rtol=1e-4, atol=0)
    assert torch.equal(step.hit_K, plain.hit_K) and torch.equal(step.live_K, plain.live_K)
    for name, g in gradients(draft, step.loss).items():
        assert distance(g.cpu(), expected[name]) < 1e-3, name


@pytest.mark.parametrize("kind", ["both ways", "DFlash 2"])
def test_a_row_without_anchors(kind: str) -> None:
    target, draft = pair(**KINDS[kind])
    row = row_of([document(9), document(1, (0, 1))], filler=3)
    features = features_for(draft, target, row)
    target.model.to(DEVICE), draft.to(DEVICE)
    draft.share_target_weights(target.embedding, target.head_weight)
    ways = Implementation("triton", "triton", "triton", 9)
    step = ttt(draft, row, features, lambda x: target.logits(x.to(DEVICE)), Objective(depth=3), ways)
    assert step.loss == 0 and not step.live_K.any()
    assert not any(p.grad.any() for p in draft.parameters() if p.grad is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "flex"])
def test_no_kernel_is_compiled_for_a_count(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first row, no kernel is compiled again, whatever the documents and the number of anchors."""
    import triton
    from torch._dynamo.utils import counters

    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **told: compiled.append(str(told["src"].name)))
    target, draft = pair(windows=(None, 40))
    target.model.to(DEVICE), draft.to(DEVICE)
    draft.share_target_weights(target.embedding, target.head_weight)
    ways = Implementation(impl, "triton", "triton", slots=100)
    for tried, (n, starts) in enumerate(
        [(300, (0, 9)), (64, (0, 333)), (200, (1, 500)), (77, (400, 401)), (1, (5, 4))]
    ):
        row = row_of([document(512, (starts[0], 512)), document(7), document(505, (starts[1], 505))])
        objective = Objective(depth=K, drop=DrawAnchors(n))
        ttt(draft, row, features_for(draft, target, row), target.logits, objective, ways)
        draft.zero_grad()
        if tried == 0:
            assert compiled or impl == "flex"
            compiled.clear()
            graphs = counters["stats"]["unique_graphs"]
    assert not compiled and counters["stats"]["unique_graphs"] == graphs


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "flex"])
def test_a_training_step_in_16_bits(impl: str) -> None:
    """In bfloat16, the error of the loss and of each gradient is at most 1.5 times that of plain torch."""
    target = tiny_target(tokenizer=False, hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4)
    draft = tiny_draft(target, **DFLASH)
    row = row_of([document(300, (2, 280), seed=1), document(90, (5, 60), (60, 90), seed=2)], filler=5)
    features, head = features_for(draft, target, row), target.head_weight.to(DEVICE)
    draft = draft.to(DEVICE, torch.bfloat16)
    rounded = Features(*(x.to(DEVICE, torch.bfloat16) for x in (features.aux_TAD, features.last_TD)))
    head, embedding = head.bfloat16(), target.embedding.to(DEVICE).bfloat16()

    def gradients_of(draft: Draft, ways: Implementation) -> dict[str, Tensor]:
        draft.share_target_weights(embedding, head)
        seen = Features(rounded.aux_TAD.to(draft.dtype), rounded.last_TD.to(draft.dtype))
        step = ttt(draft, row, seen, lambda x: x @ head.to(draft.dtype).T, Objective(depth=K), ways)
        return {"loss": step.loss, **gradients(draft, step.loss)}

    exact = gradients_of(copy.deepcopy(draft).double(), Implementation())
    usual = gradients_of(draft, Implementation())
    for slots in (None, 100):
        for name, ours in gradients_of(draft, Implementation(impl, "triton", "triton", slots)).items():
            assert distance(ours, exact[name]) <= 1.5 * distance(usual[name], exact[name]) + 1e-3, (name, slots)
