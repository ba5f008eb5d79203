"""Bodies of OpenAI's chat and completions requests. Fields that are not here are ignored, null means not given."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from ...engine import Sampling
from ..backend import AS_MANY_AS_FIT, Backend
from ..body import Body, JsonObject, Str, sendable, whole
from ..errors import BadRequestError
from ..tools import OtherTool, placeholder

MAX_STOPS = 16
MAX_GENERATIONS = 128
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# What the server itself passes to the template, and names that are none of the template's.
OWN_NAMES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


def as_text(content: Any) -> Any:
    """The text of content that is given in parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise ValueError(f"a part of type {kind!r} is not supported; only text is")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError(f"a part of type {kind!r} has no text")
        texts.append(text)
    return "\n".join(texts)


def as_result(content: Any) -> Any:
    """The text of a tool's result; what is no text in it is named."""
    if not isinstance(content, list):
        return content
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    return as_text(
        [
            {"type": "text", "text": placeholder(kind)} if isinstance(kind, str) and kind not in TEXT_PARTS else part
            for kind, part in zip(kinds, content, strict=True)
        ]
    )


def as_arguments(value: Any) -> Any:
    """The object that JSON text stands for. Models write broken JSON, and agents send it back: then it stays text."""
    if not isinstance(value, str):
        return value
    try:
        parsed = sendable(json.loads(value or "{}"))
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def as_template_names(value: dict[str, Any]) -> dict[str, Any]:
    own = sorted(OWN_NAMES & value.keys())
    if own:
        raise ValueError(f"{own[0]} cannot be set: the server sets it itself")
    return value


def as_count(value: int) -> int:
    if value == 0:
        raise ValueError(f"must be at least 1, or {AS_MANY_AS_FIT} for as many as fit")
    return value


def as_choice(value: Any) -> Any:
    """A mode, or the name of the tool that must be called."""
    if not isinstance(value, dict):
        if isinstance(value, str) and value not in ("auto", "none", "required"):
            raise ValueError('must be "auto", "none", "required" or a function')
        return value
    function = value.get("function", value)
    if value.get("type") != "function" or not isinstance(function, dict) or "name" not in function:
        raise ValueError("names no function; only functions can be chosen")
    return function["name"]


def as_legacy_choice(value: Any) -> Any:
    return as_choice({"type": "function", **value} if isinstance(value, dict) else value)


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# What may be sent where more than one form is taken.
Parts = str | list[dict[str, Any]] | None
Prompts = str | list[str] | list[int] | list[list[int]]

Numbers = Annotated[dict[str, float], BeforeValidator(sendable)]
Arguments = Annotated[JsonObject | Str, BeforeValidator(as_arguments, json_schema_input_type=str | dict[str, Any])]
Result = Annotated[Str | None, BeforeValidator(as_result, json_schema_input_type=Parts)]
TemplateNames = Annotated[JsonObject, AfterValidator(as_template_names)]
TokenCount = Annotated[int, Field(ge=AS_MANY_AS_FIT, le=2**31), AfterValidator(as_count)]
Content = Annotated[Str | None, BeforeValidator(as_text, json_schema_input_type=Parts)]
ToolChoice = Annotated[Str | None, BeforeValidator(as_choice, json_schema_input_type=str | dict[str, Any] | None)]
LegacyChoice = Annotated[
    Str | None, BeforeValidator(as_legacy_choice, json_schema_input_type=str | dict[str, Any] | None)
]
Stops = Annotated[
    Annotated[list[Str], Field(max_length=MAX_STOPS)] | None,
    BeforeValidator(as_list, json_schema_input_type=str | list[str] | None),
]


class FunctionCall(Body):
    name: Str
    arguments: Arguments


class MessageToolCall(Body):
    id: Str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    # "function" has the results of the legacy `functions`.
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    reasoning_content: Str | None = None
    # Another name for it.
    reasoning: Any = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: Str | None = None

    @model_validator(mode="before")
    @classmethod
    def _result_is_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("role") in ("tool", "function"):
            return given | {"content": as_result(given.get("content"))}
        return given

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    def as_message(self) -> dict[str, Any]:
        """As `ChatCall` wants it."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.role in ("tool", "function"):
            message |= {"role": "tool", "tool_call_id": self.tool_call_id or ""}
        if self.role != "assistant":
            return message
        reasoning = self.reasoning_content or self.reasoning
        if reasoning and isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
        calls = list(self.tool_calls or [])
        if self.function_call is not None:
            calls.append(MessageToolCall(function=self.function_call))
        if calls:
            message["tool_calls"] = [call.model_dump() for call in calls]
        return message


class Function(Body):
    name: Str = Field(min_length=1, max_length=256)
    description: Str | None = None
    parameters: JsonObject | None = None

    def as_tool(self) -> dict[str, Any]:
        """As `ChatCall` wants it."""
        parameters = self.parameters if self.parameters is not None else {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}


class Tool(Body):
    type: Literal["function"]
    function: Function


def tool_tag(tool: Any) -> str:
    """Named like no field, so that the place of an error can be recognized by it."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "other-tool" if isinstance(kind, str) and kind != "function" else "function-tool"


