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
