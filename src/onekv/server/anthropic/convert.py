"""From a body of the Messages API to the common `ChatCall`.

Thinking is off unless it is requested, as in Anthropic's API: a client that did not request it expects max_tokens to be
for the answer alone, and the first block to be text. `enabled` and `disabled` are passed to the template, which may
have a switch; `adaptive` leaves it to the template. If a model thinks nevertheless, that is hidden (`messages.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from fastapi import Request

from ..backend import Backend
from ..call import ChatCall
from ..models.choose import choose
from ..sampling_defaults import SamplingDefaults
from ..tools import OtherTool, check_choice, leave_out
from .schema import (
    AnyChoice,
    CountBody,
    MessagesBody,
    NamedChoice,
    NoChoice,
    RedactedBlock,
    ServerToolBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

Block = TextBlock | ThinkingBlock | RedactedBlock | ServerToolBlock | ToolUseBlock | ToolResultBlock


async def chosen(request: Request, body: CountBody, stream: bool | None = False) -> Backend:
    """Agents ask for the models they know; whatever Claude they ask for, the first model there is answers, unless
    another one has that name.
    """
    return await choose(request, body.model, lenient=body.model.startswith("claude"), stream=stream)


def prompt_call(body: CountBody, salt: str) -> ChatCall:
    """The call as far as the prompt goes. Raises BadRequestError for what the schema cannot tell."""
    thinking = body.thinking.type if body.thinking is not None else "disabled"
    choice = body.tool_choice
    output = body.output_config.format if body.output_config is not None else None
    return ChatCall(
        messages=_messages(body),
        tools=[
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in body.own_tools
        ],
        tool_choice=_tool_choice(body),
        schema=output.schema_ if output is not None else None,
        thinking=thinking == "enabled" if thinking in ("enabled", "disabled") else None,
        template=body.template(),
        one_call=choice is not None and not isinstance(choice, NoChoice) and choice.disable_parallel_tool_use,
        salt=salt,
    )


def full_call(body: MessagesBody, salt: str, defaults: SamplingDefaults) -> ChatCall:
    return replace(
        prompt_call(body, salt),
        stream=body.stream,
        max_tokens=body.max_tokens,
        # It must be given, so agents give the most that the model they know can do.
        clamp=True,
        sampling=defaults.sampling(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        stops=tuple(body.stop_sequences),
    )


def _tool_choice(body: CountBody) -> str:
    left_out = [tool for tool in body.tools if isinstance(tool, OtherTool)]
    leave_out(left_out)
    choice = body.tool_choice
    if isinstance(choice, NoChoice):
        return "none"
    if not isinstance(choice, AnyChoice | NamedChoice):
        return "auto"
    wanted = "required" if isinstance(choice, AnyChoice) else choice.name
    check_choice(wanted, [tool.name for tool in body.own_tools], left_out)
    return wanted


def _messages(body: CountBody) -> list[dict[str, Any]]:
    """Messages of the same role one after the other become one turn."""
    messages = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for role, turn in groupby(body.messages, lambda message: message.role):
        blocks: list[Block] = [block for message in turn for block in message.content]
        if role == "user":
            messages += _user(blocks)
        elif role == "assistant":
            messages.append(_assistant(blocks))
        else:
            messages.append({"role": "system", "content": _text(blocks)})
    return messages


def _text(blocks: Sequence[Block], between: str = "\n") -> str:
    return between.join(block.text for block in blocks if isinstance(block, TextBlock))


def _user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Results of tools as messages of their own, the text between them as the user's."""
    messages: list[dict[str, Any]] = []
    for is_text, run in groupby(blocks, lambda block: isinstance(block, TextBlock)):
        if is_text:
            messages.append({"role": "user", "content": _text(list(run))})
        else:
            messages += [_tool_result(block) for block in run if isinstance(block, ToolResultBlock)]
    return messages


def _tool_result(block: ToolResultBlock) -> dict[str, Any]:
    # The common format has no place for a failure but the text.
    text = ("Error: " if block.is_error else "") + _text(block.content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    """Text that was streamed in several blocks is joined as it was generated."""
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    text = _text(blocks, between="")
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
