"""What coding agents sent in twelve turns with a tool and thinking, sent again: nothing is computed twice.

Each file of `traces` has the requests of one real program, run by `onekv launch` on a server whose model thinks and
calls one of its tools eleven times (thinker.py), as they came: with what the program makes of its answers, in its own
spelling. Long texts and descriptions are not theirs but others of that length; keys, sessions and paths are left out.
A request has what differs from the one before: `kept` messages of that come first.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from thinker import start_thinker

from conftest import KEYS, stop_server
from onekv.bench.clients import words

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))
# Of a word with the space after it.
CHARACTERS = 5


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


@pytest.mark.parametrize("file", TRACES, ids=lambda file: file.stem)
def test_a_trace_is_computed_once(file: Path, tmp_path: Path) -> None:
    trace = json.loads(file.read_text())
    call = f"I look. \n<tool_call>\n{json.dumps(trace['call'])}\n</tool_call>"
    script = [(f"Step {turn} again: let me see.\n", call if turn < 11 else "All is well.") for turn in range(12)]
    running = start_thinker(tmp_path, script)
    try:
        found = []
        for body in bodies(trace):
            headers = {"Authorization": f"Bearer {KEYS[0]}"}
            answer = httpx.post(running.url + trace["path"], json=body, headers=headers, timeout=600)
            assert answer.status_code == 200, answer.text
            found.append(counts(usage_of(answer)))
        assert len(found) == 12
        for (prompt, _, generated), (whole, cached, _) in itertools.pairwise(found):
            # The token that ends a turn was never fed back.
            assert cached >= max(0.98 * whole, prompt + generated - 2), found
    finally:
        stop_server(running)
