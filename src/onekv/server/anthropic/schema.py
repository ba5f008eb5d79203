"""Request bodies of the Messages API. Fields that do not change the answer here (cache_control, metadata) are ignored.

A block of a kind that is not listed, such as an image, is rejected by its type; in a tool's result it is replaced by a
line of text, since it stays in the history of the conversation.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ..body import Body, JsonObject, Str
from ..tools import OtherTool, placeholder


class TextBlock(Body):
    type: Literal["text"]
    text: Str


class ThinkingBlock(Body):
    """Of an earlier turn. The signature is not checked: the rest of the conversation is the client's word, too."""

    type: Literal["thinking"]
    thinking: Str = ""


class RedactedBlock(Body):
    """Thinking that only Anthropic can read: accepted, and dropped."""

    type: Literal["redacted_thinking"]


class ServerToolBlock(Body):
    """Of a tool that Anthropic runs, in a conversation that began there: accepted, and dropped, as its tool is."""

    type: Literal[
        "server_tool_use",
        "mcp_tool_use",
        "mcp_tool_result",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "container_upload",
    ]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Str
    name: Str
    input: JsonObject


def _as_blocks(value: Any) -> Any:
    """A string stands for one block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])]


def _as_texts(value: Any) -> Any:
    """A tool's result as text; what is no text in it is named."""
    blocks = _as_blocks(value)
    if not isinstance(blocks, list):
        return blocks
    kinds = [block.get("type") if isinstance(block, dict) else None for block in blocks]
    return [
        {"type": "text", "text": placeholder(kind)} if isinstance(kind, str) and kind != "text" else block
        for kind, block in zip(kinds, blocks, strict=True)
    ]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Str
    content: Annotated[
        list[TextBlock], BeforeValidator(_as_texts, json_schema_input_type=str | list[dict[str, Any]])
    ] = Field(default_factory=list)
    is_error: bool = False


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ServerToolBlock | ToolUseBlock, Field(discriminator="type")
]


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
    """A tool that the client runs and describes; those that Anthropic runs or describes have another type."""

    type: Literal["custom"] | None = None
    name: Annotated[Str, Field(min_length=1)]
    description: Str = ""
    input_schema: JsonObject


def _tool_tag(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "other" if isinstance(kind, str) and kind != "custom" else "custom"


AnyTool = Annotated[Annotated[Tool, Tag("custom")] | Annotated[OtherTool, Tag("other")], Discriminator(_tool_tag)]


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
    """A budget is passed to the template, which may have a place for it; whether it is kept is up to the model."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Str | None = None


class CountBody(Body):
    """What the prompt is made of."""

    model: Str
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Texts = Field(default_factory=list)
    tools: list[AnyTool] = Field(default_factory=list)
    tool_choice: Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def wants_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def template(self) -> dict[str, Any]:
        """What is passed to the template."""
        effort = self.output_config.effort if self.output_config is not None else None
        budget = self.thinking.budget_tokens if self.thinking is not None and self.wants_thinking else None
        told = {"reasoning_effort": effort, "thinking_budget": budget}
        return {name: value for name, value in told.items() if value is not None}

    @property
    def own_tools(self) -> list[Tool]:
        return [tool for tool in self.tools if isinstance(tool, Tool)]


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[Annotated[Str, Field(min_length=1)]] = Field(default_factory=list)
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    # 0: the likeliest token.
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # -1: all tokens.
    top_k: Annotated[int, Field(ge=-1)] | None = None
