"""The layers that are compiled on the machine compute what plain torch does, and a row the same among any others."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.decode.load import load
from fledge.drafts.draft_decoder import DraftDecoder
from fledge.drafts.kv_cache import KVCache, SlotPool, TreeRows
from fledge.ops import compiled as build
from fledge.ops import linear as linear_module
from fledge.ops.attention_tree import VisibleChain
from fledge.ops.compiled import MOST_ROWS, CompiledWeight, Threads
from fledge.targets.native import NativeTarget
from fledge.targets.transformers import TransformersTarget
from fledge.types import Prompt, Sampling, Tree
from support.targets import tiny_draft, tiny_target

pytestmark = pytest.mark.skipif(build.library() is None, reason="needs Linux and a C compiler with OpenMP")

LAYERS = (0, 3, 8)
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": dict(attention_bias=True, mlp_bias=True),
    "wide": dict(head_dim=80, hidden_size=52, intermediate_size=80),
    "one key head": dict(num_key_value_heads=1),
    "qwen3": dict(family="qwen3"),
    "qwen2": dict(family="qwen2"),
    "phi3": dict(family="phi3", rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "mistral": dict(family="mistral", sliding_window=9),
    "qwen3 by turns": dict(family="qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=4),
}


def target_of(dtype: torch.dtype = torch.float32, **config: Any) -> NativeTarget:
    """A target in float32 whose weights are those of a checkpoint in another dtype."""
    target = tiny_target(native=True, **config)
    with torch.no_grad():
        for p in target.model.parameters():
            p.copy_(p.to(dtype))
    target.prepare_decoding()
    assert target._decoder.compiled is not None
    return target


def uncompiled(target: TransformersTarget) -> TransformersTarget:
    """The same target, computed by plain torch."""
    assert isinstance(target, NativeTarget)
    other = NativeTarget(target.model, target.tokenizer, name="plain")
    assert other._decoder.compiled is None
    return other


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def text(n: int, seed: int = 0) -> list[int]:
    return torch.randint(400, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())


# -- products -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (16, 7), (40, 33), (130, 64)], ids=str)
def test_a_product_has_its_sums_in_float32(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype).float()
    weight[0, :3] = torch.tensor([0.0, -(2.0**-24), 6e-8]).to(dtype).float()  # subnormal in float16
    copy = CompiledWeight(weight)
    assert copy.kept.dtype == dtype
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13, 40):
        x = torch.randn(rows, shape[1], generator=generator)
        torch.testing.assert_close(copy.product(x), (x.double() @ weight.double().T).float(), atol=1e-5, rtol=1e-5)


def test_a_product_of_strided_rows_and_of_none() -> None:
    weight, x = torch.randn(20, 12), torch.randn(12, 5).T
    torch.testing.assert_close(CompiledWeight(weight).product(x), x @ weight.T, atol=1e-5, rtol=1e-5)
    assert CompiledWeight(weight).product(x[:0]).shape == (0, 20)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_product_keeps_numbers_that_are_not_finite(value: float) -> None:
    weight, x = torch.ones(20, 12), torch.ones(3, 12)
    x[1, 4] = value
    out = CompiledWeight(weight).product(x)
    assert not out[1].isfinite().any() and out[::2].isfinite().all()


# -- layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_layers_compute_what_plain_torch_does(name: str, dtype: torch.dtype, threads: int) -> None:
    """The outputs are of prompts that are read in parts, and of verifications of two requests' chains and trees."""
    target = target_of(dtype, **TARGETS[name])
    found, expected = outputs(target), outputs(uncompiled(target))
    assert len(found) == len(expected) > 10
    for ours, theirs in zip(found, expected, strict=True):
        near(ours, theirs)


