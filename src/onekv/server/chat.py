"""What both chat APIs become: a `ChatCall` in, a stream of parts out.

A call is rendered with the model's own chat template to tokens; a choice's text is split into reasoning, content and
tool calls as it comes. Tools: where the template knows tools, it renders them and mlx-lm's parser for that template
reads the calls; else they are described in the system message and called as <tool_call>{json}</tool_call>. A call that
must be made (`tool_choice` "required" or a name) and JSON that must fit a schema are enforced token by token.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from ..engine import Logprob, Sampling

Schema = dict[str, Any]


@dataclass(frozen=True)
class ChatCall:
    """`messages` are as in OpenAI's API, with plain text as content; tool calls have their arguments as an object:

    {"role": "assistant", "content": str | None, "tool_calls": [{"id": str, "function": {"name": str,
    "arguments": dict}}]} and {"role": "tool", "tool_call_id": str, "content": str}. `tools` are OpenAI's:
    {"type": "function", "function": {"name": str, "description": str, "parameters": schema}}.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    # "auto", "none", "required", or the name of the one tool that must be called.
    tool_choice: str = "auto"
    # A JSON schema that the answer must fit; {} for any JSON object.
    schema: Schema | None = None
    # Whether a thinking model should think; None leaves it to the template.
    thinking: bool | None = None
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    n: int = 1
    salt: str = ""


@dataclass(frozen=True)
class Text:
    """Content or reasoning; the first may carry log probabilities, one for each token."""

    kind: Literal["content", "reasoning"]
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCall:
    """A whole call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


Part = Text | ToolCall
