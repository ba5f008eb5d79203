"""Splitting text into reasoning, content and tool calls, however it is cut into pieces."""

import json

from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import mistral

from onekv.server.deltas import TextDelta, ToolCallDelta
from onekv.server.segments import Markers, Splitter

HERMES = Markers("<think>", "</think>", "<tool_call>", "</tool_call>")
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALL = ToolCallDelta("weather", '{"city": "Rome"}')


def split(pieces: list[str], form: Markers = HERMES, thinking: bool = False) -> list[TextDelta | ToolCallDelta]:
    """All that comes out, with neighbours of one kind joined."""
    splitter = Splitter(form, thinking)
    found = [each for piece in pieces for each in splitter.feed(piece)] + splitter.finish()
    joined: list[TextDelta | ToolCallDelta] = []
    for each in found:
        last = joined[-1] if joined else None
        if isinstance(each, TextDelta) and isinstance(last, TextDelta) and last.kind == each.kind:
            joined[-1] = TextDelta(last.kind, last.text + each.text)
        else:
            joined.append(each)
    return joined


def test_plain_text_is_given_at_once():
    splitter = Splitter(Markers())
    assert splitter.feed("a < b ") == [TextDelta("content", "a < b ")]
    assert splitter.feed("<think>") == [TextDelta("content", "<think>")]
    assert splitter.finish() == []


def test_reasoning_then_content():
    found = split(["<think>\nlet me see\n</think>\n\nYes."])
    assert found == [TextDelta("reasoning", "let me see"), TextDelta("content", "Yes.")]


def test_reasoning_that_the_prompt_opened():
    found = split(["\nlet me see\n</think>\n\nYes."], thinking=True)
    assert found == [TextDelta("reasoning", "let me see"), TextDelta("content", "Yes.")]


def test_reasoning_that_was_cut_off():
    assert split(["hm, </thi"], thinking=True) == [TextDelta("reasoning", "hm, </thi")]


def test_calls_between_text():
    assert split(["I look.\n" + WEATHER + "\n" + WEATHER + "\n"]) == [TextDelta("content", "I look."), CALL, CALL]


def test_a_call_out_of_reasoning():
    assert split(["I need it" + WEATHER + "Done."], thinking=True) == [
        TextDelta("reasoning", "I need it"),
        CALL,
        TextDelta("content", "Done."),
    ]


def test_an_unreadable_call_is_content():
    for body in (
        "{broken",
        "[1]",
        '{"name": 3}',
        '{"name": "x", "arguments": 3}',
        '{"name": "x", "arguments": {"a": NaN}}',
        '{"name": "x", "arguments": {"a": "\\ud800"}}',
    ):
        text = f"See: <tool_call>{body}</tool_call> and on"
        assert split([text]) == [TextDelta("content", text)]


def test_a_call_that_was_cut_off_is_content():
    assert split([WEATHER[:30]]) == [TextDelta("content", WEATHER[:30])]


def test_arguments_as_text():
    body = json.dumps({"name": "weather", "arguments": '{"city": "Rome"}'})
    assert split([f"<tool_call>{body}</tool_call>"]) == [CALL]


def test_calls_that_run_to_the_end():
    form = Markers(call_start="[TOOL_CALLS]", call_end="", parse=mistral.parse_tool_call)
    assert split(['Sure. [TOOL_CALLS]weather[ARGS]{"city": "Rome"}'], form) == [TextDelta("content", "Sure."), CALL]
    cut_off = '[TOOL_CALLS]weather[ARGS]{"city"'
    assert split([cut_off], form) == [TextDelta("content", cut_off)]


def test_text_comes_as_early_as_it_can():
    splitter = Splitter(HERMES)
    assert splitter.feed("Hello ") == [TextDelta("content", "Hello")]
    assert splitter.feed("there <") == [TextDelta("content", " there")]
    assert splitter.feed("b>") == [TextDelta("content", " <b>")]


MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
BITS = [*MARKERS, WEATHER, "{", " ", "\n", "<", "</", "tool", "x", "ä", "{}"]


@given(st.lists(st.sampled_from(BITS), max_size=12).map("".join), st.booleans(), st.data())
def test_any_cut_gives_the_same(text: str, thinking: bool, data: st.DataObject):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, thinking=thinking) == split([text], thinking=thinking) == split(list(text), thinking=thinking)


@given(st.lists(st.sampled_from([bit for bit in BITS if bit != WEATHER]), max_size=12).map("".join))
def test_nothing_is_lost_but_markers_and_space_next_to_them(text: str):
    found = "".join(span.text for span in split([text]) if isinstance(span, TextDelta))

    def bare(text: str) -> str:
        for marker in ("<think>", "</think>"):
            text = text.replace(marker, "")
        return "".join(text.split())

    assert bare(found) == bare(text)
