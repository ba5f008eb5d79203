"""From a `ChatCall` to tokens, by the model's own chat template.

The same messages always become the same tokens, and messages added at the end leave earlier ones unchanged if the
template does, so that a conversation is found in the prefix cache. For a template without tool support, tools are
described in the system message; calls and results are then text.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..ask import TEMPLATE_ERRORS
from . import xml_parts
from .backend import Backend
from .call import ChatCall, ChatMessage
from .call_parts import CallParts
from .errors import BadRequestError
from .messages import continues, fitted
from .replay import replay
from .segments import Markers

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_JSON_PARSER = "mlx_lm.tool_parsers.json_tools"
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
    # Tokens at the end with which the template has already opened the reasoning; 0 if it has not.
    opening: int
    # What was rendered, and how often each rule of hygiene was applied to get there.
    messages: list[ChatMessage]
    cleaned: dict[str, int]

    @property
    def thinking(self) -> bool:
        return self.opening > 0


def render(backend: Backend, call: ChatCall) -> Rendered:
    """The prompt of `call`. Raises BadRequestError if the model's template does not take its messages."""
    call, cleaned = backend.hygiene.clean(call)
    if not backend.tokenizer.has_chat_template:
        raise BadRequestError(f"{backend.name} has no chat template; use /v1/completions with a plain prompt")
    if not call.messages:
        raise BadRequestError("there are no messages; give at least one", "messages")
    tokenizer = backend.tokenizer
    markers = markers_of(tokenizer, call)
    known = backend.turns.known(call.salt, call.messages)
    with _refusing(backend):
        text, tokens = replay(tokenizer, partial(_write, backend, call), markers, call.messages, known)
    opened = tokenizer.has_thinking and text.rstrip().endswith(tokenizer.think_start)
    opening = len(tokens) - tokenizer.rfind_think_start(tokens) if opened else 0
    return Rendered(tokens, opening, call.messages, cleaned)


def written(backend: Backend, call: ChatCall) -> str:
    """The text of that prompt, as the template has it. Raises BadRequestError, too."""
    call, _ = backend.hygiene.clean(call)
    with _refusing(backend):
        return _write(backend, call, call.messages)


@contextmanager
def _refusing(backend: Backend) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError:
        raise BadRequestError("the text contains a lone surrogate", "messages") from None
    except TEMPLATE_ERRORS as error:
        message = f"the chat template of {backend.name} does not accept these messages: {error}"
        raise BadRequestError(message, "messages") from error


def _write(backend: Backend, call: ChatCall, messages: list[ChatMessage]) -> str:
    """The text of `messages`, as the template has it for `call`."""
    tokenizer = backend.tokenizer
    thinking = {} if call.thinking is None else {"enable_thinking": call.thinking}
    options: dict[str, Any] = {**backend.template_args, **call.template, **thinking}
    options |= {"continue_final_message": True} if continues(call) else {"add_generation_prompt": True}
    if knows_tools(tokenizer):
        messages = [_filled(message) for message in messages]
        if uses_tools(call):
            options["tools"] = call.tools
    else:
        messages = _as_text(messages, call.tools if uses_tools(call) else [])
    text: str = tokenizer.apply_chat_template(fitted(tokenizer, messages), tokenize=False, **options)
    text.encode()
    return text


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
        parts = CallParts if call.stream else None
        return replace(markers, call_start=CALL_START, call_end=CALL_END, parse=_load, parts=parts)

    def parse(text: str) -> Any:
        return tokenizer.tool_parser(text, call.tools)

    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    markers = replace(markers, call_start=start, call_end=end, parse=parse)
    if call.stream and calls_as_json(tokenizer):
        return replace(markers, parts=CallParts)
    if call.stream and tokenizer.tool_parser.__module__ == xml_parts.PARSER:
        return replace(markers, parts=lambda: xml_parts.XmlParts(parse, call.tools))
    return markers


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
            text = "\n".join([*([content] if content else []), *calls])
            thought = {key: value for key, value in message.items() if key == "reasoning_content"}
            plain.append({"role": message["role"], "content": text, **thought})
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
