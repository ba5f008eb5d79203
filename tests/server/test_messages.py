"""Messages for templates that refuse some, and answers that go on from the assistant's last message."""

import re
from typing import Any

import pytest
from mlx_lm.tool_parsers import mistral
from templates import MISTRAL, plain_backend, with_template

from onekv.server.call import ChatCall, ChatMessage
from onekv.server.deltas import ToolCallDelta
from onekv.server.errors import BadRequestError
from onekv.server.messages import fitted
from onekv.server.prompt import markers_of, render

# The parts of templates that are out in the world.
ONE_LEADING_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SILENT = "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
# As gpt-oss's: the first system message under a heading, later ones nowhere.
HEADED = (
    "# Rules, Instructions, Greetings: {% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + SILENT
)
# As Mistral's: before the last message, if that is a user's.
FORGETFUL = (
    "{% for m in messages %}{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}"
    "[{{ messages[0].content }}]{% endif %}" + SILENT.partition("%}")[2]
)
# As Qwen3.5's.
SOMEBODY_ASKS = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('Who asks?') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content and m.reasoning_content and m.tool_calls %}{{ raise_exception('not both') }}{% endif %}"
    "{{ m.content | trim }}{% for call in m.tool_calls or [] %}"
    "{% for name, value in call.function.arguments.items() %}[{{ name }}={{ value }}]{% endfor %}{% endfor %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}{# tools {{ tools }} #}"
)
SYSTEM, MORE = {"role": "system", "content": "Rules"}, {"role": "system", "content": "More"}
HELLO, HI, BYE = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
)


@pytest.fixture(scope="module")
def plain() -> Any:
    return plain_backend()


def text(model: Any, messages: list[ChatMessage], **options: Any) -> str:
    return str(model.tokenizer.decode(render(model, ChatCall(messages, **options)).tokens))


def test_what_a_template_takes_is_left_as_it_is(plain: Any) -> None:
    messages = [SYSTEM, MORE, HELLO, BYE, MORE, HI, SYSTEM, BYE]
    assert fitted(plain.tokenizer, messages) == messages


def test_one_leading_system_message(plain: Any) -> None:
    model = with_template(plain, ONE_LEADING_SYSTEM)
    late = "<system>\nMore\n</system>"
    talk = [SYSTEM, SYSTEM, HELLO, MORE]
    start = f"<system>Rules\n\nRules<user>Hello<user>{late}"
    assert text(model, talk) == f"{start}<assistant>"
    # What is said later leaves the start as it was: it is found in the cache.
    assert text(model, [*talk, HI, MORE, BYE]) == f"{start}<assistant>Hi<user>{late}<user>Bye<assistant>"
    assert text(model, [HELLO, HI, BYE]) == "<user>Hello<assistant>Hi<user>Bye<assistant>"


def test_no_system_message_and_no_two_of_the_users(plain: Any) -> None:
    model = with_template(plain, ALTERNATING)
    assert text(model, [SYSTEM, MORE, HELLO, HI, MORE, BYE]) == (
        "<user>Rules\n\nMore\n\nHello<assistant>Hi<user><system>\nMore\n</system>\n\nBye"
    )


def test_a_system_message_is_not_dropped_in_silence(plain: Any) -> None:
    assert text(with_template(plain, SILENT), [SYSTEM, HELLO]) == "<user>Rules<user>Hello"


def test_a_word_of_the_template_itself_is_not_taken_for_a_message(plain: Any) -> None:
    found = text(with_template(plain, HEADED), [SYSTEM, MORE, HELLO, MORE, HI, BYE])
    assert found == (
        "# Rules, Instructions, Greetings: Rules\n\nMore"
        "<user>Hello<user><system>\nMore\n</system><assistant>Hi<user>Bye"
    )


def test_a_system_message_is_not_forgotten_in_a_later_turn(plain: Any) -> None:
    model = with_template(plain, FORGETFUL)
    assert text(model, [SYSTEM, HELLO]) == "<user>Rules<user>Hello"
    assert text(model, [SYSTEM, HELLO, HI, BYE]) == "<user>Rules<user>Hello<assistant>Hi<user>Bye"


def test_a_system_message_and_nothing_else(plain: Any) -> None:
    model = with_template(plain, SOMEBODY_ASKS)
    assert text(model, [SYSTEM]) == "<user>Rules"
    assert text(model, [SYSTEM, HELLO]) == "<system>Rules<user>Hello"


def test_answers_where_roles_must_alternate(plain: Any) -> None:
    model = with_template(plain, ALTERNATING)
    twice = text(model, [HELLO, HI, {**HI, "content": None}, HI, BYE])
    assert twice == "<user>Hello<assistant>Hi\n\nHi<user>Bye"
    assert text(model, [HI, BYE]) == "<user>Hello.<assistant>Hi<user>Bye"
    assert text(model, [SYSTEM, HI, BYE]) == "<user>Rules<assistant>Hi<user>Bye"


