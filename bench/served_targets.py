"""Writes two small targets for served_features.py: an fp8 checkpoint of a model, and a hybrid model.

    python bench/served_targets.py --target DIR --out OUT

OUT/fp8 is the model in compressed-tensors' format: the matrices of its layers are rounded to fp8 with a scale for each
output channel, and inputs for each token. OUT/hybrid is a Nemotron-H with eight layers (state-space, MLP and attention)
and random weights. Its tensors and its config have the names of published checkpoints, and its tokenizer and chat
template are the model's.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig, NemotronHForCausalLM

FP8_MAXIMUM = 448  # of torch.float8_e4m3fn
PATTERN = "M-*-M-M-"  # state-space (M), MLP (-) and attention (*) layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="directory of a model in safetensors files")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_fp8(options.target, options.out / "fp8")
    write_hybrid(options.target, options.out / "hybrid")


def write_fp8(target: Path, out: Path) -> None:
    shutil.copytree(target, out)
    files: dict[str, str] = {}
    for path in sorted(out.glob("*.safetensors")):
        tensors = load_file(path)
        for key, x in list(tensors.items()):
            if ".layers." in key and x.dim() == 2:
                scale = (x.float().abs().amax(1, keepdim=True) / FP8_MAXIMUM).to(torch.bfloat16)
                rounded = (x.float() / scale.float()).clamp(-FP8_MAXIMUM, FP8_MAXIMUM)
                tensors[key], tensors[f"{key}_scale"] = rounded.to(torch.float8_e4m3fn), scale
        save_file(tensors, path, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, path.name)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    number = dict(num_bits=8, type="float", symmetric=True)
    group = dict(
        targets=["Linear"], weights=number | dict(strategy="channel", dynamic=False),
        input_activations=number | dict(strategy="token", dynamic=True),
    )  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = dict(
        quant_method="compressed-tensors", format="float-quantized", ignore=["lm_head"],
        quantization_status="compressed", config_groups={"group_0": group},
    )  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))


def write_hybrid(target: Path, out: Path) -> None:
    source = json.loads((target / "config.json").read_text())
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=source["vocab_size"], hidden_size=512, hybrid_override_pattern=PATTERN, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, intermediate_size=1024, ssm_state_size=64, mamba_num_heads=16,
        mamba_head_dim=64, n_groups=2, max_position_embeddings=4096, eos_token_id=source["eos_token_id"],
        bos_token_id=None, pad_token_id=source["pad_token_id"], initializer_range=0.03,
    )  # fmt: skip
    NemotronHForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    written = json.loads((out / "config.json").read_text())
    written.pop("layers_block_type", None)
    written |= {"hybrid_override_pattern": PATTERN, "num_hidden_layers": len(PATTERN)}
    written["time_step_limit"] = [0.0, float("inf")]
    (out / "config.json").write_text(json.dumps(written))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(target / name, out)


if __name__ == "__main__":
    main()
