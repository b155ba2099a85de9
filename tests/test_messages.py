"""Tool calls and reasoning: what is supervised, with templates that behave like those of Qwen3, Llama 3.1 and gpt-oss,
and what is said of templates that drop them.

Expected documents are written as text with « and » around each span.
"""

from __future__ import annotations

import json
from itertools import groupby

import pytest

from fledge.data.answering import split_conversation, stops_at_tool
from fledge.data.messages import RenderedFields, as_sent, prepared
from fledge.data.record import Record, parse_record
from fledge.data.spans import losses, training_documents
from fledge.data.template import ChatTemplate
from fledge.data.tokenize import make_documents
from fledge.measure.prompts import prompt_of
from support.targets import CHATML, tiny_tokenizer

STOP = 1  # <|im_end|>

# like Qwen3's: earlier reasoning is dropped, calls are in tags, and the results of tools are one user turn
QWEN = r"""
{%- if tools %}{{- '<|im_start|>system\n<tools>' }}{% for t in tools %}{{- t | tojson }}{% endfor %}
    {{- '</tools><|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- set f = call.function if call.function else call %}
            {{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}""".lstrip("\n")

# like Llama 3.1's: one call at a time, as JSON; arguments are written by tojson, and results belong to ipython
LLAMA = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}{% for t in tools %}{{- t | tojson }}{% endfor %}
    {{- '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once') }}{% endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- '<|im_start|>assistant\n{"name": "' + f.name + '", "parameters": ' }}
        {{- f.arguments | tojson }}{{- '}<|im_end|>' }}
    {%- elif m.role in ('tool', 'ipython') %}{{- '<|im_start|>ipython\n' }}{{- m.content | tojson }}{{- '<|im_end|>' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}""".lstrip("\n")

# like gpt-oss's: the reasoning before a call is rendered until the final answer is there; <|pad|> stands for <|end|>,
# and <|im_end|> for <|call|> and <|return|>
HARMONY = r"""
{%- if tools %}{{- '<|im_start|>developer ' }}{% for t in tools %}{{- t.function.name }}{% endfor %}
    {{- '<|pad|>' }}{% endif %}
{%- set last = namespace(call='') %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if 'tool_calls' in m %}
            {%- set later = namespace(found=false) %}
            {%- for n in messages[loop.index:] %}
                {%- if n.role == 'assistant' and 'tool_calls' not in n %}{% set later.found = true %}{% endif %}
            {%- endfor %}
            {%- if m.content and m.thinking %}{{- raise_exception('content and thinking with a call') }}{% endif %}
            {%- if m.thinking and not later.found %}
                {{- '<|im_start|>assistant analysis: ' + m.thinking + '<|pad|>' }}
            {%- endif %}
            {%- set f = m.tool_calls[0].function %}{% set last.call = f.name %}
            {{- '<|im_start|>assistant to=' + f.name + ': ' }}{{- f.arguments | tojson }}{{- '<|im_end|>' }}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if 'thinking' in m %}{{- '<|im_start|>assistant analysis: ' + m.thinking + '<|pad|>' }}{% endif %}
            {{- '<|im_start|>assistant final: ' + m.content + '<|im_end|>' }}
        {%- else %}{{- '<|im_start|>assistant final: ' + m.content + '<|pad|>' }}{% endif %}
    {%- elif m.role == 'tool' %}{{- '<|im_start|>' + last.call + ': ' }}{{- m.content | tojson }}{{- '<|pad|>' }}
    {%- else %}{{- '<|im_start|>' + m.role + ' ' + m.content + '<|pad|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{% endif %}""".lstrip("\n")

# like DeepSeek's: the arguments are inserted, so they must be text, and null is refused as a content
INSERTED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def call(arguments='{"at": "bird"}'):
    return {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}


def chat(field="reasoning_content", arguments='{"at": "bird"}', more=()) -> Record:
    """The chat of an agent: a call after reasoning, its result, and an answer after reasoning."""
    messages = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": None, field: "I must look.", "tool_calls": [call(arguments)]},
        {"role": "tool", "tool_call_id": "c1", "content": "a wing"},
        {"role": "assistant", field: "It has a wing.", "content": "A bird."},
        *more,
    ]
    return parse_record({"messages": messages, "tools": TOOLS}, "data.jsonl, line 7")


def chats(template: str) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer(template), [STOP])


def shown(template: ChatTemplate, record: Record) -> list[str]:
    return ["".join(_runs(template, d)) for d in training_documents(template, record)]


