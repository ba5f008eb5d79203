"""Every request has an id, and a line in the log when it is over.

The id is the client's own (`x-request-id`), if it sent one that is safe to log, otherwise a new one. Each response has
it as `x-request-id`, and as `request-id` where Anthropic's clients look for it; so do errors in Anthropic's format and
errors in the log.

    Journal     middleware: creates an `Entry`, adds headers to responses, writes the line
    current     the entry of the request being handled, available to the code that handles it
    background  another entry and line, for work that continues after a request has been answered
    Backend     adds its generations, whose figures the engine's thread maintains and which are read at the end
"""

import logging
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message as ASGIMessage
from starlette.types import Receive, Scope, Send

from .around import Around
from .logs import Field, log_fields
from .metrics import Observed

log = logging.getLogger("onekv.request")

# Asked for every few seconds by machines; a line for each would hide all others.
_PROBES = ("/health", "/health/live", "/health/ready", "/metrics")
_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
_LONGEST_PATH = 200


def new_id() -> str:
    return f"req_{secrets.token_hex(12)}"


@dataclass
class Entry:
    """One request, as it will appear in the log."""

    id: str
    method: str
    path: str
    began: float = field(default_factory=time.perf_counter)
    # What was answered, whether all of it was sent, and the kind of error that it was.
    status: int = 0
    complete: bool = False
    error: str | None = None
    # Seconds for which it waited until its model was loaded, if it did.
    waited: float | None = None
    # What was generated for it, by which model.
    model: str = ""
    generations: Sequence[Observed] = ()
    # Where its prompt diverges from the nearest cached conversation, if it does (explain.py).
    lost: Sequence[Field] = ()
    # How often each rule of hygiene was applied to its prompt.
    cleaned: Mapping[str, int] = field(default_factory=dict)

    def fields(self) -> list[Field]:
        """Its line in the log; what there was none of is left out."""
        status = self.status or None
        parts = [Field(self.method, method=self.method), Field(self.path, path=self.path)]
        parts.append(Field(str(status or "-"), status=status))
        if self.generations:
            parts += [Field(f"model={self.model}", model=self.model), *_figures(self.generations, self.lost)]
        if self.waited is not None:
            parts.append(Field(f"waited={self.waited:.3f}s", waited_s=round(self.waited, 6)))
        if self.cleaned:
            counts = ",".join(f"{name}:{count}" for name, count in self.cleaned.items())
            parts.append(Field(f"cleaned={counts}", cleaned=dict(self.cleaned)))
        if (end := self._end()) is not None:
            parts.append(Field(f"end={end}", end=end))
        total = time.perf_counter() - self.began
        return [*parts, Field(f"time={total:.3f}s", total_s=round(total, 6)), Field(f"id={self.id}", id=self.id)]

    def _end(self) -> str | None:
        if self.error is not None:
            return _words(self.error)
        if not self.complete:
            return "client_gone"
        # In the order of the choices, each kind once.
        ends = dict.fromkeys(_words(each.outcome) for each in self.generations if each.outcome is not None)
        return "+".join(ends) or None


def _words(outcome: str) -> str:
    """`stop`, or of a kind of error `bad_request`: most of them are the client's, and nothing that went wrong here."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", outcome.removesuffix("Error")).lower()


def _figures(generations: Sequence[Observed], lost: Sequence[Field]) -> list[Field]:
    """Of all choices together."""
    prompt = sum(each.prompt_tokens for each in generations)
    cached = sum(each.cached_tokens for each in generations)
    generated = sum(each.generated for each in generations)
    started = [each for each in generations if each.first is not None]
    choices = len(generations)
    parts = [Field(f"choices={choices}", choices=choices)] if choices > 1 else []
    parts.append(Field(f"prompt={prompt}", prompt_tokens=prompt))
    parts.append(Field(f"cached={cached}({cached / max(1, prompt):.0%})", cached_tokens=cached))
    if (missed := generations[0].missed) is not None:
        parts.append(Field(f"missed={missed.replace(' ', '_')}", missed=missed))
    if (leaves := generations[0].leaves) is not None:
        parts.append(Field(f"leaves={leaves}", leaves=leaves))
    parts += [*lost, Field(f"generated={generated}", generated_tokens=generated)]
    if (proposed := sum(each.proposed for each in generations)) > 0:
        accepted = sum(each.accepted for each in generations)
        parts.append(Field(f"guessed={accepted}/{proposed}", proposed_tokens=proposed, accepted_tokens=accepted))
    if started:
        first = min(each.first for each in started if each.first is not None)
        waited = first - min(each.created for each in started)
        parts.append(Field(f"first_token={waited:.3f}s", first_token_s=round(waited, 6)))
        seconds = max(each.last for each in started) - first
        # What came first of each is what the prompt took.
        rest = generated - sum(each.began_with for each in started)
        if rest and seconds > 0:
            speed = rest / seconds
            parts.append(Field(f"speed={speed:.1f}tokens/s", tokens_per_s=round(speed, 3)))
    return parts


current: ContextVar[Entry | None] = ContextVar("onekv_request", default=None)


def request_id() -> str | None:
    """That of the request that is being answered; None outside of one."""
    entry = current.get()
    return entry.id if entry is not None else None


@contextmanager
def background(path: str) -> Iterator[Entry]:
    """For what continues when its request has been answered: a line of its own at its end, under the request's id.

    There is none if it raises: then it has not begun, and the request gets the error, or the log has it.
    """
    entry = Entry(request_id() or new_id(), "BACKGROUND", path)
    token = current.set(entry)
    try:
        yield entry
    finally:
        current.reset(token)
    entry.complete = True
    log_fields(log, logging.INFO, entry.fields())


class Journal(Around):
    """The outermost of what handles a request."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        # As it was sent: without what an escaped character stands for.
        path = bytes(scope.get("raw_path") or scope["path"].encode()).decode("latin-1")[:_LONGEST_PATH]
        entry = Entry(_id(headers), scope["method"], path)
        names = ["x-request-id"]
        if scope["path"].startswith("/v1/messages") or "anthropic-version" in headers:
            names.append("request-id")

        async def sending(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                told = MutableHeaders(scope=message)
                for name in names:
                    told[name] = entry.id
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                entry.complete = True

        token = current.set(entry)
        try:
            await self.app(scope, receive, sending)
        finally:
            current.reset(token)
            log_fields(log, _level(scope["path"], entry), entry.fields())


def _id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else new_id()


def _level(path: str, entry: Entry) -> int:
    # The page asks for a dozen files when it is opened, and while it is open for what has changed.
    quiet = path.startswith("/page/") or (path.startswith("/admin/cache/") and entry.method == "GET")
    if path in _PROBES or (quiet and entry.status < 400):
        return logging.DEBUG
    return logging.WARNING if entry.status >= 500 else logging.INFO
