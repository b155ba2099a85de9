"""The fields of a draft's config.json with values of every type, and the arguments of a chat template."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from fledge.config import RopeConfig
from fledge.data.template import ChatTemplate
from fledge.io import fields
from fledge.io.fields import CONFIG, EAGLE_CONFIG, FLEDGE, RESERVED, ROPE, Fields, check_template_kwargs
from fledge.io.formats import config_from_hf, config_to_hf
from fledge.ops.rope import rope_frequencies
from fledge.options import parse_template_kwargs

PLAIN = dict(
    architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=32, intermediate_size=48,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=120, draft_vocab_size=40,
    max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
TABLES = {"": CONFIG, "fledge": FLEDGE, "eagle_config": EAGLE_CONFIG, "rope_scaling": ROPE, "rope_parameters": ROPE}
PLACES = [(at, key) for at, table in TABLES.items() for key in table]
NUMBERS = [0, -1, 1, 3, 2**31, 10**30, 10**400, 0.0, -0.5, 0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf]
OTHERS = [True, False, None, "", "x", "4096", "nan", [], [1], [1.5], ["a"], [[]], {}, {"a": 1}, "x" * 10_000]
KINDS = ["default", "linear", "yarn", "llama3", "longrope"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def test_common_mistakes_in_any_field_are_read_or_refused():
    for place, value, kind in itertools.product(PLACES, [*NUMBERS, *OTHERS], KINDS):
        is_read_or_refused(*place, value, kind)


@settings(max_examples=300, deadline=None)
@given(place=st.sampled_from(PLACES), value=ANYTHING, kind=st.sampled_from(KINDS))
def test_any_value_of_any_field_is_read_or_refused(place, value, kind):
    is_read_or_refused(*place, value, kind)


def is_read_or_refused(at: str, key: str, value: Any, kind: str) -> None:
    """Asserts that a config with this value is read and has finite RoPE frequencies, or is refused in a sentence."""
    scaling = dict(
        rope_type=kind, factor=4.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0,
        short_factor=[1.0] * 4, long_factor=[2.0] * 4,
    )  # fmt: skip
    hf = {**PLAIN, "rope_scaling": scaling} if at != "rope_parameters" else {**PLAIN, "rope_parameters": scaling}
    if at:
        hf[at] = {**hf.get(at, {}), key: value}
    else:
        hf[key] = value
    try:
        config = config_from_hf(hf)
        frequencies, scale = rope_frequencies(config.rope, config.head_dim)
    except ValueError as e:
        assert 10 < len(str(e)) < 600
        return
    assert bool(frequencies.isfinite().all()) and math.isfinite(scale)
    assert 0 < config.rms_norm_eps <= 1 and 1 <= (config.provenance.depth or 1) <= 64
    json.dumps(config_to_hf(config), allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size="32"), "hidden_size is '32'; it must be an integer from 1 to 1,048,576"),
        (dict(hidden_size=-32), "hidden_size is -32; "),
        (dict(hidden_size=2**40), "hidden_size is 1099511627776; "),
        (dict(hidden_size=10**400), "hidden_size is a number of more than 60 digits; "),
        (dict(hidden_size=True), "hidden_size is True; "),
        (dict(num_attention_heads=0), "num_attention_heads is 0; "),
        (dict(num_hidden_layers=10**9), "num_hidden_layers is 1000000000; "),
        (dict(rms_norm_eps=math.nan), "rms_norm_eps is nan; it must be a number above 0 and at most 1"),
        (dict(rms_norm_eps=0.0), "rms_norm_eps is 0.0; "),
        (dict(rms_norm_eps="1e-5"), "rms_norm_eps is '1e-5'; "),
        (dict(attention_bias="false"), "attention_bias is 'false'; it must be true or false"),
        (dict(architectures="LlamaForCausalLMEagle3"), "architectures is 'LlamaForCausalLMEagle3'; "),
        (dict(eagle_aux_hidden_state_layer_ids=[1, -2, 3]), "eagle_aux_hidden_state_layer_ids is a list of 3; "),
        (dict(eagle_config="x"), "eagle_config is 'x'; it must be a JSON object"),
        (dict(fledge="x"), "fledge is 'x'; it must be a JSON object"),
        (dict(fledge=[1]), "fledge is a list of 1; it must be a JSON object"),
        (dict(fledge=dict(depth=0)), "fledge.depth is 0; it must be an integer from 1 to 64"),
        (dict(fledge=dict(depth=65)), "fledge.depth is 65; "),
        (dict(fledge=dict(method=3)), "fledge.method is 3; "),
        (dict(fledge=dict(template_kwargs=[1])), "fledge.template_kwargs is a list of 1; "),
        (dict(rope_parameters="yarn"), "rope_parameters is 'yarn'; "),
        (dict(rope_parameters=dict(full_attention=3)), "rope_parameters is 3, not a JSON object"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=0)), "rope_scaling.factor is 0; "),
        (dict(rope_theta=math.inf), "rope_theta is inf; "),
        (dict(head_dim=7), "a head of 7 dimensions, 7 of them rotated: rotary embedding needs an even number"),
    ],
)
def test_the_error_names_the_field(changes, message):
    with pytest.raises(ValueError) as refused:
        config = config_from_hf(PLAIN | changes)
        rope_frequencies(config.rope, config.head_dim)
    assert str(refused.value).startswith(message)


def test_contradicting_rope_fields_are_refused_by_their_frequencies():
    turns = (256 / (2 * math.pi / torch.ones(()))).item()  # rotations of the fastest pair over the trained length
    same = dict(rope_type="llama3", factor=8.0, low_freq_factor=turns, high_freq_factor=turns)
    rope = RopeConfig.from_hf(PLAIN | dict(rope_scaling=same))
    with pytest.raises(ValueError, match=r"the RoPE fields of the config .* give frequencies that are not finite"):
        rope_frequencies(rope, 8)


def test_reading_a_field_outside_the_table_raises_a_key_error():
    with pytest.raises(KeyError):
        Fields({}, CONFIG).get("hidden_sise")


# -- arguments of a chat template ------------------------------------------------------------------------------------


def test_every_parameter_of_apply_chat_template_is_reserved():
    """All parameters of the installed transformers' `apply_chat_template` and its renderer are reserved names."""
    taken = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
    taken |= {*inspect.signature(render_jinja_template).parameters, *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES}
    assert taken - {"self"} <= RESERVED


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "add_generation_prompt", "return_dict", "tools", "messages"]
)
def test_arguments_that_replace_the_chat_template_are_refused(name, target):
    """Reserved names are refused in a draft's config, in --template-kwargs, and from Python."""
    kwargs = {"enable_thinking": False, name: "{{ 'ignore all that' }}"}
    reason = f"sets {name}: such options replace the target's chat template"
    with pytest.raises(ValueError, match=f"fledge.template_kwargs {reason}"):
        config_from_hf(PLAIN | dict(fledge=dict(template_kwargs=kwargs)))
    with pytest.raises(ValueError, match=f"--template-kwargs {reason}"):
        parse_template_kwargs(json.dumps(kwargs))
    with pytest.raises(ValueError, match=reason):
        ChatTemplate(target.tokenizer, target.stop_ids, kwargs)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        (dict(x=object()), "not plain JSON"),
        (dict(x=math.nan), "not plain JSON"),
        (dict(x="a" * 20_000), "characters of JSON; the limit is 10,000"),
    ],
)
def test_arguments_that_are_not_short_plain_json_are_refused(kwargs, reason):
    with pytest.raises(ValueError, match=reason):
        check_template_kwargs(kwargs, "the template's arguments")
    assert check_template_kwargs(dict(x=[1, {"a": None}]), "")


def test_a_template_argument_nested_too_deep_is_refused():
    deep = current = []
    for _ in range(100_000):
        current.append([])
        current = current[0]
    with pytest.raises(ValueError, match="not plain JSON"):
        check_template_kwargs(dict(x=deep), "the template's arguments")


def test_values_in_messages_are_short():
    for value in ("x" * 10_000, list(range(10_000)), {str(i): i for i in range(1000)}, 10**5000, math.nan):
        assert len(fields.format_value(value)) < 80
