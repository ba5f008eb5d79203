"""Chat templates, and the properties of a tokenizer that follow from its template."""

import importlib
from copy import copy
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser

from ..errors import SettingError


def with_template(tokenizer: TokenizerWrapper, template: str) -> TokenizerWrapper:
    """The same tokenizer with another chat template, and with the parser of the tool calls that this one teaches.

    Raises SettingError for a template that cannot render a message.
    """
    # Another model may have the same tokenizer.
    inner = copy(tokenizer._tokenizer)
    inner.chat_template = template
    changed = TokenizerWrapper(
        inner, lambda _: tokenizer._detokenizer, eos_token_ids=tokenizer.eos_token_ids, **tool_parser(inner)
    )
    try:
        changed.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        line = f" (line {number})" if (number := getattr(error, "lineno", None)) is not None else ""
        raise SettingError(f"--chat-template cannot render a user message: {error}{line}") from error
    return changed


def tool_parser(tokenizer: Any) -> dict[str, Any]:
    """TokenizerWrapper's tool-call arguments, found as mlx-lm finds them for a folder."""
    kind = _infer_tool_parser(tokenizer)
    if kind is None:
        return {}
    module = importlib.import_module(f"mlx_lm.tool_parsers.{kind}")
    return {
        "tool_parser": module.parse_tool_call,
        "tool_call_start": module.tool_call_start,
        "tool_call_end": module.tool_call_end,
    }
