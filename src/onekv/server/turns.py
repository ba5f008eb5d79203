"""The token ids generated for each turn of a conversation, for when a client sends the turn back.

Text that is sent back does not become the same tokens: the model may have chosen other ones than the tokenizer would,
and clients trim white space, reformat JSON and leave out thinking. From that point on nothing would be found in the
prefix cache. So the generated ids are remembered (`remember`), and reused when the conversation continues (`known`).

A turn is identified by its conversation: the key is a hash of the salt and of what all messages up to it say (`Said`),
regardless of formatting. So only a client that sends that conversation with that API key finds it. `replay` checks
whether the ids may be used in the prompt, at the place where the template has put the message.

Owned by the backend, used in any thread. At most `limit` bytes, the least recently used dropped first. With a disk
cache they are also in a file in its folder (`tiers/turns.py`), and survive a restart.
"""

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..tiers.turns import OVERHEAD, TurnsFile
from .call import ChatMessage
from .deltas import TextDelta, ToolCallDelta, TypedDelta


@dataclass(frozen=True)
class Said:
    """What a turn says, whatever white space is around it and however its calls are spelled."""

    content: str
    reasoning: str = ""
    # Names and arguments.
    calls: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(message: ChatMessage) -> "Said":
        functions = [call["function"] for call in message.get("tool_calls") or []]
        calls = tuple((function["name"], _spelled(function["arguments"])) for function in functions)
        return Said((message.get("content") or "").strip(), (message.get("reasoning_content") or "").strip(), calls)

    @staticmethod
    def of_deltas(deltas: Iterable[TypedDelta]) -> "Said":
        texts = {"content": "", "reasoning": ""}
        calls = []
        for delta in deltas:
            if isinstance(delta, TextDelta):
                texts[delta.kind] += delta.text
            elif isinstance(delta, ToolCallDelta):
                # Half a call has text that is no JSON.
                arguments = json.loads(delta.arguments) if delta.complete else delta.arguments
                calls.append((delta.name, _spelled(arguments)))
        return Said(texts["content"].strip(), texts["reasoning"].strip(), tuple(calls))


def _spelled(arguments: Any) -> str:
    """One spelling for arguments that are equal."""
    return json.dumps(_plain(arguments), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """JavaScript has one kind of number, and writes 1.0 as 1."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def keys(salt: str, messages: Sequence[ChatMessage]) -> list[bytes]:
    """For each message the key of the conversation that ends with it."""
    key, found = hashlib.sha256(salt.encode()).digest(), []
    for message in messages:
        key = _next(key, message["role"], Said.of(message))
        found.append(key)
    return found


def _next(key: bytes, role: str, said: Said) -> bytes:
    # Not the reasoning, which may be left out.
    text = json.dumps([role, said.content, said.calls])
    return hashlib.sha256(key + text.encode()).digest()


class Turns:
    def __init__(self, limit: int, file: TurnsFile | None = None) -> None:
        """At most `limit` bytes; 0 remembers nothing."""
        self._limit, self._file = limit, file
        self._lock = threading.Lock()
        # The least recently used first.
        self._turns: OrderedDict[bytes, bytes] = OrderedDict()
        self.nbytes = 0
        for key, ids in file.read() if file is not None else ():
            self._put(key, ids)

    def __len__(self) -> int:
        return len(self._turns)

    def remember(self, salt: str, messages: Sequence[ChatMessage], said: Said, tokens: Sequence[int]) -> None:
        """`tokens` were generated after `messages` and say `said`."""
        key, ids = _next(keys(salt, messages)[-1], "assistant", said), array("I", tokens).tobytes()
        with self._lock:
            self._put(key, ids)
            if self._file is not None and key in self._turns:
                self._file.add(key, ids)
                if self._file.is_long(self.nbytes):
                    self._file.write(self._turns.items())

    def known(self, salt: str, messages: Sequence[ChatMessage]) -> dict[int, list[int]]:
        """The ids of those of `messages` that were generated here, by index; the last one is not asked for."""
        found: dict[int, list[int]] = {}
        if not self._turns:
            return found
        with self._lock:
            for index, key in enumerate(keys(salt, messages[:-1])):
                if messages[index]["role"] == "assistant" and key in self._turns:
                    self._turns.move_to_end(key)
                    found[index] = array("I", self._turns[key]).tolist()
        return found

    def _put(self, key: bytes, ids: bytes) -> None:
        """With the lock held."""
        self.nbytes -= _size(self._turns.pop(key, None))
        self._turns[key] = ids
        self.nbytes += _size(ids)
        while self.nbytes > self._limit:
            self.nbytes -= _size(self._turns.popitem(last=False)[1])


def _size(ids: bytes | None) -> int:
    return 0 if ids is None else len(ids) + OVERHEAD
