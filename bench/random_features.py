"""Random features on disk, as `fledge features` writes those of a target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fledge.data.documents import fingerprint
from fledge.features.cache import FORMAT, FeatureCache, Manifest
from fledge.features.layout import Layout, Sizes, split_shards
from fledge.features.writer import FeatureWriter
from fledge.types import Document, Features, Packed

SHARD_BYTES = 128 * 2**20
MOST_TOKENS = 1 << 15  # of a pass of the writer


def write_random_features(
    path: Path, documents: Sequence[Document], layout: Layout, device: str, dtype: torch.dtype
) -> tuple[FeatureCache, float]:
    """Writes features of documents of at most MOST_TOKENS tokens to a new directory, with fledge's own writer. Returns
    them, and the GB/s of writing, of which the rounding and the disk are a part."""
    sizes = Sizes.of(documents, layout)
    manifest = Manifest(
        format=FORMAT, fledge_version="", target="random", target_sha256="", target_layers=max(layout.layers),
        tokenizer_sha256="", template_sha256=None, template_kwargs=None, data=[],
        data_sha256=fingerprint(documents), max_length=max(d.tokens.numel() for d in documents),
        documents=len(documents), tokens=sum(sizes.tokens), last_states=sum(sizes.last), layers=list(layout.layers),
        width=layout.width, precision=layout.precision, all_last=layout.all_last,
        dtype=str(dtype).removeprefix("torch."), shards=[list(s) for s in split_shards(sizes, layout, SHARD_BYTES)],
    )  # fmt: skip
    path.mkdir(parents=True)
    cache = FeatureCache(path, manifest, documents)
    cache.create([])
    with torch.device(device):
        states = torch.randn(MOST_TOKENS, len(layout.layers) + 1, layout.width, dtype=dtype)

    def compute(row: Packed) -> Features:
        T = row.token_T.numel()
        return Features(states[:T, 1:], states[:T, 0])

    start = time.perf_counter()
    FeatureWriter(cache, compute, 1 << 60, 0, print, lambda tokens: None).write()
    taken = time.perf_counter() - start
    return cache, sum(map(cache.bytes, cache.shards)) / taken / 1e9
