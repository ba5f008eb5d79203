"""Turns that come back are the tokens they were generated as, and never tokens that say something else."""

import random
from typing import Any

import pytest
from mlx_lm.tool_parsers import mistral
from templates import (
    ALWAYS_THINKING,
    EMPTY_THINKING,
    MISTRAL,
    RESULT_AFTER_CALL,
    THINKING,
    plain_backend,
    with_template,
)

from onekv.server.call import ChatCall
from onekv.server.prompt import markers_of, render
from onekv.server.turns import Said, Turns

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "What is 1 and 2?"}
MORE = {"role": "user", "content": "And then?"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "3"}


@pytest.fixture(scope="module")
def plain() -> Any:
    return plain_backend()


@pytest.fixture(scope="module")
def shared(plain: Any) -> Any:
    return with_template(plain, THINKING)


@pytest.fixture
def model(shared: Any) -> Any:
    shared.turns = Turns(1 << 20)
    return shared


def odd(model: Any, text: str) -> list[int]:
    """Tokens that a tokenizer would not choose: those of each character, but for markers."""
    tokens = []
    for special in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        text = text.replace(special, f"\0{special}\0")
    for part in text.split("\0"):
        pieces = [part] if part.startswith("<") else list(part)
        tokens += [token for piece in pieces for token in model.tokenizer.encode(piece, add_special_tokens=False)]
    assert model.tokenizer.decode(tokens) == text.replace("\0", "")
    return tokens


def generated(
    model: Any, messages: list[dict[str, Any]], text: str, salt: str = "", thinking: bool = False
) -> list[int]:
    """The model has answered `messages` with `text`, in odd tokens; gives those."""
    call = ChatCall(messages, [TOOL], salt=salt, thinking=thinking)
    rendered = render(model, call)
    opening = rendered.tokens[len(rendered.tokens) - rendered.opening :]
    tokens = [*opening, *odd(model, text)]
    whole = model.tokenizer.decode(tokens)
    said = Said.of_deltas(markers_of(model.tokenizer, call).split(whole))
    model.turns.remember(salt, messages, said, tokens)
    return tokens


def has(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens) - len(part) + 1))


def prompt(model: Any, messages: list[dict[str, Any]], salt: str = "", thinking: bool = False) -> list[int]:
    return render(model, ChatCall(messages, [TOOL], salt=salt, thinking=thinking)).tokens


def plainly(model: Any, messages: list[dict[str, Any]]) -> str:
    """The template's own text."""
    messages = [message | {"content": message["content"] or ""} for message in messages]
    options = {"add_generation_prompt": True, "tools": [TOOL], "enable_thinking": False}
    return str(model.tokenizer.apply_chat_template(messages, tokenize=False, **options))


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(**arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}]


@pytest.mark.parametrize("sent", ["It is three.", "It is three.  ", "\n It is three."])
def test_the_same_text_is_the_tokens_that_were_generated(model, sent):
    tokens = generated(model, [QUESTION], "It is three. \n")
    made = prompt(model, [QUESTION, assistant(sent), MORE])
    assert made[: len(prompt(model, [QUESTION])) + len(tokens)] == prompt(model, [QUESTION]) + tokens
    text = model.tokenizer.decode(made)
    assert text == plainly(model, [QUESTION, assistant("It is three. \n"), MORE])


@pytest.mark.parametrize(
    "messages",
    [
        [QUESTION, assistant("It is four."), MORE],
        [MORE, assistant("It is three."), MORE],
        [QUESTION, assistant("It is three.", tool_calls=call(a=1)), RESULT],
        [{"role": "system", "content": "Be brief."}, QUESTION, assistant("It is three."), MORE],
    ],
)
def test_another_text_or_another_conversation_is_tokenized(model, messages):
    tokens = generated(model, [QUESTION], "It is three.")
    made = prompt(model, messages)
    assert not has(made, tokens)
    assert made == model.tokenizer.encode(plainly(model, messages), add_special_tokens=False)


def test_another_key_gets_nothing(model):
    tokens = generated(model, [QUESTION], "It is three.", salt="mine")
    talk = [QUESTION, assistant("It is three."), MORE]
    assert has(prompt(model, talk, salt="mine"), tokens)
    assert not has(prompt(model, talk, salt="yours"), tokens) and not has(prompt(model, talk), tokens)


def test_calls_in_any_spelling(model):
    text = 'I add.\n<tool_call>\n{"arguments": {"b":2,   "a": 1}, "name": "add"}\n</tool_call>'
    tokens = generated(model, [QUESTION], text)
    talk = [QUESTION, assistant("I add.", tool_calls=call(a=1, b=2)), RESULT]
    assert has(prompt(model, talk), tokens)
    talk[1] = assistant("I add.", tool_calls=call(a=1, b=3))
    assert not has(prompt(model, talk), tokens)


