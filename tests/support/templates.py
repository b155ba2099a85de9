"""Small chat templates that behave as those of model families do."""

from __future__ import annotations

# As Qwen3: the last answer has its reasoning, earlier answers have none, and without thinking the prompt opens and
# closes an empty reasoning. Unlike Qwen3, with thinking a last answer without reasoning has no empty reasoning: answers
# of random targets render as they were generated.
QWEN3 = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last and (m.reasoning_content or enable_thinking is false) %}"
    "{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{- m.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"
    "{%- endif %}"
)
# As gpt-oss (harmony): a system message names the effort of reasoning, answers are in channels, the reasoning of
# earlier answers is dropped, and the last answer ends with another token than earlier ones.
HARMONY = (
    "{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- if loop.last and m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"
)
# As Gemma 3: the assistant is called model, its system message is a part of the first user turn, and roles have to
# alternate.
GEMMA3 = (
    "{{- bos_token }}{%- set first = '' %}"
    "{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{- (first if loop.first else '') + (m.content | trim) + '<end_of_turn>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"
)
# As Llama 3: headers around the role, and a date that callers can set.
LLAMA3 = (
    "{{- bos_token }}{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' "
    "+ (date_string or '26 Jul 2024') + '<|eot_id|>' }}"
    "{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
