"""Grammars over the default model's tokenizer, without the model."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onekv.engine import Constraint
from onekv.errors import RequestFailedError
from onekv.models import load_model
from onekv.server.call import ChatCall
from onekv.server.constrain import GrammarConstraint, constraint_for
from onekv.server.errors import BadRequestError, FormError, status_of

ANSWER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": ANSWER}}
    for name in ("first", 'sec"ond')
]
USER = [{"role": "user", "content": "Hi"}]
ARGUMENTS = {"name": "Zoë", "age": 7}


class Model:
    """What `constraint_for` needs of a backend."""

    def __init__(self) -> None:
        loaded = load_model("smollm2-135m", lazy=True, progress=False)
        self.name, self.tokenizer = loaded.name, loaded.tokenizer
        self.llm = SimpleNamespace(stop_tokens=set(loaded.tokenizer.eos_token_ids))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def constrained(model: Any, call: ChatCall, thinking: bool = False) -> GrammarConstraint:
    constraint = constraint_for(model, call, thinking)
    assert constraint is not None
    return constraint


def follows(model: Model, constraint: Constraint, text: str) -> bool:
    """Whether `text` may be written and the answer may end after it."""
    for token in model.tokenizer.encode(text, add_special_tokens=False):
        if not constraint.allowed()[token]:
            return False
        constraint.advance(token)
    return bool(constraint.allowed()[list(model.llm.stop_tokens)].all())


def test_json_that_fits(model: Model):
    fitting = json.dumps(ARGUMENTS, ensure_ascii=False)
    constraint = constrained(model, ChatCall(USER, schema=ANSWER))
    assert constraint.allowed().dtype == np.bool_ and len(constraint.allowed()) == len(model.tokenizer)
    assert follows(model, constraint.copy(), fitting)
    assert not follows(model, constraint.copy(), fitting[:-1])
    assert not follows(model, constraint.copy(), '{"name": "Zoë", "age": "7"}')
    assert not follows(model, constraint.copy(), "Sure: " + fitting)


@pytest.mark.parametrize(("multiple", "fits"), [(1000, 5000), (25, 75), (0.01, 1.25), (9973, 9973)])
def test_multiples(model: Model, multiple: float, fits: float):
    constraint = constrained(model, ChatCall(USER, schema={"type": "number", "multipleOf": multiple}))
    assert follows(model, constraint, str(fits))


def test_any_object(model: Model):
    constraint = constrained(model, ChatCall(USER, schema={}))
    assert follows(model, constraint.copy(), '{"a": [1, null]}')
    assert not follows(model, constraint.copy(), "[1]")


def test_after_the_end_only_the_end_is_allowed(model: Model):
    constraint = constrained(model, ChatCall(USER, schema={"const": 1}))
    assert follows(model, constraint, "1")
    assert set(np.flatnonzero(constraint.allowed())) == model.llm.stop_tokens
    constraint.advance(min(model.llm.stop_tokens))


def test_what_is_not_allowed_fails_the_request(model: Model):
    constraint = constrained(model, ChatCall(USER, schema=ANSWER))
    with pytest.raises(RequestFailedError):
        constraint.advance(model.tokenizer.encode("x")[0])
    assert constraint.allowed().any()
    with pytest.raises(RequestFailedError):
        constraint.advance(min(model.llm.stop_tokens))


def calling(name: str) -> str:
    body = json.dumps({"name": name, "arguments": ARGUMENTS}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def test_a_call_that_must_be_made(model: Model):
    required = constrained(model, ChatCall(USER, TOOLS, "required"))
    assert follows(model, required.copy(), calling("first"))
    assert follows(model, required.copy(), calling('sec"ond'))
    assert not follows(model, required.copy(), calling("third"))
    assert not follows(model, required.copy(), "No.")
    named = constrained(model, ChatCall(USER, TOOLS, "first"))
    assert follows(model, named.copy(), calling("first"))
    assert not follows(model, named.copy(), calling('sec"ond'))


def test_a_call_or_an_answer(model: Model):
    either = constrained(model, ChatCall(USER, TOOLS, schema=ANSWER))
    assert follows(model, either.copy(), calling("first"))
    assert follows(model, either.copy(), json.dumps(ARGUMENTS, ensure_ascii=False))


def test_nothing_to_enforce(model: Any):
    assert constraint_for(model, ChatCall(USER, TOOLS), False) is None
    assert constraint_for(model, ChatCall(USER, TOOLS, "none"), False) is None


def test_reasoning_is_free(model: Model):
    call = ChatCall(USER, schema={"const": 1})
    end = model.tokenizer.encode("</think>", add_special_tokens=False)
    free = constrained(model, call)
    thinking = GrammarConstraint(free._matcher, free._tokenizer, tuple(end))
    assert not thinking.allowed()[list(model.llm.stop_tokens)].any()
    for token in [*model.tokenizer.encode("well, "), *end]:
        assert thinking.allowed()[token]
        thinking.advance(token)
    assert follows(model, thinking, "1")


@pytest.mark.parametrize(
    "schema",
    [{"type": "foo"}, {"type": "string", "pattern": "("}, {"$ref": "#/none"}, {"required": 3}, {"x": float("nan")}],
)
def test_a_bad_schema(model: Any, schema: dict[str, Any]):
    with pytest.raises(BadRequestError) as caught:
        constraint_for(model, ChatCall(USER, schema=schema), False)
    assert caught.value.field == "response_format" and "x-guidance" not in str(caught.value)


ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "infinitely recursive"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "infinitely recursive",
        ),
        (ENDLESS, "infinitely recursive"),
        *(
            ({word: value}, word)
            for word, value in {
                "propertyNames": {"pattern": "^a"},
                "not": {"type": "string"},
                "if": {},
                "contains": {},
                "minContains": 1,
                "uniqueItems": True,
                "dependentRequired": {"a": ["b"]},
                "dependentSchemas": {"a": {}},
                "unevaluatedProperties": False,
                "unevaluatedItems": False,
                "$dynamicRef": "#a",
            }.items()
        ),
        ({"type": "string", "format": "unheard-of"}, "unheard-of"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        # These took minutes and more than 10 GB.
        ({"type": "integer", "multipleOf": 2**24}, "multipleOf"),
        ({"items": {"anyOf": [{"type": "number", "multipleOf": 99.99983}]}}, "multipleOf"),
    ],
)
def test_what_cannot_be_kept_is_told_before_the_answer(model: Any, schema: dict[str, Any], reason: str):
    with pytest.raises(BadRequestError) as caught:
        constraint_for(model, ChatCall(USER, schema=schema), False)
    assert reason in str(caught.value)
    assert not any(noise in str(caught.value) for noise in ("NoExtensionBias", "<state>", "at 2(", "x-guidance"))


def test_what_proves_too_hard_is_the_clients_error(model: Model):
    # llguidance finds out while the answer is written.
    constraint = constrained(model, ChatCall(USER, schema={"type": "string", "pattern": "(.*a){30}.{200}b"}))
    with pytest.raises(FormError) as caught:
        for token in model.tokenizer.encode('"' + "ab" * 400, add_special_tokens=False):
            if not constraint.allowed()[token]:
                token = min(model.llm.stop_tokens)
            constraint.advance(token)
    assert status_of(caught.value) == 400


def test_bad_tools(model: Any):
    def field(tools: list[dict[str, Any]], choice: str) -> str | None:
        with pytest.raises(BadRequestError) as caught:
            constraint_for(model, ChatCall(USER, tools, choice), False)
        return caught.value.field

    wrong = {"type": "function", "function": {"name": "x", "parameters": {"type": "string"}}}
    assert field([wrong], "required") == "tools"
    assert field(TOOLS, "third") == "tool_choice"
