"""From a body of the Messages API to the common `ChatCall`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ...engine import Sampling
from ..backend import Backend
from ..call import ChatCall
from ..errors import BadRequestError
from .schema import (
    AnyChoice,
    CountBody,
    MessagesBody,
    NamedChoice,
    NoChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


def check_model(backend: Backend, body: CountBody) -> None:
    """Agents ask for the models they know; whatever Claude they ask for, the one model there is answers."""
    if not body.model.startswith("claude"):
        backend.check_model(body.model)


def prompt_call(body: CountBody, salt: str) -> ChatCall:
    """The call as far as the prompt goes. Raises BadRequestError for what the schema cannot tell."""
    if body.messages[-1].role == "assistant":
        raise BadRequestError(
            "the last message is the assistant's; continuing it is not supported, end with a user message",
            f"messages.{len(body.messages) - 1}",
        )
    thinking = body.thinking.type if body.thinking is not None else None
    output = body.output_config.format if body.output_config is not None else None
    return ChatCall(
        messages=_messages(body),
        tools=[
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in body.tools
        ],
        tool_choice=_tool_choice(body),
        schema=output.schema_ if output is not None else None,
        thinking=thinking == "enabled" if thinking in ("enabled", "disabled") else None,
        salt=salt,
    )


def full_call(body: MessagesBody, salt: str) -> ChatCall:
    return replace(
        prompt_call(body, salt),
        max_tokens=body.max_tokens,
        # It must be given, so agents give the most that the model they know can do.
        clamp=True,
        sampling=Sampling(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        stops=tuple(body.stop_sequences),
    )


def _tool_choice(body: CountBody) -> str:
    choice = body.tool_choice
    if isinstance(choice, NoChoice):
        return "none"
    if not isinstance(choice, AnyChoice | NamedChoice):
        return "auto"
    if not body.tools:
        raise BadRequestError("a tool must be used, but there are no tools", "tool_choice")
    if isinstance(choice, AnyChoice):
        return "required"
    if choice.name not in [tool.name for tool in body.tools]:
        raise BadRequestError(f"there is no tool {choice.name!r} in tools", "tool_choice.name")
    return choice.name


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
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text or None, "tool_calls": calls}
