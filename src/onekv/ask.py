"""Converts a caller's arguments for the engine: prompts to tokens, messages to tokens, keywords to a `Sampling`.

Invalid arguments are reported here, before anything starts. Neither MLX nor the engine is used: any thread may call it.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

from jinja2 import TemplateError

from .config import whole
from .engine import Sampling
from .errors import PromptError, SettingError

Prompt = str | Sequence[int]
Message = dict[str, Any]

MAX_TOKENS = 256
OPTIONS = ("max_tokens", *(f.name for f in fields(Sampling) if f.name != "max_tokens"), "salt", "pin", "prediction")
# What the Python and Jinja code of a template raises on messages it was not made for.
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError)


@dataclass(frozen=True)
class Options:
    """What is asked of one answer."""

    sampling: Sampling
    salt: str = ""
    pin: bool = False
    # Text that the answer may largely consist of; empty if unknown.
    prediction: Prompt = ""


def prompts_of(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts there are, and whether it is a list of them and not one of token ids."""
    if isinstance(prompt, list) and not prompt:
        raise PromptError("the prompt is empty; it must have at least one token")
    if isinstance(prompt, list) and not all(isinstance(item, Integral) for item in prompt):
        return list(prompt), True
    one: Any = prompt
    return [one], False


def encode(prompt: Prompt, tokenizer: Any, name: str = "prompt", **how: Any) -> list[int]:
    """The tokens of a prompt; without a tokenizer it must be tokens already. `how` is for the tokenizer."""
    if not isinstance(prompt, str):
        listed = isinstance(prompt, Iterable) and not isinstance(prompt, bytes)
        tokens: list[Any] = list(prompt) if listed else [None]
        if not all(isinstance(token, Integral) for token in tokens):
            raise PromptError(f"the {name} is {str(prompt)[:80]}; it must be text or a list of token ids")
        return [int(token) for token in tokens]
    if not prompt:
        raise PromptError(f"the {name} is empty; it must have at least one token")
    if tokenizer is None:
        raise PromptError("a text prompt needs the model's tokenizer; pass tokenizer=... to LLM, or pass token ids")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise PromptError(f"the {name} contains a lone surrogate; it must be valid text")
    return [int(token) for token in tokenizer.encode(prompt, **how)]


def encode_prediction(prediction: Prompt, tokenizer: Any) -> list[int]:
    """The tokens of a prediction, which continues where the prompt ends: nothing marks its beginning."""
    empty = isinstance(prediction, str) and not prediction
    return [] if empty else encode(prediction, tokenizer, "prediction", add_special_tokens=False)


def chat_tokens(name: str, tokenizer: Any, messages: list[Message], given: Mapping[str, Any] | None) -> list[int]:
    """What messages become under the chat template of the model `name`; `given` are names for the template."""
    if not messages:
        raise PromptError("there are no messages; give at least one")
    if tokenizer is None:
        raise PromptError("messages need the model's tokenizer; pass tokenizer=... to LLM, or pass token ids")
    if tokenizer.chat_template is None:
        raise PromptError(f"{name} has no chat template; use generate with a plain prompt")
    if given is not None and not isinstance(given, Mapping):
        raise SettingError(f"chat_template_kwargs is {given!r}; it must be a dict of names that the template knows")
    try:
        tokens = tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, **(given or {})})
    except TEMPLATE_ERRORS as error:
        raise PromptError(f"the chat template of {name} does not accept these messages: {error}") from error
    return [int(token) for token in tokens]


def options_of(
    count: int, max_tokens: int | None, sampling: Sampling | Sequence[Sampling] | None, given: dict[str, Any]
) -> list[Options]:
    """One for each of `count` prompts. Keywords change single fields of `sampling`, or of the default."""
    for name in given:
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingError(f"unknown option {name!r}; available: {', '.join(OPTIONS)}{hint}")
    salt, pin, predictions = given.get("salt", ""), given.get("pin", False), _predictions(given, count)
    changes = {name: value for name, value in given.items() if name not in ("salt", "pin", "prediction")}
    if max_tokens is not None:
        changes["max_tokens"] = whole()(max_tokens, "--max-tokens")
    each: list[Any] = list(sampling) if isinstance(sampling, list | tuple) else [sampling or Sampling()] * count
    if not all(isinstance(one, Sampling) for one in each):
        raise SettingError(f"sampling is {sampling!r}; it must be a Sampling, or one for each prompt")
    if len(each) != count:
        raise SettingError(f"sampling has {len(each)} entries for {count} prompts; pass one, or one for each")
    return [
        Options(replace(one, **changes) if changes else one, salt, pin, prediction)
        for one, prediction in zip(each, predictions, strict=True)
    ]


def _predictions(given: dict[str, Any], count: int) -> list[Prompt]:
    """One for each of `count` prompts."""
    prediction = given.get("prediction")
    if prediction is None or (isinstance(prediction, list) and not prediction):
        return [""] * count
    predictions, many = prompts_of(prediction)
    if many and len(predictions) != count:
        raise SettingError(f"prediction has {len(predictions)} entries for {count} prompts; pass one, or one for each")
    return predictions if many else predictions * count
