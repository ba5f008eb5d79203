"""Splits a model's text, as it arrives, into reasoning, content and tool calls.

    content <-> reasoning       between the thinking markers
    content, reasoning -> call -> content

However the text is chunked, the joined output is the same. Text that may begin a marker is held back until that is
known; white space next to a marker belongs to it. The text of a call that cannot be parsed is content. Tokens go with
the first text that comes after them.

For a call in JSON, or in Qwen3-Coder's format, the arguments are streamed, if wanted (`Markers.parts`). Text sent as
arguments cannot become content afterwards: if they turn out to be broken, they are sent as they are. Any other call is
emitted whole. A call that was cut off by the token limit is not content: it is emitted as far as it got if its name and
the beginning of its arguments can be parsed, as OpenAI does, otherwise left out.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..engine import Logprob
from ..engine.output import overlap
from .call_parts import BEGUN_CALL
from .deltas import TextDelta, ToolCallDelta, ToolCallPart

# What a parser may raise on text it was not made for.
UNREADABLE = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    SyntaxError,
    RecursionError,
    OverflowError,
)

# As Mistral's models write it.
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_DECODER = json.JSONDecoder()

Parser = Callable[[str], Any]
Found = TextDelta | ToolCallPart | ToolCallDelta


class Parts(Protocol):
    """One call, whose text it is given as far as it has come, again and again (call_parts.py, xml_parts.py)."""

    def feed(self, text: str, found: list[Found]) -> bool:
        """Add what is new of the arguments to `found`; whether they have begun."""

    def end(self, text: str, found: list[Found]) -> ToolCallDelta:
        """The whole call; what is left of its arguments is added to `found`."""


@dataclass(frozen=True)
class Markers:
    """The markers of a model's text. None: the model has none; an empty `call_end`: a call runs to the end."""

    think_start: str | None = None
    think_end: str | None = None
    call_start: str | None = None
    call_end: str | None = None
    # From the text of a call to {"name", "arguments"}, or a list of such.
    parse: Parser = json.loads
    # Makes what reads the arguments of a call as they come, if they are to be given so.
    parts: Callable[[], Parts] | None = None

    def split(self, text: str) -> "list[Found]":
        """A whole turn."""
        splitter = Splitter(self)
        return [*splitter.feed(text), *splitter.finish()]


