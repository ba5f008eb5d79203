"""What renders prompts: the tokenizer of SmolLM2, with templates of other models."""

import copy
from types import SimpleNamespace
from typing import Any

from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from onekv.models import load_model
from onekv.server.hygiene import Hygiene
from onekv.server.turns import Turns

# ChatML with tools and thinking; thinking from before the last question is dropped.
THINKING = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for tool_call in m.tool_calls or [] %}"
    "\n<tool_call>\n"
    '{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)

# The same, and a result has to follow a call.
RESULT_AFTER_CALL = THINKING.replace(
    "{{ m.content }}",
    "{% if m.role == 'tool' %}{% set before = messages[loop.index0 - 1] %}{% if before.role != 'tool' and not "
    "before.tool_calls %}{{ raise_exception('a result needs a call') }}{% endif %}{% endif %}{{ m.content }}",
)
_THOUGHT = THINKING[THINKING.index("{% if m.reasoning_content") : THINKING.index("{{ m.content }}")]
# After the last question every turn has a thinking block, if only an empty one, as with Qwen3.5.
ALWAYS_THINKING = THINKING.replace(
    _THOUGHT,
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ (m.reasoning_content or '') | trim }}\n</think>\n\n{% endif %}",
)
# As with GLM-4.5: every turn has one, and the line that the answer begins is part of it.
EMPTY_THINKING = THINKING.replace(
    "<|im_start|>{{ m.role }}\n" + _THOUGHT,
    (
        "<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}\n<think>"
        "{% if loop.index0 > ns.last %}{{ (m.reasoning_content or '') | trim }}{% endif %}</think>{% endif %}\n"
    ),
).replace("<|im_start|>assistant\n{% if enable_thinking", "<|im_start|>assistant{% if enable_thinking")
# As Mistral's: calls without text beside them, users and answers in turns. Ids have nine letters or digits.
MISTRAL = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% set ns = namespace(at=0) %}"
    "{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.at % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.at = ns.at + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == asked[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids have nine') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ '' if loop.last else ', ' }}{% endfor %}]{{ eos_token }}{% elif m.role == 'assistant' %}"
    " {{ m.content }}{{ eos_token }}{% else %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}'
    "{% endfor %}"
)


def plain_backend() -> Any:
    loaded = load_model("smollm2-135m", lazy=True, progress=False)
    return _backend(loaded.name, loaded.tokenizer)


def _backend(name: str, tokenizer: Any) -> Any:
    return SimpleNamespace(name=name, tokenizer=tokenizer, turns=Turns(1 << 20), hygiene=Hygiene(), template_args={})


def with_template(plain: Any, template: str | None, parser: Any = json_tools) -> Any:
    inner = copy.deepcopy(plain.tokenizer._tokenizer)
    inner.chat_template = template
    inner.add_tokens(["<think>", "</think>"])
    wrapped = TokenizerWrapper(
        inner,
        NaiveStreamingDetokenizer,
        tool_parser=parser.parse_tool_call,
        tool_call_start=parser.tool_call_start,
        tool_call_end=parser.tool_call_end,
    )
    return _backend("other", wrapped)
