"""vLLM's files of hidden states, one for each request, and the command that makes vLLM write hidden states.

vLLM's speculative method `extract_hidden_states` keeps hidden states in the KV cache, and vLLM's connector
`ExampleHiddenStatesConnector` writes the hidden states of a finished request to a file (vLLM 0.26,
`vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py`).

<request>.safetensors       `hidden_states` [tokens, layers, D], layers ascending, and `token_ids` [tokens]
<request>.safetensors.lock  locked (flock) from the request's start until the file is written
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import itertools
import json
import re
import shlex
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from fledge.data.documents import Document
from fledge.io.hub import split_revision
from fledge.states.layout import needed_tokens

DIRECTORY = "/dev/shm/hidden-states"  # the directory in the command of messages, without the layers
UNCHECKED = (
    "does not say by its name which layers vLLM captured, so they are not checked, and a draft that was trained on "
    "others than its config names is hardly accepted. Name it as docs/hidden-states.md says, or run fledge check on "
    "the draft afterwards"
)


def directory_of(layers: Sequence[int]) -> str:
    """The directory for states of layers. The name has the layers' ids, since vLLM writes the ids nowhere else."""
    return "-".join([DIRECTORY, *map(str, layers)])


def layers_of(directory: str) -> tuple[int, ...] | None:
    """The layers in the name of a directory, in the form of `directory_of`; None for names of another form."""
    found = re.fullmatch(r"hidden-states((?:-\d+)+)", directory.rstrip("/").rpartition("/")[2])
    return tuple(map(int, found[1].split("-")[1:])) if found else None


def serve_words(
    target: str, layers: Sequence[int], max_model_len: int, directory: str | None = None, *, trust: bool = False
) -> list[str]:
    """The words of the command that makes vLLM write the states of `layers` to a directory (None: `directory_of` the
    layers). vLLM's layer ids are as in `TrainingTarget.features`.

    Prefixes are not cached, since a file must have the states of all tokens. vLLM writes no states of a text of
    `max_model_len` tokens or more.
    """
    name, revision = split_revision(target)
    captured = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": captured},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": directory or directory_of(layers)},
    }
    words = ["vllm", "serve", name, *(["--revision", revision] if revision else [])]
    words += ["--trust-remote-code"] if trust else []
    words += ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(connector)]
    return [*words, "--no-enable-prefix-caching", "--max-model-len", str(max_model_len)]


def serve_command(target: str, layers: Sequence[int], max_model_len: int, *, trust: bool = False) -> str:
    """The command of `serve_words` as text for a shell."""
    return shlex.join(serve_words(target, layers, max_model_len, trust=trust))


STATES, TOKENS = "hidden_states", "token_ids"  # vLLM's names of the tensors
ID_BYTES = 4  # bytes of a token id in a key; big-endian, so that the order of bytes is the order of ids


@dataclass(frozen=True)
class Captured:
    """The states of the first T tokens of a document, [T, L, D] in the dtype of the file, on the CPU. `next_token` is
    the token that the server decoded after the whole document, with the log-probability (None: not known). `layers` are
    the layer ids in the name of the file's directory (None: not known)."""

    states_TLD: Tensor
    next_token: tuple[int, float] | None = None
    layers: tuple[int, ...] | None = None


def read_states(file: Path, tokens: Sequence[int], needed: int) -> Tensor:
    """The states of a document's first T tokens from a complete file, [T, L, D]. T is the length of the common prefix
    of the document's and the file's tokens.

    The file is read as a whole instead of being mapped: a truncated file is then an error instead of a signal. Raises
    ValueError if T is less than `needed`, or if the file is not a file of hidden states.
    """
    try:
        tensors = load(file.read_bytes())
        found, states = tensors[TOKENS], tensors[STATES]
    except FileNotFoundError:
        raise
    except Exception as e:  # a damaged file may raise anything
        raise ValueError(f"{file} is not a file of hidden states of vLLM ({type(e).__name__})") from e
    if states.dim() != 3 or states.shape[0] != found.numel() or not states.is_floating_point():
        raise ValueError(
            f"{file} has hidden states of shape {list(states.shape)} for {found.numel():,} tokens, not [tokens, "
            "layers, width]"
        )
    pairs = zip(tokens, found.tolist(), strict=False)
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if count < needed:
        raise ValueError(
            f"{file} has hidden states of other tokens than those that were asked for: they differ after {count:,} of "
            f"{len(tokens):,} tokens"
        )
    return states[:count]


