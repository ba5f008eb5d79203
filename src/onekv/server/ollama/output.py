"""An answer in the format of Ollama's API: lines of JSON, the last of which has the durations.

    {..., "done": false} ... -> {..., "done": true, "done_reason": "stop", "total_duration": ...}

Durations are in nanoseconds and add up: `load_duration` is the time until prefill started (rendering the prompt,
waiting in the queue), `prompt_eval_duration` from then to the first token, `eval_duration` for the tokens after it.
"""

import json
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar

from starlette.responses import JSONResponse, Response

from ...errors import OneKVError
from ..answer import Answer
from ..backend import Backend
from ..deltas import Finish, TextDelta, ToolCallDelta, ToolCallPart, TypedDelta
from ..errors import ollama_body
from ..openai.common import TokenTexts
from .schema import AnswerBody

NDJSON = "application/x-ndjson"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer(Answer):
    media_type: ClassVar = NDJSON
    fields: ClassVar = {"response_format": "format"}

    def __init__(self, backend: Backend, body: AnswerBody) -> None:
        self._model = body.model
        self._started = time.perf_counter_ns()
        self._texts = TokenTexts(backend) if body.logprobs else None
        # Clients read a line of nothing as an error; a piece of nothing is none.
        self.keep_alive = self._line(self._said([]), done=False)

    @abstractmethod
    def _said(self, deltas: Iterable[TypedDelta]) -> dict[str, Any]:
        """What `deltas` are in a line, without what all lines have."""

    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        if isinstance(delta, Finish):
            yield self._line(self._said([]), done=True, **self._took(delta))
        elif (
            isinstance(delta, ToolCallDelta | ToolCallPart) or delta.text or (delta.tokens and self._texts is not None)
        ):
            yield self._line(self._said([delta]), done=False, **self._logprobs([delta]))

    def end(self) -> Iterator[str]:
        yield from ()

    def fail(self, error: OneKVError) -> Iterator[str]:
        yield _encode(ollama_body(error)) + "\n"

    def whole(self, said: list[list[TypedDelta]]) -> dict[str, Any]:
        (deltas,) = said
        (finish,) = [delta for delta in deltas if isinstance(delta, Finish)]
        return self._object(self._said(deltas), done=True, **self._took(finish), **self._logprobs(deltas))

    def loaded(self, stream: bool) -> Response:
        """The answer to a request that says nothing: programs send one so that the model is loaded, and it is."""
        said = self._said([])
        if stream:
            return Response(self._line(said, done=True, done_reason="load"), media_type=NDJSON)
        return JSONResponse(self._object(said, done=True, done_reason="load"))

    def _object(self, said: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"model": self._model, "created_at": now(), **said, **more}

    def _line(self, said: dict[str, Any], **more: Any) -> str:
        return _encode(self._object(said, **more)) + "\n"

    def _logprobs(self, deltas: Iterable[TypedDelta]) -> dict[str, Any]:
        if self._texts is None:
            return {}
        texts = [delta for delta in deltas if isinstance(delta, TextDelta)]
        return {"logprobs": [entry for delta in texts for entry in self._texts.chat(delta.tokens, delta.logprobs)]}

    def _took(self, finish: Finish) -> dict[str, Any]:
        total = time.perf_counter_ns() - self._started
        prompt, answer = (int(seconds * 1e9) for seconds in (finish.timings.prefill, finish.timings.decode))
        return {
            "done_reason": "length" if finish.reason == "length" else "stop",
            "total_duration": total,
            "load_duration": max(0, total - prompt - answer),
            "prompt_eval_count": finish.prompt_tokens,
            # Not in Ollama's API: how many of those were found in the prefix cache.
            "prompt_cached_count": finish.cached_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": finish.generated,
            "eval_duration": answer,
        }


def text_of(deltas: Iterable[TypedDelta], kind: str) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta) and delta.kind == kind)
