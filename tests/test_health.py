"""Damaged or hostile draft files: loading refuses them in one sentence, before it allocates memory."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.commands.inspect import InspectOptions, run
from fledge.drafts.weights import find_damage, load_draft, save_draft
from support.drafts_on_disk import V, make, refused, rewrite, same, saved
from support.files import reconfigure


def inspected(directory: Path) -> tuple[bool, str]:
    lines: list[str] = []
    return run(InspectOptions(directory=str(directory)), lines.append), "\n".join(lines)


# -- weights with unusable values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    ("value", "finding"),
    [
        (math.nan, "has NaN or infinite values"),
        (math.inf, "has NaN or infinite values"),
        (-math.inf, "has NaN or infinite values"),
        (3e30, r"has (values above 100,000|NaN or infinite values)"),  # infinite in float16
    ],
)
def test_one_bad_value_is_found_with_its_tensor(tmp_path, dtype, value, finding):
    save_draft(make(), tmp_path / "d", dtype)
    rewrite(tmp_path / "d", lambda t: t["midlayer.mlp.up_proj.weight"][3, 5:6].fill_(value))
    refused(
        tmp_path / "d",
        rf"model\.safetensors: midlayer\.mlp\.up_proj\.weight {finding}\. The target would accept no token",
    )
    fine, said = inspected(tmp_path / "d")
    assert not fine and "Wrong: " in said and "midlayer.mlp.up_proj.weight has" in said and "1 problem(s)." in said
    assert said.startswith("An EAGLE-3 draft: "), "inspect does not describe the damaged draft"


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "norm.weight", "midlayer.self_attn.o_proj.weight"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_all_zero_or_huge_weights_are_refused(tmp_path, name, scale):
    saved(tmp_path / "d")
    rewrite(tmp_path / "d", lambda t: t[name].mul_(scale))
    refused(tmp_path / "d", f"{name} has " + ("values above 100,000" if scale > 1 else "only zeros"))


def test_findings_name_a_few_and_count_the_rest(tmp_path):
    saved(tmp_path / "d")
    rewrite(tmp_path / "d", lambda t: [t[n].fill_(math.nan) for n in t if t[n].is_floating_point()])
    refused(tmp_path / "d", r"fc\.weight, lm_head\.weight, .* and 10 more have NaN or infinite values")


def test_tensors_that_may_be_zero(tmp_path):
    """Biases, P-EAGLE's state for masked tokens, and the vocabulary map may be zero."""
    draft = make(V, attention_bias=True, mlp_bias=True, method="peagle", mask_token_id=3)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if name.endswith("bias") or name == "mask_hidden":
                p.zero_()
    save_draft(draft, tmp_path / "d", torch.float32)
    assert same(load_draft(tmp_path / "d"), draft)
    assert not find_damage({"d2t": torch.zeros(3, dtype=torch.int64), "empty": torch.zeros(0)}.items())


# -- files that hold something else -----------------------------------------------------------------------------------


