"""The answer of /v1/responses: one response object, and the events of its stream."""

import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ...errors import OneKVError
from ..answer import Answer, frame
from ..backend import Backend
from ..call import ChatMessage
from ..deltas import Finish, TypedDelta
from .common import TokenTexts, new_id
from .output import ResponseOutput, StreamEvent
from .responses_schema import ResponsesBody


class ResponseAnswer(Answer):
    fields: ClassVar = {"messages": "input", "response_format": "text.format"}

    def __init__(
        self,
        backend: Backend,
        body: ResponsesBody,
        keep: Callable[[ChatMessage], None],
        begun: tuple[str, int] | None = None,
    ) -> None:
        """`keep` is called with the answer, once the response is complete. `begun`: its id, and how many events the
        client has, where it was told of the response before (`models/early.py`).
        """
        self._keep = keep
        self._output = ResponseOutput(TokenTexts(backend))
        # What the client gets, as far as it is known.
        self.response = _empty(backend, body)
        # Frames written so far.
        self._number = 0
        if begun is not None:
            self.response["id"], self._number = begun

    def begin(self, prompt_tokens: int) -> Iterator[str]:
        for kind in ("in_progress",) if self._number else ("created", "in_progress"):
            yield self._frame({"type": f"response.{kind}", "response": self.response})

    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        for event in self._finish(delta) if isinstance(delta, Finish) else self._output.add(delta):
            yield self._frame(event)

    def waiting(self) -> str:
        return self._frame({"type": "response.in_progress", "response": self.response})

    def end(self) -> Iterator[str]:
        yield self._frame({"type": f"response.{self.response['status']}", "response": self.response})

    def fail(self, error: OneKVError) -> Iterator[str]:
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
        yield self._frame({"type": "response.failed", "response": self.response})

    def cancel(self) -> Iterator[str]:
        """The answer ends here, because the client wants no more; the API has no event for that alone."""
        self._output.cut_off()
        self.response |= {"status": "cancelled", "output": self._output.items}
        yield self._frame({"type": "response.incomplete", "response": self.response})

    def whole(self, said: list[list[TypedDelta]]) -> dict[str, Any]:
        for delta in said[0]:
            for _ in self._finish(delta) if isinstance(delta, Finish) else self._output.add(delta):
                pass
        return self.response

    def _finish(self, finish: Finish) -> Iterator[StreamEvent]:
        incomplete = finish.reason == "length"
        status = "incomplete" if incomplete else "completed"
        yield from self._output.close(status)
        self.response |= {
            "status": status,
            "output": self._output.items,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "usage": _usage(finish),
        }
        self._keep(self._output.message())

    def _frame(self, event: StreamEvent) -> str:
        self._number += 1
        return frame({**event, "sequence_number": self._number - 1}, event["type"])


def _usage(finish: Finish) -> dict[str, Any]:
    return {
        "input_tokens": finish.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finish.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finish.generated,
        "output_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
        "total_tokens": finish.prompt_tokens + finish.generated,
    }


def _empty(backend: Backend, body: ResponsesBody) -> dict[str, Any]:
    """The response before any output."""
    choice = body.tool_choice or "auto"
    form = body.text.format if body.text is not None else None
    described = form.model_dump(by_alias=True, exclude_unset=True) if form is not None else {"type": "text"}
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": backend.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.effort, "summary": None},
        "store": body.store is not False,
        "temperature": backend.defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": described},
        "tool_choice": choice if choice in ("auto", "none", "required") else {"type": "function", "name": choice},
        "tools": [tool.described() for tool in body.functions],
        "top_p": backend.defaults.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }
