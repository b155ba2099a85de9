"""Times a target's pass over few tokens on a CPU, with fledge and with llama.cpp, on the same weights.

    pip install xllamacpp gguf
    python bench/llama_cpp.py --target DIR --out bench/results/llama_cpp_cpu.json

A pass runs 1, 4 or 6 tokens after `--context` others, and gives the logits of all of them: a baseline's token, or the
verification of a chain. Afterwards the cache is rolled back, outside the time. fledge computes in float32. llama.cpp
reads a GGUF file that this program writes for each of `--types`, and computes as it does by default, with keys and
values in float16. The engines take turns, llama.cpp in a process of its own.

Before, llama.cpp's argmax is compared with that of transformers at each position of a few prompts; a share below
LEAST_SAME is an error.

llama.cpp is the library in the package xllamacpp. Of its structs, only the layout of `llama_batch`, and the first field
of `llama_context_params`, are used here.
"""

import argparse
import ctypes
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from fledge.io.machine import environment
from fledge.measure.record import check_record_path, write_record
from fledge.targets.interface import Cache, DecodingTarget
from fledge.targets.loading import load_target
from fledge.types import Prompt, Tree

TOKENS = (1, 4, 6)
TYPES = {"f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16}
BLOCKS, WARM_UP = 3, 5  # turns of each engine, and passes before those that are timed, at each turn
LEAST_SAME = 0.95
TEXTS = (
    "I would like to book a table for two people at an Italian restaurant on Friday evening.",
    "Once upon a time there was a small dog who lived in a house by the sea. Every morning he",
    "A train leaves at 9 and arrives at 12. It travels 60 miles in each hour. How far does it go?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="directory of a LlamaForCausalLM")
    parser.add_argument("--out", type=Path, default=Path("bench/results/llama_cpp_cpu.json"))
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES, help="of the weights in llama.cpp")
    parser.add_argument("--context", type=int, default=200, help="tokens before those that are timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30, help="passes of which the median is taken")
    options = parser.parse_args()
    check_record_path(options.out, "--out")
    torch.set_num_threads(options.threads)
    target = load_target(options.target)
    target.prepare_decoding()
    prompts = [target.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    size = options.context + max(TOKENS)
    text = list(itertools.islice(itertools.cycle(itertools.chain(*prompts)), size))
    prompt, following = text[: options.context], text[options.context :]
    with torch.inference_mode():
        expected = torch.cat([target.model(torch.tensor([p])).logits[0] for p in prompts])

    cache = target.new_cache([size])
    target.prefill([Prompt(prompt)], cache)
    engines = {"fledge": lambda tokens, repeats: fledge_seconds(target, cache, tokens, repeats)}
    checks, rows, spawn = {}, [], multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, spawn, start, (options.threads,)) as process:
        for name in options.types:
            write_gguf(target.model, Path(folder, name), TYPES[name])
            found = process.submit(load, name, f"{folder}/{name}", size, prompts, prompt).result()
            checks[name] = compared(torch.from_numpy(found), expected)
            print(f"llama.cpp {name}: " + ", ".join(f"{k} {v:.4g}" for k, v in checks[name].items()))
            if checks[name]["same_argmax"] < LEAST_SAME:
                raise SystemExit(f"llama.cpp and transformers do not compute the same model from {options.target}")
            engines[f"llama.cpp {name}"] = lambda *args, name=name: process.submit(llama_seconds, name, *args).result()
        for n in TOKENS:
            times = {name: [] for name in engines}
            for _ in range(BLOCKS):
                for name, run in engines.items():
                    times[name] += run(following[:n], -(-options.repeats // BLOCKS))
            rows.append({"tokens": n, "ms": {name: 1e3 * statistics.median(t) for name, t in times.items()}})
            print(f"{n} tokens: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in rows[-1]["ms"].items()), flush=True)
        llama_cpp = {"xllamacpp": version("xllamacpp"), "system": process.submit(system_info).result()}

    used = {name: getattr(options, name) for name in ("context", "threads", "repeats")}
    record = {"environment": environment("cpu", "float32"), "llama_cpp": llama_cpp, "target": options.target.name}
    write_record(options.out, {**record, **used, "checks": checks, "rows": rows})


def compared(found: Tensor, expected: Tensor) -> dict[str, float]:
    """The share of positions at which two models' logits have the same argmax, and their largest difference."""
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    return {"positions": len(found), "same_argmax": same, "max_difference": (found - expected).abs().max().item()}


def seconds(run: Callable[[], Any], undo: Callable[[], Any], repeats: int) -> list[float]:
    """The seconds of each `run` after WARM_UP others; `undo`, which is not timed, follows each."""
    times = []
    for _ in range(WARM_UP + repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
        undo()
    return times[WARM_UP:]


def fledge_seconds(target: DecodingTarget, cache: Cache, tokens: list[int], repeats: int) -> list[float]:
    tree, none = Tree.chain(torch.tensor([tokens])), torch.tensor([0])
    return seconds(lambda: target.verify(tree, cache), lambda: cache.keep(None, none), repeats)


def write_gguf(model: torch.nn.Module, file: Path, dtype: gguf.GGMLQuantizationType) -> None:
    """Writes a LlamaForCausalLM as a GGUF file without a tokenizer: matrices in `dtype`, norms in float32."""
    c = model.config
    if c.model_type != "llama" or c.rope_parameters["rope_type"] != "default":
        raise SystemExit("only models of LlamaForCausalLM without scaled rotations can be written as GGUF")
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in {
        "tokenizer_model": "no_vocab", "vocab_size": c.vocab_size, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "block_count": c.num_hidden_layers, "head_count": c.num_attention_heads,
        "feed_forward_length": c.intermediate_size, "head_count_kv": c.num_key_value_heads, "key_length": c.head_dim,
        "value_length": c.head_dim, "rope_dimension_count": c.head_dim, "layer_norm_rms_eps": c.rms_norm_eps,
        "rope_freq_base": c.rope_parameters["rope_theta"],
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        if n := heads.get(name.split(".")[-2]):  # llama.cpp rotates neighbours, transformers the halves of a head
            weight = weight.unflatten(0, (n, 2, -1)).transpose(1, 2).reshape(weight.shape)
        kind = dtype if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(weight.float().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Params(ctypes.Structure):
    """Parameters of a model or a context, as llama.cpp fills them: more bytes than either has."""

    _fields_ = (("n_ctx", c_uint32), ("rest", c_uint32 * 255))


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)), ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    )  # fmt: skip


class Handle(c_void_p):
    """A pointer of C; ctypes would return a plain `c_void_p` as an int."""


RESULTS = {
    "print_system_info": c_char_p, "model_default_params": Params, "model_load_from_file": Handle,
    "context_default_params": Params, "init_from_model": Handle, "model_get_vocab": Handle, "batch_init": Batch,
    "get_memory": Handle, "memory_seq_rm": c_bool, "get_logits": POINTER(c_float),
}  # fmt: skip
quiet = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda level, text, data: None)


class LlamaCpp:
    """A model in llama.cpp, with a context for at least `size` tokens."""

    def __init__(self, file: str, size: int) -> None:
        model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = max(params.n_ctx, size)
        self.context, self.length = lib.llama_init_from_model(model, params), 0
        assert lib.llama_n_ctx(self.context) >= size
        lib.llama_set_n_threads(self.context, threads, threads)
        self.memory = lib.llama_get_memory(self.context)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def batch(self, tokens: list[int]) -> Batch:
        """Tokens after the first `length` in the cache, with logits for each."""
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, self.length + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        return batch

    def run(self, batch: Batch) -> None:
        if lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        lib.llama_synchronize(self.context)

    def roll_back(self) -> None:
        if not lib.llama_memory_seq_rm(self.memory, 0, self.length, -1):
            raise RuntimeError("llama_memory_seq_rm failed")

    def logits(self, tokens: list[int]) -> np.ndarray:
        self.run(self.batch(tokens))
        self.roll_back()
        return np.ctypeslib.as_array(lib.llama_get_logits(self.context), (len(tokens), self.vocab)).copy()


def start(n: int) -> None:
    """Begins the process of llama.cpp, which is part of xllamacpp's extension module."""
    global lib, models, threads
    (folder,) = find_spec("xllamacpp").submodule_search_locations
    (file,) = Path(folder).glob("xllamacpp*.so")
    lib, models, threads = ctypes.CDLL(str(file)), {}, n
    for name, result in RESULTS.items():
        getattr(lib, f"llama_{name}").restype = result
    lib.llama_log_set(quiet, None)


def system_info() -> str:
    return lib.llama_print_system_info().decode()


def load(name: str, file: str, size: int, prompts: list[list[int]], prompt: list[int]) -> np.ndarray:
    """Loads a model, returns the logits of all prompts, and fills the cache with another prompt."""
    model = models[name] = LlamaCpp(file, size)
    logits = np.concatenate([model.logits(p) for p in prompts])
    model.run(model.batch(prompt))
    model.length = len(prompt)
    return logits


def llama_seconds(name: str, tokens: list[int], repeats: int) -> list[float]:
    model = models[name]
    batch = model.batch(tokens)
    return seconds(lambda: model.run(batch), model.roll_back, repeats)


if __name__ == "__main__":
    main()
