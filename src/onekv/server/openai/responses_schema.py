"""The body of a /v1/responses request, and the conversation it stands for."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ..body import Body, JsonObject, Str, sendable
from ..tools import OtherTool
from .schema import (
    Arguments,
    Function,
    GenerateBody,
    Parts,
    Result,
    TemplateBody,
    TokenCount,
    ToolChoice,
    as_text,
    tool_tag,
)

LOGPROBS = "message.output_text.logprobs"


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _as_reasoning(content: Any) -> Any:
    """Parts of a reasoning item are text too."""
    if isinstance(content, list):
        content = [
            part | {"type": "text"} if isinstance(part, dict) and part.get("type") == "reasoning_text" else part
            for part in content
        ]
    return as_text(content)


class Item(Body):
    """A message, a tool call, its result, or reasoning; which fields count depends on the type.

    Calls of custom tools, whose input is text, are in conversations that another server began, as are those of tools
    that this one leaves out: they are left out, too.
    """

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    ] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[Str | None, BeforeValidator(_as_reasoning, json_schema_input_type=Parts)] = None
    call_id: Str | None = None
    name: Str | None = None
    arguments: Arguments | None = None
    input: Str | None = None
    output: Result = None

    @model_validator(mode="after")
    def _complete(self) -> "Item":
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "custom_tool_call": ("call_id", "name", "input"),
            "custom_tool_call_output": ("call_id", "output"),
        }.get(self.type, ())
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"an item of type {self.type} needs {missing[0]}")
        return self

    @property
    def left_out(self) -> bool:
        own = ("message", "reasoning", "function_call", "custom_tool_call")
        return self.type.removesuffix("_output") not in own


class FunctionTool(Function):
    type: Literal["function"]
    strict: bool | None = None

    def described(self) -> dict[str, Any]:
        return {"parameters": None, "strict": False, **self.model_dump(exclude_unset=True)}


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function-tool")] | Annotated[OtherTool, Tag("other-tool")], Discriminator(tool_tag)
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type json_schema needs schema")
        return self


class TextOptions(Body):
    format: TextFormat | None = None


class Reasoning(Body):
    effort: Str | None = None


class ResponsesBody(GenerateBody, TemplateBody):
    input: Annotated[
        Annotated[list[Item], Field(min_length=1)], BeforeValidator(_as_items, json_schema_input_type=str | list[Item])
    ]
    instructions: Str | None = None
    previous_response_id: Str | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: TokenCount | None = None
    reasoning: Reasoning | None = None
    include: list[Str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    store: bool | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(sendable)] | None = None
    user: Str | None = None
    # Whether it continues when the client has gone.
    background: bool | None = None
    # These would change what the answer means; they are not there.
    conversation: None = None
    prompt: None = None

    def schema_of_answer(self) -> dict[str, Any] | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return None
        return form.schema_ if form.type == "json_schema" and form.schema_ is not None else {}

    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if LOGPROBS in (self.include or []) else None

    @property
    def functions(self) -> list[FunctionTool]:
        return [tool for tool in self.tools or [] if isinstance(tool, FunctionTool)]

    @property
    def effort(self) -> str | None:
        """Named as in this API, or as in the chat's."""
        given = self.reasoning.effort if self.reasoning is not None else None
        return self.reasoning_effort if given is None else given


def messages_of(items: list[Item]) -> list[dict[str, Any]]:
    """Items as messages: reasoning, text and calls of one turn of the model's are one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if item.left_out:
            continue
        if item.type in ("function_call_output", "custom_tool_call_output"):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif item.type == "message" and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": item.content})
        else:
            _join(_turn(messages, item), item)
    return messages


def _turn(messages: list[dict[str, Any]], item: Item) -> dict[str, Any]:
    """The message of the model's that `item` belongs to."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    begins = item.type == "reasoning" or (item.type == "message" and last is not None and last["content"] is not None)
    if last is None or begins or (item.type == "message" and "tool_calls" in last):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _join(message: dict[str, Any], item: Item) -> None:
    if item.type == "message":
        message["content"] = item.content
    elif item.type == "reasoning":
        message["reasoning_content"] = item.content or ""
    else:
        arguments = {"input": item.input} if item.type == "custom_tool_call" else item.arguments
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)
