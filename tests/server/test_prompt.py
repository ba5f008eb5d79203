"""Chat calls as prompts: templates that know tools and thinking, and templates that do not."""

from typing import Any

import pytest
from mlx_lm.tool_parsers import qwen3_coder
from templates import plain_backend, with_template

from onekv.server.call import ChatCall
from onekv.server.constrain import constraint_for
from onekv.server.errors import BadRequestError
from onekv.server.prompt import markers_of, render

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 and 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
    {"role": "tool", "tool_call_id": "1", "content": "4"},
]
TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}"
    "{% for tool_call in m.tool_calls or [] %}{{ tool_call.function.arguments.a }}{% endfor %}{% endfor %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools first') }}{% endif %}"
    "<assistant>{% if enable_thinking %}<think>\n{% else %}<think>\n</think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def plain() -> Any:
    return plain_backend()


def text(model: Any, call: ChatCall) -> str:
    return str(model.tokenizer.decode(render(model, call).tokens))


def test_tools_as_text(plain: Any):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    rendered = text(plain, ChatCall(TALK, [TOOL]))
    assert rendered.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    assert '{"type": "function", "function": {"name": "add"' in rendered
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>" in rendered
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert rendered.endswith(f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n")


def test_no_tools_where_none_may_be_called(plain: Any):
    assert "<tools>" not in text(plain, ChatCall(TALK, [TOOL], "none"))
    assert markers_of(plain.tokenizer, ChatCall(TALK, [TOOL], "none")).call_start is None


def test_a_longer_talk_begins_as_the_shorter_did(plain: Any):
    short = render(plain, ChatCall(TALK[:2], [TOOL])).tokens
    assert render(plain, ChatCall(TALK, [TOOL])).tokens[: len(short)] == short


def test_a_template_that_knows_tools_and_thinking(plain: Any):
    model = with_template(plain, TEMPLATE)
    start = "[add]<system>Be brief.<user>1 and 2?<assistant>11<tool>3<tool>4<assistant>"
    assert text(model, ChatCall(TALK, [TOOL])) == start + "<think>\n"
    assert render(model, ChatCall(TALK, [TOOL])).thinking
    assert text(model, ChatCall(TALK, [TOOL], thinking=False)) == start + "<think>\n</think>\n"
    assert not render(model, ChatCall(TALK, [TOOL], thinking=False)).thinking
    form = markers_of(model.tokenizer, ChatCall(TALK, [TOOL]))
    assert (form.think_start, form.call_start) == ("<think>", "<tool_call>")
    assert form.parse(' {"name": "add"} ') == {"name": "add"}


def test_a_call_cannot_be_forced_in_a_format_of_its_own(plain: Any):
    model = with_template(plain, TEMPLATE, qwen3_coder)
    with pytest.raises(BadRequestError) as caught:
        constraint_for(model, ChatCall(TALK, [TOOL], "required"), False)
    assert caught.value.field == "tool_choice"


def test_a_template_that_refuses(plain: Any):
    with pytest.raises(BadRequestError, match="no tools first") as caught:
        render(with_template(plain, TEMPLATE), ChatCall([TALK[3]]))
    assert caught.value.field == "messages"


def test_no_template(plain: Any):
    with pytest.raises(BadRequestError, match="/v1/completions"):
        render(with_template(plain, None), ChatCall(TALK))


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "\ud800"}]])
def test_messages_that_are_none(plain: Any, messages: list[Any]):
    with pytest.raises(BadRequestError) as caught:
        render(plain, ChatCall(messages))
    assert caught.value.field == "messages"