def pickled(directory: Path, content: object) -> None:
    """Replaces the safetensors file by a pytorch_model.bin with the given content."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    torch.save(content, directory / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([torch.ones(3)], "it holds a value of type list, not a dict of tensors"),
        (torch.ones(3), "it holds a value of type Tensor, not a dict of tensors"),
        (3, "it holds a value of type int, not a dict of tensors"),
        ({"fc.weight": [1.0]}, "fc.weight is not a dense tensor"),
        ({3: torch.ones(3)}, "3 is not a dense tensor"),
        ({"fc.weight": torch.eye(3).to_sparse()}, "fc.weight is not a dense tensor"),
        (
            {"fc.weight": torch.ones(1, 1).expand(10**6, 10**6)},
            r"fc.weight has shape \[1000000, 1000000\], but the file has",
        ),
        ({"state_dict": {"fc.weight": torch.ones(3)}}, "state_dict is not a dense tensor"),
    ],
)
def test_pickles_of_other_content_are_refused(tmp_path, content, reason):
    saved(tmp_path / "d")
    pickled(tmp_path / "d", content)
    refused(tmp_path / "d", rf"pytorch_model\.bin cannot be read \({reason}")


def test_code_in_a_pickle_is_not_run(tmp_path):
    saved(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").unlink()
    (tmp_path / "d" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    refused(tmp_path / "d", r"holds more than tensors: loading it would run Python code.* as model\.safetensors")
    assert not Path("ran").exists()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_weights_of_other_types(tmp_path, dtype):
    saved(tmp_path / "d")
    rewrite(tmp_path / "d", lambda t: t.update({"fc.weight": t["fc.weight"].to(dtype)}))
    refused(tmp_path / "d", rf"fc\.weight has dtype {str(dtype).removeprefix('torch.')}|cannot be read")


def test_a_vocabulary_map_of_floats_is_refused(tmp_path):
    saved(tmp_path / "d")
    rewrite(tmp_path / "d", lambda t: t.update(d2t=t["d2t"].float()))
    refused(tmp_path / "d", "d2t has dtype float32")


def test_one_tensor_under_two_names(tmp_path):
    saved(tmp_path / "d")
    rewrite(tmp_path / "d", lambda t: t.update({"model.fc.weight": t["fc.weight"].clone()}))
    refused(tmp_path / "d", r"fc\.weight is in the file twice, under two names")


def test_a_config_cannot_ask_for_more_memory_than_the_file_holds(tmp_path):
    """This config describes a draft of four terabytes."""
    saved(tmp_path / "d")
    reconfigure(tmp_path / "d", hidden_size=2**20, intermediate_size=2**20, vocab_size=2**24, num_hidden_layers=3)
    refused(tmp_path / "d", r"it does not match its config\.json: layers\.1\.input_layernorm\.weight is missing")
    reconfigure(tmp_path / "d", num_hidden_layers=1)
    refused(tmp_path / "d", r"fc\.weight has shape \[32, 96\], but the config requires \[1048576, 3145728\]")


def test_a_file_of_a_thousand_layers(tmp_path):
    saved(tmp_path / "d")
    reconfigure(tmp_path / "d", fledge=None)
    rewrite(tmp_path / "d", lambda t: t.update({f"layers.{i}.x": torch.ones(1) for i in range(1, 1001)}))
    refused(tmp_path / "d", "it has 1,001 layers; fledge reads at most 512")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 5000 + "]" * 5000, "is not JSON|not a JSON object"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "is not JSON|lacks hidden_size"),
        ("[1, 2]", "it is a list of 2, not a JSON object"),
        ('"config"', "it is 'config', not a JSON object"),
    ],
)
def test_configs_that_are_no_objects_or_nested_too_deep(tmp_path, text, reason):
    saved(tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text(text)
    refused(tmp_path / "d", reason)
    fine, said = inspected(tmp_path / "d")
    assert not fine and said.startswith("Wrong: ") and "1 problem(s)." in said


def test_a_config_that_replaces_the_targets_template_is_wrong(tmp_path):
    saved(tmp_path / "d")
    reconfigure(tmp_path / "d", fledge={"template_kwargs": {"chat_template": "{{ 'other text' }}"}})
    refused(tmp_path / "d", r"config\.json: fledge\.template_kwargs sets chat_template")
    fine, said = inspected(tmp_path / "d")
    assert not fine and "Wrong: " in said and "fledge.template_kwargs sets chat_template" in said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A draft saved in both file formats, to be damaged."""
    directory = tmp_path_factory.mktemp("whole")
    draft = saved(directory / "d")
    torch.save(draft.state_dict(), directory / "pytorch_model.bin")
    return directory


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**31), kind=st.sampled_from(["config.json", "model.safetensors", "pytorch_model.bin"]))
def test_changed_bytes_load_or_give_an_error(whole, tmp_path_factory, seed, kind):
    draw = random.Random(seed)
    directory = tmp_path_factory.mktemp("damaged")
    content = bytearray((whole / kind if kind.endswith("bin") else whole / "d" / kind).read_bytes())
    head = min(len(content), draw.choice([64, 2000, len(content)]))  # damage in the header matters most
    for _ in range(draw.choice([1, 3, 30])):
        content[draw.randrange(head)] = draw.randrange(256)
    if draw.random() < 0.2:
        del content[draw.randrange(len(content)) :]
    (directory / "config.json").write_bytes((whole / "d" / "config.json").read_bytes())
    if kind == "config.json":
        (directory / "model.safetensors").write_bytes((whole / "d" / "model.safetensors").read_bytes())
    (directory / kind).write_bytes(content)
    try:
        draft = load_draft(directory)
    except ValueError as e:
        assert str(directory) in str(e)
        return
    assert all(bool(p.isfinite().all()) for p in draft.parameters())


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_numbers_layers_like_aux_layers(tmp_path):
    """Layer numbers are those of --aux-layers, which includes the embeddings (0) and the last layer's output."""
    saved(tmp_path / "d", aux_layers=(0, 1, 8))
    assert (
        "It reads the target's hidden states 0, 1, 8, numbered as in fledge train --aux-layers"
        in inspected(tmp_path / "d")[1]
    )


def test_inspecting_a_draft_imports_no_model_code(tmp_path):
    """Importing transformers takes seconds, and inspecting a draft alone does not need it."""
    import subprocess
    import sys

    saved(tmp_path / "d")
    code = "import sys; from fledge.cli import app; app(['inspect', sys.argv[1]], standalone_mode=False); "
    code += "print(sorted({m.partition('.')[0] for m in sys.modules} & {'transformers', 'datasets', 'tokenizers'}))"
    went = subprocess.run([sys.executable, "-c", code, tmp_path / "d"], capture_output=True, text=True, check=True)
    assert went.stdout.splitlines()[-2:] == ["Nothing is wrong with it.", "[]"]
