"""Stored responses, in memory, bounded."""

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from ..call import ChatMessage
from ..errors import BadRequestError, NotFoundError
from .background import Background

MAX_RESPONSES = 1000
MAX_BYTES = 16 * 2**20


@dataclass
class Stored:
    response: dict[str, Any]
    # The conversation up to this response and, once it is whole, with it; without instructions.
    messages: list[ChatMessage]
    # What was asked, as the API lists it.
    items: list[dict[str, Any]]
    # The task that generates it, or has generated it, if it runs in the background.
    background: Background | None = None
    # As it was stored last.
    size: int = 0

    @property
    def running(self) -> bool:
        return self.background is not None and self.background.running

    def conversation(self) -> list[ChatMessage]:
        """To continue from. Raises BadRequestError if the response is not whole."""
        if (status := self.response["status"]) not in ("completed", "incomplete"):
            name = self.response["id"]
            raise BadRequestError(f"the response {name!r} is {status}: it cannot be continued", "previous_response_id")
        return self.messages


class ResponseStore:
    """The latest responses of each key; no key can read another's. Those that run stay: the engine bounds them."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: dict[str, OrderedDict[str, Stored]] = {}

    def put(self, salt: str, stored: Stored) -> None:
        """Also one that is there, and has changed."""
        own = self._stored.setdefault(salt, OrderedDict())
        stored.size = sum(len(json.dumps(each)) for each in (stored.response, stored.messages, stored.items))
        stored.size += sum(map(len, stored.background.frames)) if stored.background is not None else 0
        own[stored.response["id"]] = stored
        while len(own) > self._max_responses or sum(each.size for each in own.values()) > self._max_bytes:
            oldest = next((name for name, each in own.items() if not each.running), None)
            if oldest is None:
                break
            del own[oldest]

    def get(self, salt: str, name: str) -> Stored:
        stored = self._stored.get(salt, OrderedDict()).get(name)
        if stored is None:
            raise NotFoundError(f"there is no response {name!r}; it may have been dropped to make room for newer ones")
        return stored

    def forget(self, salt: str, name: str) -> None:
        self._stored.get(salt, OrderedDict()).pop(name, None)

    def running(self) -> Iterator[Background]:
        """Of all keys."""
        every = [each for own in self._stored.values() for each in own.values()]
        return (each.background for each in every if each.background is not None and each.running)


def stored_responses(app: FastAPI) -> ResponseStore:
    """Those of this server."""
    if not hasattr(app.state, "responses"):
        app.state.responses = ResponseStore()
    store: ResponseStore = app.state.responses
    return store
