"""The directory of stored features: a manifest, the documents, and shards of consecutive documents.

    manifest.json            what the features were computed from, the documents of each shard (written once)
    documents.safetensors    tokens, spans and lengths of all documents, so that training needs no other data
    held-out.jsonl           records that are not among the documents, to measure τ
    shard-00000.safetensors  the features of the shard's documents, concatenated (`Layout.tensors`)

A shard is written to a temporary file, flushed to the disk and renamed, so each file with a shard's name is complete. A
shard's metadata name the shard's manifest and the hash of the content. Only `fledge features --verify` compares the
hash: a shard is large, and training reads parts of many shards from the first step on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from fledge.data.documents import Document, fingerprint, lengths_of
from fledge.data.record import Record
from fledge.io.fields import check_template_kwargs, parse_json, read_json, shortened
from fledge.io.files import TEMPORARY, replace_file, replace_parts, replace_text
from fledge.options import has_type
from fledge.states.layout import HEADER_BYTES, PRECISIONS, Layout, Sizes

T = TypeVar("T")

MANIFEST, DOCUMENTS, HELD_OUT = "manifest.json", "documents.safetensors", "held-out.jsonl"
FORMAT = 1
BLOCK_BYTES, THREADS = 8 * 2**20, 8  # bytes of a block of hashed content, and threads that hash blocks
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
CONTENT = "content"  # the entry of a file's metadata with the hash of its content

# the fields of a manifest that determine the features, with the names in messages
IDENTITY = {
    "target_sha256": "target",
    "tokenizer_sha256": "tokenizer",
    "template_sha256": "chat template",
    "template_kwargs": "variables of the chat template",
    "max_length": "maximum document length",
    "data_sha256": "data",
    "layers": "layers",
    "width": "width of hidden states",
    "precision": "precision",
    "all_last": "choice of final states",
    "dtype": "dtype of computation",
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of stored features: the content of manifest.json.

    `target` is the target's directory or hub id, `target_sha256` a hash of the target's weights (`weights_sha256`), and
    `target_layers` the target's number of layers. `data` are the sources, as given, and `data_sha256` the fingerprint
    of the documents. `template_modes` are all sets of template variables of the documents (empty: `template_kwargs`
    alone). `layers`, `width`, `precision` and `all_last` are as in `Layout`, and `dtype` is the target's dtype of
    computation. `tokens` and `last_states` are the numbers of tokens and of stored final states. `shards` are the
    documents of each shard, [first, end).
    """

    format: int
    fledge_version: str
    target: str
    target_sha256: str
    target_layers: int
    tokenizer_sha256: str
    template_sha256: str | None
    template_kwargs: dict | None
    template_modes: list[dict] = field(default_factory=list)
    data: list[str]
    data_sha256: str
    max_length: int
    documents: int
    tokens: int
    last_states: int
    layers: list[int]
    width: int
    precision: str
    all_last: bool
    dtype: str
    shards: list[list[int]]

    @property
    def layout(self) -> Layout:
        return Layout(tuple(self.layers), self.width, self.precision, self.all_last)

    @property
    def id(self) -> str:
        """A hash of everything that determines the content of the shards, in hexadecimal."""
        content = {name: getattr(self, name) for name in (*IDENTITY, "format", "shards")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def difference(self, other: Manifest) -> str | None:
        """The difference to the features of another manifest, as text for a message; None for equal features."""
        for name, what in IDENTITY.items():
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                shown = "" if name.endswith("sha256") else f" ({ours}, not {theirs})"
                return f"another {what}{shown}"
        return None


class FeatureCache:
    """A directory of stored features, or of features to be written. `documents` are the manifest's documents (None:
    read from the directory when needed)."""

    def __init__(self, path: Path, manifest: Manifest, documents: Sequence[Document] | None = None):
        self.path, self.manifest, self.layout = path, manifest, manifest.layout
        self._documents = documents

    @classmethod
    def open(cls, path: str | Path, documents: Sequence[Document] | None = None) -> FeatureCache:
        """The features in a directory. Raises ValueError if the manifest is missing or damaged."""
        return cls(Path(path), _read_manifest(Path(path)), documents)

    def create(self, held_out: Sequence[Record]) -> None:
        """Writes everything but the shards; the manifest last. Only one process at a time may call `create`."""
        documents = self.documents
        tensors = {
            "tokens": torch.from_numpy(np.concatenate([d.tokens for d in documents])),
            "spans": torch.from_numpy(np.concatenate([d.spans for d in documents])),
            "lengths": torch.from_numpy(lengths_of(documents)),
        }
        replace_file(self.path / DOCUMENTS, [save(tensors)])
        replace_text(self.path / HELD_OUT, "".join(json.dumps(asdict(r)) + "\n" for r in held_out))
        replace_text(self.path / MANIFEST, json.dumps(asdict(self.manifest), indent=2) + "\n")

    @functools.cached_property
    def documents(self) -> Sequence[Document]:
        """The documents. Raises ValueError if the documents are damaged, or differ from the manifest's documents."""
        if self._documents is not None:
            return self._documents
        file = self.path / DOCUMENTS
        try:
            tensors = load(file.read_bytes())
            lengths = tensors["lengths"].tolist()
            parts = zip(tensors["tokens"].split(lengths), tensors["spans"].split(lengths), strict=True)
            documents = [Document(tokens.numpy(), spans.numpy()) for tokens, spans in parts]
            whole = len(documents) == self.manifest.documents and fingerprint(documents) == self.manifest.data_sha256
        except Exception as e:  # a damaged file may raise anything
            raise ValueError(f"{file} cannot be read ({type(e).__name__}); {_ANEW}") from e
        if not whole:
            raise ValueError(f"{file} does not hold the documents of {MANIFEST}; {_ANEW}")
        return documents

    @functools.cached_property
    def sizes(self) -> Sizes:
        return Sizes.of(self.documents, self.layout)

    def held_out(self) -> list[Record]:
        """The records that are kept to measure τ."""
        file = self.path / HELD_OUT
        try:
            return [Record(**parse_json(line)) for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, TypeError) as e:
            raise ValueError(f"{file} cannot be read ({type(e).__name__}); {_ANEW}") from e

    @property
    def shards(self) -> range:
        return range(len(self.manifest.shards))

    def file(self, shard: int) -> Path:
        return self.path / f"shard-{shard:05}.safetensors"

    def lock(self, shard: int) -> Path:
        return self.file(shard).with_suffix(".lock")

    def is_written(self, shard: int) -> bool:
        return self.file(shard).exists()

    def check_written(self) -> None:
        """Raises ValueError if a written shard is truncated, has a damaged header, or is of other features."""
        for shard in filter(self.is_written, self.shards):
            self._header(shard)

    def tokens(self, shard: int) -> int:
        """The number of tokens of a shard."""
        return self.sizes.total(*self.manifest.shards[shard])[0]

    def bytes(self, shard: int) -> int:
        """The most bytes that a shard takes."""
        return HEADER_BYTES + self.layout.bytes(*self.sizes.total(*self.manifest.shards[shard]))

    def metadata(self, shard: int) -> dict[str, str]:
        """The metadata in a shard's file, without the hash of its content."""
        return {"fledge": f"shard {shard} of the features {self.manifest.id}"}

    def save(self, shard: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes a shard of contiguous tensors on the CPU, with the hash of the content in the header. The file gets
        the shard's name when the whole content is on the disk."""
        parts = [memoryview(x.view(-1).view(torch.uint8).numpy()) for x in tensors.values()]
        blocks = (part[a : a + BLOCK_BYTES] for part in parts for a in range(0, len(part), BLOCK_BYTES))
        content = {CONTENT: content_hash(blocks, bytes_of=lambda block: block)}
        entries = {"__metadata__": self.metadata(shard) | content}
        entries |= _entries({name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()})
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # the format aligns the data
        file = self.file(shard)
        size = len(header).to_bytes(8, "little")
        replace_parts(file, [size, header, *parts], file.with_name(TEMPORARY + file.name))

    def offsets(self, shard: int) -> dict[str, int]:
        """The position of each tensor in a shard's file, in bytes.

        Raises ValueError if the file is missing or truncated, if its header is damaged, or if it belongs to other
        features.
        """
        return {name: start for name, (start, _) in self._header(shard)[0].items()}

    def verify(self, shard: int) -> None:
        """Reads a shard, and compares the hash of the content with the hash in the header. Raises ValueError like
        `offsets`, and if the hashes differ."""
        ranges, expected = self._header(shard)
        blocks = (
            (a, min(BLOCK_BYTES, end - a)) for start, end in ranges.values() for a in range(start, end, BLOCK_BYTES)
        )
        with self.file(shard).open("rb", buffering=0) as f:
            found = content_hash(blocks, lambda block: os.pread(f.fileno(), block[1], block[0]))
        if found != expected:
            raise ValueError(f"{self.file(shard)} is damaged: its content is not what was written; {_REPLACE}")

    def _header(self, shard: int) -> tuple[dict[str, tuple[int, int]], str | None]:
        """The [start, end) bytes of each tensor in a shard's file, ascending, and the hash of the content (None: not in
        the header). Raises ValueError like `offsets`."""
        file = self.file(shard)
        expected = _entries(self.layout.tensors(*self.sizes.total(*self.manifest.shards[shard])))
        try:
            with file.open("rb") as f:
                start = 8 + int.from_bytes(f.read(8), "little")
                header = parse_json(f.read(min(start - 8, HEADER_BYTES)))
            metadata = header.pop("__metadata__", {})
            content = metadata.pop(CONTENT, None)
        except FileNotFoundError as e:
            raise ValueError(f"{file} is missing; {_REWRITE}") from e
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            raise ValueError(f"{file} is damaged: it has no header of a shard; {_REPLACE}") from e
        if metadata != self.metadata(shard):
            raise ValueError(f"{file} is a shard of other features than those of {MANIFEST}; {_REPLACE}")
        if header != expected:
            raise ValueError(f"{file} is damaged: its tensors are others than the manifest says; {_REPLACE}")
        ranges = {name: tuple(start + at for at in entry["data_offsets"]) for name, entry in expected.items()}
        size, end = file.stat().st_size, max(end for _, end in ranges.values())
        if size != end:
            raise ValueError(f"{file} has {size:,} bytes instead of {end:,}; {_REPLACE}")
        return ranges, content


_REWRITE = "run the same `fledge features` command again to write what is missing"
_REPLACE = "delete it and run the same `fledge features` command again, which writes it anew"
_ANEW = "write the features anew with `fledge features`, in another directory"


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"{path} holds no features (no {MANIFEST}); write them with `fledge features`")
    try:
        content = read_json(file)
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')!r:.20}, and this version reads format {FORMAT}")
        manifest = Manifest(**content)
        if wrong := _wrong_field(manifest):
            raise ValueError(f"the value of {wrong} is not valid")
        for mode in (manifest.template_kwargs or {}, *manifest.template_modes):
            check_template_kwargs(mode, "template_kwargs")
    except (TypeError, AttributeError, ValueError) as e:
        raise ValueError(f"{file} cannot be read: {shortened(str(e))}; {_ANEW}") from e
    return manifest


def _wrong_field(manifest: Manifest) -> str | None:
    """The name of a field whose value has a wrong type, or does not fit the other values; None if there is none."""
    kinds = get_type_hints(Manifest)
    if wrong := next((name for name, kind in kinds.items() if not has_type(kind, getattr(manifest, name))), None):
        return wrong
    ends = [0, *(shard[-1] for shard in manifest.shards if shard)]
    fits = {
        "precision": manifest.precision in PRECISIONS,
        "shards": manifest.shards == [[a, b] for a, b in pairwise(ends) if a < b],
        "documents": manifest.documents == ends[-1] > 0,
        **{name: getattr(manifest, name) > least for name, least in (("width", 0), ("tokens", 0), ("max_length", 2))},
    }
    return next((name for name, fine in fits.items() if not fine), None)


def _entries(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Any]:
    """The entries of tensors, given by dtype and shape, in the header of a safetensors file."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    return entries


def content_hash(blocks: Iterable[T], bytes_of: Callable[[T], bytes | memoryview]) -> str:
    """The hash of a content, in hexadecimal: the SHA-256 of the blocks' SHA-256 hashes. Blocks have BLOCK_BYTES bytes,
    and each tensor starts a block. Several threads hash blocks, which is faster than a disk."""
    with ThreadPoolExecutor(THREADS) as executor:
        hashes = executor.map(lambda block: hashlib.sha256(bytes_of(block)).digest(), blocks)
        return hashlib.sha256(b"".join(hashes)).hexdigest()
