"""Bodies of Ollama's requests. Fields and options that are not here are ignored (`keep_alive`, `num_ctx`, ...), null
means not given.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..body import Body, JsonObject, Str
from ..openai.schema import Arguments, Function, Stops


def as_whole(value: Any) -> Any:
    """Ollama takes 8.0 for 8, and programs send it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def no_images(value: Any) -> Any:
    if value:
        raise ValueError("images are not supported: the model only accepts text")
    return value


Whole = BeforeValidator(as_whole, json_schema_input_type=int)
Images = Annotated[list[Any] | None, BeforeValidator(no_images, json_schema_input_type=list[str] | None)]
# Ollama's name for the longest answer that is possible.
WITHOUT_LIMIT = -2


class Options(Body):
    """How tokens are chosen, and when the answer ends."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31), Whole] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), Whole] | None = None
    # -1 and -2: as long as the server lets it.
    num_predict: Annotated[int, Field(ge=WITHOUT_LIMIT, le=2**31), Whole] | None = None
    stop: Stops = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None


class AnswerBody(Body):
    """What chat and generate have in common."""

    model: Str
    stream: bool | None = None
    options: Options | None = None
    # "json" is any JSON object.
    format: Literal["", "json"] | JsonObject | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def streams(self) -> bool:
        """By default it does."""
        return self.stream is not False


class FunctionCall(Body):
    name: Str
    arguments: Arguments


class MessageToolCall(Body):
    id: Str | None = None
    function: FunctionCall


class Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: Str | None = None
    thinking: Str | None = None
    images: Images = None
    tool_calls: list[MessageToolCall] | None = None
    tool_name: Str | None = None
    tool_call_id: Str | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class ChatBody(AnswerBody):
    messages: list[Message] | None = None
    tools: list[Tool] | None = None


class GenerateBody(AnswerBody):
    prompt: Str | None = None
    system: Str | None = None
    raw: bool | None = None
    images: Images = None
    suffix: Str | None = None
    template: Str | None = None
    context: list[int] | None = None

    @model_validator(mode="after")
    def _can_be_done(self) -> "GenerateBody":
        if self.template:
            raise ValueError("template is not supported: the server has one for all requests (--chat-template)")
        if self.context:
            raise ValueError("context is not supported: send the conversation as messages to /api/chat")
        return self


class ShowBody(Body):
    model: Str | None = None
    # As it was called once.
    name: Str | None = None

    @model_validator(mode="after")
    def _names_a_model(self) -> "ShowBody":
        if not (self.model or self.name):
            raise ValueError("model is missing")
        return self
