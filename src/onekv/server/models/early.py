"""A stream that begins while its request waits for a model.

Loading a large model takes longer than proxies and clients wait for the first byte. So after a few seconds the stream
begins, with comments that report the request's place in the queue; clients ignore them. Comments do not reset the
timeouts of some clients, so each comes with an event that the API allows and that has no content. The endpoint's own
events follow; for a response, under the same id (`EarlyStream.response`). The status has already been sent, so an error
becomes an event, as in every stream that has begun.
"""

import json
import time
from typing import Any

from starlette.types import Message, Send

from ..answer import frame
from ..journal import new_id

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class EarlyStream:
    def __init__(self, path: str, send: Send) -> None:
        """Of a request for `path`; `send` is how it is answered."""
        self._send = send
        self._path = path
        self._begun = self._failed = False
        # Whether events are sent with the comments.
        self.events = True
        self._created = int(time.time())
        self._id = new_id().removeprefix("req_")
        self._model = ""
        # Events of a response that were sent.
        self._number = 0

    @property
    def response(self) -> tuple[str, int] | None:
        """The id of the response that has been begun, and how many of its events were sent, if one has been."""
        return (self._response()["id"], self._number) if self._number else None

    async def say(self, text: str, model: str) -> None:
        """In a comment; the answer will be that of `model`."""
        self._model = model
        if not self._begun:
            self._begun = True
            headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = f": {text}\n\n" + (self._nothing() if self.events else "")
        await self._send({"type": "http.response.body", "body": body.encode(), "more_body": True})

    async def send(self, message: Message) -> None:
        """What the endpoint sends, a stream or an error in one piece."""
        if self._begun and message["type"] == "http.response.start":
            self._failed = message["status"] != 200
            return
        # Where the client has gone, there is none.
        if self._failed and (body := message.get("body")):
            message = {**message, "body": self._error(body.decode()).encode()}
        await self._send(message)

    def _nothing(self) -> str:
        """Events that say nothing yet."""
        if self._path.startswith("/v1/messages"):
            return frame({"type": "ping"}, "ping")
        if self._path.startswith("/v1/responses"):
            kinds = ("in_progress",) if self._number else ("created", "in_progress")
            return "".join(self._of_response(kind) for kind in kinds)
        chat = self._path.startswith("/v1/chat")
        choice: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        return frame(
            {
                "id": ("chatcmpl-" if chat else "cmpl-") + self._id,
                "object": "chat.completion.chunk" if chat else "text_completion",
                "created": self._created,
                "model": self._model,
                "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": None}],
            }
        )

    def _error(self, body: str) -> str:
        # Anthropic's clients go by the name of an event; OpenAI's by what is in it.
        if self._path.startswith("/v1/messages"):
            return frame(body, "error")
        if self._number:
            error = json.loads(body)["error"]
            told = {"code": error.get("code") or "server_error", "message": error["message"]}
            return self._of_response("failed", status="failed", error=told)
        return frame(body) + frame("[DONE]")

    def _of_response(self, kind: str, **changed: Any) -> str:
        name = f"response.{kind}"
        event = {"type": name, "response": self._response() | changed, "sequence_number": self._number}
        self._number += 1
        return frame(event, name)

    def _response(self) -> dict[str, Any]:
        """As far as it is known without the request."""
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None,
        }
