"""Targets with quantized weights.

The packages of the formats are not needed for most tests. Those that need one run where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fledge import train_draft
from fledge.targets.distributed import layout_of, load_sharded_target, parts_of, target_of_parts
from fledge.targets.loading import load_target
from fledge.targets.quantized import quantization_of, weight_of
from fledge.targets.transformers import TransformersTarget
from fledge.train.setup.target import live_features
from support.chats import tiny_chats
from support.files import metrics_of
from support.rows import document, row_of
from support.targets import tiny_target, tiny_target_directory, tiny_tokenizer

FP8 = torch.float8_e4m3fn
ROW = row_of([document(24, (0, 24), seed=i) for i in range(3)])


class Int8Linear(nn.Module):
    """A linear layer as those of quantization packages: its weight and its inputs have 8 bits, with a scale a row."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features = linear.in_features
        self.scale = nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        return F.linear((x / scale).round() * scale, self.weight * self.scale, self.bias)


class StaticFp8Linear(Int8Linear):
    """One with 8-bit floating-point numbers, and a fixed scale for its inputs, which rounds most of them."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        self.scale.data = linear.weight.detach().abs().amax(1, keepdim=True) / 448
        self.weight.data = self.rounded(linear.weight.detach() / self.scale)
        self.input_scale = nn.Parameter(torch.tensor(0.0123), requires_grad=False)

    @staticmethod
    def rounded(x: Tensor) -> Tensor:
        return x.clamp(-448, 448).to(FP8)  # larger numbers become NaN with some versions of PyTorch

    def forward(self, x: Tensor) -> Tensor:
        rounded = self.rounded(x / self.input_scale).to(x.dtype) * self.input_scale
        return F.linear(rounded, self.weight.to(x.dtype) * self.scale, self.bias)


def quantized_target(kind: type[Int8Linear]) -> TransformersTarget:
    """A tiny target all of whose linear layers are of a kind, the head included."""
    model = tiny_target(family="qwen2", tokenizer=False, tie_word_embeddings=False).model  # with biases
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, kind(child))
    model.config.quantization_config = {"quant_method": "fp8"}
    return TransformersTarget(model, tiny_tokenizer(), name="quantized")


@pytest.mark.parametrize("kind", [Int8Linear, StaticFp8Linear])
def test_weights_are_those_that_the_layers_compute_with(kind: type[Int8Linear]) -> None:
    """The head's and the last layer's, whatever is stored: the packed numbers would be wrong by their scales."""
    target = quantized_target(kind)
    last = target.layers[-1]
    modules = {"q_proj": last.self_attn.q_proj, "o_proj": last.self_attn.o_proj, "down_proj": last.mlp.down_proj}
    found = {name: target.last_layer_weights()[f"{name}.weight"] for name in modules}
    for module, weight in ((target.head, target.head_weight), *((m, found[name]) for name, m in modules.items())):
        torch.testing.assert_close(weight, module.weight.float() * module.scale, rtol=1e-5, atol=1e-6)
    assert target.quantization == "fp8" and target.implementation == "transformers"
    features = target.features(ROW, (1, 4, 8))
    expected = F.linear(features.last_TD, target.head_weight)
    error = (target.logits(features.last_TD) - expected).norm() / expected.norm()
    assert error < 0.1, "it is the head's own computation, with rounded inputs"


def test_a_layer_that_is_not_linear_is_refused() -> None:
    class Odd(Int8Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    with pytest.raises(ValueError, match="the weight of a Odd cannot be read: its products are not linear"):
        weight_of(Odd(nn.Linear(8, 6)), torch.float32)


def test_quantized_embeddings_are_refused() -> None:
    model = tiny_target(tokenizer=False).model
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(embedding.weight.detach().to(FP8), requires_grad=False)
    with pytest.raises(ValueError, match=r"tiny cannot be used: its embedding is quantized \(torch.float8_e4m3fn\)"):
        TransformersTarget(model, None, name="tiny")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (None, ""),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes (4 bits)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes (8 bits)"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors (float-quantized)"),
        ({"quant_method": "gptq", "bits": 4}, "gptq (4 bits)"),
        ({"quant_method": "fp8"}, "fp8"),
        ({}, "an unknown method"),
    ],
)  # fmt: skip
def test_names_of_formats(config: dict[str, Any] | None, name: str) -> None:
    assert quantization_of(SimpleNamespace(quantization_config=config)) == name


def with_config(path: Path, quantization: dict[str, Any]) -> Path:
    """Adds a quantization_config to a saved target."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return path


