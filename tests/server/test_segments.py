"""Splitting text into reasoning, content and tool calls, however it is cut into pieces."""

import json

from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import mistral

from onekv.engine import Logprob
from onekv.server.call_parts import CallParts
from onekv.server.deltas import TextDelta, ToolCallDelta, ToolCallPart
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


def test_a_call_that_ends_too_early_is_content():
    assert split([WEATHER[:30]]) == [TextDelta("content", WEATHER[:30])]
    assert split([WEATHER.removesuffix("</tool_call>")]) == [CALL], "all but its marker is there"


def test_a_call_that_was_cut_off_is_given_as_far_as_it_came():
    for end in range(len("<tool_"), len(WEATHER)):
        splitter = Splitter(HERMES)
        found = [*splitter.feed("So: " + WEATHER[:end]), *splitter.finish(cut_off=True)]
        assert found[0] == TextDelta("content", "So:") and len(found) <= 2
        begun = WEATHER[:end].partition('"arguments": ')[2]
        if not begun:
            assert found[1:] == []
        else:
            (call,) = found[1:]
            assert isinstance(call, ToolCallDelta) and call.name == "weather"
            assert call.complete == ("}" in begun)
            assert call.arguments == (CALL.arguments if call.complete else begun)


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


PARTS = Markers("<think>", "</think>", "<tool_call>", "</tool_call>", parts=CallParts)


def parts(pieces: list[str], cut_off: bool = False) -> list[TextDelta | ToolCallPart | ToolCallDelta]:
    splitter = Splitter(PARTS)
    return [each for piece in pieces for each in splitter.feed(piece)] + splitter.finish(cut_off)


def test_arguments_come_as_they_are_written():
    splitter = Splitter(PARTS)
    assert splitter.feed('Look: <tool_call>{"name": "weather", "argum') == [TextDelta("content", "Look:")]
    (first,) = splitter.feed('ents": {"city": "Ro')
    (second,) = splitter.feed('me"}')
    assert isinstance(first, ToolCallPart) and isinstance(second, ToolCallPart)
    assert (first.name, first.text, first.first) == ("weather", '{"city": "Ro', True)
    assert (second.text, second.first, second.id) == ('me"}', False, first.id)
    assert splitter.feed("}\n</tool") == []
    (call,) = splitter.feed("_call>")
    assert isinstance(call, ToolCallDelta)
    assert call == CALL and call.in_parts and call.id == first.id


@given(st.data())
def test_parts_are_the_call_however_it_is_cut(data: st.DataObject):
    arguments = {"text": 'a "b" \\ {[</tool \n', "n": [{"x": []}, 1.5, None], "ä": {}}
    body = json.dumps({"name": "write", "arguments": arguments}, ensure_ascii=False)
    text = f"<tool_call>{body}</tool_call> after"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    found = parts([text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    pieces = [each for each in found if isinstance(each, ToolCallPart)]
    (call,) = [each for each in found if isinstance(each, ToolCallDelta)]
    assert "".join(piece.text for piece in pieces) == call.arguments
    assert json.loads(call.arguments) == arguments and call.complete
    assert "".join(each.text for each in found if isinstance(each, TextDelta)) == "after"


def test_lines_inside_of_arguments_become_strict_json():
    found = parts(['<tool_call>{"name": "write", "arguments": {"text": "a\nb\tc"}}</tool_call>'])
    assert json.loads(found[0].text) == {"text": "a\nb\tc"}  # type: ignore[union-attr]


def test_arguments_that_prove_broken_are_sent_as_they_are():
    found = parts(['<tool_call>{"name": "write", "arguments": {"text": "say "hi""}}</tool_call>Done.'])
    assert isinstance(found[0], ToolCallPart) and found[0].text == '{"text": "say "hi""}'
    assert found[1:] == [ToolCallDelta("write", found[0].text, complete=False), TextDelta("content", "Done.")]


def test_a_call_whose_arguments_have_not_begun_is_given_whole_or_as_content():
    body = json.dumps({"name": "weather", "arguments": '{"city": "Rome"}'})
    assert parts([f"<tool_call>{body}</tool_call>"]) == [CALL]
    assert parts(["<tool_call>{broken</tool_call>"]) == [TextDelta("content", "<tool_call>{broken</tool_call>")]
    assert parts(['<tool_call>{"name": "wea'], cut_off=True) == []


def test_tokens_of_a_call_are_no_contents():
    for text in (WEATHER, WEATHER.removesuffix("</tool_call>")):
        splitter = Splitter(PARTS)
        found = [*splitter.feed(text, [1, 2], [Logprob(-1.0, []), Logprob(-2.0, [])]), *splitter.finish()]
        assert [type(each) for each in found] == [ToolCallPart, ToolCallDelta]


def test_parts_of_a_call_that_was_cut_off():
    for end in range(WEATHER.index("{"), len(WEATHER)):
        found = parts(list(WEATHER[:end]), cut_off=True)
        begun = WEATHER[:end].partition('"arguments": ')[2].removesuffix("}\n")
        pieces = "".join(each.text for each in found if isinstance(each, ToolCallPart))
        calls = [each for each in found if isinstance(each, ToolCallDelta)]
        assert [call.arguments for call in calls] == ([pieces] if begun else [])
        assert begun.startswith(pieces) and all(call.complete == ("}" in pieces) for call in calls)
