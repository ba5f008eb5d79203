"""The common form of a chat request: an endpoint converts its body to a `ChatCall`, everything else reads that."""

from dataclasses import dataclass, field
from typing import Any

from ..engine import Sampling

ChatMessage = dict[str, Any]
Schema = dict[str, Any]


@dataclass(frozen=True)
class ChatCall:
    """`messages` are as in OpenAI's API, with plain text as content; tool calls have their arguments as an object:

    {"role": "assistant", "content": str | None, "tool_calls": [{"id": str, "function": {"name": str,
    "arguments": dict}}], "reasoning_content": str} and {"role": "tool", "tool_call_id": str, "content": str}.
    Arguments that the client sends as anything but a JSON object are the text that it sent. `tools` are OpenAI's:
    {"type": "function", "function": {"name": str, "description": str, "parameters": schema}}.
    """

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = field(default_factory=list)
    # "auto", "none", "required", or the name of the one tool that must be called.
    tool_choice: str = "auto"
    # A JSON schema that the answer must fit; {} for any JSON object.
    schema: Schema | None = None
    # Whether a thinking model should think; None leaves it to the template.
    thinking: bool | None = None
    # Values for the chat template besides; they win over `--chat-template-args`.
    template: dict[str, Any] = field(default_factory=dict)
    # The answer is given as it comes.
    stream: bool = False
    # The answer ends after its first tool call.
    one_call: bool = False
    # None: the server's default; AS_MANY_AS_FIT.
    max_tokens: int | None = None
    # Where there is room for less than `max_tokens`, take what there is.
    clamp: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    n: int = 1
    salt: str = ""
    # What the client thinks that the answer will mostly be.
    prediction: str = ""