@pytest.mark.parametrize(
    ("quantization", "package", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "gptqmodel", "pip install gptqmodel"),
        ({"quant_method": "gptq", "bits": 4}, "optimum", "pip install optimum"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", r"pip install .*(bitsandb|accel)"),
        ({"quant_method": "compressed-tensors"}, "compressed_tensors", "pip install compressed-tensors"),
        ({"quant_method": "fp8"}, "accelerate", "pip install accelerate"),
        ({"quant_method": "fp7"}, "fp7", "Unknown quantization type, got fp7"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named(quantization: dict[str, Any], package: str, message: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    path = with_config(tiny_target_directory(tmp_path), quantization)
    with pytest.raises(ValueError, match=message) as raised:
        load_target(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_quantized_layers_are_not_sharded(tmp_path: Path) -> None:
    path = with_config(tiny_target_directory(tmp_path), {"quant_method": "fp8"})
    with pytest.raises(ValueError, match="quantized by fp8, so its layers cannot be sharded; let each"):
        load_sharded_target(path, SimpleNamespace())


# -- formats whose packages are installed ---------------------------------------------------------------------------

SHAPE = dict(hidden_size=64, intermediate_size=128, head_dim=16, tie_word_embeddings=False)  # bitsandbytes needs 64


def rounded_to_fp8(path: Path, name: str, head: bool, shape: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Rounds the matrices of a saved target's layers to fp8, with scales called `name` of the maxima that `shape`
    takes. Returns the rounded weights."""
    file, rounded = path / "model.safetensors", {}
    tensors = load_file(file)
    for key, x in list(tensors.items()):
        if (".layers." in key and x.dim() == 2) or (head and key == "lm_head.weight"):
            scale = shape(x.abs()) / 448
            tensors[key], tensors[f"{key}{name}"] = (x / scale).to(FP8), scale
            rounded[key] = tensors[key].float() * scale
    save_file(tensors, file, metadata={"format": "pt"})
    return rounded


def test_compressed_tensors(tmp_path: Path) -> None:
    """fp8 weights with a scale a channel, and inputs rounded to fp8 with a scale a token, also in the head."""
    pytest.importorskip("compressed_tensors")
    path = tiny_target_directory(tmp_path, **SHAPE)
    rounded = rounded_to_fp8(path, "_scale", True, lambda x: x.amax(1, keepdim=True))
    eight = dict(num_bits=8, type="float", symmetric=True)
    group = dict(
        targets=["Linear"], weights=eight | dict(strategy="channel", dynamic=False),
        input_activations=eight | dict(strategy="token", dynamic=True),
    )  # fmt: skip
    with_config(path, dict(
        quant_method="compressed-tensors", format="float-quantized", config_groups={"group_0": group}, ignore=[],
        quantization_status="compressed",
    ))  # fmt: skip
    target = load_target(path)
    assert "its weights are quantized by compressed-tensors" in target.implementation
    torch.testing.assert_close(target.head_weight, rounded["lm_head.weight"])
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        weight = target.last_layer_weights()[f"{name.partition('.')[2]}.weight"]
        torch.testing.assert_close(weight, rounded[f"model.layers.7.{name}.weight"])
    assert_trains(path, tmp_path, "compressed-tensors (float-quantized)")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    path, out = tiny_target_directory(tmp_path, **SHAPE), tmp_path / "quantized"
    made = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    )
    shutil.copytree(path, out)
    (out / "model.safetensors").unlink()
    made.save_pretrained(out)
    whole, target = load_target(path), load_target(out)
    ours, theirs = target.last_layer_weights(), whole.last_layer_weights()
    assert ours.keys() == theirs.keys()
    for name in ("q_proj.weight", "down_proj.weight"):
        assert (ours[name] - theirs[name]).norm() < {4: 0.15, 8: 0.02}[bits] * theirs[name].norm()
    torch.testing.assert_close(target.head_weight, whole.head_weight, rtol=1e-3, atol=1e-2)  # the format leaves it out
    assert_trains(out, tmp_path, f"bitsandbytes ({bits} bits)")


def test_fp8_without_a_gpu(tmp_path: Path) -> None:
    """transformers turns the weights into numbers of more bits; the message is the same, as an engine's states are
    those of 8 bits."""
    pytest.importorskip("accelerate")
    path = tiny_target_directory(tmp_path, **SHAPE)
    rounded = rounded_to_fp8(path, "_scale_inv", False, lambda x: x.amax().reshape(1, 1))
    with_config(path, dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]))
    target = load_target(path, dtype=torch.float32)
    weight = target.last_layer_weights()["q_proj.weight"]
    torch.testing.assert_close(weight, rounded["model.layers.7.self_attn.q_proj.weight"], rtol=1e-2, atol=1e-3)
    assert_trains(path, tmp_path, "fp8")


def assert_trains(path: Path, directory: Path, name: str) -> None:
    """A draft trains for a quantized target, which is said to be one, and other ranks get the same parts of it."""
    lines: list[str] = []
    target = load_target(path)
    features = live_features(target, (1, 4, 8), lines.append).features(ROW)
    assert any(f"is quantized by {name}: its hidden states differ from those of the full" in line for line in lines)
    parts = parts_of(target)
    assert all(parts[key].shape == shape for key, (shape, _) in layout_of(parts).items())
    there = target_of_parts(path, parts)
    assert there.last_layer_weights().keys() == target.last_layer_weights().keys()
    ours, theirs = there.logits(features.last_TD), target.logits(features.last_TD)
    assert (ours - theirs).norm() < 0.1 * theirs.norm(), "a quantized head rounds its inputs"
    run, data = directory / "run", tiny_chats(directory / "chats.jsonl", 20)
    train_draft(
        target=path, data=data, out=run, max_length=64, row_length=128, draft_vocab=200, steps=2, depth=2, device="cpu"
    )
    assert len(metrics_of(run)) == 2
