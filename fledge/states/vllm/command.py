"""The command that starts a vLLM server that writes hidden states."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

from fledge.io.hub import split_revision

DIRECTORY = "/dev/shm/hidden-states"  # where the command of messages lets vLLM write, before the layers
UNCHECKED = (
    "does not say by its name which layers vLLM captured, so they are not checked, and a draft that was trained on "
    "others than its config names is hardly accepted. Name it as docs/hidden-states.md says, or run fledge check on "
    "the draft afterwards"
)


def directory_of(layers: Sequence[int]) -> str:
    """The directory for states of layers. Its name has their ids, since vLLM writes them nowhere else."""
    return "-".join([DIRECTORY, *map(str, layers)])


def layers_of(directory: str) -> tuple[int, ...] | None:
    """The layers that the name of a directory says, as `directory_of` writes it; None for other names."""
    found = re.fullmatch(r"hidden-states((?:-\d+)+)", directory.rstrip("/").rpartition("/")[2])
    return tuple(map(int, found[1].split("-")[1:])) if found else None


def serve_words(
    target: str, layers: Sequence[int], max_model_len: int, directory: str | None = None, *, trust: bool = False
) -> list[str]:
    """The words of the command, for the states of `layers` (ids as in `TrainingTarget.features`, which are vLLM's),
    which are written to a directory (default: `directory_of` the layers).

    Prefixes are not cached, since a file is to have the states of all its tokens. vLLM writes no states of a text of
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
    """The command as text for a shell."""
    return shlex.join(serve_words(target, layers, max_model_len, trust=trust))
