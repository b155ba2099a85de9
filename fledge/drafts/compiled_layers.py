"""Decoder layers for a few rows on a CPU, by C code that is compiled on the machine (`ops/layers.c`).

Between the products of a few rows, plain torch spends more time on calls than on arithmetic. Here all layers are one
call. A row's result does not depend on the number of rows and threads, bit by bit, so that verification computes
what decoding token by token does. `fledge.drafts.decode_layer` has the definition; both agree up to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.drafts.decode_layer import LayerShape, LayerWeights
from fledge.drafts.kv_cache import CacheRows, KVCache, PromptRows, TreeRows
from fledge.ops.attention_tree import Visible, VisibleChain
from fledge.ops.compiled import (
    LANES,
    MOST_ROWS,
    PANEL,
    THREADS,
    CompiledWeight,
    WeightStruct,
    check_memory,
    library,
    pointer,
)


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, WeightStruct) for name in ("qkv", "out", "gate_up", "down")),
        ("window", c_int64),
    ]


class _Shape(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "width", "inner")),
        ("eps", c_float),
        ("scale", c_float),
    ]


class _Pass(Structure):
    _fields_ = [
        *((n, c_int64) for n in ("rows", "queries", "sequences", "slots", "new_slots", "angles", "rotated", "threads")),
        *((n, c_void_p) for n in ("cache", "slot", "asked", "start", "length", "last", "mask", "position")),
        *((n, c_void_p) for n in ("cosine", "sine", "first", "token", "embedding", "token_gain", "state_gain")),
        ("normed_residual", c_int64),
        *((n, c_void_p) for n in ("final_norm", "x", "out", "normed", "aux", "aux_layer")),
        ("aux_layers", c_int64),
    ]


class CompiledLayers:
    """Decoder layers whose weights have copies, as `layers_of` makes them. `final_norm_E` is the gain of a norm after
    the last layer."""

    def __init__(self, layers: Sequence[LayerWeights], shape: LayerShape, final_norm_E: Tensor | None):
        self.layers, self.final_norm_E = layers, final_norm_E  # kept, as layers.c reads their memory
        self.array = (_Layer * len(layers))(*map(self._layer, layers))
        self.windows = [w.window for w in layers]
        width, inner = layers[0].out.shape[0], layers[0].down.shape[1]
        self.shape = _Shape(shape.heads, shape.kv_heads, shape.head_dim, width, inner, shape.eps, shape.scale)

    def _layer(self, w: LayerWeights) -> _Layer:
        pairs = (w.qkv, w.qkv_bias), (w.out, w.out_bias), (w.gate_up, w.gate_up_bias), (w.down, w.down_bias)
        return _Layer(
            *map(pointer, (w.input_norm, w.q_norm, w.k_norm, w.post_norm)),
            *(weight.packed_copy.with_bias(bias) for weight, bias in pairs),
            w.window or 0,
        )

    def takes(self, rows: CacheRows, count: int) -> bool:
        """Whether a pass of so many rows of a cache can be computed: of trees, or of the prompt of one sequence."""
        if not 0 < count <= MOST_ROWS:
            return False
        if isinstance(rows, TreeRows):  # layers.c has windows in the order of slots, which is not that of a tree
            tree = not isinstance(rows.visible, VisibleChain)
            return not tree or all(window is None or rows.visible.shape[2] <= window for window in self.windows)
        return isinstance(rows, PromptRows) and len(rows.counts) == 1

    def __call__(
        self, x_ME: Tensor, rotation: tuple[Tensor, Tensor], rows: CacheRows, *, asked_Q: Tensor | None = None,
        first: Tensor | Joined | None = None, aux_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        """The last layer's output [Q, E], its norm with `final_norm_E`, and the inputs of `aux_layers` (ascending; the
        number of layers stands for the output), [M, A, E]. Writes keys and values of all M rows to the cache.

        `first` is what the first projection reads if it is not the norm of x. The queries are all rows, or those at
        `asked_Q` (int64, contiguous), where a row may be more than once. Raises MemoryError.
        """
        (M, E), pool = x_ME.shape, rows.cache.pool
        visible, position = _seen(rows, M, asked_Q)
        B, S, J = visible.shape
        x_ME = x_ME.clone(memory_format=torch.contiguous_format)  # it changes
        out_QE = x_ME if asked_Q is None else x_ME.new_empty(B * S, E)
        normed_QE = None if self.final_norm_E is None else x_ME.new_empty(B * S, E)
        aux_MAE = x_ME.new_empty(M, len(aux_layers), E)
        cosine, sine = rotation
        last = visible.last_BS if isinstance(visible, VisibleChain) else None
        mask = visible.mask_BSJ if last is None else None
        position = position if any(self.windows) else None
        joined = first if isinstance(first, Joined) else NOTHING
        tensors = dict(
            cache=pool.buffer, slot=_integers(rows.slot_M), asked=asked_Q, start=rows.cache.start_B,
            length=rows.cache.length_B, last=_integers(last), mask=_contiguous(mask), position=_integers(position),
            cosine=_contiguous(cosine), sine=_contiguous(sine), **joined.tensors(),
            first=_contiguous(first) if joined is NOTHING else None,
            final_norm=self.final_norm_E, x=x_ME, out=out_QE, normed=normed_QE, aux=aux_MAE,
        )  # fmt: skip
        numbers = (c_int64 * len(aux_layers))(*aux_layers)
        layer_pass = _Pass(
            rows=M, queries=B * S, sequences=B, slots=pool.slots, new_slots=J, angles=cosine.shape[0],
            rotated=cosine.shape[1], normed_residual=joined.normed_residual, aux_layer=ctypes.addressof(numbers),
            aux_layers=len(aux_layers), **_pointers(tensors),
        )  # fmt: skip
        with THREADS.computing() as layer_pass.threads:
            failed = library().fledge_layers(byref(self.shape), self.array, len(self.array), byref(layer_pass))
        check_memory(failed)
        return out_QE, normed_QE, aux_MAE

    def chain(
        self, joined: Joined, state_ME: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache, slot_KM: Tensor,
        head: CompiledWeight, target_id_W: Tensor | None, normed_state: bool, noise: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """Drafts a chain of K tokens for each of the M sequences of a cache. Returns the target ids, int64 [K, M].

        A step runs the layers and the head, and takes the token with the largest logit, after adding the noise of
        `coupled` if `noise` is given: the noise's states, int64 [K, M], and the temperatures, [M]. The first step reads
        `joined` and the states [M, E]. A later step reads the token of the step before and its state: the output of the
        layers or, with `normed_state`, the norm of the output.

        `rotation` are the angles of all steps, [K * M, r], step by step, and `slot_KM` (int64) the steps' slots in the
        cache. `target_id_W` (int64) maps draft ids to target ids; None if the ids are the same. Raises MemoryError.
        """
        (K, M), E = slot_KM.shape, state_ME.shape[1]
        state_ME = _contiguous(state_ME)
        token_KM, out_ME, normed_ME = slot_KM.new_empty(K, M), state_ME.new_empty(M, E), state_ME.new_empty(M, E)
        cosine, sine = rotation
        tensors = dict(
            cache=cache.pool.buffer, slot=_contiguous(slot_KM), start=cache.start_B, length=cache.length_B,
            cosine=cosine, sine=sine, **joined.tensors(),
            final_norm=self.final_norm_E, x=out_ME, out=out_ME, normed=normed_ME,
        )  # fmt: skip
        step = _Pass(
            rows=M, queries=M, sequences=M, slots=cache.pool.slots, new_slots=1, angles=M, rotated=cosine.shape[1],
            normed_residual=joined.normed_residual, **_pointers(tensors),
        )  # fmt: skip
        noise_KM, temperature_M = (None, None) if noise is None else (_integers(noise[0]), noise[1].double())
        with THREADS.computing() as step.threads:
            failed = library().fledge_chain(
                byref(self.shape), self.array, len(self.array), byref(step), byref(head.struct),
                pointer(target_id_W), pointer(noise_KM), pointer(temperature_M), normed_state, state_ME.data_ptr(), K,
                token_KM.data_ptr(),
            )  # fmt: skip
        check_memory(failed)
        return token_KM


class Joined(NamedTuple):
    """The input of an EAGLE-3 draft: the first projection reads [norm of the token's embedding ; norm of x], each with
    its gain. `token_M` is int64. With `normed_residual`, the layer's residual is that norm of x, else x."""

    token_M: Tensor | None
    embedding_VE: Tensor | None
    token_gain_E: Tensor | None
    state_gain_E: Tensor | None
    normed_residual: bool

    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors by the names of `_Pass`."""
        return dict(
            token=_integers(self.token_M), embedding=self.embedding_VE, token_gain=self.token_gain_E,
            state_gain=self.state_gain_E,
        )  # fmt: skip


NOTHING = Joined(None, None, None, None, False)


def _seen(rows: CacheRows, M: int, asked_Q: Tensor | None) -> tuple[Visible | VisibleChain, Tensor | None]:
    """The visibility of the queries, and the queries' positions."""
    if isinstance(rows, PromptRows):  # as the chain of one sequence
        asked_Q = torch.arange(M) if asked_Q is None else asked_Q
        return VisibleChain(asked_Q[None], M), rows.position_M[asked_Q]
    assert isinstance(rows, TreeRows)
    return rows.visible, rows.position_BS


def layers_of(
    layers: Sequence[LayerWeights], shape: LayerShape, final_norm_E: Tensor | None, others: Sequence[Tensor] = ()
) -> CompiledLayers | None:
    """The compiled layers of `layers`, with the final norm if its gain is given. Returns None if a weight has no
    copy, for experts, for heads and MLPs that do not fill whole vectors, and if a vector, or
    one of the read tensors `others`, is not in float32."""
    fits = shape.head_dim % LANES == 0 and all(map(_plain, [final_norm_E, *others]))
    for w in layers:
        copied = all(hasattr(m, "packed_copy") for m in w.matrices())
        vectors = [w.qkv_bias, w.out_bias, w.gate_up_bias, w.down_bias, w.input_norm, w.q_norm, w.k_norm, w.post_norm]
        fits = fits and copied and all(map(_plain, vectors)) and w.experts is None and w.down.shape[1] % PANEL == 0
    return CompiledLayers(layers, shape, final_norm_E) if fits else None


def _pointers(tensors: dict[str, Tensor | None]) -> dict[str, int | None]:
    """The addresses of tensors, which must live until the C code has returned; None for None."""
    return {name: pointer(x) for name, x in tensors.items()}


def _plain(x: Tensor | None) -> bool:
    return x is None or (x.dtype == torch.float32 and x.is_contiguous())


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.contiguous()


def _integers(x: Tensor | None) -> Tensor | None:
    return x if x is None or (x.dtype == torch.int64 and x.is_contiguous()) else x.long().contiguous()
