"""Streams the arguments of a call in Qwen3-Coder's format, as JSON.

    <function=write>
    <parameter=path>
    a.py
    </parameter>        {"path": "a.py"          text that is declared as a string is sent as it arrives,
    <parameter=lines>
    3
    </parameter>        , "lines": 3             all else when its parameter has ended, as mlx-lm's parser reads it
    </function>         }                        what the parser makes of the whole call, minus what was sent

What was emitted is the beginning of that. Anything written differently from what the template teaches, such as other
text between parameters, is not emitted before the end; the parser may still understand it. If a call turns out to be
different from how it began (a parameter twice, or one that never ends), what was emitted cannot be taken back: it is
left as it is, incomplete, as with broken JSON.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from ..engine.output import overlap
from .deltas import ToolCallDelta, ToolCallPart, new_call_id
from .segments import UNREADABLE, Found

PARSER = "mlx_lm.tool_parsers.qwen3_coder"
_FUNCTION = re.compile(r"\s*<function=([^\s<>]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^\s<>]+)>")
_END = "</parameter>"


class XmlParts:
    """One call; `feed` is given its text, as far as it has come, again and again."""

    def __init__(self, parse: Callable[[str], Any], tools: list[dict[str, Any]]) -> None:
        self._parse, self._tools = parse, tools
        self._id = new_call_id()
        self._name = ""
        self._strings: set[str] = set()
        # How far the text was read, and whether what follows cannot be.
        self._at, self._stuck = 0, False
        # The parameter that is being read, those before it, and whether its string has been opened.
        self._parameter: str | None = None
        self._seen: set[str] = set()
        self._open = False
        # The arguments so far, and those of them that were not given yet.
        self._arguments: list[str] = []
        self._new: list[str] = []

    def feed(self, text: str, found: list[Found]) -> bool:
        """Add what is new of the arguments to `found`; whether some were given."""
        while not self._stuck and self._step(text):
            pass
        self._give(found)
        return bool(self._arguments)

    def end(self, text: str, found: list[Found]) -> ToolCallDelta:
        """The whole call, whose text this is; the rest of its arguments is added to `found`."""
        given = "".join(self._arguments)
        try:
            whole = _json(self._parse(text)["arguments"])
            complete = whole.startswith(given)
        except UNREADABLE:
            complete = False
        if complete:
            self._new.append(whole[len(given) :])
            self._give(found)
        return ToolCallDelta(self._name, "".join(self._arguments), complete, self._id, in_parts=True)

    def _give(self, found: list[Found]) -> None:
        if piece := "".join(self._new):
            found.append(ToolCallPart(self._name, piece, self._id, first=not self._arguments))
            self._arguments.append(piece)
            self._new.clear()

    def _step(self, text: str) -> bool:
        """Read over the next tag, or what there is of a value; False if more must come."""
        if not self._name:
            return self._begin(text)
        if self._parameter is None:
            return self._begin_parameter(text)
        end = text.find(_END, self._at)
        if self._parameter in self._strings:
            self._read_string(text, end)
        elif end >= 0:
            self._read_value(text[self._at : end])
        if end >= 0:
            self._at, self._parameter = end + len(_END), None
        return end >= 0

    def _begin(self, text: str) -> bool:
        if (tag := _FUNCTION.match(text)) is None:
            return False
        self._name, self._at = tag[1], tag.end()
        functions = [tool["function"] for tool in self._tools if tool["function"]["name"] == self._name]
        declared = (functions[0].get("parameters") or {}).get("properties") or {} if functions else {}
        self._strings = {
            name for name, schema in declared.items() if isinstance(schema, dict) and schema.get("type") == "string"
        }
        return True

    def _begin_parameter(self, text: str) -> bool:
        if (tag := _PARAMETER.match(text, self._at)) is None:
            return False
        name = tag[1]
        # The parser takes the last of two; the first has been given.
        self._stuck = name in self._seen
        self._parameter, self._at, self._open = name, tag.end(), False
        return not self._stuck

    def _begin_value(self) -> None:
        """All that stands before the value of the parameter."""
        assert self._parameter is not None
        self._new.append((", " if self._seen else "{") + json.dumps(self._parameter, ensure_ascii=False) + ": ")
        self._seen.add(self._parameter)

    def _read_value(self, text: str) -> None:
        call = f"<function={self._name}><parameter={self._parameter}>{text}{_END}</function>"
        try:
            value = _json(self._parse(call)["arguments"][self._parameter])
        except UNREADABLE:
            self._stuck = True
            return
        self._begin_value()
        self._new.append(value)

    def _read_string(self, text: str, end: int) -> None:
        """What is certain of a string; all of it if its `end` is known. A line end on both sides is no part of it."""
        stop = end
        if end < 0:
            stop = len(text) - max(overlap(text, _END), overlap(text, "\n" + _END))
        value = text[self._at : max(self._at, stop)]
        if not self._open:
            value = value.removeprefix("\n")
            null = value.lower()
            if end < 0 and "null\n".startswith(null):
                # Without quotes, if it is all.
                return
            self._begin_value()
            if end >= 0 and null.removesuffix("\n") == "null":
                self._new.append("null")
                return
            self._new.append('"')
            self._open = True
        if end >= 0:
            value = value.removesuffix("\n")
        self._new.append(json.dumps(value, ensure_ascii=False)[1:-1] + ('"' if end >= 0 else ""))
        self._at = max(self._at, stop)


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half a character cannot be sent.
    text.encode()
    return text
