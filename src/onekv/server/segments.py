"""Splits a model's text, as it comes, into reasoning, content and tool calls.

    content <-> reasoning       between the thinking markers
    content, reasoning -> call -> content

However the text is cut, what comes out is the same, joined. A marker that may just be beginning is held back until it
is known; white space next to a marker belongs to it. The text of a call that cannot be read is content. Tokens go with
the first text that comes after them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..engine import Logprob
from ..engine.output import overlap
from .deltas import TextDelta, ToolCallDelta

# What a parser may raise on text it was not made for.
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, SyntaxError, RecursionError)

Parser = Callable[[str], Any]
Found = TextDelta | ToolCallDelta


@dataclass(frozen=True)
class Markers:
    """The markers of a model's text. None: the model has none; an empty `call_end`: a call runs to the end."""

    think_start: str | None = None
    think_end: str | None = None
    call_start: str | None = None
    call_end: str | None = None
    # From the text of a call to {"name", "arguments"}, or a list of such.
    parse: Parser = json.loads


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

    def finish(self) -> list[Found]:
        """What was held back; nothing comes after it."""
        rest, self._held = self._held, ""
        found: list[Found] = []
        if self._mode != "call":
            found += self._text(rest)
        elif self._marks.call_end != "" or not self._add_calls(rest, found):
            found.append(self._delta("content", self._opening + rest))
        if self._logprobs:
            found.append(self._delta("content", ""))
        return found

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
            return False
        before, self._held = self._held[:at], self._held[at + len(marker) :]
        if self._mode == "call":
            self._end_call(before, found)
            return True
        text = before.rstrip()
        found += self._text(text)
        if marker == self._marks.call_start:
            self._mode, self._opening = "call", before[len(text) :] + marker
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
        called = self._add_calls(body, found)
        if not called:
            found.append(self._delta("content", self._opening + body + (self._marks.call_end or "")))
        self._mode, self._at_marker = "content", called

    def _add_calls(self, body: str, found: list[Found]) -> bool:
        """Whether `body` could be read."""
        try:
            parsed = self._marks.parse(body)
            calls = [_call(each) for each in (parsed if isinstance(parsed, list) else [parsed])]
        except _UNREADABLE:
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
    return ToolCallDelta(name, text)


def _undecided(text: str, markers: list[str]) -> int:
    """How many characters at the end of `text` may belong to a marker, the white space before it included."""
    begun = max(overlap(text, marker) for marker in markers)
    rest = text[: len(text) - begun]
    return begun + len(rest) - len(rest.rstrip())
