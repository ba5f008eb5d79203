"""Who may look at what is about all keys."""

from fastapi import Depends, Request

from ..errors import ForbiddenError


def administrator(request: Request) -> None:
    """What is about all keys is for the first one alone."""
    if not request.state.administrator:
        raise ForbiddenError("this is for the first of the server's API keys")


ADMINISTRATOR = [Depends(administrator)]
