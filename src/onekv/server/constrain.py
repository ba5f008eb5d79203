"""Constrained answers, enforced token by token with llguidance.

Three constraints: JSON that matches a schema, a mandatory tool call, or either of the two. Thinking is unconstrained;
the constraint begins with the token after the reasoning.
"""

import json
import threading
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import RequestFailedError, SettingError
from .backend import Backend
from .call import ChatCall
from .errors import BadRequestError, FormError
from .prompt import CALL_END, CALL_START, calls_as_json, uses_tools

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


Flags = np.ndarray[Any, np.dtype[np.bool_]]
# One way to write JSON, the way earlier calls are rendered: a call that comes back is found in the prefix cache, and a
# small model cannot fill its answer with white space.
_LAYOUT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}

_tokenizers: "WeakKeyDictionary[Backend, LLTokenizer]" = WeakKeyDictionary()
_lock = threading.Lock()


class GrammarConstraint:
    """One request's place in a grammar."""

    def __init__(self, matcher: "LLMatcher", tokenizer: "LLTokenizer", think_end: tuple[int, ...] = ()) -> None:
        """With `think_end` the grammar begins after those tokens; until then only the end is forbidden."""
        self._matcher, self._tokenizer = matcher, tokenizer
        self._think_end = think_end
        self._last: list[int] = []
        # What was allowed for the token that comes next.
        self._allowed: Flags | None = None

    def copy(self) -> "GrammarConstraint":
        """The same, for another request; only before the first token."""
        return GrammarConstraint(self._matcher.deep_copy(), self._tokenizer, self._think_end)

    def allowed(self) -> Flags:
        size = self._tokenizer.vocab_size
        if self._think_end:
            flags = np.ones(size, np.bool_)
            flags[self._tokenizer.eos_tokens] = False
            return flags
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        # A matcher that gave up allows the end alone; `advance` then says why.
        self._allowed = np.unpackbits(bits, bitorder="little")[:size].astype(np.bool_)
        return self._allowed

    def advance(self, token: int) -> None:
        if self._think_end:
            self._last = [*self._last, token][-len(self._think_end) :]
            if tuple(self._last) == self._think_end:
                self._think_end = ()
            return
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            message = f"the answer could not be constrained: {_reason(self._matcher)}"
            asked = self._allowed is not None and self._allowed[token]
            raise (FormError if asked else RequestFailedError)(message)


def constraint_for(backend: Backend, call: ChatCall, thinking: bool) -> GrammarConstraint | None:
    """The constraint on answers to `call`, if any; `thinking`: the prompt has opened the reasoning."""
    tokenizer = backend.tokenizer
    tools = _callable_tools(call)
    if call.schema is None and not tools:
        return None
    if tools and not calls_as_json(tokenizer):
        what = "tools together with response_format" if call.schema is not None else "a mandatory tool call"
        message = f"{backend.name} writes tool calls in its own format; {what} cannot be enforced for it"
        raise BadRequestError(message, "tool_choice")
    model = _tokenizer(backend)
    grammar = _grammar(call, tools, model, tokenizer)
    matcher = _llguidance().LLMatcher(model, grammar, log_level=0)
    reason = _reason(_begun(matcher))
    if reason:
        field = "response_format" if call.schema is not None else "tools"
        raise BadRequestError(f"the JSON schema cannot be used: {reason}", field)
    think_end = tuple(tokenizer.think_end_tokens) if thinking else ()
    return GrammarConstraint(matcher, model, think_end)


def _begun(matcher: "LLMatcher") -> "LLMatcher":
    """A copy that has gone as far as the answer is forced: schemas that compile and that no answer fits fail here."""
    copy = matcher.deep_copy()
    if not copy.is_error():
        copy.compute_bitmask()
    if not copy.is_error():
        copy.consume_tokens(copy.compute_ff_tokens()[:1])
    return copy


def _reason(matcher: "LLMatcher") -> str:
    """Why `matcher` gave up, without its state and the grammar, which the client has not written; "" if it has not."""
    error = str(matcher.get_error())
    if error.startswith("NoExtensionBias"):
        return "no answer satisfies it; it may be infinitely recursive"
    if "Too many items" in error:
        return "it is too large, or is infinitely recursive"
    text = error.partition("\n   1 |")[0].partition("\n<state>")[0]
    return text.partition("failed to compile JSON schema: ")[2] or text


def _callable_tools(call: ChatCall) -> list[dict[str, Any]]:
    """The functions that the form has to provide for."""
    if not uses_tools(call):
        return []
    functions = [tool["function"] for tool in call.tools]
    if call.tool_choice == "required":
        return functions
    if call.tool_choice == "auto":
        return functions if call.schema is not None else []
    named = [function for function in functions if function["name"] == call.tool_choice]
    if not named:
        raise BadRequestError(f"tool_choice names {call.tool_choice!r}, which is not in tools", "tool_choice")
    return named


def _grammar(call: ChatCall, functions: list[dict[str, Any]], model: "LLTokenizer", tokenizer: Any) -> str:
    """A Lark grammar of the calls, the answer, or both."""
    rules, starts = [], []
    if functions:
        starts.append("call")
        start, end = (_marker(marker, model, tokenizer) for marker in (CALL_START, CALL_END))
        names = " | ".join(f"call_{index}" for index in range(len(functions)))
        rules.append(f'call: {start} "\\n" ({names}) "\\n" {end}')
    for index, function in enumerate(functions):
        head = '{"name": ' + json.dumps(function["name"], ensure_ascii=False) + ', "arguments": '
        rules.append(f'call_{index}: {json.dumps(head, ensure_ascii=False)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: {_json(_parameters(function))}")
    if call.schema is not None and call.tool_choice in ("auto", "none"):
        starts.append("answer")
        rules.append(f"answer: {_json(call.schema or {'type': 'object'})}")
    lark = "\n".join(["start: " + " | ".join(starts), *rules])
    return str(_llguidance().LLMatcher.grammar_from_lark(lark))


def _check_multiples(schema: Any) -> None:
    """llguidance has a state for every remainder: for a large `multipleOf` it takes minutes and all memory."""
    if isinstance(schema, list):
        for each in schema:
            _check_multiples(each)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name == "multipleOf" and isinstance(value, int | float):
                digits = "".join(map(str, Decimal(str(value)).as_tuple().digits)).rstrip("0")
                if len(digits) > 4:
                    raise BadRequestError(f"multipleOf is {value}; more than 4 significant digits cannot be enforced")
            _check_multiples(value)


def _json(schema: dict[str, Any]) -> str:
    _check_multiples(schema)
    return "%json " + json.dumps(schema | {"x-guidance": _LAYOUT})


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object"} | (function.get("parameters") or {})
    if parameters["type"] != "object":
        raise BadRequestError(f"the parameters of {function['name']} are not of type object", "tools")
    return parameters


def _marker(text: str, model: "LLTokenizer", tokenizer: Any) -> str:
    """A marker in Lark: a special token is written as it is, text as a string."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) == 1 and model.is_special_token(tokens[0]):
        return text
    return json.dumps(text)


def _tokenizer(backend: Backend) -> "LLTokenizer":
    """The model's tokenizer as llguidance wants it; made once."""
    with _lock:
        if backend not in _tokenizers:
            _tokenizers[backend] = _build_tokenizer(backend)
        return _tokenizers[backend]


def _build_tokenizer(backend: Backend) -> "LLTokenizer":
    _llguidance()
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(backend.tokenizer._tokenizer, eos_token=sorted(backend.llm.stop_tokens))
    except ValueError as error:
        message = f"response_format and tool_choice cannot be enforced for the tokenizer of {backend.name}: {error}"
        raise BadRequestError(message) from error


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        message = "response_format and tool_choice need the package llguidance; install onekv[server]"
        raise SettingError(message) from None
    return llguidance
