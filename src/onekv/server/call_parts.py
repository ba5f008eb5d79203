"""Streams the arguments of a JSON call as they are generated, before it is known whether they can be parsed.

    {"name": "write", "arguments": {"path": "a.py", "text": "import os\\n ...
                                   |__ given from here on, up to the brace that closes it

Line breaks and the like inside strings, which models write unescaped, are escaped: clients read strict JSON. Everything
else is sent as the model wrote it, whether or not it can be parsed in the end.
"""

import json
import re

from .deltas import TextDelta, ToolCallDelta, ToolCallPart, new_call_id

# A call that may not have ended; arguments without a first character could be taken for none.
BEGUN_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"arguments"\s*:\s*(\{.*)', re.DOTALL)
# What is longer than this without arguments has none that can be read before its end.
_LONGEST_NAME = 1024


class CallParts:
    """One call; `feed` is given its text, as far as it has come, again and again."""

    def __init__(self) -> None:
        self._id = new_call_id()
        self._name = ""
        # No arguments can be read before the end of the call.
        self._given_up = False
        # How far the text was read, the arguments so far, and where in them it stands.
        self._at = 0
        self._arguments: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str, found: list[TextDelta | ToolCallPart | ToolCallDelta]) -> bool:
        """Add what is new of the arguments to `found`; whether they have begun."""
        first = not self._name
        if first and not self._begin(text):
            return False
        start, self._at = self._at, len(text)
        piece = self._read(text[start:])
        if piece:
            self._arguments.append(piece)
            found.append(ToolCallPart(self._name, piece, self._id, first))
        return True

    def end(self, text: str, found: list[TextDelta | ToolCallPart | ToolCallDelta]) -> ToolCallDelta:
        """The whole call, after its last text; all of its arguments have been given."""
        arguments = "".join(self._arguments)
        try:
            # Half a character, as an escape, is no text.
            json.dumps(json.loads(arguments, parse_constant=_refuse), ensure_ascii=False).encode()
            complete = True
        except (ValueError, RecursionError):
            complete = False
        return ToolCallDelta(self._name, arguments, complete, self._id, in_parts=True)

    def _begin(self, text: str) -> bool:
        begun = None if self._given_up else BEGUN_CALL.fullmatch(text)
        if begun is None:
            self._given_up |= len(text) > _LONGEST_NAME
            return False
        try:
            name = json.loads(begun[1])
            name.encode()
        except ValueError:
            self._given_up = True
            return False
        self._name, self._at = name, begun.start(2)
        return True

    def _read(self, text: str) -> str:
        """Those of the next characters that belong to the arguments, as JSON has them."""
        read: list[str] = []
        for character in text:
            if self._depth == 0 and (read or self._arguments):
                break
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character < " ":
                    character = json.dumps(character)[1:-1]
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            read.append(character)
        return "".join(read)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
