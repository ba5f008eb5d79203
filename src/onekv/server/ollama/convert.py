"""From the bodies of Ollama's API to the common `ChatCall`."""

from typing import Any

from fastapi import Request

from ..backend import Backend
from ..call import ChatCall, ChatMessage
from ..models.choose import choose
from .schema import AnswerBody, Message, Options, Tool

# What Ollama adds to a name that has no tag.
LATEST = ":latest"


async def chosen(request: Request, name: str) -> Backend:
    """The model that a request names. Raises NotFoundError if there is none of that name."""
    return await choose(request, name.removesuffix(LATEST))


def call_of(
    backend: Backend, body: AnswerBody, salt: str, messages: list[ChatMessage], tools: list[Tool] | None = None
) -> ChatCall:
    options = body.options or Options()
    form = body.format
    return ChatCall(
        messages=messages,
        tools=[tool.function.as_tool() for tool in tools or []],
        schema=form if isinstance(form, dict) else {} if form == "json" else None,
        thinking=None if body.think is None else bool(body.think),
        template={"reasoning_effort": body.think} if isinstance(body.think, str) else {},
        max_tokens=options.num_predict if options.num_predict is not None and options.num_predict > 0 else None,
        # Programs give more than there is room for.
        clamp=True,
        sampling=backend.defaults.sampling(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=options.seed,
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
        ),
        stops=tuple(options.stop or ()),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        salt=salt,
    )


def messages_of(messages: list[Message]) -> list[ChatMessage]:
    """Calls and results mostly have no ids here: the results after a turn are those of its calls, in order."""
    found: list[ChatMessage] = []
    open_calls: list[str] = []
    number = 0
    for message in messages:
        made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "tool":
            first = open_calls.pop(0) if open_calls else ""
            made["tool_call_id"] = message.tool_call_id or first
            if message.tool_name:
                made["name"] = message.tool_name
        elif message.role == "assistant":
            if message.thinking:
                made["reasoning_content"] = message.thinking
            if message.tool_calls:
                open_calls = [call.id or f"call_{number + each}" for each, call in enumerate(message.tool_calls)]
                number += len(open_calls)
                calls = zip(open_calls, message.tool_calls, strict=True)
                made["tool_calls"] = [
                    {"id": id, "type": "function", "function": call.function.model_dump()} for id, call in calls
                ]
        found.append(made)
    return found
