"""Makes fledge/demo/target, the small target model of the demo: a BPE tokenizer and a Llama of 7.4 M parameters.

Both are trained on Python source that is installed on the machine (see fledge/demo/corpus.py). Nothing is downloaded.

    python -m fledge.demo.pretrain --minutes 6.5
"""

import argparse
import json
import math
import os
import platform
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fledge.demo.corpus import HELD_OUT_ONE_IN, held_out, package_files, stdlib_files

EOS = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 1024  # tokens of a training sequence
STDLIB_COPIES = 3  # copies of the standard library in a pass over the text; package files have one copy
TOKENIZER_BYTES = 60_000_000  # of source text on which the tokenizer is trained
WARM_UP = 0.02  # fraction of the training time
RECORDS = 40  # number of points of the loss curve
HELD_OUT_EVERY = 4  # the held-out loss is measured at every fourth point

# In this order: a newline with the indentation after it, words, numbers, operators, spaces within a line.
PIECES = r"\s*\n[ \t]*| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"

PACKAGES = """
absl accelerate aiohttp anyio attr attrs botorch chex click coverage cupy Cython diffrax e3nn einops equinox
etils execnet flax fontTools formulaic fsspec gpytorch h5py httpcore httpx huggingface_hub imageio jax
jaxtyping jinja2 joblib lightning lightning_utilities linear_operator lineax llvmlite lxml markdown
markdown_it matplotlib mesonbuild mpmath multipledispatch narwhals networkx numba numpy numpyro onnx
onnxruntime onnxscript opt_einsum optax optimistix orbax packaging pandas patsy peft PIL pluggy
prometheus_client psutil pyarrow _pytest pygments pyparsing requests rich sacrebleu scikit_build_core scipy
seaborn sentence_transformers simplejson skimage sklearn sortedcontainers statsmodels sympy tensorboard
tifffile timm toolz torch torch_geometric torchaudio torchdiffeq torchmetrics torchvision transformers
treescope triton typer urllib3 werkzeug wrapt xarray yaml yarl
""".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("fledge/demo/target"), help="output directory (default: fledge/demo/target)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=6.0,
        help="training time in minutes, without data preparation and compilation (default: 6)",
    )
    parser.add_argument(
        "--sequences", type=int, default=128, help=f"batch size, in sequences of {CONTEXT} tokens (default: 128)"
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate after warm-up (default: 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--packages",
        nargs="*",
        default=PACKAGES,
        help="import names of the packages to train on, if installed (default: a list of about 90)",
    )
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    random.seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    library, packages = stdlib_files(), package_files(options.packages)
    seen = [(path, text) for path, text in library if not held_out(path)]
    unseen = [(path, text) for path, text in library if held_out(path)]
    sources = {"python standard library": amount(seen), "held out": amount(unseen)} | amounts_by_package(packages)
    print(json.dumps(sources, indent=1))

    tokenizer = train_tokenizer([text for _, text in seen], [text for _, text in packages])
    documents = STDLIB_COPIES * encode(tokenizer, seen) + encode(tokenizer, packages)
    random.shuffle(documents)
    train, valid = (on_device(docs, device) for docs in (documents, encode(tokenizer, unseen)))
    valid_bytes = sum(len(text.encode()) for _, text in unseen)
    print(f"{len(train):,} tokens per pass, {len(valid):,} held out, {valid_bytes / len(valid):.2f} bytes per token")

    model = LlamaForCausalLM(model_config()).to(device)
    untrained = evaluate(model, valid)
    figures = pretrain(model, train, valid, options.minutes * 60, options.sequences, options.lr)
    model.to(torch.bfloat16)  # the saved model has this dtype, so the figures below are those of the saved model
    loss = evaluate(model, valid)
    figures |= {
        "parameters": model.num_parameters(),
        "tokens_a_pass": len(train),
        "held_out_tokens": len(valid),
        "held_out_bytes": valid_bytes,
        "held_out_loss_untrained": untrained,
        "held_out_loss": loss,
        "held_out_bits_per_byte": loss / math.log(2) * len(valid) / valid_bytes,
        "seen_stdlib_loss": evaluate(model, on_device(encode(tokenizer, seen), device)[: len(valid)]),
        "options": {"minutes": options.minutes, "sequences": options.sequences, "lr": options.lr, "seed": options.seed},
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "sources": sources,
    }
    save(options.out, model, tokenizer, figures)


def amount(files: list[tuple[str, str]]) -> dict[str, float]:
    """The number of these files, and their size in MB."""
    return {"files": len(files), "mb": round(sum(len(text.encode()) for _, text in files) / 1e6, 2)}


def amounts_by_package(files: list[tuple[str, str]]) -> dict[str, dict[str, float]]:
    names = sorted({path.split("/")[0] for path, _ in files})
    return {name: amount([file for file in files if file[0].split("/")[0] == name]) for name in names}


def train_tokenizer(seen: list[str], packages: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on seen standard-library files and a sample of the package files."""
    share = TOKENIZER_BYTES / sum(map(len, seen + packages))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(seen + [text for text in packages if random.random() < share], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, files: list[tuple[str, str]]) -> list[np.ndarray]:
    """The tokens of each file, with the end-of-text token at the end."""
    end = tokenizer.token_to_id(EOS)
    # In groups of 1,000 files, because the encoding objects of the whole corpus would not fit in memory.
    pieces = [files[at : at + 1000] for at in range(0, len(files), 1000)]
    encodings = (one for piece in pieces for one in tokenizer.encode_batch_fast([text for _, text in piece]))
    return [np.array([*one.ids, end], dtype=np.int32) for one in encodings]


def on_device(documents: list[np.ndarray], device: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(documents)).to(device)


def model_config() -> LlamaConfig:
    # No pad_token_id: it would be the end-of-text token, whose embedding would then get no gradient.
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=432,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )


def causal_attention(module, query, key, value, attention_mask, scaling=None, **_) -> tuple[torch.Tensor, None]:
    """Causal attention with the flash kernel.

    The "sdpa" attention of transformers builds a mask when it is compiled, which selects a slower kernel.
    """
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register("causal", causal_attention)


def pretrain(
    model: LlamaForCausalLM, train: torch.Tensor, valid: torch.Tensor, seconds: float, sequences: int, lr: float
) -> dict:
    """Trains the model for the given time and returns figures about the run. Losses are in nats per token."""
    device = train.device.type
    model.set_attn_implementation("causal")
    forward = torch.compile(model) if device == "cuda" else model
    optimizer = make_optimizer(model)
    batches = cut(train, sequences)
    loss_of(forward, next(batches)).backward()  # compiles, before the clock starts
    optimizer.zero_grad()

    curve, steps, summed, last = [], 0, torch.zeros((), device=device), 0
    start = time.perf_counter()
    while (share := (time.perf_counter() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = lr * min(share / WARM_UP, (1 - share) / (1 - WARM_UP))
        loss = loss_of(forward, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        summed += loss.detach()
        steps += 1
        if share >= (len(curve) + 1) / RECORDS:
            point = {"step": steps, "tokens": steps * sequences * CONTEXT, "train_loss": summed.item() / (steps - last)}
            if len(curve) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1:
                point["held_out_loss"] = evaluate(model, valid)
            curve.append(point | {"seconds": time.perf_counter() - start})
            print(json.dumps(curve[-1]), flush=True)
            last = steps
            summed.zero_()
    train_loss = summed.item() / (steps - last) if steps > last else curve[-1]["train_loss"]
    taken = time.perf_counter() - start
    model.set_attn_implementation("sdpa")
    tokens = steps * sequences * CONTEXT
    return {
        "steps": steps,
        "tokens": tokens,
        "seconds": taken,
        "tokens_a_second": tokens / taken,
        "train_loss": train_loss,
        "curve": curve,
    }


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    gains = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def cut(tokens: torch.Tensor, sequences: int) -> Iterator[torch.Tensor]:
    """An endless iterator of batches. Each pass cuts the tokens at other offsets and shuffles the sequences."""
    while True:
        offset = random.randrange(CONTEXT)
        rows = (len(tokens) - offset) // CONTEXT
        cuts = tokens[offset : offset + rows * CONTEXT].view(rows, CONTEXT)
        for chosen in torch.randperm(rows, device=tokens.device).split(sequences):
            if len(chosen) == sequences:
                yield cuts[chosen].long()


def loss_of(forward, batch: torch.Tensor) -> torch.Tensor:
    """The mean next-token loss, in nats per token."""
    with torch.autocast(batch.device.type, torch.bfloat16):
        return forward(input_ids=batch, labels=batch, use_cache=False).loss


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """The mean next-token loss over sequences of CONTEXT tokens, in nats per token, without a shorter last one."""
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT).long()
    losses = [loss_of(model, batch) * len(batch) for batch in rows.split(32)]
    return sum(losses).item() / len(rows)


def machine() -> str:
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"{chip}, {os.cpu_count()} processor cores"


def versions() -> dict[str, str]:
    used = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)}
    return {"python": platform.python_version()} | used


def commit() -> str | None:
    """The commit of this checkout, or None outside a git checkout."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def save(out: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, figures: dict) -> None:
    """Writes the model, its tokenizer, the figures and the model card to the directory."""
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    model.save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    (out / "pretrain.json").write_text(json.dumps(figures, indent=1) + "\n")
    (out / "README.md").write_text(card(model.config, figures))


def card(config: LlamaConfig, figures: dict) -> str:
    """The model card."""
    options, software, sources = (figures[key] for key in ("options", "versions", "sources"))
    python = ".".join(software["python"].split(".")[:2])
    packages = {name: has for name, has in sources.items() if name not in ("python standard library", "held out")}
    stdlib, unseen = sources["python standard library"], sources["held out"]
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [code, demo]
---

# A very small language model of Python source

The target model of fledge's demo: {figures["parameters"] / 1e6:.1f} M parameters, enough to continue Python source
in the style of the standard library. It exists so that the demo needs no download and takes only minutes.

## How it was made

```
python -m fledge.demo.pretrain --minutes {options["minutes"]:g} --sequences {options["sequences"]} \
--lr {options["lr"]:g} --seed {options["seed"]}
```

Machine: {figures["machine"]}; {", ".join(f"{name} {version}" for name, version in software.items())}.
In {figures["seconds"] / 60:.1f} minutes it was trained on {figures["tokens"] / 1e6:,.0f} M tokens,
{figures["tokens"] / figures["tokens_a_pass"]:.1f} passes over the training text,
which contains the standard library {STDLIB_COPIES} times. `pretrain.json` holds the figures and the loss curve.

| | loss, nats per token | bits per byte |
| --- | --- | --- |
| training text, end of training | {figures["train_loss"]:.3f} | |
| standard library, some of the training files | {figures["seen_stdlib_loss"]:.3f} | |
| standard library, held-out files | {figures["held_out_loss"]:.3f} | {figures["held_out_bits_per_byte"]:.3f} |
| standard library, held-out files, before training | {figures["held_out_loss_untrained"]:.3f} | |

The last three losses are means over sequences of {CONTEXT} tokens, cut from the concatenated files.

## Architecture

Llama with {config.num_hidden_layers} layers, hidden size {config.hidden_size},
{config.num_attention_heads} attention heads of {config.head_dim} over {config.num_key_value_heads} key/value heads,
intermediate size {config.intermediate_size}, tied embeddings, bfloat16.
Byte-level BPE vocabulary of {config.vocab_size}; a newline and the indentation after it are one token.
`{EOS}` ends a text; there is no token at its start.
Trained on sequences of {CONTEXT} tokens; it accepts up to {config.max_position_embeddings}, but was not trained on
longer ones.

## What it was trained on

The Python {python} standard library's own source ({stdlib["files"]} files, {stdlib["mb"]:.1f} MB) and files of the
packages below, without tests, generated files and data. The licences of this text depend on the package,
and the model may reproduce parts of it.

A file is held out when the SHA-256 of its path relative to its root (`json/decoder.py`), read as one big-endian
number, is divisible by {HELD_OUT_ONE_IN}. Neither the tokenizer nor the model was trained on those files:
{unseen["files"]} of the standard library ({unseen["mb"]:.2f} MB), and their copies in packages.
The rule depends on the path: a module that moved between
Python versions may have been trained on under its Python {python} path.

| package | files | MB |
| --- | --- | --- |
{chr(10).join(f"| {name} | {has['files']} | {has['mb']:.2f} |" for name, has in packages.items())}

## Limitations

Do not use it to write or judge code: it imitates the look of Python, not its meaning. Do not use it to compare drafting
methods beyond what the demo shows: a model this small may be easier to draft for than a large one, and it is so cheap
to run that drafting saves little time.
"""


if __name__ == "__main__":
    main()