def lock_of(file: Path) -> Path:
    return file.with_name(file.name + ".lock")


def lock_state(file: Path) -> str:
    """Whether vLLM holds the lock of a file: "held", "free", or "absent" if there is none."""
    try:
        with lock_of(file).open("rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return "free"
    except FileNotFoundError:
        return "absent"
    except BlockingIOError:
        return "held"


def remove(file: Path) -> None:
    """Deletes a file and its lock. Raises OSError if that is not allowed."""
    for path in (file, lock_of(file)):
        path.unlink(missing_ok=True)


class StatesFolder:
    """Finds a document's file, by the document's tokens, in a directory that vLLM has written. Changes no file.

    The file of a document is a file whose text begins with the document's first `needed` tokens. The document's end may
    be missing: vLLM keeps no state of the last generated token, nor of the text that a chat template puts after an
    answer. Raises ValueError if the directory has no file of hidden states, or if a file is damaged or unfinished.
    """

    def __init__(self, path: Path):
        self.path, self.layers = path, layers_of(str(path.resolve()))
        self._files = sorted(self._keys())
        if not self._files:
            raise ValueError(f"{path} holds no hidden states (no *.safetensors with {TOKENS} and {STATES})")

    def __len__(self) -> int:
        return len(self._files)

    def get(self, tokens: Sequence[int], needed: int, closed: threading.Event) -> Captured:
        """The states of at least a document's first `needed` tokens. Raises ValueError if no file has the states."""
        if (file := self.find(tokens[:needed])) is None:
            raise ValueError(f"{self.path} has no hidden states of a document of {len(tokens):,} tokens{_BEGINNING}")
        return Captured(read_states(file, tokens, needed), layers=self.layers)

    def find(self, tokens: Sequence[int]) -> Path | None:
        """A file whose tokens begin with `tokens`; None without a file."""
        key = _key(tokens)
        at = bisect.bisect_left(self._files, (key,))
        return self._files[at][1] if at < len(self._files) and self._files[at][0].startswith(key) else None

    def check(self, documents: Sequence[Document]) -> None:
        """Raises ValueError unless each document has a file."""
        missing = [len(d.tokens) for d in documents if self.find(d.tokens[: needed_tokens(d)].tolist()) is None]
        if missing:
            raise ValueError(
                f"{self.path} lacks the hidden states of {len(missing):,} of {len(documents):,} documents, such as one "
                f"of {missing[0]:,} tokens{_BEGINNING}"
            )

    def _keys(self) -> Iterator[tuple[bytes, Path]]:
        for file in sorted(self.path.glob("*.safetensors")):
            if lock_state(file) == "held":
                raise ValueError(f"{file} is still being written; wait until vLLM has finished")
            with contextlib.suppress(KeyError):  # safetensors files without hidden states
                yield _key(_tokens_of(file)), file


_BEGINNING = (
    "; vLLM's prompts have to be the token ids of the training documents, as the target's chat template and "
    "--max-length give them"
)


def _tokens_of(file: Path) -> list[int]:
    """The tokens of a file, without reading the states. Raises KeyError for a file without tokens or states."""
    try:
        with safe_open(file, "pt") as f:
            if not {STATES, TOKENS} <= set(f.keys()):
                raise KeyError(STATES)
            return f.get_tensor(TOKENS).tolist()
    except SafetensorError as e:
        raise ValueError(f"{file} is truncated or damaged ({e}); delete it, or write it again") from e


def _key(tokens: Sequence[int]) -> bytes:
    return torch.tensor(list(tokens), dtype=torch.int64).numpy().astype(f">u{ID_BYTES}").tobytes()
