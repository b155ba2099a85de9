"""Small stand-ins for what the commands of the documentation name: models, chats, servers, the hub and engines."""

from __future__ import annotations

import copy
import gzip
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.chats import tiny_chats
from support.commands import Ran
from support.files import write_rows
from support.hub import serving, stand_in
from support.openai_server import FakeServer
from support.pages import BLOCKS, ROOT
from support.targets import tiny_target, tiny_tokenizer
from support.templates import QWEN3
from support.vllm_server import FakeVllm

MODELS = (
    "my-model", "owner/model", "owner/target", "meta-llama/Llama-3.1-8B-Instruct", "my-70b",
    "meta-llama/Llama-3.3-70B-Instruct",
)  # fmt: skip
LAYERS = (2, 4, 5, 8)  # those of a target of 8 layers that an EAGLE-3 draft and its teacher read
TEXTS = ["the young bird tries its wings", "it falls and tries again", "until it can fly"]
HUB_DATA = {  # data sets of the hub: their number of rows here, and a row in their columns
    "HuggingFaceH4/ultrachat_200k": (20, lambda i: {"messages": _chat(i)}),
    "nvidia/Llama-Nemotron-Post-Training-Dataset": (
        4, lambda i: {"system_prompt": "fly", "input": _text(i), "output": _text(i + 1)},
    ),
    "HuggingFaceH4/mt_bench_prompts": (2, lambda i: {"prompt": [_text(i), _text(i + 1)]}),
    "openai/gsm8k": (3, lambda i: {"question": _text(i), "answer": "3"}),
}  # fmt: skip


def _text(i: int) -> str:
    return TEXTS[i % len(TEXTS)]


def _chat(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(i)}, {"role": "assistant", "content": _text(i + 1)}]


def make_models(root: Path) -> None:
    """Writes the targets that the pages name, by these names, and the bundled pair."""
    llama = tiny_target()
    first = root / MODELS[0]
    llama.model.save_pretrained(first)
    llama.tokenizer.save_pretrained(first)
    for name in MODELS[1:]:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).symlink_to(first)
    qwen = tiny_target("qwen3")
    qwen.model.save_pretrained(root / "Qwen/Qwen3-8B")
    tokenizer = copy.copy(llama.tokenizer)
    tokenizer.chat_template = QWEN3
    tokenizer.save_pretrained(root / "Qwen/Qwen3-8B")
    (root / "fledge-demo").mkdir()
    for name in ("target", "draft"):
        (root / "fledge-demo" / name).symlink_to(ROOT / "fledge/demo" / name)


def make_data(root: Path) -> None:
    """Writes the data, the prompts and the recipes that the pages name."""
    (root / "more").mkdir()
    chats = tiny_chats(root / "chats.jsonl", 6)
    for name in ("new-chats.jsonl", "own.jsonl", "code.jsonl", "more/a.jsonl", "thinking.jsonl"):
        shutil.copy(chats, root / name)
    (root / "more/b.jsonl.gz").write_bytes(gzip.compress(chats.read_bytes()))
    for name in ("prompts.jsonl", "p.jsonl"):
        write_rows(root / name, [{"messages": _chat(i)[:1]} for i in range(3)])
    (root / "faq.csv").write_text("question,answer\n" + "".join(f"{_text(i)},{_text(i + 1)}\n" for i in range(4)))
    pq.write_table(pa.table({"dialog": [_chat(i) for i in range(4)]}), root / "dialogs.parquet")
    (root / "my-recipe.yaml").write_text(_recipe("docs/recipes.md", "more/*.jsonl@0.5"))
    (root / "thinking-and-not.yaml").write_text(_recipe("docs/recipes.md", "source: fast.jsonl"))


def make_results(root: Path) -> None:
    """Trains the drafts and measures the record that the pages name."""
    from fledge.commands.evaluate import run as evaluate
    from fledge.commands.train import run
    from fledge.io.display import ProgressDisplay
    from fledge.measure.options import EvalOptions
    from fledge.train.setup.options import TrainOptions

    target, quiet = str(root / MODELS[0]), ProgressDisplay(quiet=True)
    given = {"target": target, "data": [str(root / "chats.jsonl")], "steps": 2, "max_length": 64}
    run(TrainOptions(**given, out=str(root / "run"), given=frozenset(given)), lambda line: None, quiet)
    draft = root / "run/draft"
    shutil.copytree(draft, root / "owner/name")
    for name in ("run-a", "run-b"):
        shutil.copytree(root / "run", root / name)
    given = {"target": target, "draft": [str(draft)], "prompts": [str(root / "p.jsonl")], "max_new_tokens": 4}
    evaluate(EvalOptions(**given, out=str(root / "eval.json"), given=frozenset(given)), quiet, lambda record: None)


def _recipe(page: str, text: str) -> str:
    """The YAML block of a page that contains a text."""
    (found,) = (b.text for b in BLOCKS if b.page == page and b.language == "yaml" and text in b.text)
    return found


def replace_hub_data(patch: pytest.MonkeyPatch) -> None:
    """`datasets.load_dataset` gives a few rows for the data sets in HUB_DATA."""
    import datasets

    def load(name: str, *config: str | None, split: str, **options: Any) -> Any:
        rows, row = HUB_DATA[name]
        return datasets.Dataset.from_list([row(i) for i in range(rows)])

    patch.setattr(datasets, "load_dataset", load)


def replace_engines(patch: pytest.MonkeyPatch, fledge: Callable[..., Ran]) -> None:
    """Engines are installed, but nothing takes the place of this process, in which the check before a start runs."""
    from fledge.commands import serve
    from fledge.engines import export

    def check(words: list[str]) -> SimpleNamespace:
        return SimpleNamespace(returncode=fledge(*words[3:]).code)

    patch.setattr(export, "available", lambda engine: True)
    patch.setattr(serve, "subprocess", SimpleNamespace(run=check))
    patch.setattr(os, "execvp", lambda file, words: None)


@contextmanager
def uploads(patch: pytest.MonkeyPatch, directory: Path) -> Iterator[None]:
    """A hub on this machine, where `my-name` may create repositories."""
    with serving() as hub:
        hub.owners = ("my-name",)
        stand_in(hub, patch, directory)
        yield


class _Keeping(FakeVllm):
    """vLLM that also keeps its files in `hidden-states`, for "files that vLLM wrote before"."""

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super().complete(body)
        kept = self.directory.with_name("hidden-states")
        kept.mkdir(exist_ok=True)
        shutil.copy(answer["kv_transfer_params"]["hidden_states_path"], kept)
        return answer


@contextmanager
def servers(place: Path) -> Iterator[Callable[[list[str]], list[str]]]:
    """A function that puts the addresses of running servers into the words of a command: of one that computes hidden
    states for --features-from, of one with a draft, and of one without at port 8001."""
    tokenizer = tiny_tokenizer()
    with (
        _Keeping(tiny_target(), place / "states", LAYERS) as states,
        FakeServer(tokenizer=tokenizer).started() as drafting,
        FakeServer(tokenizer=tokenizer, speculates=False).started() as alone,
    ):

        def addressed(words: list[str]) -> list[str]:
            first = states.url if "--features-from" in words else drafting.url
            addresses = {"http://localhost:8000": first, "http://localhost:8001": alone.url}
            return [addresses.get(word, word) for word in words]

        yield addressed
