"""The estimates of a run's memory, against measurements on GPUs, and of its disk space, against a run's files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fledge.config import DraftConfig
from fledge.drafts.draft import Draft
from fledge.drafts.registry import new_draft
from fledge.io.formats import config_from_hf
from fledge.targets.distributed import TargetBytes, target_bytes
from fledge.targets.transformers import TransformersTarget
from fledge.train.checkpoint import RunDirectory
from fledge.train.objective import RowSums, ttt
from fledge.train.plan import DrawAnchors
from fledge.train.row_pass import Implementation, Objective
from fledge.train.setup.estimate import Machine, Work, memory_parts, step_bytes
from fledge.train.setup.run import SMALL_CHUNK, UPDATE_BYTES, disk_space
from fledge.types import Features
from support.chats import tiny_chats
from support.rows import document, row_of
from support.targets import tiny_target, tiny_target_directory

RESULTS = Path(__file__).parents[1] / "bench/results"
SHAPE = dict(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=128_256,
)  # fmt: skip
DRAFT = dict(**SHAPE, draft_vocab_size=32_000, target_hidden_size=4096)
QWEN3_8B: dict[str, Any] = dict(  # a DFlash draft for this target
    intermediate_size=12_288, vocab_size=151_936, draft_vocab_size=151_936, num_hidden_layers=5, method="dflash",
    num_aux_hidden_states=5, aux_layers=(2, 10, 18, 26, 34), mask_token_id=151_669,
)  # fmt: skip
FAST = Implementation("triton", "triton", "triton", 4096, prefetch=True)


def meta_target(layers: int = 32, **shape: Any) -> TransformersTarget:
    """A Llama of the shape of Llama-3.1-8B, without values."""
    config = LlamaConfig(**SHAPE | shape, num_hidden_layers=layers, max_position_embeddings=1 << 17)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return TransformersTarget(model, None)


def meta_draft(**config: Any) -> Draft:
    with torch.device("meta"):
        return new_draft(DraftConfig(**DRAFT | config)).to(torch.bfloat16)


def machine(ranks: int = 1) -> Machine:
    return Machine(ranks, "cuda", 80 << 30, there=False)


def steps_of(record: str) -> list[dict[str, Any]]:
    """The measured training steps of a record, by their rows."""
    rows = json.loads((RESULTS / f"{record}.json").read_text())["rows"]
    return [row for row in rows if row["gib"] is not None]


def implementation(ways: dict[str, Any]) -> Implementation:
    """How a measured step was computed, without prefetch, which these benchmarks do not do."""
    return Implementation(**{name: ways[name] for name in ways if name not in ("ahead", "prefetch")})


@pytest.mark.parametrize("record", ["train_step", "train_step_h200", "peagle_step", "block_step"])
def test_a_step_takes_what_was_measured(record: str) -> None:
    """Each implementation, few and many slots, rows of 2,048 to 131,072 tokens, all supervised or a quarter, a P-EAGLE
    draft of four layers, and a DFlash draft. The benchmarks do no update, which may take more than the row."""
    peagle = dict(method="peagle", mask_token_id=0, num_hidden_layers=4) if record == "peagle_step" else {}
    for row in steps_of(record):
        if record == "block_step":
            draft = meta_draft(**QWEN3_8B)
        else:
            draft = meta_draft(**peagle, vocab_size=32_000 if row.get("teacher", "W") == "W" else 128_256)
        work = Work(TargetBytes(0, 0, 0), draft, row["T"], tuple(row["slots"]), row["T"])
        measured = max(row["gib"], UPDATE_BYTES * work.trained / 2**30)
        estimate = step_bytes(work, implementation(row["ways"]), "cuda") / 2**30
        assert estimate == pytest.approx(measured, rel=0.15), row


BLOCKS = dict(
    method="dflash", hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, vocab_size=65_536, draft_vocab_size=65_536, target_hidden_size=2048, num_hidden_layers=4,
    num_aux_hidden_states=3, aux_layers=(2, 5, 9), mask_token_id=9,
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "flex", "eager"])
@pytest.mark.parametrize(("tokens", "anchors", "slots"), [(2048, 512, 512), (2048, 512, 100), (8192, 512, 256)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_of_blocks_takes_what_the_formula_says(
    impl: str, tokens: int, anchors: int, slots: int, recompute: bool
) -> None:
    """The peak of a step of a DFlash draft, above its weights and the hidden states of the row."""
    if recompute and impl == "eager":
        pytest.skip("plain torch does not recompute")
    torch.manual_seed(0)
    fast = "eager" if impl == "eager" else "triton"
    ways = Implementation(impl, fast, fast, slots, recompute, chunk=SMALL_CHUNK if recompute else None)
    with torch.device("cuda"):
        draft = new_draft(DraftConfig(**BLOCKS)).to(torch.bfloat16)
        embedding, head = (torch.randn(65_536, 2048, dtype=torch.bfloat16) * 0.02 for _ in range(2))
        states = [torch.randn(shape, dtype=torch.bfloat16) for shape in ((tokens, 3, 2048), (tokens, 2048))]
    for p in draft.parameters():
        torch.nn.init.normal_(p, 0, 0.02) if p.dim() > 1 else torch.nn.init.ones_(p)
    draft.share_target_weights(embedding, head)
    row, objective = row_of([document(tokens, (0, tokens))]), Objective(depth=15, drop=DrawAnchors(anchors))

    def step() -> RowSums:
        draft.zero_grad(set_to_none=True)
        return ttt(draft, row, Features(*states), lambda x: x @ head.T, objective, ways)

    step()  # compiles kernels and allocates what stays
    draft.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trained = tuple(step().live_K.tolist())
    work = Work(TargetBytes(0, 0, 0), draft, tokens, trained, tokens)
    measured = max(torch.cuda.max_memory_allocated() - before, UPDATE_BYTES * work.trained)
    assert step_bytes(work, ways, "cuda") == pytest.approx(measured, rel=0.15)


def test_fewer_blocks_take_less_memory() -> None:
    """Of a draft for Qwen3-8B: at most 8 GiB with 512 blocks of 16 rows in a row of 3,072 tokens. With 1,024 blocks in
    flight, the step takes more than the update, and fewer blocks, fewer tokens or recomputation take less."""
    draft = meta_draft(**QWEN3_8B)

    def taken(tokens: int = 3072, anchors: int = 1024, **ways: Any) -> int:
        work = Work(TargetBytes(0, 0, 0), draft, tokens, tuple(anchors - k for k in range(15)), tokens)
        return step_bytes(work, replace(FAST, **dict(slots=1024) | ways), "cuda")

    assert taken(slots=512, anchors=512) < 8 << 30
    less = [taken(slots=512), taken(anchors=512), taken(tokens=1024), taken(recompute=True)]
    assert max(less) < taken() < min(taken(attention="flex"), taken(attention="eager"))


def test_a_run_takes_what_was_measured_on_one_and_two_gpus() -> None:
    """The peak of each rank with a target of 8B parameters, and with the optimizer's state sharded and replicated."""
    weights, draft = target_bytes(meta_target()), meta_draft()
    rows = json.loads((RESULTS / "scale.json").read_text())["rows"]
    assert {row["gpus"] for row in rows} == {1, 2}
    for row in rows:
        documents = row["T"] // 1024  # with 7 steps, and all tokens supervised
        work = Work(weights, draft, row["T"], tuple(documents * (1022 - k) for k in range(7)), 1024)
        shares = row["gpus"] if row["what"].endswith("shard") else 1
        taken = sum(memory_parts(work, FAST, machine(shares)).values()) / 2**30
        assert taken == pytest.approx(row["gib"], rel=0.05), row


