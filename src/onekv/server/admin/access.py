"""Who may see figures about all keys, and when they are available."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from ..backend import Backend
from ..errors import ForbiddenError, LoadingError
from ..models.registry import Models


def administrator(request: Request) -> None:
    """What is about all keys is for the first one alone."""
    if not request.state.administrator:
        raise ForbiddenError("this requires the server's first API key")


@dataclass(frozen=True)
class Reader:
    """Who asks about cache contents: the administrator sees figures of all keys, other keys their own.

    Text is shown to the key that sent it, and to the administrator if the server runs with `--show-text on`.
    """

    salt: str
    administrator: bool
    show_text: bool
    # The server's keys, counted from 1, by salt; empty if it has none.
    owners: dict[str, int]

    @classmethod
    def of(cls, request: Request) -> "Reader":
        state, app = request.state, request.app.state
        return cls(state.salt, state.administrator, app.show_text, app.owners)

    def sees(self, salt: str) -> bool:
        return self.administrator or salt == self.salt

    def reads(self, salt: str) -> bool:
        return salt == self.salt or (self.administrator and self.show_text)

    def owner(self, salt: str) -> dict[str, Any]:
        """The number of a key, null if the server no longer has it, and whether it is the caller's."""
        return {"key": self.owners.get(salt), "own": salt == self.salt}


def loaded(request: Request) -> None:
    """Before the model is loaded nothing but its health is known."""
    models: Models | None = request.app.state.models
    backend: Backend | None = request.app.state.backend
    ready = models.ready if models is not None else backend is not None and backend.loaded
    if not ready:
        raise LoadingError("the model is being loaded; try again later, when /health/ready returns 200")


LOADED = [Depends(loaded)]
ADMINISTRATOR = [Depends(administrator)]
Asking = Annotated[Reader, Depends(Reader.of)]
