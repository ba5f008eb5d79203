"""Bodies of OpenAI's chat and completions requests. Fields that are not here are ignored, null means not given."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ...engine import Sampling
from ..body import Body, JsonObject, Str, sendable, whole
from ..errors import BadRequestError

MAX_STOPS = 16
MAX_GENERATIONS = 128


def as_text(content: Any) -> Any:
    """The text of content that is given in parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"a part of type {kind!r} is not supported; only text is")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ValueError(f"a part of type {kind!r} has no text")
        texts.append(text)
    return "\n".join(texts)


def as_arguments(value: Any) -> Any:
    """The object that JSON text stands for."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "{}")
    except RecursionError:
        raise ValueError("the arguments are nested too deep") from None


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


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# What may be sent where more than one form is taken.
Parts = str | list[dict[str, Any]] | None
Prompts = str | list[str] | list[int] | list[list[int]]

Numbers = Annotated[dict[str, float], BeforeValidator(sendable)]
Arguments = Annotated[JsonObject, BeforeValidator(as_arguments, json_schema_input_type=str | dict[str, Any])]
Content = Annotated[Str | None, BeforeValidator(as_text, json_schema_input_type=Parts)]
ToolChoice = Annotated[Str | None, BeforeValidator(as_choice, json_schema_input_type=str | dict[str, Any] | None)]
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
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    reasoning_content: Str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: Str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        return self

    def as_message(self) -> dict[str, Any]:
        """As `ChatCall` wants it."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id or ""
        if self.role == "assistant" and self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "assistant" and self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
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


class StreamOptions(Body):
    include_usage: bool | None = None


class ChatTemplateKwargs(Body):
    enable_thinking: bool | None = None


class GenerateBody(Body):
    """What chat and completions have in common."""

    model: Str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Numbers | None = None
    stop: Stops = None
    n: int | None = Field(None, ge=1, le=16)
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def sampling(self, vocabulary: int) -> Sampling:
        """Raises BadRequestError for a bias on what is no token of the model's."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_biases(self.logit_bias or {}, vocabulary),
        )

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(GenerateBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None
    reasoning_effort: Str | None = None

    def thinking(self) -> bool | None:
        if self.chat_template_kwargs is not None and self.chat_template_kwargs.enable_thinking is not None:
            return self.chat_template_kwargs.enable_thinking
        return False if self.reasoning_effort == "none" else None


def as_prompts(value: Any) -> Any:
    """A list of prompts, each of them text or tokens."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_token(value[0])):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, a list of texts, a list of tokens, or a list of such lists, and not empty")
    if len(value) > MAX_GENERATIONS:
        raise ValueError(f"has {len(value)} prompts; at most {MAX_GENERATIONS} are taken")
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
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None


def _biases(given: dict[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    biases = []
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12 and int(key) < vocabulary):
            raise BadRequestError(f"{key[:40]!r} is no token id; the model knows 0 to {vocabulary - 1}", "logit_bias")
        if not -100 <= bias <= 100:
            raise BadRequestError(f"the bias of {key} is {bias}; it must be from -100 to 100", "logit_bias")
        biases.append((int(key), bias))
    return tuple(biases)
