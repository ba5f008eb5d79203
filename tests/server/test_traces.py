"""What coding agents sent in twelve turns with a tool and thinking, sent again: nothing is computed twice.

Each file of `traces` has the requests of one real program, run by `onekv launch` on a server whose model thinks and
calls one of its tools eleven times (thinker.py), as they came: with what the program makes of its answers, in its own
spelling. Long texts and descriptions are not theirs but others of that length; keys, sessions and paths are left out.
A request has what differs from the one before: `kept` messages of that come first.

They are also sent as other clients might: with a clock in the system prompt, without thinking, with calls in another
spelling; to a template that wants one system message, at the start, and users and answers in turns.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest
from thinker import TEMPLATE, start_thinker

from conftest import KEYS, stop_server
from onekv.bench.clients import words

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))
# Of a word with the space after it.
CHARACTERS = 5
STRICT = """\
{%- set ns = namespace(at=0) -%}
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}
{{ raise_exception('System message must be at the beginning') }}
{%- elif m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (ns.at % 2 == 0) -%}{{ raise_exception('Roles must alternate') }}{%- endif -%}
{%- set ns.at = ns.at + 1 -%}
{%- endif -%}
{%- endfor -%}
"""


# Arguments that clients put before the others.
MORE = {"limit": 2}


class Way(NamedTuple):
    template: str
    # Of the server.
    flags: tuple[str, ...] = ()
    changed: bool = False


AS_RECORDED = Way(TEMPLATE)
OTHERWISE = Way(STRICT + TEMPLATE, ("--hygiene", "billing,clocks"), changed=True)


def expanded(value: Any) -> Any:
    """With texts where the file has their lengths."""
    if isinstance(value, list):
        return [expanded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"filler", "characters"}:
        return words(random.Random(value["filler"]), max(1, value["characters"] // CHARACTERS))
    return {key: expanded(each) for key, each in value.items()}


def bodies(trace: dict[str, Any]) -> list[dict[str, Any]]:
    field = "input" if trace["path"] == "/v1/responses" else "messages"
    found: list[dict[str, Any]] = []
    for request in expanded(trace["requests"]):
        before = found[-1] if found else {field: []}
        messages = [*before[field][: request.pop("kept")], *request[field]]
        # As the clients ask, and in one piece, by turns.
        stream = {"stream": True, "stream_options": {"include_usage": True}} if len(found) % 2 else {"stream": False}
        found.append({**before, **request, field: messages, "model": "default", **stream})
    return found


def changed(value: Any) -> Any:
    """Without thinking; calls have two arguments, in another order than they were generated, and other white space."""
    if isinstance(value, list):
        kinds = [each.get("type") if isinstance(each, dict) else None for each in value]
        return [changed(each) for each, kind in zip(value, kinds, strict=True) if kind not in ("thinking", "reasoning")]
    if not isinstance(value, dict):
        return value
    kept = {name: changed(each) for name, each in value.items() if name != "reasoning_content"}
    if kept.get("type") == "tool_use":
        kept["input"] = {**MORE, **kept["input"]}
    elif isinstance(kept.get("arguments"), str):
        kept["arguments"] = json.dumps({**MORE, **json.loads(kept["arguments"])}, indent=1)
    return kept


def with_clock(body: dict[str, Any], turn: int) -> dict[str, Any]:
    """A system message with the time before the others, in each API's way."""
    clock = f"Now it is 2026-11-18 at 12:{turn:02}:59."
    if "system" in body:
        return body | {"system": [{"type": "text", "text": clock}, *body["system"]]}
    if "input" in body:
        return body | {"instructions": clock}
    return body | {"messages": [{"role": "system", "content": clock}, *body["messages"]]}


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens of the prompt, how many of them were cached, and those of the answer, in each API's way."""
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    asked, said = ("prompt", "completion") if "prompt_tokens" in usage else ("input", "output")
    return usage[f"{asked}_tokens"], usage[f"{asked}_tokens_details"]["cached_tokens"], usage[f"{said}_tokens"]


def usage_of(answer: httpx.Response) -> dict[str, Any]:
    """That of an answer in one piece, or the last that a stream tells."""
    if answer.headers["content-type"] == "application/json":
        return answer.json()["usage"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    return [used for event in events if (used := event.get("usage") or event.get("response", {}).get("usage"))][-1]


def test_there_is_one_of_each_api() -> None:
    paths = sorted(json.loads(file.read_text())["path"] for file in TRACES)
    assert paths == ["/v1/chat/completions", "/v1/messages", "/v1/responses"]


@pytest.mark.parametrize("way", [AS_RECORDED, OTHERWISE], ids=["as recorded", "otherwise"])
@pytest.mark.parametrize("file", TRACES, ids=lambda file: file.stem)
def test_a_trace_is_computed_once(file: Path, way: Way, tmp_path: Path) -> None:
    trace = json.loads(file.read_text())
    call = trace["call"]
    if way.changed:
        call["arguments"] |= MORE
    said = f"I look. \n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    script = [(f"Step {turn} again: let me see.\n", said if turn < 11 else "All is well.") for turn in range(12)]
    running = start_thinker(tmp_path, script, *way.flags, chat_template=way.template)
    try:
        found = []
        for turn, body in enumerate(bodies(trace)):
            sent = with_clock(changed(body), turn) if way.changed else body
            headers = {"Authorization": f"Bearer {KEYS[0]}"}
            answer = httpx.post(running.url + trace["path"], json=sent, headers=headers, timeout=600)
            assert answer.status_code == 200, answer.text
            found.append(counts(usage_of(answer)))
        assert len(found) == 12
        for (prompt, _, generated), (whole, cached, _) in itertools.pairwise(found):
            # The token that ends a turn was never fed back.
            assert cached >= max(0.98 * whole, prompt + generated - 2), found
    finally:
        stop_server(running)
