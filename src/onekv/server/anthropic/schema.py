"""Request bodies of the Messages API. Fields that do not change the answer here (cache_control, metadata) are ignored.

A block of a kind that is not listed, such as an image, is refused by its type.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..body import Body, JsonObject, Str


class TextBlock(Body):
    type: Literal["text"]
    text: Str


class ThinkingBlock(Body):
    """Of an earlier turn: accepted, and dropped."""

    type: Literal["thinking", "redacted_thinking"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Str
    name: Str
    input: JsonObject


def _as_blocks(value: Any) -> Any:
    """A string stands for one block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Str
    content: Texts = Field(default_factory=list)
    is_error: bool = False


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(Body):
    role: Literal["user"]
    content: Annotated[
        list[UserBlock],
        Field(min_length=1),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[UserBlock]),
    ]


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: Annotated[
        list[AssistantBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[AssistantBlock])
    ]


class SystemMessage(Body):
    role: Literal["system"]
    content: Texts


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(Body):
    """A tool that the client runs; those that run at Anthropic have another type and are refused by it."""

    type: Literal["custom"] | None = None
    name: Annotated[Str, Field(min_length=1)]
    description: Str = ""
    input_schema: JsonObject


class AutoChoice(Body):
    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyChoice(Body):
    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(Body):
    type: Literal["tool"]
    name: Str
    disable_parallel_tool_use: bool = False


class NoChoice(Body):
    type: Literal["none"]


class Thinking(Body):
    """How much is thought is the model's own affair: a budget is accepted and ignored."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None


class CountBody(Body):
    """What the prompt is made of."""

    model: Str
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Texts = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[Annotated[Str, Field(min_length=1)]] = Field(default_factory=list)
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