AnyTool = Annotated[
    Annotated[Tool, Tag("function-tool")] | Annotated[OtherTool, Tag("other-tool")], Discriminator(tool_tag)
]


class JsonSchema(Body):
    name: Str | None = None
    schema_: JsonObject = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs json_schema")
        return self

    def schema_of_answer(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        return self.json_schema.schema_ if self.type == "json_schema" and self.json_schema is not None else {}


class Prediction(Body):
    """Predicted outputs: what the client thinks that the answer will mostly be."""

    type: Literal["content"]
    content: Content


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerateBody(Body):
    """What chat and completions have in common."""

    model: Str
    temperature: float | None = Field(None, ge=0, le=2)
    # 0: the likeliest token.
    top_p: float | None = Field(None, ge=0, le=1)
    # -1: all tokens.
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Numbers | None = None
    stop: Stops = None
    n: int | None = Field(None, ge=1, le=16)
    max_tokens: TokenCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # As in llama.cpp: the stream reports prefill progress.
    return_progress: bool | None = None

    def sampling(self, backend: Backend) -> Sampling:
        """Raises BadRequestError for a bias on what is no token of the model's."""
        return backend.defaults.sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias or {}, backend.llm.vocabulary),
        )

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TemplateBody(Body):
    """What is passed to the template besides messages and tools."""

    chat_template_kwargs: TemplateNames | None = None
    reasoning_effort: Str | None = None
    thinking_budget: int | None = Field(None, ge=0, le=2**31)

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    def template(self) -> dict[str, Any]:
        told = {} if self.effort is None else _template_effort(self.effort)
        if self.thinking_budget is not None:
            told["thinking_budget"] = self.thinking_budget
        given = {name: value for name, value in (self.chat_template_kwargs or {}).items() if value is not None}
        return told | given


class ChatBody(GenerateBody, TemplateBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[AnyTool] | None = None
    tool_choice: ToolChoice = None
    # What tools were called before there were tools.
    functions: list[Function] | None = None
    function_call: LegacyChoice = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None

    @property
    def legacy(self) -> bool:
        """Whether the client knows `functions` alone."""
        return bool(self.functions) and not self.tools

    @property
    def callable_functions(self) -> list[Function]:
        return [tool.function for tool in self.tools or [] if isinstance(tool, Tool)] + (self.functions or [])


def _template_effort(effort: str) -> dict[str, Any]:
    """An effort as templates know it: some by that name, some as a switch."""
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def as_prompts(value: Any) -> Any:
    """A list of prompts, each of them text or tokens."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_token(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, a list of texts, a list of tokens, or a list of such lists, and not empty")
    if len(value) > MAX_GENERATIONS:
        raise ValueError(f"has {len(value)} prompts; at most {MAX_GENERATIONS} are accepted")
    for each in value:
        if not isinstance(each, str) and not (isinstance(each, list) and all(_is_token(token) for token in each)):
            raise ValueError("has a prompt that is neither text nor a list of tokens")
        if not each:
            raise ValueError("has a prompt that is empty")
        if isinstance(each, str):
            whole(each)
    return value


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CompletionBody(GenerateBody):
    prompt: Annotated[list[Any], BeforeValidator(as_prompts, json_schema_input_type=Prompts)]
    logprobs: int | None = Field(None, ge=0, le=20)
    # 0 with `echo`: nothing but the prompt.
    max_tokens: Annotated[int, Field(ge=AS_MANY_AS_FIT, le=2**31)] | None = None
    echo: bool | None = None
    suffix: Str | None = None
    best_of: Literal[1] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which needs echo; it must be at least 1, or -1 for as many as fit")
        if self.suffix and self.echo:
            raise ValueError("suffix and echo cannot be combined: the prompt is then not what was sent")
        return self


def _biases(given: dict[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    biases = []
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < vocabulary):
            raise BadRequestError(f"{key[:40]!r} is not a token id from 0 to {vocabulary - 1}", "logit_bias")
        if not -100 <= bias <= 100:
            raise BadRequestError(f"the bias of {key} is {bias}; it must be from -100 to 100", "logit_bias")
        biases.append((int(key), bias))
    return tuple(biases)
