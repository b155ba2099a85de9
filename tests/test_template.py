"""Chat templates: which tokens belong to the assistant, and in which document, compared with spans written by hand.

Expected documents are written as text with « and » around each span (see `shown`).
"""

from __future__ import annotations

import copy
import re
import signal
import time
import warnings
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors

from fledge.data import spans as spans_module
from fledge.data import template as template_module
from fledge.data.record import Record
from fledge.data.spans import _common_prefix_length, losses, training_documents
from fledge.data.template import ChatTemplate, TemplateWarning
from support.targets import CHATML, tiny_tokenizer

STOP = 1  # <|im_end|>
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}

# like Qwen3's: earlier reasoning is dropped from the history, and a prompt without thinking has an empty block
QWEN = r"""
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content, reasoning = m.content, '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning + '\n</think>\n\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t.function.name + ';' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}{{ '[' + f.name + ' ' + f.arguments | tojson + ']' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# like DeepSeek-R1-Distill's: the prompt opens the reasoning, and no rendered turn has it
R1 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1] + '<|im_end|>' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
QWQ = R1.replace("[-1] +", "[-1].strip() +")
# like Nemotron 3's: the last turn has its reasoning, earlier turns an empty block, and the reasoning can be turned off
NEMOTRON = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set c = '<think>\n' + m.reasoning_content + '\n</think>\n' + m.content if m.reasoning_content else m.content %}"
    "{% if '</think>' not in c %}{% set c = '<think></think>' + c %}{% endif %}"
    "{% if not loop.last and '<think>' in c %}{% set c = '<think></think>' + c.split('</think>')[-1] %}{% endif %}"
    "{{ c + '<|im_end|>' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '<think>\n' if enable_thinking | default(true) else '<think></think>' }}{% endif %}"
)
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def chat(*turns: str, **fields) -> Record:
    """A conversation from turns written as "u:Hello", "a:Hi"."""
    return Record("data.jsonl, line 7", messages=[{"role": ROLES[t[0]], "content": t[2:]} for t in turns], **fields)


def made(template: str | None, record: Record, stop=(STOP,), tokenizer=None, **kwargs) -> list[str]:
    chats = ChatTemplate(tokenizer or tiny_tokenizer(template), stop, kwargs)
    return [shown(chats, d) for d in training_documents(chats, record)]


def shown(chats: ChatTemplate, document) -> str:
    out = ""
    runs = groupby(zip(document.tokens.tolist(), document.spans.tolist(), strict=True), key=lambda pair: pair[1])
    for span, run in runs:
        text = chats.tokenizer.decode([token for token, _ in run])
        out += text if span < 0 else f"«{text}»"
    return out


def supervised(chats: ChatTemplate, document) -> list[str]:
    ids = np.unique(document.spans)
    return [chats.tokenizer.decode(document.tokens[document.spans == i].tolist()) for i in ids[ids >= 0]]


# -- spans ----------------------------------------------------------------------------------------------------------


def test_each_turn_is_a_span_that_ends_with_its_stop_token():
    assert made(CHATML, chat("s:Fly.", "u:Can it?", "a:Not yet.", "u:When?", "a:Soon.")) == [
        "<|im_start|>system\nFly.<|im_end|>\n"
        "<|im_start|>user\nCan it?<|im_end|>\n"
        "<|im_start|>assistant\n«Not yet.<|im_end|>»\n"
        "<|im_start|>user\nWhen?<|im_end|>\n"
        "<|im_start|>assistant\n«Soon.<|im_end|>»\n"
    ]


def test_span_ids_count_up_and_the_rest_is_minus_one():
    (document,) = training_documents(ChatTemplate(tiny_tokenizer(), [STOP]), chat("u:a", "a:b", "u:c", "a:d"))
    assert np.unique(document.spans).tolist() == [-1, 0, 1]
    assert document.tokens[document.spans >= 0].tolist().count(STOP) == 2
    assert document.tokens.dtype == document.spans.dtype and document.tokens.shape == document.spans.shape


def test_two_assistant_messages_in_a_row_are_two_spans():
    assert made(CHATML, chat("u:Well?", "a:One.", "a:Two.")) == [
        "<|im_start|>user\nWell?<|im_end|>\n"
        "<|im_start|>assistant\n«One.<|im_end|>»\n"
        "<|im_start|>assistant\n«Two.<|im_end|>»\n"
    ]


def test_a_span_ends_at_the_first_stop_token_even_inside_the_text():
    assert made(CHATML, chat("u:x", "a:One.<|im_end|>Two.")) == [
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n«One.<|im_end|>»Two.<|im_end|>\n"
    ]


def test_a_turn_without_a_stop_token_is_supervised_to_its_end():
    assert made(CHATML, chat("u:x", "a:One.", "u:y", "a:Two."), stop=[0])[0].endswith(
        "«One.<|im_end|>\n»<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n«Two.<|im_end|>\n»"
    )


def test_the_next_speakers_mark_is_supervised_if_it_is_the_stop_token():
    """GLM's turns end with the next speaker's mark, which is the stop token."""
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}" + PROMPT
    assert made(template, chat("u:x", "a:One.", "u:y", "a:Two."), stop=[2]) == [
        "<|im_start|>user\nx<|im_start|>assistant\n«One.<|im_start|>»user\ny<|im_start|>assistant\n«Two.»"
    ]


def test_tools_are_rendered_and_calls_are_supervised():
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "bird"}}}
    messages = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a wing"},
        {"role": "assistant", "content": "A wing."},
    ]
    tools = [{"type": "function", "function": {"name": n, "parameters": {}}} for n in ("look", "fly")]
    assert made(TOOLS, Record("here", messages=messages, tools=tools)) == [
        "<|im_start|>system\nlook;fly;<|im_end|>\n<|im_start|>user\nLook!<|im_end|>\n"
        '<|im_start|>assistant\n«[look {"at": "bird"}]<|im_end|>»\n'
        "<|im_start|>tool\na wing<|im_end|>\n<|im_start|>assistant\n«A wing.<|im_end|>»\n"
    ]


@pytest.mark.parametrize("trim", [False, True], ids=["whole offsets", "offsets without spaces"])
def test_a_token_that_straddles_the_start_belongs_to_the_prompt(trim):
    """The prompt's last space and the first word are one token; Llama-3 and GPT-2 report its offsets without the
    space."""
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer = copy.deepcopy(tiny_tokenizer(template))
    if trim:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert len(tokenizer(" bird")["input_ids"]) == 1
    assert made(template, chat("u:x", "a:bird tries"), tokenizer=tokenizer) == [
        "user: x<|im_end|>assistant: bird« tries<|im_end|>»"
    ]


def test_an_opening_assistant_message_is_not_supervised():
    assert made(CHATML, chat("a:Hello!", "u:x", "a:One.")) == [
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
        "<|im_start|>assistant\n«One.<|im_end|>»\n"
    ]


CONTENT = st.text(max_size=12).filter(lambda s: "<|" not in s)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), CONTENT), max_size=6)


@settings(max_examples=60, deadline=None)
@given(TURNS, CONTENT, st.booleans())
def test_exactly_the_assistants_messages_are_supervised(turns, last, system):
    first = {"role": "system" if system else "user", "content": "Fly."}
    messages = [first, *({"role": r, "content": c} for r, c in turns), {"role": "assistant", "content": last}]
    chats = ChatTemplate(tiny_tokenizer(), [STOP])
    (document,) = training_documents(chats, Record("here", messages=messages))
    said = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert supervised(chats, document) == said
    assert chats.tokenizer.decode(document.tokens.tolist()) == chats.render(messages, prompt=False)


# -- templates that rewrite history -----------------------------------------------------------------------------------

THOUGHT = (
    "u:One?",
    "a:<think>\nhm\n</think>\n\nYes.",
    "u:Two?",
    "a:<think>\nwell\n</think>\n\nNo.",
    "u:Three?",
    "a:Ok.",
)


def as_decoded(chats: ChatTemplate, record: Record) -> dict[int, list[int]]:
    """For each assistant turn, the tokens that decoding would generate after that turn's own prompt.

    Asserts that every span of every document directly follows the prompt of one turn.
    """
    turns = [i for i, m in enumerate(record.messages) if m["role"] == "assistant"]
    prompts = {tuple(chats.prompt_ids(record.messages[:i])): i for i in turns}
    written: dict[int, list[int]] = {}
    for document in training_documents(chats, record):
        tokens, spans = document.tokens.tolist(), document.spans.tolist()
        for span in {s for s in spans if s >= 0}:
            a = spans.index(span)
            turn = prompts[tuple(tokens[:a])]
            assert turn not in written, "a turn is supervised in two documents"
            written[turn] = tokens[a : a + spans.count(span)]
    assert sorted(written) == turns
    return written


def test_turns_that_lose_their_reasoning_in_the_history_are_documents_of_their_own():
    chats, record = ChatTemplate(tiny_tokenizer(QWEN), [STOP]), chat(*THOUGHT)
    assert [shown(chats, d) for d in training_documents(chats, record)] == [
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
        "<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\nOk.<|im_end|>»\n",
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n«<think>\nhm\n</think>\n\nYes.<|im_end|>»\n",
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n«<think>\nwell\n</think>\n\nNo.<|im_end|>»\n",
    ]
    written = as_decoded(chats, record)
    assert [chats.tokenizer.decode(written[i]) for i in (1, 3, 5)] == [
        "<think>\nhm\n</think>\n\nYes.<|im_end|>", "<think>\nwell\n</think>\n\nNo.<|im_end|>",
        "<think>\n\n</think>\n\nOk.<|im_end|>",
    ]  # fmt: skip


def test_the_empty_reasoning_block_of_a_prompt_is_not_supervised():
    chats = ChatTemplate(tiny_tokenizer(QWEN), [STOP], {"enable_thinking": False})
    record = chat("s:Fly.", "u:One?", "a:Yes.", "u:Two?", "a:No.")
    empty = "<think>\n\n</think>\n\n"
    start = "<|im_start|>system\nFly.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    assert [shown(chats, d) for d in training_documents(chats, record)] == [
        f"{start}Yes.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n{empty}«No.<|im_end|>»\n",
        f"{start}{empty}«Yes.<|im_end|>»\n",
    ]
    written = as_decoded(chats, record)
    assert [chats.tokenizer.decode(written[i]) for i in (2, 4)] == ["Yes.<|im_end|>", "No.<|im_end|>"]


ONE, TWO = (f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n" for asked in ("One?", "Two?"))


def reasoned(content: str, reasoning: str | None = None) -> dict:
    return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})


@pytest.mark.parametrize(
    ("template", "first", "end"),
    [(R1, "Yes.", "\n\n"), (QWQ, "Yes.", "\n\n"), (NEMOTRON, "<think></think>\nYes.", "\n")],
    ids=["r1", "qwq", "nemotron"],
)
def test_a_turn_after_a_prompt_that_opens_the_reasoning_is_a_document_of_its_own(template, first, end):
    """Reasoning in its field ends as the prompt begins."""
    asked = [{"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}]
    messages = [asked[0], reasoned("Yes.", "hm"), asked[1], reasoned("No.", "well")]
    chats = ChatTemplate(tiny_tokenizer(template), [STOP])
    record = Record("here", messages=messages)
    assert {shown(chats, d) for d in training_documents(chats, record)} == {
        f"{ONE}<think>\n«hm\n</think>{end}Yes.<|im_end|>»",
        f"{ONE}{first}<|im_end|>{TWO}<think>\n«well\n</think>{end}No.<|im_end|>»",
    }
    as_decoded(chats, record)
    assert losses(chats, record, training_documents(chats, record)) == ()


@pytest.mark.parametrize("template", [R1, QWQ, NEMOTRON], ids=["r1", "qwq", "nemotron"])
@pytest.mark.parametrize("written", ["hm</think>Yes.", " hm\n</think>\n\nYes.", "hm</think>\n\nYes.</think> Or no."])
def test_an_answer_as_its_target_wrote_it_is_trained_token_by_token(template, written):
    """Reasoning up to its end is in the content, as regenerate writes it; the data may also write its opening."""
    expected = [f"{ONE}<think>\n«{written}<|im_end|>»"]
    assert made(template, chat("u:One?", f"a:{written}")) == expected
    if not written.startswith(" "):
        assert made(template, chat("u:One?", f"a:<think>\n{written}")) == expected


def test_reasoning_before_tool_calls_follows_a_prompt_that_opens_it():
    """Neighbours: a prompt that goes on without a line end, and a turn of calls alone."""
    template = TOOLS.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    for message in (reasoned("", "hm"), reasoned("hm</think>")):
        record = Record("here", messages=[{"role": "user", "content": "One?"}, message | {"tool_calls": [call]}])
        content = message["content"] or "hm</think>"
        assert made(template, record) == [f"{ONE}<think>«{content}[look {{}}]<|im_end|>»\n"]


def test_a_prompt_with_an_empty_block_of_reasoning():
    """The turns of some templates have no such block."""
    off = R1.replace("<think>\n'", "<think>\n\n</think>\n\n'")
    assert made(off, chat("u:One?", "a:Yes.")) == [f"{ONE}<think>\n\n</think>\n\n«Yes.<|im_end|>»"]
    record = chat("u:One?", "a:Yes.", template_kwargs={"enable_thinking": False})  # the row's own
    assert made(NEMOTRON, record) == [f"{ONE}<think></think>«Yes.<|im_end|>»"]
    message = refused(off, chat("u:One?", "a:hm</think>Yes."), "message 2: the rendered turn does not start")
    assert "--template-kwargs may contradict the data" in message


@pytest.mark.parametrize("template", [CHATML, QWEN, TOOLS], ids=["chatml", "qwen", "tools"])
def test_every_span_follows_the_prompt_the_decoder_would_have_seen(template):
    as_decoded(ChatTemplate(tiny_tokenizer(template), [STOP]), chat("s:Fly.", *THOUGHT))


def test_an_end_of_text_token_does_not_split_the_documents():
    """Phi-3 ends every rendering with a second stop token that is not in the history; this still gives one document."""
    template = CHATML + "{% if not add_generation_prompt %}{{ '<|pad|>' }}{% endif %}"
    assert made(template, chat("u:x", "a:One.", "u:y", "a:Two."), stop=[STOP, 0]) == [
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n«One.<|im_end|>»\n"
        "<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n«Two.<|im_end|>»\n<|pad|>"
    ]


def test_a_turn_that_loses_its_stop_token_in_the_history_is_a_document_of_its_own():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if loop.last %}{{ '<|im_end|>' }}{% endif %}{% endfor %}" + PROMPT
    ).replace("{% if loop.last %}", "{% if loop.last and not add_generation_prompt %}")
    assert made(template, chat("u:x", "a:One.", "u:y", "a:Two.")) == [
        "<|im_start|>user\nx<|im_start|>assistant\nOne.<|im_start|>user\ny<|im_start|>assistant\n«Two.<|im_end|>»",
        "<|im_start|>user\nx<|im_start|>assistant\n«One.<|im_end|>»",
    ]


@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_common_prefix_length(a, b):
    n = _common_prefix_length(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])


# -- long chats -------------------------------------------------------------------------------------------------------

GEMMA = (  # like Gemma's: roles must alternate, contents are trimmed, and the assistant's role is named model
    "{{ '<|pad|>' }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
NUMBERED = CHATML.replace("m['role'] + '\n'", "m['role'] + '\n' + loop.index | string").replace(  # as in ChatGLM2
    "assistant\n' }}{% endif", "assistant\n' + (messages | length + 1) | string }}{% endif"
)
ENDED = CHATML + "{% if not add_generation_prompt %}{{ '<|pad|>' }}{% endif %}"
LONG = {"chatml": CHATML, "qwen": QWEN, "tools": TOOLS, "gemma": GEMMA, "numbered": NUMBERED, "ended": ENDED}
SAID = st.sampled_from(["", " Yes. ", "<think>\nhm\n</think>\n\nNo.", "No."])


@pytest.mark.parametrize("template", LONG.values(), ids=LONG)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("uuut"), SAID, st.booleans()), min_size=1, max_size=6), st.booleans(), SAID)
def test_long_chats_give_the_documents_of_the_slow_method(template, turns, system, last):
    """The linear-time method finds the same documents as rendering every prefix of the chat."""
    told = [f"{role}:x" if answered else f"{role}:{said}" for role, said, answered in turns]
    answers = [f"a:{said}" for _, said, answered in turns if answered] + [f"a:{last}"]
    for template_turns in ([*(t for pair in zip(told, answers, strict=False) for t in pair)], [*told, *answers]):
        record, found = chat(*["s:Fly."] * system, *template_turns), {}
        for most in (1, 1_000):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(spans_module, "MANY_TURNS", most)
                try:
                    found[most] = made(template, record)
                except ValueError as e:
                    found[most] = str(e)
        assert found[1] == found[1_000]


@pytest.mark.parametrize("template", [CHATML, TOOLS, GEMMA])
def test_long_chats_are_rendered_in_linear_time(template, monkeypatch):
    """The number of rendered messages grows linearly with the turns, unless the template rewrites history."""
    rendered, apply = [], type(tiny_tokenizer()).apply_chat_template
    chats, turns = ChatTemplate(tiny_tokenizer(template), [STOP]), ["u:Can it fly?", "a:Soon."] * 50

    def count(self, messages, **kwargs):
        rendered.append(len(messages))
        return apply(self, messages, **kwargs)

    monkeypatch.setattr(type(chats.tokenizer), "apply_chat_template", count)
    (document,) = training_documents(chats, chat(*turns))
    assert supervised(chats, document) == ["Soon.<|im_end|>"] * 50
    assert sum(rendered) < 10 * len(turns)


# -- begin-of-sequence, kwargs, plain text --------------------------------------------------------------------------


def test_a_template_with_bos_gets_no_second_one():
    tokenizer = copy.deepcopy(tiny_tokenizer("{{ bos_token }}" + CHATML))
    tokenizer.bos_token = "<|pad|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 0)]
    )
    chats = ChatTemplate(tokenizer, [STOP])
    record = chat("u:x", "a:y")
    (document,) = training_documents(chats, record)
    (plain,) = training_documents(chats, Record("here", text="Once upon a time"))
    for ids in (document.tokens.tolist(), chats.prompt_ids(record.messages[:1]), chats.prompt_ids("x"), plain.tokens):
        assert ids[0] == 0 and list(ids).count(0) == 1


def test_special_tokens_that_a_text_writes_out_are_not_doubled():
    """A tokenizer that adds tokens around a text: BOS, several tokens (GLM), or an end token too."""
    for added, before, after in (("<|pad|> $A", [0], []), ("<|im_start|> <|pad|> $A <|im_end|>", [2, 0], [1])):
        tokenizer = copy.deepcopy(tiny_tokenizer(None))
        special = [(tokenizer.convert_ids_to_tokens(i), i) for i in (0, 1, 2)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=added, special_tokens=special)
        chats, words = (
            ChatTemplate(tokenizer, [STOP]),
            tokenizer("The young bird", add_special_tokens=False)["input_ids"],
        )
        written = tokenizer.decode(before) + "The young bird" + tokenizer.decode(after)
        rows = [Record("a", text=written), Record("b", text="The young bird"), Record("c", text="The" + written)]
        rows.append(Record("d", text=written, prompt_length=len(tokenizer.decode(before) + "The")))
        for row in (*rows[:2], rows[3]):
            (document,) = training_documents(chats, row)
            assert document.tokens.tolist()[: len(before + words)] == before + words
            assert document.tokens.tolist().count(1) == int(bool(after or row.prompt_length))
        assert document.spans.tolist()[len(before)] == -1 and document.spans.tolist()[len(before) + 1] == 0
        assert [losses(chats, row, []) for row in rows] == [("added",), (), ("added",) if after else (), ("added",)]
        shown = tokenizer.decode(before + after)
        with pytest.warns(
            TemplateWarning, match=re.escape(f"a prompt writes out {shown}, which the tokenizer adds too")
        ):
            assert chats.prompt_ids(written) == before + words + after
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert chats.prompt_ids("The young bird") == before + words + after


def test_keyword_arguments_reach_the_template():
    messages = chat("u:x").messages
    plain, with_kwargs = (ChatTemplate(tiny_tokenizer(QWEN), [STOP], k) for k in ({}, {"enable_thinking": False}))
    assert with_kwargs.render(messages, prompt=True) == plain.render(messages, prompt=True) + "<think>\n\n</think>\n\n"


def test_plain_text_is_one_span_from_its_second_token():
    text = "Once upon a time a young bird"
    chats = ChatTemplate(tiny_tokenizer(None), [STOP])  # plain text needs no chat template
    (document,) = training_documents(chats, Record("here", text=text))
    assert document.spans.tolist() == [-1] + [0] * (len(document.tokens) - 1)
    assert document.tokens.tolist() == chats.prompt_ids(text)


def test_only_the_completion_of_a_prompt_is_supervised():
    chats = ChatTemplate(tiny_tokenizer(None), [STOP])

    def spans(prompt, completion):
        (document,) = training_documents(chats, Record("here", text=prompt + completion, prompt_length=len(prompt)))
        return shown(chats, document)

    assert spans("The young", " bird tries") == "The young« bird tries<|im_end|>»"
    assert spans("The young ", "bird tries") == "The young bird« tries<|im_end|>»"  # a token across is the prompt's
    assert spans("T", "he young bird") == "The« young bird<|im_end|>»"
    assert spans("The young", " bird<|im_end|>") == "The young« bird<|im_end|>»"  # it has its end
    assert spans("The", " bird") == "The« bird<|im_end|>»"
    for prompt, completion in (("The young bird", ""), ("The young bir", "d")):
        with pytest.raises(ValueError, match="here has a prompt but no completion to train on"):
            spans(prompt, completion)


@pytest.mark.parametrize("trim", [False, True], ids=["whole offsets", "offsets without spaces"])
def test_special_tokens_around_a_plain_text_do_not_move_its_span(trim):
    tokenizer = copy.deepcopy(tiny_tokenizer(None))
    around = processors.TemplateProcessing(
        single="<|pad|> $A <|im_end|>", special_tokens=[("<|pad|>", 0), ("<|im_end|>", 1)]
    )
    trimmed = [processors.ByteLevel(trim_offsets=True)] * trim
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([*trimmed, around])
    chats = ChatTemplate(tokenizer, [STOP])
    for behind, expected in (
        (0, "<|pad|>«The young bird<|im_end|>»"), (3, "<|pad|>The« young bird<|im_end|>»"),
        (4, "<|pad|>The young« bird<|im_end|>»"), (9, "<|pad|>The young« bird<|im_end|>»"),
    ):  # fmt: skip
        (document,) = training_documents(chats, Record("here", text="The young bird", prompt_length=behind))
        assert shown(chats, document) == expected


def test_the_prompt_messages_of_a_conversation_are_not_supervised():
    record = chat("u:One?", "a:Yes.", "u:Two?", "a:No.", prompt_length=3)
    assert made(CHATML, record) == [
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n«No.<|im_end|>»\n"
    ]
    refused(CHATML, chat("u:One?", "a:Yes.", prompt_length=2), "line 7 has no assistant message to train on")
    refused(CHATML, chat("u:One?"), r"train on \(user: One\?\); fledge regenerate generates answers")
    refused(CHATML, chat("a:Hello."), "; its first message answers nothing, so it is not trained on")


def test_a_variable_that_the_template_does_not_read_is_named():
    with pytest.warns(TemplateWarning, match="reads no variable enable_thinkng, .*; did you mean enable_thinking"):
        chats = ChatTemplate(tiny_tokenizer(QWEN), [STOP], {"enable_thinkng": False})
    with pytest.warns(TemplateWarning, match="reads no variable a and no b, which has no effect$"):
        ChatTemplate(tiny_tokenizer(CHATML), [STOP], {"a": 1, "b": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatTemplate(tiny_tokenizer(QWEN), [STOP], {"enable_thinking": False})
        assert chats.of({"mode": "think"}).kwargs == {"enable_thinkng": False, "mode": "think"}  # data may have more


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_contents_of_prompts_must_be_text():
    """Messages given to the engine are checked like messages from files."""
    chats = ChatTemplate(tiny_tokenizer(CHATML), [STOP])
    listed = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Can it", "fly?")]}]
    assert chats.prompt_ids(listed) == chats.prompt_ids([{"role": "user", "content": "Can it\nfly?"}])
    for content in (5, [{"type": "image"}], {"text": "x"}, None):
        with pytest.raises(ValueError, match=r"^chat, message 1"):
            chats.prompt_ids([{"role": "user", "content": content}])
    for prompt in ("a \ud83d", [{"role": "user", "content": "a \ud83d"}]):
        with pytest.raises(
            ValueError, match=r"^here(, message 1)?: the escape \\ud83d after .* is an unpaired surrogate"
        ):
            chats.prompt_ids(prompt, where="here")


# -- refusals -------------------------------------------------------------------------------------------------------


def refused(template, record, match, **kwargs):
    with pytest.raises(ValueError, match=match) as error:
        made(template, record, **kwargs)
    return str(error.value)


def test_a_template_that_refuses_roles_is_quoted_with_the_place():
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
    )
    message = refused(template, chat("s:Fly.", "u:x", "a:y"), r"data\.jsonl, line 7: .* refuses .*System role not supp")
    assert "(system user assistant)" in message
    assert made(template, chat("u:x", "a:y"))  # other roles are accepted


ENDLESS = "{% for i in range(99999) %}{% for i in range(99999) %}\n{% set x = 1 %}{% endfor %}{% endfor %}"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no CPU-time timer on this system")
@pytest.mark.parametrize("template", [CHATML + "\n" + ENDLESS, "{{ 9**(9**8) }}"], ids=["loop", "constant"])
def test_a_template_that_does_not_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(template_module, "RENDER_SECONDS", 0.2)
    stopped = "line 7: the tokenizer's chat template does not terminate: it was stopped after 0.2 s of CPU time; fix"
    start = time.process_time()
    refused(template, chat("u:x", "a:y"), stopped)
    assert time.process_time() - start < 1, "no other chat is rendered"
    assert made(CHATML, chat("u:x", "a:y"))  # the timer does not affect the next rendering


def test_a_template_that_recurses_or_grows_without_end_is_refused():
    refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", chat("u:x", "a:y"), "line 7: .* maximum recursion depth")
    refused(
        "{{ 'a' * 10**15 }}", chat("u:x", "a:y"), r"line 7: .* refuses this conversation \(user assistant\): MemoryErr"
    )


def test_turns_without_answers_are_refused():
    refused(CHATML, Record("line 3", turns=("One?", "Two?")), "line 3 has user turns but no answers to train on")


def test_a_prompt_that_is_not_how_the_turn_begins_is_refused():
    starts = r"line 7, message 2: the rendered turn does not start with the template's generation prompt"
    template = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\nWell, ' }}")
    assert "--template-kwargs" in refused(template, chat("u:x", "a:y"), starts)


@pytest.mark.parametrize("template", [R1, QWQ, NEMOTRON], ids=["r1", "qwq", "nemotron"])
def test_an_answer_without_the_reasoning_that_the_prompt_opens_is_refused(template):
    message = refused(
        template, chat("u:x", "a:y"), "line 7, message 2: the template's generation prompt opens reasoning"
    )
    assert "<think>" in message and "fledge regenerate" in message and "--skip-bad" in message
    refused(template, chat("u:x", "a:hm</think>y", "u:x", "a:y"), "line 7, message 4: the template's generation prompt")


def test_templates_that_render_only_lists_of_parts_get_them():
    """Each role alone: some templates render a string of the system, and none of users."""
    parts = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    for template in (
        CHATML.replace("{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
                       "{{ '<|im_start|>' + m.role + '\n' }}" + parts + "{{ '<|im_end|>\n' }}"),
        CHATML.replace("{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
                       "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}" + parts
                       + "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"),
    ):  # fmt: skip
        record = chat("s:Fly.", "u:Can it?", "a:Not yet.", "t:a wing", "a:Soon.")
        assert made(template, record) == made(CHATML, record)
        chats = ChatTemplate(tiny_tokenizer(template), [STOP])
        assert chats.prompt_ids(record.messages[:2]) == ChatTemplate(tiny_tokenizer(), [STOP]).prompt_ids(
            record.messages[:2]
        )


def test_conversations_need_a_template():
    refused(None, chat("u:x", "a:y"), "line 7 is a conversation, but the tokenizer has no chat template")


def test_a_chat_without_an_assistant_to_train_on_is_refused():
    assert "user: Can it fly?" in refused(CHATML, chat("s:x", "u:Can it fly?"), "line 7 has no assistant message")
    refused(CHATML, Record("here", messages=[]), "here has no assistant message")
    refused(CHATML, chat("a:Hello!", "u:Hi."), "line 7 has no assistant message")


def test_a_template_that_supervises_nothing_or_everything_is_refused():
    mute = CHATML.replace("m['content']", "('' if m.role == 'assistant' else m['content'])").replace("<|im_end|>", "")
    mute = mute.replace("+ '\n' }}{% endfor", "}}{% endfor")
    assert "user" in refused(mute, chat("u:x", "a:y"), "line 7: 0 of .* tokens are the assistant's")
    echo = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
    assert "starts with 'One.'" in refused(
        echo, chat("u:x", "a:One."), r"line 7: (\d+) of \1 tokens are the assistant's"
    )


def test_a_text_of_one_token_is_refused():
    refused(CHATML, Record("line 3", text="ab"[:1]), "line 3: a text of 1 tokens is too short")


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(ValueError, match="provides no character offsets; fledge needs a fast tokenizer"):
        ChatTemplate(SimpleNamespace(is_fast=False), [STOP])


def test_the_tiny_tokenizer_is_byte_level():
    """The spans above can start at any character only if the tokenizer reproduces any text."""
    text = "Ünïcødé 你好 \U0001f426\n\t  x"
    assert isinstance(tiny_tokenizer().backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel)
    assert tiny_tokenizer().decode(tiny_tokenizer()(text)["input_ids"]) == text
