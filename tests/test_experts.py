"""Mixtures of experts against a sum over each row's experts: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.ops.device import computed_by
from fledge.ops.experts import MOST_ROWS, experts, route
from fledge.targets.native import NativeTarget
from fledge.types import Prompt
from support.devices import distance, needs_triton
from support.targets import tiny_target

needs_triton()

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter does not round bfloat16
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
EPS = 1e-5


class Case:
    """Random arguments for M rows of E numbers, and C of X experts that are F wide."""

    def __init__(self, M: int, E: int, F: int, X: int, C: int, dtype: torch.dtype = torch.float32, seed: int = 0):
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

        self.chosen, self.logits = C, 2 * randn(M, X)
        self.x, self.gain, self.residual = 3 * randn(M, E), 1 + randn(E) / 4, randn(M, E)
        self.gate_up, self.down = randn(X, 2 * F, E) / E**0.5, randn(X, E, F) / F**0.5

    def __call__(self, impl: str | None = "triton", rows: slice = slice(None), normalized: bool = True) -> Tensor:
        with nullcontext() if impl is None else computed_by(impl):
            routing = route(self.logits[rows], self.chosen, normalized)
            return experts(self.x[rows], self.gain, EPS, routing, self.gate_up, self.down, self.residual[rows])

    def exact(self, normalized: bool = True) -> Tensor:
        """In float64, expert by expert of each row."""
        gate_up, down, out = self.gate_up.double(), self.down.double(), self.residual.double()
        normed = self.x.double()
        normed = normed / (normed.square().mean(-1, keepdim=True) + EPS).sqrt() * self.gain.double()
        for m, p in enumerate(self.logits.double().softmax(-1)):
            best = p.topk(self.chosen).indices.tolist()
            for e in best:
                gate, up = (gate_up[e] @ normed[m]).chunk(2)
                out[m] += p[e] / (p[best].sum() if normalized else 1) * (down[e] @ (F.silu(gate) * up))
        return out


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("M", "E", "F", "X", "C"),
    [(1, 32, 16, 8, 2), (3, 33, 20, 5, 5), (8, 40, 12, 9, 3), (11, 24, 16, 3, 1), (70, 16, 16, 4, 3)],
)
def test_values(M: int, E: int, F: int, X: int, C: int, normalized: bool) -> None:
    """Also where an expert has more pairs than a program takes at a time, and with all experts."""
    for dtype in (torch.float64, torch.float32, HALF):
        case = Case(M, E, F, X, C, dtype)
        for impl in ("definition", "triton")[: 1 + (dtype != torch.float64)]:
            found = case(impl, normalized=normalized)
            assert found.dtype == dtype and found.is_contiguous()
            assert distance(found, case.exact(normalized)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("M", "X", "C"), [(1, 1, 1), (5, 7, 3), (8, 128, 8), (64, 128, 8), (33, 40, 40)])
def test_routing(M: int, X: int, C: int) -> None:
    logits = torch.randn(M, X, generator=torch.Generator().manual_seed(M)).to(DEVICE)
    p_MX, order = logits.softmax(-1), logits.sort(-1, descending=True).indices[:, :C]
    for impl in ("definition", "triton"):
        for normalized in (False, True):
            with computed_by(impl):
                found = route(logits, C, normalized)
            weight_MC = p_MX.gather(1, order)
            torch.testing.assert_close(
                found.weight_MC, weight_MC / weight_MC.sum(-1, True) if normalized else weight_MC
            )
            assert all(x.dtype == torch.int32 for x in (found.order_P, found.end_X, found.slot_S))
            expert_P = order.flatten()
            assert found.order_P.tolist() == sorted(range(M * C), key=lambda pair: (expert_P[pair].item(), pair))
            assert found.end_X.tolist() == [int((expert_P <= e).sum()) for e in range(X)]
            slots = [e for e in found.slot_S.tolist() if e >= 0]
            assert len(set(slots)) == len(slots) and set(slots) >= set(expert_P.tolist())


def test_of_equal_logits_the_first_expert_is_chosen() -> None:
    with computed_by("triton"):
        found = route(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [-torch.inf] * 5], device=DEVICE), 3, True)
        numbers = route(torch.tensor([[torch.nan, 1.0, torch.nan, 2.0]], device=DEVICE), 2, True)
    assert found.end_X.tolist() == [2, 4, 5, 6, 6]
    assert numbers.end_X.tolist() == [1, 1, 2, 2] and numbers.weight_MC.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_a_row_depends_on_no_other(dtype: torch.dtype) -> None:
    """Bit by bit, with any number of rows among those that have the same tiles."""
    case = Case(8, 32, 16, 4, 2, dtype)
    whole = case()
    assert torch.equal(whole, case())
    for rows in (slice(5, 6), slice(3, 8)):
        assert torch.equal(case(rows=rows), whole[rows])
    case = Case(20, 32, 16, 4, 2, dtype)
    assert torch.equal(case(rows=slice(2, 15)), case()[2:15])


def test_views_and_no_rows() -> None:
    case = Case(3, 24, 16, 4, 2)
    expected = case()
    case.x, case.residual, case.logits = (x.T.contiguous().T for x in (case.x, case.residual, case.logits))
    case.gate_up, case.down = F.pad(case.gate_up, (0, 5))[..., :24], F.pad(case.down, (0, 3, 0, 2))[:, :24, :16]
    for impl in ("definition", "triton"):
        assert distance(case(impl), expected) < 1e-6
        assert case(impl, slice(0)).shape == (0, 24)
    case.down = case.down.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="rows are contiguous"):
        case()


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 8, 60, MOST_ROWS + 1, 480])
def test_a_captured_call_serves_other_rows(M: int) -> None:
    """Of the size of Qwen3-30B-A3B, which waits for nothing, whichever implementation the number of rows takes."""
    case, other = (Case(M, 2048, 768, 128, 8, torch.bfloat16, seed) for seed in (0, 1))
    case(None)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case(None)
    case.x.copy_(other.x), case.logits.copy_(other.logits)
    graph.replay()
    assert distance(found, case("definition")) <= TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_target_on_a_gpu(family: str) -> None:
    """Its rows of a chain, and a prompt with so many rows that grouped products are chosen, in bfloat16."""
    sizes = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, shared_expert_intermediate_size=32)
    if family == "mixtral":
        sizes = dict(num_local_experts=8, num_experts_per_tok=3)
    model = tiny_target(family, num_hidden_layers=3, hidden_size=64, **sizes).model.to(DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = copy.deepcopy(model).to(dtype)
        target = NativeTarget(narrow, None)
        for n in (7, 200):
            tokens = torch.randint(400, (1, n), device=DEVICE)
            expected = narrow(input_ids=tokens, use_cache=False).logits[0, -1:]
            logits, _ = target.prefill([Prompt(p) for p in tokens.tolist()], target.new_cache([n]))
            assert distance(logits, expected) < (1e-3 if dtype == torch.float32 else 0.2)
