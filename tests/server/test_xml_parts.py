"""Arguments of calls in Qwen3-Coder's form: what is streamed is the beginning of what mlx-lm's parser reads."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import qwen3_coder
from thinker import TEMPLATE, start_thinker

from conftest import Server, stop_server
from onekv.server.deltas import TextDelta, ToolCallDelta, ToolCallPart
from onekv.server.segments import Found, Markers, Splitter
from onekv.server.xml_parts import XmlParts

PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "text": {"type": "string"},
    "lines": {"type": "integer"},
    "force": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "any": {},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": PROPERTIES}}}
]


def parse(text: str) -> Any:
    return qwen3_coder.parse_tool_call(text, TOOLS)


CODER = Markers(call_start="<tool_call>", call_end="</tool_call>", parse=parse, parts=lambda: XmlParts(parse, TOOLS))


def body_of(*parameters: tuple[str, str]) -> str:
    said = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    return f"\n<function=write>\n{said}</function>\n"


def read(pieces: list[str], cut_off: bool = False) -> list[Found]:
    splitter = Splitter(CODER)
    return [each for piece in pieces for each in splitter.feed(piece)] + splitter.finish(cut_off)


def given_of(found: list[Found]) -> tuple[list[str], ToolCallDelta]:
    """The arguments as they were streamed, and the call."""
    (call,) = [each for each in found if isinstance(each, ToolCallDelta)]
    pieces = [each for each in found if isinstance(each, ToolCallPart)]
    assert all(piece.id == call.id and piece.name == call.name for piece in pieces)
    assert [piece.first for piece in pieces] == [True, *[False] * (len(pieces) - 1)]
    return [piece.text for piece in pieces], call


def test_a_string_comes_as_it_is_written() -> None:
    splitter = Splitter(CODER)

    def texts(piece: str) -> list[str]:
        return [each.text for each in splitter.feed(piece) if not isinstance(each, ToolCallDelta)]

    assert texts("<tool_call>\n<function=write>\n<parameter=pa") == []
    assert texts("th>\n") == []
    assert texts("a.py\n") == ['{"path": "a.py']
    assert texts("b</par") == ["\\nb"]
    assert texts("ameter>\n<parameter=lines>\n1") == ['"']
    assert texts("2\n</parameter>\n") == [', "lines": 12']
    assert texts('<parameter=text>\nnull and "void"') == [', "text": "null and \\"void\\"']
    assert texts("\n</parameter>\n</function>\n") == ['"']
    (last, call) = splitter.feed("</tool_call>")
    assert isinstance(last, ToolCallPart) and last.text == "}"
    assert isinstance(call, ToolCallDelta) and call.complete and call.in_parts
    assert json.loads(call.arguments) == {"path": "a.py\nb", "lines": 12, "text": 'null and "void"'}


VALUES = st.one_of(
    st.sampled_from(
        ["", "null", "NULL", "nul", "null\n", "\n", "\n\n", "12", "1.5", "1e400", "true", '["a", "b"]', '{"x": 1}']
    ),
    st.text('ab \n\t"\\<>/{}[]é\U0001f600', max_size=12),
    st.sampled_from(["</param", "</parameter", "<parameter=x>", "</function>", "</func", "a</tool", "None", "(1, 2)"]),
)


@given(st.data())
def test_what_is_streamed_is_what_is_read_however_it_is_cut(data: st.DataObject) -> None:
    names = st.sampled_from([*PROPERTIES, "unknown"])
    parameters = data.draw(st.lists(st.tuples(names, VALUES), max_size=4))
    body = body_of(*parameters)
    if data.draw(st.booleans()):
        # As the template does not write it.
        cut = data.draw(st.integers(0, len(body)))
        body = body[:cut] + data.draw(st.sampled_from(["\n", " ", "x", "<parameter=path>", "</function>"])) + body[cut:]
    text = f"<tool_call>{body}</tool_call>"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    found = read([text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    whole = Splitter(Markers(call_start="<tool_call>", call_end="</tool_call>", parse=parse))
    (wanted,) = [*whole.feed(text), *whole.finish()]
    if not any(isinstance(each, ToolCallPart) for each in found):
        assert found == [wanted]
        return
    pieces, call = given_of(found)
    assert "".join(pieces) == call.arguments
    if call.complete:
        assert call == wanted
    else:
        # It cannot be read, or not as it was begun: it has a parameter twice, or one that does not end.
        twice = len({name for name, _ in parameters}) < len(parameters) or "<parameter=path>" in text
        assert isinstance(wanted, TextDelta) or twice or text.count("<parameter=") != text.count("</parameter>")


def test_a_number_that_is_too_large_is_no_call() -> None:
    text = f"<tool_call>{body_of(('lines', '1e400'))}</tool_call>"
    assert read([text]) == [TextDelta("content", text)]
    found = read([f"<tool_call>{body_of(('path', 'a.py'), ('lines', '1e400'))}</tool_call>"])
    assert given_of(found) == (['{"path": "a.py"'], ToolCallDelta("write", '{"path": "a.py"', complete=False))


@given(st.data())
def test_what_is_cut_off_is_the_beginning(data: st.DataObject) -> None:
    # With the end of the function in a value, the call may seem to have ended there.
    values = VALUES.filter(lambda value: "</function>" not in value)
    chosen = st.lists(st.tuples(st.sampled_from([*PROPERTIES]), values), min_size=1, unique_by=lambda each: each[0])
    body = body_of(*data.draw(chosen))
    try:
        whole = json.dumps(parse(body)["arguments"], ensure_ascii=False)
    except (ValueError, OverflowError):
        return
    found = read([*f"<tool_call>{body}"[: data.draw(st.integers(11, 11 + len(body)))]], cut_off=True)
    assert all(isinstance(each, ToolCallPart | ToolCallDelta) for each in found)
    assert whole.startswith("".join(each.text for each in found if isinstance(each, ToolCallPart)))


# As Qwen3-Coder's template writes calls, after which mlx-lm chooses its parser.
CODER_TEMPLATE = TEMPLATE.replace(
    """<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>""",
    """<tool_call>