def test_numbers_as_javascript_writes_them(model):
    text = '<tool_call>\n{"name": "add", "arguments": {"a": [1.0, 2.5, {"b": 1e2}], "c": -0.0}}\n</tool_call>'
    tokens = generated(model, [QUESTION], text)
    talk = [QUESTION, assistant(None, tool_calls=call(a=[1, 2.5, {"b": 100}], c=0)), RESULT]
    assert has(prompt(model, talk), tokens)
    talk[1] = assistant(None, tool_calls=call(a=[1, 2, {"b": 100}], c=0))
    assert not has(prompt(model, talk), tokens)


THOUGHT = "Hmm, three.\n</think>\n\n"
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("sent", [{}, {"reasoning_content": "Hmm, three."}])
def test_thinking_stays_where_the_template_wants_it_whether_or_not_it_was_sent(model, thinking, sent):
    opened = "" if thinking else "<think>\n"
    tokens = generated(model, [QUESTION], opened + THOUGHT + CALLS, thinking=thinking)
    # The model goes on after a call: the thinking is there.
    talk = [QUESTION, assistant(None, tool_calls=call(a=1), **sent), RESULT]
    begun = prompt(model, talk, thinking=thinking)
    assert has(begun, tokens)
    end = generated(model, talk, opened + THOUGHT + "Three.", thinking=thinking)
    # A new question: the template drops it, and all that is said stays.
    talk += [assistant("Three.", **sent), MORE]
    made = prompt(model, talk, thinking=thinking)
    assert not has(made, tokens) and not has(made, end)
    text = model.tokenizer.decode(made)
    assert "Hmm" not in text and "<think>" not in text.rstrip().removesuffix("<think>") and "Three." in text


def test_thinking_that_was_changed_is_what_the_client_says(model):
    tokens = generated(model, [QUESTION], "<think>\n" + THOUGHT + CALLS)
    talk = [QUESTION, assistant(None, tool_calls=call(a=1), reasoning_content="No, five."), RESULT]
    made = prompt(model, talk)
    assert not has(made, tokens) and "No, five." in model.tokenizer.decode(made)


