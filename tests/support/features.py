"""Features of small documents on disk, and the same features in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fledge.data.documents import Document, fingerprint
from fledge.data.pack import make_row
from fledge.states.cache import FORMAT, FeatureCache, Manifest
from fledge.states.layout import PRECISIONS, Layout, Precision, Sizes, decode_layers, encode_layers, split_shards
from fledge.states.writer import FeatureWriter, passes
from fledge.targets.source import LiveFeatures
from fledge.types import Features, Packed


def manifest_of(documents: Sequence[Document], layout: Layout, shard_bytes: int, **changes: Any) -> Manifest:
    sizes = Sizes.of(documents, layout)
    values = dict(
        format=FORMAT, fledge_version="0", target="tiny", target_sha256="t", target_layers=8, tokenizer_sha256="",
        template_sha256=None, template_kwargs=None, data=[], data_sha256=fingerprint(documents), max_length=64,
        documents=len(documents), tokens=sum(sizes.tokens), last_states=sum(sizes.last), layers=list(layout.layers),
        width=layout.width, precision=layout.precision, all_last=layout.all_last, dtype="float32",
        shards=[list(s) for s in split_shards(sizes, layout, shard_bytes)],
    )  # fmt: skip
    return Manifest(**values | changes)


def new_cache(
    path: Path, documents: Sequence[Document], layout: Layout, shard_bytes: int = 20_000, **changes: Any
) -> FeatureCache:
    """A directory with a manifest and documents, and no shard."""
    path.mkdir()
    cache = FeatureCache(path, manifest_of(documents, layout, shard_bytes, **changes), documents)
    cache.create([])
    return FeatureCache.open(path)


def round_features(features: Features, precision: Precision) -> Features:
    """The features as they come back from the disk, in their dtype and on their device."""
    aux_TAD = torch.empty_like(features.aux_TAD)
    decode_layers(*encode_layers(features.aux_TAD, precision), aux_TAD)
    return Features(aux_TAD, features.last_TD.to(precision.last).to(features.last_TD.dtype))


def writer_of(cache: FeatureCache, source: LiveFeatures, say: Any = print) -> FeatureWriter:
    return FeatureWriter(cache, source.features, say, lambda tokens: None)


class RoundedFeatures:
    """The features that a target computes in the writer's passes, rounded, in memory: a source without any file."""

    def __init__(self, cache: FeatureCache, live: LiveFeatures):
        self.live, self.parts = live, []
        for first, end in cache.manifest.shards:
            for a, b in passes(cache, first, end):
                lengths = cache.sizes.tokens[a:b]
                computed = live.features(make_row(list(cache.documents[a:b]), sum(lengths)))
                rounded = round_features(computed, PRECISIONS[cache.manifest.precision])
                parts = zip(rounded.aux_TAD.split(lengths), rounded.last_TD.split(lengths), strict=True)
                self.parts += [Features(*part) for part in parts]

    def features(self, row: Packed) -> Features:
        parts = [self.parts[i] for i in row.sources]
        whole = []
        for states in zip(*((p.aux_TAD, p.last_TD) for p in parts), strict=True):
            joined = torch.cat(states)
            filler = row.token_T.numel() - len(joined)
            whole.append(torch.cat([joined, joined.new_zeros(filler, *joined.shape[1:])]))
        return Features(*whole)

    def logits(self, last_ND: torch.Tensor) -> torch.Tensor:
        return self.live.logits(last_ND)