def _runs(template, document):
    pairs = zip(document.tokens.tolist(), document.spans.tolist(), strict=True)
    for span, run in groupby(pairs, key=lambda pair: pair[1]):
        text = template.tokenizer.decode([token for token, _ in run])
        yield text if span < 0 else f"«{text}»"


def spans(template: ChatTemplate, record: Record) -> list[str]:
    return [
        text.strip("«»") for d in training_documents(template, record) for text in _runs(template, d) if text[0] == "«"
    ]


NEXT = ({"role": "user", "content": "Again!"}, {"role": "assistant", "content": "No."})


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_calls_and_reasoning_are_supervised_and_results_are_not_qwen(field):
    template = chats(QWEN)
    start = f"<|im_start|>system\n<tools>{json.dumps(TOOLS[0])}</tools><|im_end|>\n<|im_start|>user\nLook!<|im_end|>\n"
    called = (
        '<think>\nI must look.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": "bird"}}\n</tool_call>'
    )
    result = "<|im_start|>user\n<tool_response>\na wing\n</tool_response><|im_end|>\n"
    answer = "<think>\nIt has a wing.\n</think>\n\nA bird.<|im_end|>"
    head = "<|im_start|>assistant\n"
    assert shown(template, chat(field)) == [f"{start}{head}«{called}<|im_end|>»\n{result}{head}«{answer}»\n"]
    later = spans(template, chat(field, more=NEXT))  # the reasoning is dropped behind the next question
    assert sorted(later) == sorted(["<think>\n\n</think>\n\nNo.<|im_end|>", called + "<|im_end|>", answer])
    two = chat(field)
    two.messages.insert(3, {"role": "tool", "content": "a beak"})
    assert shown(template, two)[0].count("<|im_start|>user") == 2, "results in a row are one turn of the user"
    assert spans(template, two) == [called + "<|im_end|>", answer]


@pytest.mark.parametrize("arguments", ['{"at": "bird"}', {"at": "bird"}], ids=["text", "object"])
def test_calls_are_supervised_llama(arguments):
    template, record = chats(LLAMA), chat(arguments=arguments)
    assert spans(template, record) == ['{"name": "look", "parameters": {"at": "bird"}}<|im_end|>', "A bird.<|im_end|>"]
    assert '<|im_start|>ipython\n"a wing"<|im_end|>' in shown(template, record)[0]
    assert losses(template, record, training_documents(template, record)) == ("reasoning",)
    record.messages[1]["tool_calls"].append(call())
    with pytest.raises(ValueError, match=r"line 7: the chat template refuses .*only single tool-calls"):
        training_documents(template, record)


def test_each_turn_follows_the_reasoning_that_the_decoder_saw_harmony():
    """The final answer follows the reasoning before the call, which the template drops once the answer is there."""
    template = chats(HARMONY)
    start, result = (
        "<|im_start|>developer look<|pad|><|im_start|>user Look!<|pad|>",
        '<|im_start|>look: "a wing"<|pad|>',
    )
    called = ' analysis: I must look.<|pad|><|im_start|>assistant to=look: {"at": "bird"}<|im_end|>'
    answer = " analysis: It has a wing.<|pad|><|im_start|>assistant final: A bird.<|im_end|>"
    documents = [
        f"{start}<|im_start|>assistant«{called}»",
        f"{start}<|im_start|>assistant{called}{result}<|im_start|>assistant«{answer}»",
    ]
    record = chat("thinking")
    assert shown(template, record) == documents and losses(template, record, training_documents(template, record)) == ()
    again = shown(template, chat("reasoning", more=NEXT))
    assert set(documents) < set(again) and len(again) == 3
    assert next(text for text in again if "«" in text and "final: No." in text).endswith("« final: No.<|im_end|>»")


@pytest.mark.parametrize("template", [QWEN, LLAMA, HARMONY], ids=["qwen", "llama", "harmony"])
def test_long_chats_of_tools_give_the_spans_of_short_ones(template):
    more = [m for _ in range(10) for m in chat().messages]
    template, one = chats(template), chat()
    found = spans(template, chat(more=more))
    assert len(found) == 22 and set(found) == set(spans(template, one))


def test_arguments_are_text_for_templates_that_insert_them():
    for arguments in ({"at": "bird"}, '{"at": "bird"}'):
        record = chat(arguments=arguments)
        assert spans(chats(INSERTED), record)[0] == '[look {"at": "bird"}]<|im_end|>'


