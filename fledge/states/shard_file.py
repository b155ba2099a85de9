"""The file of a shard: a safetensors file, written from memory without copies, and the hash of its content.

The hash of a content is the SHA-256 of the SHA-256 hashes of its blocks, BLOCK_BYTES each, which start anew with each
tensor. Several threads compute those of the blocks, so that a disk is slower than they are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.io.files import replace_parts

BLOCK_BYTES = 8 * 2**20
THREADS = 8
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}
CONTENT = "content"  # the entry of a file's metadata with the hash of its content

Read = Callable[[int, int], bytes | memoryview]  # from a first byte to an end


def write_shard(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str], temporary: Path) -> None:
    """Writes contiguous tensors on the CPU to a file, through `temporary` (see `replace_parts`). The content's hash is
    added to the metadata."""
    parts = [memoryview(x.view(-1).view(torch.uint8).numpy()) for x in tensors.values()]
    found = content_hash([(len(part), lambda a, b, part=part: part[a:b]) for part in parts])
    ends = list(itertools.accumulate(map(len, parts)))
    entries: dict[str, Any] = {"__metadata__": metadata | {CONTENT: found}}
    for (name, x), part, end in zip(tensors.items(), parts, ends, strict=True):
        offsets = [end - len(part), end]
        entries[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the format aligns the data
    replace_parts(file, [len(header).to_bytes(8, "little"), header, *parts], temporary)


def file_hash(file: Path, ranges: Sequence[tuple[int, int]]) -> str:
    """The hash of the content of a file whose tensors are in these [start, end) bytes. Raises ValueError if the file
    ends before."""
    with file.open("rb", buffering=0) as f:

        def read(start: int, end: int) -> bytes:
            if len(found := os.pread(f.fileno(), end - start, start)) < end - start:
                raise ValueError(f"{file} is truncated")
            return found

        return content_hash([(b - a, lambda i, j, a=a: read(a + i, a + j)) for a, b in ranges])


def content_hash(parts: Sequence[tuple[int, Read]]) -> str:
    """The hash of tensors, in hexadecimal: of each its number of bytes, and a function that reads some of them."""

    def blocks() -> Iterator[tuple[Read, int, int]]:
        for size, read in parts:
            for start in range(0, size, BLOCK_BYTES):
                yield read, start, min(start + BLOCK_BYTES, size)

    with ThreadPoolExecutor(THREADS) as executor:
        hashes = executor.map(lambda block: hashlib.sha256(block[0](*block[1:])).digest(), blocks())
        return hashlib.sha256(b"".join(hashes)).hexdigest()