def test_a_template_that_ends_turns_with_text_replays_nothing(plain):
    model = with_template(plain, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    tokens = generated(model, [QUESTION], "It is three.")
    talk = [QUESTION, assistant("It is three."), MORE]
    made = render(model, ChatCall(talk)).tokens
    assert not has(made, tokens) and "assistant: It is three.\nuser: And then?" in model.tokenizer.decode(made)


def test_a_template_without_tools():
    model = plain_backend()
    tokens = generated(model, [QUESTION], "Well: " + CALLS)
    talk = [QUESTION, assistant("Well:", tool_calls=call(a=1)), RESULT]
    assert has(prompt(model, talk), tokens)


def test_a_template_in_which_a_result_needs_a_call(plain):
    model = with_template(plain, RESULT_AFTER_CALL)
    first = generated(model, [QUESTION], "I add. \n" + CALLS)
    talk = [QUESTION, assistant("I add.", tool_calls=call(a=1)), RESULT]
    assert has(prompt(model, talk), first)
    twice = CALLS + "\n" + CALLS.replace("1", "2")
    second = generated(model, talk, twice)
    talk += [assistant(None, tool_calls=[*call(a=1), *call(a=2)]), RESULT, RESULT]
    third = generated(model, talk, "Three.  ")
    talk += [assistant("Three."), MORE]
    made = prompt(model, talk)
    assert all(has(made, tokens) for tokens in (first, second, third))
    talk[1], talk[-2] = assistant("I add. \n", tool_calls=call(a=1)), assistant("Three.  ")
    assert model.tokenizer.decode(made) == plainly(model, talk).replace("call><tool", "call>\n<tool")


def test_a_template_with_roles_in_turns_and_no_text_beside_calls(plain):
    model = with_template(plain, MISTRAL, mistral)
    calls = [{"id": "abcdefgh1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    result = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "3"}
    first = generated(model, [QUESTION], '[TOOL_CALLS] [{"name": "add",  "arguments": {"a": 1}, "id": "abcdefgh1"}]')
    talk = [QUESTION, assistant(None, tool_calls=calls), result]
    made = prompt(model, talk)
    assert made[: len(prompt(model, [QUESTION])) + len(first)] == prompt(model, [QUESTION]) + first
    assert model.tokenizer.decode(made) == plainly(model, talk).replace('"add", "arg', '"add",  "arg')
    second = generated(model, talk, " Three.")
    talk += [assistant("Three."), MORE]
    made = prompt(model, talk)
    assert has(made, first) and has(made, second)
    # What the template leaves out was said: it is the template's.
    other = generated(model, [MORE], '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]')
    assert not has(prompt(model, [MORE, assistant("I add", tool_calls=calls), result]), other)


def test_a_template_that_refuses_every_mark(plain):
    """It knows what it was asked."""
    template = THINKING.replace("{{ m.content }}", "{% if 'turn' in m.content %}{{ raise_exception('no') }}{% endif %}")
    model = with_template(plain, template)
    generated(model, [QUESTION], "It is three.")
    talk = [QUESTION, assistant("It is three."), MORE]
    assert prompt(model, talk) == model.tokenizer.encode(plainly(model, talk), add_special_tokens=False)


@pytest.mark.parametrize("template", [ALWAYS_THINKING, EMPTY_THINKING])
@pytest.mark.parametrize("sent", [{}, {"reasoning_content": "Hmm, three."}])
def test_a_template_that_writes_empty_thinking(plain, template, sent):
    model = with_template(plain, template)
    opened = "\n<think>" if template == EMPTY_THINKING else "<think>\n"
    end = "</think>\n" if template == EMPTY_THINKING else "\n</think>\n\n"
    first = generated(model, [QUESTION], opened + "Hmm, three." + end + "I add.\n" + CALLS)
    talk = [QUESTION, assistant("I add.", tool_calls=call(a=1), **sent), RESULT]
    begun = prompt(model, talk)
    assert begun[: len(prompt(model, [QUESTION])) + len(first)] == prompt(model, [QUESTION]) + first
    second = generated(model, talk, opened + "Hmm, three." + end + CALLS)
    talk += [assistant(None, tool_calls=call(a=1), **sent), RESULT]
    made = prompt(model, talk)
    assert made[: len(begun) + len(second)] == begun + second
    talk += [assistant("Three."), MORE]
    made = prompt(model, talk)
    assert not has(made, first) and "Hmm" not in model.tokenizer.decode(made)


def test_an_answer_without_thinking_keeps_the_templates_empty_block(plain):
    model = with_template(plain, ALWAYS_THINKING)
    tokens = generated(model, [QUESTION], "I add.\n" + CALLS)
    talk = [QUESTION, assistant("I add.", tool_calls=call(a=1)), RESULT]
    made = prompt(model, talk)
    text = model.tokenizer.decode(made)
    assert has(made, tokens) and text == plainly(model, talk).replace("I add.", "I add.\n")


@pytest.mark.parametrize("odd_one", range(4))
@pytest.mark.parametrize("before", [True, False])
def test_a_turn_whose_place_is_not_found_costs_no_other(plain, odd_one, before):
    part = "<|im_start|>{{ m.role }}" if before else "<|im_end|>"
    at = THINKING.rindex(part) + len(part)
    template = THINKING[:at] + "{{ ' odd' if 'odd' in m.content else '' }}" + THINKING[at:]
    model = with_template(plain, template)
    talk: list[dict[str, Any]] = []
    tokens = []
    for turn in range(4):
        talk.append(QUESTION)
        said = "An odd one." if turn == odd_one else f"Number {turn}."
        tokens.append(generated(model, talk, said))
        talk.append(assistant(said))
    talk.append(MORE)
    made = prompt(model, talk)
    assert [has(made, each) for each in tokens] == [turn != odd_one for turn in range(4)]
    assert model.tokenizer.decode(made) == plainly(model, talk)


WORDS = ["yes", "No.", "three", " ", "\n", "é", "<b>", "{}", '"', "turn", "ok?"]


@pytest.mark.parametrize("seed", range(40))
def test_a_prompt_says_what_the_messages_say(model, seed):
    """Random conversations, some turns of which were generated, some changed on their way back."""
    draw = random.Random(seed)
    talk: list[dict[str, Any]] = []
    expected: list[dict[str, Any]] = []
    for _ in range(draw.randrange(1, 7)):
        talk.append(draw.choice([QUESTION, MORE]))
        expected.append(talk[-1])
        text = "".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 8)))
        thought = draw.choice(["", "<think>\nWhy?\n</think>\n\n"])
        generated(model, talk, thought + text)
        sent = draw.choice([text, text.strip(), text, text + "!"])
        talk.append(assistant(sent))
        expected.append(assistant(sent))
    talk.append(MORE)
    expected.append(MORE)
    text = model.tokenizer.decode(prompt(model, talk))
    read = markers_of(model.tokenizer, ChatCall(talk, [TOOL])).split
    # Turn by turn the same, but for the space around it.
    turns = [turn.strip() for turn in text.split("<|im_start|>assistant\n")[1:-1]]
    said = [Said.of_deltas(read(turn.split("<|im_end|>")[0])) for turn in turns]
    assert said == [Said.of(message) for message in expected if message["role"] == "assistant"]
    others = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>user\n")[1:]]
    assert others == [message["content"] for message in expected if message["role"] == "user"]
