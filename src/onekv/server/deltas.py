"""What the model says, as it comes: the same for all APIs, each of which only writes it in its own format.

    TextDelta, ToolCallDelta ... -> Finish        per choice; the choices of one answer come mixed

A call is given whole: what its markers enclose can only be read when it has ended.
"""

import secrets
from dataclasses import dataclass, field
from typing import Literal

from ..engine import End, Logprob


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class TextDelta:
    """Content or reasoning, and the tokens it was made from, with their log probabilities if those were asked for.

    Text may lag behind its tokens.
    """

    kind: Literal["content", "reasoning"]
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCallDelta:
    """A tool call; `arguments` is JSON text of an object."""

    name: str
    arguments: str
    id: str = field(default_factory=_call_id, compare=False)


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
        )


TypedDelta = TextDelta | ToolCallDelta | Finish
