"""Tiny real models and tokenizers, made here: nothing is downloaded and nothing outside the repository is read."""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which the following do

from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from fledge.config import DraftConfig
from fledge.data.pack import make_row
from fledge.decode.propose import Drafter
from fledge.models.draft import Draft
from fledge.models.target import Target
from fledge.models.weights import fit
from fledge.types import Document, Packed, Tree

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def propose_one(proposer: Drafter, token_R: Tensor, aux_RAD: Tensor, path: Sequence[int] = ()) -> Tree:
    """What a proposer drafts for a single request, which it admits when it is first asked."""
    if proposer.cache is None:
        proposer.admit([(0, [], aux_RAD)])
    return proposer.propose([token_R.tolist()], [aux_RAD], [path])


FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config, "phi3": Phi3Config, "mistral": MistralConfig}

torch.set_num_threads(1)  # models this small only lose time to threads

requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(requires_gpu)


def needs_triton() -> None:
    """Skips, with the reason, where Triton is not installed, or its interpreter is to run and does not (3.6 beside
    numpy 2.4: it takes the only element of an array for a number)."""
    pytest.importorskip("triton", reason="Triton is not installed; it is there on Linux alone")
    from fledge.kernels.elementwise import silu_times
    from fledge.kernels.loss import LossOptions, Teacher, loss_and_gradients

    if torch.cuda.is_available():
        return
    try:
        silu_times(torch.ones(2, 2), torch.ones(2, 2))
        teacher = Teacher(lambda s: torch.ones(1, 3), [torch.zeros(1).long()], torch.arange(3), 3)
        loss_and_gradients([torch.ones(1, 2)], torch.ones(3, 2), teacher, [1.0], LossOptions(impl="triton"))
    except Exception as e:
        if "0-dimensional" not in str(e):
            raise
        pytest.skip("this Triton's interpreter does not run with this numpy", allow_module_level=True)


@functools.cache
def tiny_tokenizer(template: str | None = CHATML, vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few sentences; id 0 pads, id 1 is <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = "The young bird tries its wings, falls, and tries again until it can fly. system user assistant tool"
    tokenizer.train_from_iterator([text] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = template
    return fast


def tiny_target(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, vocab_size: int = 400, seed: int = 0,
    scale: float = 4.0, max_length: int | None = None, tokenizer: bool = True, **config,
) -> Target:  # fmt: skip
    """A random model of 8 layers whose choices are sharp, vary, and depend on the context: embeddings and head are
    drawn from N(0, 1) and untied, matrices keep their input's size at `scale` 4, norms and biases are jittered."""
    shape = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=vocab_size, max_position_embeddings=512, pad_token_id=0, bos_token_id=None,
        eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    hf = FAMILIES[family](**{**shape, **config})
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and ("embed" in name or "lm_head" in name):
                p.normal_(0, 1)
            elif p.dim() > 1:
                p.normal_(0, 0.25 * scale * p.shape[-1] ** -0.5)
            elif "norm" in name:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.normal_(0, 0.1)
    # float64 rotary frequencies too would differ from the draft's; transformers keeps them float32
    model = model.to(dtype)
    fast = tiny_tokenizer(vocab_size=vocab_size) if tokenizer else None
    return Target(model, fast, name=f"tiny {family}", max_length=max_length)


def tiny_draft(target: Target, *, seed: int = 1, draft_vocab_size: int | None = None, **overrides) -> Draft:
    """A random draft joined to a target; its vocabulary is spread over the target's."""
    vocab = target.embedding.shape[0]
    W = draft_vocab_size or vocab
    config = DraftConfig.for_target(target.shape, max_length=target.max_length, draft_vocab_size=W, **overrides)
    torch.manual_seed(seed)
    draft = Draft(config)
    with torch.no_grad():
        for p in draft.parameters():
            if p.dim() > 1:
                p.normal_(0, p.shape[-1] ** -0.5)
            else:
                p.add_(0.1 * torch.randn_like(p))
    draft.set_vocabulary(torch.linspace(0, vocab - 1, W).round().long())
    draft = draft.to(target.dtype)
    fit(draft, target)
    return draft


def on_device(target: Target, draft: Draft) -> None:
    """Moves a pair to the GPU where there is one: there Triton compiles, and takes nothing of the CPU's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target.model.to(device), draft.to(device)
    fit(draft, target)


def document(length: int, *spans: tuple[int, int], seed: int = 0, vocab: int = 400) -> Document:
    """Random tokens with the given [start, end) spans."""
    tokens = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    marks = torch.full((length,), -1, dtype=torch.int32)
    for i, (a, b) in enumerate(spans):
        marks[a:b] = i
    return Document(tokens, marks)


def row_of(documents: list[Document], filler: int = 0) -> Packed:
    return make_row(documents, sum(d.tokens.numel() for d in documents) + filler)


@st.composite
def layouts(draw) -> tuple[list[Document], int]:
    """A few documents of any length from one token on, with any spans, and the room left for filler."""
    documents = []
    for i in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 18))
        cuts = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
        spans = [(a, b) for a, b in pairwise(cuts) if draw(st.booleans())]
        documents.append(document(n, *spans, seed=draw(st.integers(0, 1000)) + i))
    return documents, draw(st.integers(0, 5))


def live_by_definition(d: Document, steps: int) -> set[tuple[int, int]]:
    """x_{t+1} .. x_{t+2+k} all in one span."""
    n, spans = d.tokens.numel(), d.spans.tolist()
    return {
        (t, k)
        for t in range(n)
        for k in range(steps)
        if t + 2 + k < n and spans[t + 1] >= 0 and len(set(spans[t + 1 : t + 3 + k])) == 1
    }


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target()


def tiny_target_directory(parent: Path, **config: Any) -> Path:
    """A tiny target saved as `save_pretrained` does, for what is loaded by path."""
    target = tiny_target(**config)
    target.model.save_pretrained(parent / "target")
    target.tokenizer.save_pretrained(parent / "target")
    return parent / "target"


def tiny_chats(file: Path, n: int) -> Path:
    """n two-turn conversations in the words of the tiny tokenizer."""
    words = "the young bird tries its wings falls and tries again until it can fly".split()
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(3, 8)))

    roles = ("user", "assistant") * 2
    lines = [json.dumps({"messages": [{"role": r, "content": text()} for r in roles]}) for _ in range(n)]
    file.write_text("\n".join(lines) + "\n")
    return file


@dataclass
class Ran:
    """How a command ended: exit code, standard output and standard error."""

    code: int
    out: str
    err: str


@pytest.fixture
def fledge(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs a fledge command in this process, as its console script would."""
    from fledge.cli import main

    def run(*words: Any) -> Ran:
        monkeypatch.setattr(sys, "argv", ["fledge", *map(str, words)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return run


class AlteredDraft:
    """A draft some of whose methods are replaced, for tests of what a mistake on one side alone would do.

    `AlteredDraft(draft, read=wrong)` calls `wrong(draft.read, *args)` wherever `read` is called on it.
    """

    def __init__(self, draft: Draft, **replaced: Callable[..., Any]):
        self._draft = draft
        for name, wrong in replaced.items():
            setattr(self, name, functools.partial(wrong, getattr(draft, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._draft(*args, **kwargs)


def replace_function(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replaces a function or method by `wrong`, which is called with the original first, then its arguments."""
    right = getattr(owner, name)

    @functools.wraps(right)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    monkeypatch.setattr(owner, name, replacement)