class Splitter:
    def __init__(self, markers: Markers, thinking: bool = False) -> None:
        """`thinking`: the prompt has already opened the reasoning."""
        self._marks = markers
        self._mode: Literal["content", "reasoning", "call"] = "reasoning" if thinking else "content"
        self._held = ""
        # White space is dropped until there is something else.
        self._at_marker = thinking
        # What has to be given back if the call cannot be read: its marker and the space before.
        self._opening = ""
        # The call that continues, if its arguments are given as they come.
        self._parts: Parts | None = None
        # Those whose text has not come yet.
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []

    def feed(self, text: str, tokens: Sequence[int] = (), logprobs: Sequence[Logprob] = ()) -> list[Found]:
        """What is certain after `text`, which came with `tokens`."""
        self._held += text
        self._tokens += tokens
        self._logprobs += logprobs
        found: list[Found] = []
        while self._step(found):
            pass
        return found

    def finish(self, cut_off: bool = False) -> list[Found]:
        """What was held back; nothing comes after it. `cut_off`: the answer would have gone on."""
        rest, self._held = self._held, ""
        found: list[Found] = []
        if cut_off:
            rest = self._without_marker(rest)
        if self._mode != "call":
            found += self._text(rest)
        elif not (self._end_parts(rest, found) or self._add_calls(rest, found)):
            found += _begun_call(rest) if cut_off else [self._delta("content", self._opening + rest)]
        if self._logprobs:
            found.append(self._delta("content", ""))
        return found

    def _without_marker(self, text: str) -> str:
        """`text` without a marker of a call in the middle of which it was cut off."""
        called = self._mode == "call"
        marker = (self._marks.call_end if called else self._marks.call_start) or ""
        begun = overlap(text, marker)
        # Outside of a call, less of it is more likely to be text.
        return text[:-begun].rstrip() if begun > (0 if called else len(marker) // 2) else text

    def _step(self, found: list[Found]) -> bool:
        """Move over one marker; False when the held text has none that is whole."""
        markers = self._markers()
        at, marker = min(((at, m) for m in markers if (at := self._held.find(m)) >= 0), default=(-1, ""))
        if at < 0:
            if self._mode != "call":
                keep = _undecided(self._held, markers) if markers else 0
                end = len(self._held) - keep
                found += self._text(self._held[:end])
                self._held = self._held[end:]
            elif self._parts is not None:
                self._parts.feed(self._held[: len(self._held) - overlap(self._held, self._marks.call_end or "")], found)
            return False
        before, self._held = self._held[:at], self._held[at + len(marker) :]
        if self._mode == "call":
            self._end_call(before, found)
            return True
        text = before.rstrip()
        found += self._text(text)
        if marker == self._marks.call_start:
            self._mode, self._opening = "call", before[len(text) :] + marker
            self._parts = self._marks.parts() if self._marks.parts is not None else None
        else:
            self._mode = "reasoning" if marker == self._marks.think_start else "content"
        self._at_marker = True
        return True

    def _markers(self) -> list[str]:
        """The markers that mean something in this state."""
        marks = self._marks
        if self._mode == "call":
            return [marks.call_end] if marks.call_end else []
        turn = marks.think_end if self._mode == "reasoning" else marks.think_start
        return [marker for marker in (turn, marks.call_start) if marker]

    def _text(self, text: str) -> list[Found]:
        if self._at_marker:
            text = text.lstrip()
        if not text:
            return []
        self._at_marker = False
        return [self._delta("reasoning" if self._mode == "reasoning" else "content", text)]

    def _delta(self, kind: Literal["content", "reasoning"], text: str) -> TextDelta:
        delta = TextDelta(kind, text, self._tokens, self._logprobs)
        self._tokens, self._logprobs = [], []
        return delta

    def _end_call(self, body: str, found: list[Found]) -> None:
        called = self._end_parts(body, found) or self._add_calls(body, found)
        if not called:
            found.append(self._delta("content", self._opening + body + (self._marks.call_end or "")))
        self._mode, self._at_marker = "content", called

    def _end_parts(self, body: str, found: list[Found]) -> bool:
        """Whether the call of `body` is one whose arguments were given as they came."""
        if self._parts is None or not self._parts.feed(body, found):
            return False
        found.append(self._parts.end(body, found))
        self._tokens, self._logprobs = [], []
        return True

    def _add_calls(self, body: str, found: list[Found]) -> bool:
        """Whether `body` could be read."""
        try:
            parsed = self._marks.parse(body)
            calls = [_call(each) for each in (parsed if isinstance(parsed, list) else [parsed])]
        except UNREADABLE:
            return False
        if calls:
            found += calls
            self._tokens, self._logprobs = [], []
        return bool(calls)


def _call(parsed: dict[str, Any]) -> ToolCallDelta:
    name, arguments = parsed["name"], parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("not a tool call")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # Half a character cannot be sent.
    (name + text).encode()
    given = parsed.get("id")
    # Where the model writes an id, its turn comes back with that one: the result then belongs to it.
    if isinstance(given, str) and SHORT_ID.fullmatch(given):
        return ToolCallDelta(name, text, id=given)
    return ToolCallDelta(name, text)


def _begun_call(body: str) -> list[Found]:
    begun = BEGUN_CALL.fullmatch(body)
    if begun is None:
        return []
    try:
        name = json.loads(begun[1])
        name.encode()
    except ValueError:
        return []
    try:
        # All but the end of the call may be there.
        arguments, _ = _DECODER.raw_decode(begun[2])
        return [_call({"name": name, "arguments": arguments})]
    except UNREADABLE:
        return [ToolCallDelta(name, begun[2], complete=False)]


def _undecided(text: str, markers: list[str]) -> int:
    """How many characters at the end of `text` may belong to a marker, the white space before it included."""
    begun = max(overlap(text, marker) for marker in markers)
    rest = text[: len(text) - begun]
    return begun + len(rest) - len(rest.rstrip())