def outputs(target: TransformersTarget) -> list[Tensor]:
    """The logits and features of passes of many kinds."""
    out = []
    cache = target.new_cache([120])
    for part in (text(40), text(1), text(17)):
        logits, (features,) = target.prefill([Prompt(part)], cache, LAYERS)
        out += [logits, features.aux_TAD, features.last_TD]
    logits, (features,) = target.prefill([Prompt(text(5))], cache, LAYERS, final=False)
    out += [logits, features.aux_TAD, features.last_TD]
    cache = target.new_cache([60, 60])
    target.prefill([Prompt(text(23, 1)), Prompt(text(31, 2))], cache)
    chain, other = torch.tensor([text(6, 3), text(6, 4)]), torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 0, 0]])
    for tree in (Tree.chain(chain[:, :1]), Tree.chain(chain), Tree(chain, other, 3)):
        logits, features = target.verify(tree, cache, LAYERS)
        out += [logits, features.aux_TAD, features.last_TD]
        cache.keep(None, torch.tensor([1, 1]))
    return out


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_a_row_is_the_same_among_any_others_and_with_any_threads(name: str) -> None:
    """Bit by bit: a token decoded alone, in chains of all lengths, among other requests, and with more threads."""
    target, tokens = target_of(torch.bfloat16, **TARGETS[name]), text(90, 5)
    logits = {}
    for threads, length in ((1, 1), (1, 2), (1, 5), (2, 1), (2, 7), (3, 40)):
        torch.set_num_threads(threads)
        cache, parts = target.new_cache([200]), []
        target.prefill([Prompt(text(70))], cache)
        for first in range(0, 80, length):
            chain = torch.tensor([tokens[first : first + length]])
            parts.append(target.verify(Tree.chain(chain), cache)[0][0])
            cache.keep(None, torch.tensor([chain.shape[1]]))
        logits[threads, length] = torch.cat(parts)[:80]
    torch.set_num_threads(1)
    assert all(torch.equal(x, logits[1, 1]) for x in logits.values())
    cache = target.new_cache([200, 200, 200])
    target.prefill([Prompt(text(70)), Prompt(text(3)), Prompt(text(50))], cache)
    both, _ = target.verify(Tree.chain(torch.tensor([tokens[:4], text(4), text(4)])), cache)
    # prompts of several requests are read by plain torch, whose rounding differs
    near(both[0], logits[1, 1][:4])


def test_large_scores_do_not_overflow(threads: int) -> None:
    target = tiny_target(native=True, scale=4.0)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.q_proj.weight.mul_(100)
            layer.mlp.gate_proj.weight.mul_(100)
    target.prepare_decoding()
    logits, _ = target.prefill([Prompt(text(30))], target.new_cache([64]))
    expected, _ = uncompiled(target).prefill([Prompt(text(30))], uncompiled(target).new_cache([64]))
    assert logits.isfinite().all() and torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_nan_stays_where_it_belongs() -> None:
    """A weight of NaN makes all later logits NaN, as in plain torch: nothing masks it away."""
    target = target_of()
    with torch.no_grad():
        target.model.model.layers[3].self_attn.k_proj.weight[0, 0] = float("nan")
    target.prepare_decoding()
    logits, _ = target.prefill([Prompt(text(30))], target.new_cache([64]))
    assert logits.isnan().all()


def test_longer_prompts_are_read_by_plain_torch() -> None:
    target = target_of(max_position_embeddings=512)
    long = text(MOST_ROWS + 1)
    found, expected = (t.prefill([Prompt(long)], t.new_cache([500]))[0] for t in (target, uncompiled(target)))
    near(found, expected)


@pytest.mark.parametrize(
    "config",
    [dict(head_dim=12), dict(intermediate_size=40), dict(family="mixtral", num_local_experts=4)],
    ids=["heads", "width", "experts"],
)
def test_layers_that_are_not_compiled_are_computed_all_the_same(config: dict[str, Any]) -> None:
    target = tiny_target(native=True, **config)
    target.prepare_decoding()
    assert target._decoder.compiled is None
    found, expected = (t.prefill([Prompt(text(9))], t.new_cache([64]))[0] for t in (target, uncompiled(target)))
    near(found, expected)


