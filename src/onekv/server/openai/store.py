"""Responses that can be asked for again, in memory, bounded."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ..errors import NotFoundError

MAX_RESPONSES = 1000
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Stored:
    response: dict[str, Any]
    # The conversation up to and with this response, without instructions.
    messages: list[dict[str, Any]]
    size: int


class ResponseStore:
    """The latest responses of each key; no key can read another's."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: dict[str, OrderedDict[str, Stored]] = {}

    def put(self, salt: str, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        own = self._stored.setdefault(salt, OrderedDict())
        size = len(json.dumps(response)) + len(json.dumps(messages))
        own[response["id"]] = Stored(response, messages, size)
        while len(own) > self._max_responses or sum(each.size for each in own.values()) > self._max_bytes:
            own.popitem(last=False)

    def get(self, salt: str, name: str) -> Stored:
        stored = self._stored.get(salt, OrderedDict()).get(name)
        if stored is None:
            raise NotFoundError(f"there is no response {name!r}; it may have been dropped for newer ones")
        return stored

    def delete(self, salt: str, name: str) -> None:
        self.get(salt, name)
        del self._stored[salt][name]
