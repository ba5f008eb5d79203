"""A stream that is begun while its request waits for a model.

Loading a large model takes longer than proxies and clients wait for the first byte. So after a few seconds a stream is
begun, with comments that say which place in the queue its request has; clients ignore them. What the endpoint then
sends goes on from there. The status has been sent by then: an error comes as an event, as it does in every stream that
has begun.
"""

from starlette.types import Message, Send

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class EarlyStream:
    def __init__(self, path: str, send: Send) -> None:
        """Of a request for `path`; `send` is how it is answered."""
        self._send = send
        # Anthropic's clients go by the name of an event; OpenAI's by what is in it.
        self._error = ("event: error\ndata: ", "\n\n")
        if not path.startswith("/v1/messages"):
            self._error = ("data: ", "\n\ndata: [DONE]\n\n")
        self._begun = self._failed = False

    async def say(self, text: str) -> None:
        """In a comment."""
        if not self._begun:
            self._begun = True
            headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": f": {text}\n\n".encode(), "more_body": True})

    async def send(self, message: Message) -> None:
        """What the endpoint sends, a stream or an error in one piece."""
        if self._begun and message["type"] == "http.response.start":
            self._failed = message["status"] != 200
            return
        if self._failed:
            before, after = self._error
            message = {**message, "body": before.encode() + message.get("body", b"") + after.encode()}
        await self._send(message)
