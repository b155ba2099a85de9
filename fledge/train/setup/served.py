"""Hidden states that vLLM computes, for `fledge train` and `fledge features`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fledge.io.fields import parse_dtype
from fledge.io.http import key_in
from fledge.states.vllm_files import UNCHECKED, StatesFolder, serve_command
from fledge.states.vllm_server import VllmServer
from fledge.states.vllm_source import VllmFeatures
from fledge.targets.loading import load_head
from fledge.targets.parts import TargetParts
from fledge.train.setup.options import TargetOptions
from fledge.train.setup.recipe import DataRecipe, ServedRecipe


def open_served_target(requested: TargetOptions, data: DataRecipe, device: str) -> TargetParts:
    """The parts of a target that training from vLLM's states needs: embedding, head and final norm, and what is not
    quantized of the last layer. Raises ValueError if the checkpoint does not have them by their names."""
    target = load_head(
        requested.target, device=device, dtype=parse_dtype(requested.dtype), max_length=data.longest,
        trust_remote_code=requested.trust_remote_code, partial_layer=True,
    )  # fmt: skip
    if target is None:
        raise ValueError(
            f"{requested.target} has no safetensors files with its embedding, head and final norm, or has quantized "
            "them; training from vLLM's hidden states needs them here, in 16 or 32 bits"
        )
    return target


def check_connector(target: TargetParts) -> None:
    """Raises ValueError for a target with multi-head latent attention, which vLLM's connector refuses."""
    config = target.config
    # vLLM computes MiniCPM3 with ordinary attention
    if getattr(config, "kv_lora_rank", None) is not None and config.model_type != "minicpm3":
        raise ValueError(
            f"{target.name} has multi-head latent attention (kv_lora_rank {config.kv_lora_rank}), of which vLLM's "
            "connector gives no hidden states; leave --features-from out, and let transformers compute them"
        )


def open_served_features(
    served: ServedRecipe, target: TargetParts, layers: tuple[int, ...], max_length: int,
    say: Callable[[str], None],
) -> VllmFeatures:  # fmt: skip
    """vLLM's features of the given layers, for documents of at most `max_length` tokens. Raises ValueError if they are
    not available; if no server answers, with the command that starts one."""
    needed = tuple(sorted({*layers, target.num_layers}))
    captured = served.layers or needed
    if Path(served.address).is_dir():
        states = StatesFolder(Path(served.address))
        say(f"{states.path} has hidden states of {len(states):,} texts")
        if states.layers is None:
            say(f"{states.path} {UNCHECKED}")
    else:
        check_connector(target)
        length = min(max_length + 1, target.context)  # vLLM refuses a longer one than the target's
        start = serve_command(target.name, captured, length, trust=target.trust_remote_code)
        key = key_in(served.api_key_env)
        states = VllmServer(served.address, start, say, mapped=served.mapped, api_key=key)
        say(f"{states.root} computes {states.model}")
    return VllmFeatures(states, target, layers, captured)