def test_what_a_template_drops_is_counted():
    """Each record counts once for each kind."""
    plain = parse_record({"messages": [chat().messages[0], chat().messages[3]]}, "x")
    _, report = make_documents([chat(), chat(), plain], chats(CHATML), 512)
    assert report.losses == {"reasoning": 3, "calls": 2, "tools": 2}
    assert "; 3 records have reasoning that this chat template drops; 2 records have tool calls" in str(report)
    assert make_documents([chat(), plain], chats(QWEN), 512)[1].losses == {}


# a null content would raise in the first template and be "None" in the second
@pytest.mark.parametrize("template", [CHATML, CHATML.replace("+ m['content'] +", "~ m['content'] ~")], ids=["+", "~"])
def test_a_turn_that_a_dropped_call_leaves_empty_is_context(template):
    for content, turn in ((None, "<|im_end|>"), ("", "<|im_end|>"), ("Hm.", "«Hm.<|im_end|>»")):
        record = chat()
        record.messages[1]["content"] = content
        assert shown(chats(template), record) == [
            f"<|im_start|>user\nLook!<|im_end|>\n<|im_start|>assistant\n{turn}\n"
            "<|im_start|>tool\na wing<|im_end|>\n<|im_start|>assistant\n«A bird.<|im_end|>»\n"
        ]
    alone = parse_record({"messages": chat().messages[:2]}, "here")
    with pytest.raises(ValueError, match=r"here has no assistant message to train on .*drops its tool calls"):
        training_documents(chats(template), alone)
    thinks = template.replace("m['content']", "(m['reasoning_content'] or '') + m['content']")
    assert spans(chats(thinks), alone) == ["I must look.<|im_end|>"], "its reasoning is rendered"


def test_the_field_of_reasoning():
    found = [chats(template).fields.reasoning for template in (QWEN, LLAMA, HARMONY)]
    assert found[:2] == ["reasoning_content", None]
    assert found[2] in ("thinking", "reasoning_content"), "newer transformers fill one from the other"


def test_rows_of_tools_and_calls_are_read():
    """Tables hold tools as JSON text; an empty list of calls is no call."""
    said = {"role": "assistant", "content": "Hm.", "tool_calls": []}
    record = parse_record({"messages": [{"role": "user", "content": "Hi"}, said], "tools": json.dumps(TOOLS)}, "x")
    assert record.tools == TOOLS and "tool_calls" not in record.messages[1]
    for tools in ("no JSON", '{"a": 1}', 5):
        with pytest.raises(ValueError, match=r"x: its `tools` are a"):
            parse_record({"messages": [said], "tools": tools}, "x")


def test_answers_end_before_the_result_of_a_tool():
    """The result answers the data's own call; a result in the prompt is kept."""
    record = chat(more=NEXT)
    assert stops_at_tool(record)
    assert [m["role"] for m in split_conversation(record)[1]] == ["user", "assistant"]
    asked = parse_record({"prompt": chat().messages[:3], "completion": "A bird.", "tools": TOOLS}, "x")
    assert not stops_at_tool(asked) and [m["role"] for m in split_conversation(asked)[1]] == ["assistant"]
    assert not stops_at_tool(Record("x", text="a")) and not stops_at_tool(Record("x", turns=("a",)))


def test_prompts_have_their_tools():
    prompt = prompt_of(chat())
    assert [m["role"] for m in prompt.messages] == ["user", "assistant", "tool"] and prompt.tools == TOOLS


def test_what_is_sent_to_a_server_is_in_the_form_of_its_api():
    sent = as_sent(chat(arguments={"at": "bird"}).messages[1])
    assert sent["tool_calls"][0]["function"]["arguments"] == '{"at": "bird"}'
    assert sent["reasoning"] == sent["reasoning_content"] == "I must look."


def test_reasoning_is_rendered_once():
    """Templates that know several names of it get one."""
    fields = RenderedFields("reasoning", tools=True, calls=True, json_arguments=False, null_content=True)
    given = [{"role": "assistant", "content": "b", "reasoning_content": "r"}]
    assert prepared(given, fields) == [{"role": "assistant", "content": "b", "reasoning": "r"}]


def test_function_calls_of_sharegpt_are_tool_calls():
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ]
    message = parse_record({"conversations": turns}, "here").messages[1]
    assert message["content"] is None and message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    with pytest.raises(ValueError, match="here: a function_call turn needs a JSON object"):
        parse_record({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "here")