<function={{ tool_call.name }}>
{% for name, value in tool_call.arguments.items() %}<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>""",
)
ARGUMENTS = {"path": "north/garden.txt", "text": 'a "wall"\n\tand a gate\n' * 8, "lines": 16}
SAID = "<tool_call>" + body_of(*((name, str(value)) for name, value in ARGUMENTS.items())) + "</tool_call>"
QUESTION: Any = [{"role": "user", "content": "Write the file of the garden."}]


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--speculate", "off", "--hot-only", "on")
    folder = tmp_path_factory.mktemp("coder")
    running = start_thinker(folder, [("Hm.", SAID)], *flags, chat_template=CODER_TEMPLATE)
    yield running
    assert "Traceback" not in stop_server(running)


def test_openai_clients_put_them_together(coder: Server) -> None:
    client = openai.OpenAI(base_url=f"{coder.url}/v1", api_key=coder.keys[0], max_retries=0)
    asked: Any = {"model": "default", "messages": QUESTION, "tools": TOOLS, "max_tokens": 400}
    (whole,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
    with client.chat.completions.stream(**asked) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert len(deltas) > 20, "as they are generated"
    assert "".join(deltas) == call.function.arguments == whole.function.arguments  # type: ignore[union-attr]
    assert json.loads(call.function.arguments) == ARGUMENTS


def test_anthropic_clients_put_them_together(coder: Server) -> None:
    client = anthropic.Anthropic(base_url=coder.url, api_key=coder.keys[0], max_retries=0)
    tools: Any = [{"name": "write", "input_schema": TOOLS[0]["function"]["parameters"]}]
    with client.messages.stream(model="default", messages=QUESTION, tools=tools, max_tokens=400) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (block,) = [block for block in message.content if block.type == "tool_use"]
    assert len(pieces) > 20 and json.loads("".join(pieces)) == block.input == ARGUMENTS