def test_a_question_after_a_result_where_roles_must_alternate(plain: Any) -> None:
    model = with_template(plain, MISTRAL, mistral)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    result = {"role": "tool", "tool_call_id": "1", "content": "Seen"}
    talk = [SYSTEM, HELLO, call({}), result, BYE]
    start = text(model, talk, tools=tools)
    assert start.startswith("[INST] Rules\n\nHello[/INST][TOOL_CALLS] [")
    assert "[/TOOL_RESULTS] Noted.<|im_end|>" in start and start.endswith("[INST] Bye[/INST]")
    # So do the reminders that Claude Code sends as system messages, and what a user says instead of a result.
    assert "</system>\n\nBye[/INST]" in text(model, [*talk[:4], MORE, BYE], tools=tools)
    assert " Noted.<|im_end|>[AVAILABLE_TOOLS]" in text(model, [*talk[:3], BYE], tools=tools)


def test_a_template_is_tried_once(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(plain, ONE_LEADING_SYSTEM).tokenizer
    fitted(tokenizer, [HELLO])
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", None)
    assert fitted(tokenizer, [SYSTEM, MORE]) == [{"role": "system", "content": "Rules\n\nMore"}]


def call(arguments: Any, **more: Any) -> ChatMessage:
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def test_earlier_thinking_has_its_place(plain: Any) -> None:
    model = with_template(plain, THINKING)
    assert "<assistant><think>Hm</think>Hi<end>" in text(model, [HELLO, {**HI, "reasoning_content": "Hm"}, BYE])
    assert "<assistant><think>Hm</think>[at=1]<end>" in text(model, [HELLO, call({"at": 1}, reasoning_content="Hm")])
    both = call({"at": 1}, reasoning_content="Hm", content="So")
    assert "<assistant>So[at=1]<end>" in text(model, [HELLO, both]), "the template refuses all three"
    # One that has no place for it is not troubled.
    assert "Hm" not in text(plain, [HELLO, {**HI, "reasoning_content": "Hm"}, BYE])


def test_broken_arguments_stay_text(plain: Any) -> None:
    model = with_template(plain, THINKING)
    found = text(model, [HELLO, call("{broken"), BYE])
    assert '<assistant>{"name": "look", "arguments": "{broken"}<end>' in found
    assert '"arguments": "{broken"' in text(plain, [HELLO, call("{broken"), BYE])
    # Some templates drop a result without its call.
    result = {"role": "tool", "tool_call_id": "1", "content": "Seen"}
    assert text(model, [HELLO, call("{broken"), result]).endswith(
        "<end><user><tool_response>\nSeen\n</tool_response><end><assistant><think>"
    )
    assert "<tool>Seen<end>" in text(model, [HELLO, call({"at": 1}), result])


def test_ids_of_nine_characters(plain: Any) -> None:
    model = with_template(plain, MISTRAL, mistral)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    def talk(first: str, second: str) -> str:
        calls = [{"id": each, "function": {"name": "look", "arguments": {}}} for each in (first, second)]
        results = [{"role": "tool", "tool_call_id": each, "content": "1"} for each in (second, first)]
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        return text(model, [HELLO, said, *results], tools=tools)

    assert talk("abcdefgh1", "abcdefgh2").count("abcdefgh1") == 2
    found = re.findall(r'"(?:call_)?id": "([^"]*)"', talk("call_aaaaaaaaaaaaaaaaaaaaaaaa", "toolu_1"))
    assert found[0] == found[3] != found[1] == found[2] and {len(each) for each in found} == {9}
    # The id that the model writes is the client's.
    written = '[TOOL_CALLS] [{"name": "look", "arguments": {}, "id": "Xy3456789"}]'
    (call,) = markers_of(model.tokenizer, ChatCall([HELLO], tools)).split(written)
    assert isinstance(call, ToolCallDelta) and call.id == "Xy3456789"


def test_any_ids_where_the_template_takes_them(plain: Any) -> None:
    messages = [HELLO, call({"at": 1}, content="So"), {"role": "tool", "tool_call_id": "1", "content": "Seen"}]
    assert fitted(with_template(plain, THINKING).tokenizer, messages) == messages


def test_an_answer_goes_on_from_the_assistants_message(plain: Any) -> None:
    begun = {"role": "assistant", "content": "The answer is"}
    assert text(plain, [SYSTEM, HELLO, begun]).endswith("<|im_start|>assistant\nThe answer is")
    model = with_template(plain, THINKING)
    assert text(model, [HELLO, begun]) == "<user>Hello<end><assistant>The answer is"
    assert not render(model, ChatCall([HELLO, begun])).thinking
    # There is nothing to go on from.
    empty = {"role": "assistant", "content": ""}
    assert text(plain, [SYSTEM, HELLO, empty]) == text(plain, [SYSTEM, HELLO])


def test_an_answer_that_goes_on_has_no_form(plain: Any) -> None:
    for options in ({"schema": {}}, {"tool_choice": "required"}):
        with pytest.raises(BadRequestError) as caught:
            text(plain, [HELLO, HI], **options)
        assert caught.value.field == "messages.1"


def test_the_template_is_told_what_the_client_says(plain: Any) -> None:
    model = with_template(plain, "{{ messages[0].content }} {{ reasoning_effort }} {{ mood }}")
    assert text(model, [HELLO], template={"reasoning_effort": "low", "mood": "merry"}) == "Hello low merry"
