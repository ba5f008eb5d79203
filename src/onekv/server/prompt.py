"""From a `ChatCall` to tokens, by the model's own chat template.

The same messages always become the same tokens, and messages added at the end leave those before as they were wherever
the template does, so that a conversation is found again in the prefix cache. A template that knows no tools gets them
described in the system message; calls and results then are text.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from .backend import Backend
from .call import ChatCall, ChatMessage
from .errors import BadRequestError
from .segments import Markers

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_JSON_PARSER = "mlx_lm.tool_parsers.json_tools"
# What the Python and Jinja code of a template raises on messages it was not made for.
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError)
_TOOLS = """\
You may call one or more functions to help with the request. The functions you may call are described by these JSON \
signatures inside <tools></tools>:
<tools>
{signatures}
</tools>

For each call write a JSON object with the function's name and its arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Rendered:
    tokens: list[int]
    # The template has already opened the reasoning.
    thinking: bool


def render(backend: Backend, call: ChatCall) -> Rendered:
    """The prompt of `call`. Raises BadRequestError if the model's template does not take its messages."""
    tokenizer = backend.tokenizer
    if not tokenizer.has_chat_template:
        raise BadRequestError(f"{backend.name} has no chat template; use /v1/completions with a plain prompt")
    if not call.messages:
        raise BadRequestError("there are no messages; give at least one", "messages")
    options: dict[str, Any] = {} if call.thinking is None else {"enable_thinking": call.thinking}
    if knows_tools(tokenizer):
        messages = [_filled(message) for message in call.messages]
        if uses_tools(call):
            options["tools"] = call.tools
    else:
        messages = _as_text(call.messages, call.tools if uses_tools(call) else [])
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        text.encode()
        tokens = tokenizer.encode(text, add_special_tokens=False)
    except UnicodeEncodeError:
        raise BadRequestError("the text has half a character (a lone surrogate)", "messages") from None
    except _TEMPLATE_ERRORS as error:
        message = f"the chat template of {backend.name} does not take these messages: {error}"
        raise BadRequestError(message, "messages") from error
    opened = tokenizer.has_thinking and text.rstrip().endswith(tokenizer.think_start)
    return Rendered([int(token) for token in tokens], opened)


def uses_tools(call: ChatCall) -> bool:
    return bool(call.tools) and call.tool_choice != "none"


def knows_tools(tokenizer: Any) -> bool:
    """Whether the template renders tools and there is a parser for the calls it teaches."""
    return tokenizer.has_tool_calling and "tools" in str(tokenizer.chat_template)


def calls_as_json(tokenizer: Any) -> bool:
    """Whether calls are written as <tool_call>{"name": ..., "arguments": ...}</tool_call>."""
    return not knows_tools(tokenizer) or tokenizer.tool_parser.__module__ == _JSON_PARSER


def markers_of(tokenizer: Any, call: ChatCall) -> Markers:
    """The markers to expect in the answers to `call`."""
    markers = Markers(tokenizer.think_start, tokenizer.think_end)
    if not uses_tools(call):
        return markers
    if not knows_tools(tokenizer):
        return replace(markers, call_start=CALL_START, call_end=CALL_END, parse=_load)
    return replace(
        markers,
        call_start=tokenizer.tool_call_start,
        call_end=tokenizer.tool_call_end,
        parse=lambda text: tokenizer.tool_parser(text, call.tools),
    )


def _load(text: str) -> Any:
    return json.loads(text, strict=False)


def _filled(message: ChatMessage) -> ChatMessage:
    """Many templates join content without looking whether there is any."""
    return message | {"content": message.get("content") or ""}


def _as_text(messages: list[ChatMessage], tools: list[dict[str, Any]]) -> list[ChatMessage]:
    """Messages for a template that knows only roles and content."""
    plain: list[ChatMessage] = []
    after_tool = False
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if after_tool:
                plain[-1]["content"] += "\n" + content
            else:
                plain.append({"role": "user", "content": content})
        else:
            calls = [_call_text(call) for call in message.get("tool_calls") or []]
            plain.append({"role": message["role"], "content": "\n".join([*([content] if content else []), *calls])})
        after_tool = message["role"] == "tool"
    return _with_tools(plain, tools) if tools else plain


def _call_text(call: dict[str, Any]) -> str:
    function = call["function"]
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"{CALL_START}\n{json.dumps(body, ensure_ascii=False)}\n{CALL_END}"


def _with_tools(messages: list[ChatMessage], tools: list[dict[str, Any]]) -> list[ChatMessage]:
    described = _TOOLS.format(signatures="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{described}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": described}, *messages]