def test_the_layers_of_a_target_are_shared_and_the_rest_is_whole() -> None:
    """The bytes of a rank by the model's parameters, with and without a head of its own."""
    for tied in (False, True):
        target = tiny_target(tokenizer=False, tie_word_embeddings=tied)
        layer = sum(p.numel() for p in target.layers[0].parameters()) * 4
        rest = (400 * 32 * (1 if tied else 2) + 32) * 4
        sizes = target_bytes(target)
        assert sizes == TargetBytes(layers=8 * layer, largest=layer, rest=rest)
        assert sizes.whole == sizes.on_rank(1) == sum(p.numel() for p in target.model.parameters()) * 4
        assert sizes.on_rank(4) == 2 * layer + 2 * layer + rest


def test_less_work_takes_less_memory() -> None:
    work = Work(target_bytes(meta_target(2)), meta_draft(), 16_384, tuple(16_000 - k for k in range(5)), 2048)

    def taken(work: Work = work, impl: Implementation = FAST, ranks: int = 1) -> int:
        return sum(memory_parts(work, impl, machine(ranks)).values())

    less = [
        taken(impl=replace(FAST, slots=1024)), taken(impl=replace(FAST, recompute=True)), taken(ranks=8),
        taken(replace(work, tokens=8192, slots=tuple(n // 2 for n in work.slots))),
        taken(impl=replace(FAST, prefetch=False)),
    ]  # fmt: skip
    more = [taken(replace(work, rows=2)), taken(impl=replace(FAST, slots=8192))]
    assert max(less) < taken() < min(more)


def test_the_disk_of_a_run(tmp_path: Path, fledge: Any) -> None:
    """The draft and the checkpoint of a finished run take half of the estimate, which counts a copy of both."""
    words = ("--data", tiny_chats(tmp_path / "c.jsonl", 20), "--steps", 3, "--draft-vocab", 200, "--device", "cpu")
    went = fledge("train", "--target", tiny_target_directory(tmp_path), *words, "--out", tmp_path / "run")
    assert went.code == 0, went.err
    with torch.device("meta"):
        draft = new_draft(config_from_hf(json.loads((tmp_path / "run/draft/config.json").read_text())))
    needed, free = disk_space(RunDirectory(tmp_path / "other"), draft, "muon")
    # without the probe of `fledge check`, which is small beside the weights of a real draft
    written = sum(f.stat().st_size for f in (tmp_path / "run").rglob("*.safetensors") if f.parent.name != "fledge")
    assert written == pytest.approx(needed / 2, rel=0.1) and free > 0
    left, _ = disk_space(RunDirectory(tmp_path / "run"), draft, "muon")
    assert left < needed - written, "a new draft replaces the old one"