# -- drafts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "config",
    [
        {}, dict(draft_vocab_size=300), dict(norm_output=True), dict(norm_before_residual=True),
        dict(attention_bias=True), dict(num_hidden_layers=2), dict(method="eagle1"),
    ],
    ids=str,
)  # fmt: skip
def test_chains_are_those_of_single_steps(
    config: dict[str, Any], temperature: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of()
    engine = load(target, tiny_draft(target, **config), depth=4)
    prompts = [text(9 + 4 * n, n) for n in range(batch)]

    def answers() -> list[Any]:
        return engine.generate(prompts, max_new_tokens=24, sampling=Sampling(temperature=temperature, seed=3))

    found = answers()
    monkeypatch.setattr(DraftDecoder, "rest_of_chain", lambda *_: None)
    expected = answers()
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert [[r.accepted for r in c.trace.rounds] for c in found] == [
        [r.accepted for r in c.trace.rounds] for c in expected
    ]


@torch.inference_mode()
def test_more_queries_than_rows() -> None:
    """Reading along asks for guesses of rows that may not exist, as the first row."""
    target = target_of()
    found, asked_Q = [], torch.tensor([1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1])
    for compiled in (True, False):
        decoder = DraftDecoder(tiny_draft(target))
        decoder.compiled = decoder.compiled if compiled else None
        config = decoder.draft.config
        shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        cache = KVCache(SlotPool(*shape, torch.device("cpu"), torch.float32), [20])
        rotation, state = decoder.rotation(torch.arange(2)), torch.ones(2, config.hidden_size)
        queries = TreeRows(cache, 2, VisibleChain(asked_Q[None], 2), asked_Q=asked_Q)
        found.append(decoder.step(torch.tensor([5, 6]), state, rotation, queries, queries)[0])
    near(*found)


# -- threads ------------------------------------------------------------------------------------------------------


def test_one_thread_computes_while_others_use_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores are idle, then busy for 10 seconds, then idle; several threads are tried again, ever more seldom."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    now = preempted = 0.0
    threads = Threads(lambda: now, lambda: int(preempted))

    def seconds(end: int, alone: int, together: int) -> list[int]:
        """The numbers of threads of passes until then, with so many preemptions a second with one thread and two."""
        nonlocal now, preempted
        chosen = []
        while now < end:
            with threads.computing() as count:
                now += 0.008
                preempted += 0.008 * (alone if count == 1 else together)
            chosen.append(count)
            now += 0.002
            preempted += 1  # of what is computed between the passes, which does not count
        return chosen

    assert set(seconds(5, 15, 30)) == {2}
    busy = seconds(15, 100, 200)
    assert 0 < busy.count(2) < 30
    assert set(seconds(90, 15, 30)[-400:]) == {2}
    one_core = seconds(150, 15, 180)  # the thread that computes alone has a core of its own
    assert 0 < one_core.count(2) < 150


# -- compiling ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing was compiled yet. Returns where the compiled file will be."""
    build.library.cache_clear()
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    yield tmp_path / "compiled"
    build.library.cache_clear()


def test_it_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.library() is not None
    (file,) = fresh.iterdir()
    made = file.stat().st_mtime_ns
    build.library.cache_clear()
    run = subprocess.run
    commands = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **given: (commands.append(command), run(command, **given))[1]
    )
    assert build.library() is not None and file.stat().st_mtime_ns == made
    assert [c[1:] for c in commands] == [["--version"]]


def test_a_damaged_file_is_compiled_again(fresh: Path) -> None:
    build.library()
    (file,) = fresh.iterdir()
    file.unlink()  # not overwritten: this process has it in memory
    file.write_bytes(b"\x7fELF and no more")
    build.library.cache_clear()
    assert build.library() is not None
    assert file.stat().st_size > 1000


def test_code_is_not_loaded_from_where_others_can_write(fresh: Path) -> None:
    build.library()
    (file,) = fresh.iterdir()
    file.unlink()
    file.write_bytes(b"code of somebody else")
    fresh.chmod(0o777)
    build.library.cache_clear()
    assert build.library() is not None
    assert file.read_bytes() == b"code of somebody else"


@pytest.mark.parametrize("compiler", ["fails", "slow", "none"])
def test_without_a_compiler_plain_torch_computes(
    compiler: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "cc"
    tool.write_text({"fails": "#!/bin/sh\nexit 1\n", "slow": "#!/bin/sh\nexec sleep 60\n", "none": ""}[compiler])
    tool.chmod(0o755 if compiler != "none" else 0o644)
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", str(tmp_path) if compiler != "slow" else f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(build, "SECONDS", 1)
    reason = {"fails": f"{tool} did not compile .*", "slow": "timed out", "none": "there is no C compiler"}[compiler]
    with pytest.warns(build.SlowWarning, match=f"{reason}.*install gcc"):
        assert build.library() is None
    target = tiny_target(native=True)
    target.prepare_decoding()
    assert target._decoder.compiled is None
    assert target.prefill([Prompt(text(9))], target.new_cache([64]))[0].isfinite().all()


def test_who_wants_no_compiler_is_not_warned(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build.library() is None


def test_a_cache_that_cannot_be_written_is_no_error(fresh: Path) -> None:
    fresh.write_text("a file where the folder would be")
    assert build.library() is not None


def test_copies_of_more_than_half_the_free_memory_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "free_bytes", lambda device: 1 << 10)
    target = tiny_target(native=True)
    target.prepare_decoding()
    assert target._decoder.compiled is None
