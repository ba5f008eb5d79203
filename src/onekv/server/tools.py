"""What clients send that a server of text models cannot use: tools that it cannot run, parts that are not text.

Agents send the same list of tools to every server. Tools of a kind that only their own vendor runs (`web_search`,
`computer_20250124`, `namespace`, ...) are left out of the prompt, as if the client had not sent them, which is logged
once per kind. A part of a tool's result that is not text becomes a line of text: it stays in the history, so rejecting
it would end the conversation.
"""

import logging
from collections.abc import Sequence
from typing import Any

from .body import Body, Str
from .errors import BadRequestError

log = logging.getLogger("onekv.server")
# Clients choose the names of kinds.
MOST_KINDS = 100
_told: set[str] = set()


class OtherTool(Body):
    """A tool that is not a function of the client's."""

    type: Str
    name: Str | None = None


def leave_out(tools: Sequence[OtherTool]) -> None:
    """Tell the log that `tools` are left out."""
    for tool in tools:
        if tool.type not in _told and len(_told) < MOST_KINDS:
            _told.add(tool.type)
            log.info("tools of type %.60r are left out of requests: this server cannot run them", tool.type)


def check_choice(choice: str | None, names: Sequence[str], left_out: Sequence[OtherTool]) -> None:
    """Raises BadRequestError for a `tool_choice` that the tools which are left cannot meet."""
    if choice in (None, "auto", "none") or (choice == "required" and names) or choice in names:
        return
    what = "asks for a call" if choice == "required" else f"names {choice!r}"
    kinds = ", ".join(sorted({tool.type for tool in left_out}))
    why = f"; tools of type {kinds} are left out, since this server cannot run them" if kinds else ""
    among = "which is not in tools" if names else "but there are no tools"
    raise BadRequestError(f"tool_choice {what}, {among}{why}", "tool_choice")


def placeholder(kind: Any) -> str:
    """What stands for a part of a tool's result that is no text."""
    return f"[{kind} left out: this model reads text only]"
