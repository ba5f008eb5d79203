"""The model's output as it arrives: the same for all APIs, each of which only renders it in its own format.

    TextDelta, ToolCallPart ... ToolCallDelta ... -> Finish       per choice; the choices of one answer come mixed

A call is emitted whole when it has ended. If its arguments can be parsed before that, and the answer is streamed, parts
of them are emitted first.
"""

import secrets
from dataclasses import dataclass, field
from typing import Literal

from ..engine import End, Logprob, Timings
from ..prefix.branch import Branch


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class TextDelta:
    """Content or reasoning, and the tokens it was made from, with their log probabilities if those were requested.

    Text may lag behind its tokens.
    """

    kind: Literal["content", "reasoning"]
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCallPart:
    """A piece of the arguments of a call that continues; the `ToolCallDelta` of the same id then has all of them."""

    name: str
    text: str
    id: str
    first: bool


@dataclass(frozen=True)
class ToolCallDelta:
    """A tool call; `arguments` is JSON text of an object, or the beginning of one if the answer was cut off in it."""

    name: str
    arguments: str
    complete: bool = True
    id: str = field(default_factory=new_call_id, compare=False)
    # Whether its arguments have come in parts before.
    in_parts: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Finish:
    """How a choice ended, and what it took in tokens; `generated` counts all of them, the stop token too."""

    reason: Literal["stop", "length", "tool_calls"]
    # The stop string that was met.
    stopped_by: str | None
    prompt_tokens: int
    cached_tokens: int
    generated: int
    reasoning_tokens: int
    timings: Timings
    # Where the prompt left what was cached.
    branch: Branch | None = None
    # Tokens that were guessed to be next, and those of them that were.
    proposed: int = 0
    accepted: int = 0

    @staticmethod
    def of(end: End, called: bool = False, reasoning_tokens: int = 0) -> "Finish":
        """`called`: the choice has called a tool."""
        return Finish(
            "length" if end.finish_reason == "length" else "tool_calls" if called else "stop",
            end.stopped_by,
            end.prompt_tokens,
            end.cached_tokens,
            end.generated,
            reasoning_tokens,
            end.timings,
            end.branch,
            end.proposed,
            end.accepted,
        )


TypedDelta = TextDelta | ToolCallPart | ToolCallDelta | Finish
