"""POST /v1/completions: text goes on where a prompt ends."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine import Delta, End
from ...errors import OneKVError
from ..answer import Answer, AnswerResponse, Prepared, frame
from ..backend import Backend, Generation
from ..deltas import Finish, TextDelta, TypedDelta
from ..errors import BadRequestError, openai_body
from .common import DONE, TokenTexts, fingerprint, finite, new_id, usage
from .schema import MAX_GENERATIONS, CompletionBody

router = APIRouter()
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    backend: Backend = request.app.state.backend
    backend.check_model(body.model)
    asked = partial(_prepare, body, backend, request.state.salt)
    return AnswerResponse(request, CompletionAnswer(backend, body), asked, body.stream)


def _prepare(body: CompletionBody, backend: Backend, salt: str) -> Prepared:
    """All choices of the first prompt, then those of the second, and so on."""
    n = body.n or 1
    if n * len(body.prompt) > MAX_GENERATIONS:
        asked = f"{len(body.prompt)} prompts with n = {n}"
        raise BadRequestError(f"{asked} are more than {MAX_GENERATIONS} generations", "n")
    sampling = body.sampling(backend.llm.vocabulary)
    generations = [
        Generation(
            tokens,
            body.max_tokens or DEFAULT_MAX_TOKENS,
            sampling.of_answer(index),
            body.stops,
            body.logprobs,
            salt=salt,
        )
        for tokens in map(backend.encode, body.prompt)
        for index in range(n)
    ]
    return Prepared(generations, [_PlainChoice() for _ in generations])


class _PlainChoice:
    """All text is content, with every token it came with."""

    def read(self, event: Delta | End) -> list[TypedDelta]:
        if isinstance(event, End):
            return [Finish.of(event)]
        return [TextDelta("content", event.text, event.tokens, event.logprobs)]


class CompletionAnswer(Answer):
    def __init__(self, backend: Backend, body: CompletionBody) -> None:
        self._body, self._stop_tokens = body, backend.llm.stop_tokens
        self._texts = TokenTexts(backend)
        # By choice: characters sent so far, and how it finished.
        self._sent = [0] * len(body.prompt) * (body.n or 1)
        self._finished: dict[int, Finish] = {}
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": backend.name,
            "system_fingerprint": fingerprint(backend),
        }

    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        if isinstance(delta, Finish):
            self._finished[index] = delta
            yield self._frame([self._choice(index, TextDelta("content", ""), delta.reason)])
        elif isinstance(delta, TextDelta) and (delta.text or self._body.logprobs is not None):
            yield self._frame([self._choice(index, delta, None)])

    def end(self) -> Iterator[str]:
        if self._body.wants_usage:
            yield self._frame([], self._usage([self._finished[index] for index in sorted(self._finished)]))
        yield DONE

    def fail(self, error: OneKVError) -> Iterator[str]:
        yield frame(openai_body(error))
        yield DONE

    def whole(self, said: list[list[TypedDelta]]) -> dict[str, Any]:
        finishes = [delta for deltas in said for delta in deltas if isinstance(delta, Finish)]
        choices = [
            self._choice(index, _joined(deltas), finish.reason)
            for index, (deltas, finish) in enumerate(zip(said, finishes, strict=True))
        ]
        return {**self._head, "choices": choices, "usage": self._usage(finishes)}

    def _usage(self, finishes: list[Finish]) -> dict[str, Any]:
        return usage(finishes[:: self._body.n or 1], finishes)

    def _frame(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        counted = {"usage": usage} if self._body.wants_usage else {}
        return frame({**self._head, "choices": choices, **counted})

    def _choice(self, index: int, delta: TextDelta, finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(index, delta) if self._body.logprobs is not None and delta.tokens else None
        self._sent[index] += len(delta.text)
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, delta: TextDelta) -> dict[str, Any]:
        pairs = zip(delta.tokens, delta.logprobs, strict=True)
        shown = [(self._texts.text(token), logprob) for token, logprob in pairs if token not in self._stop_tokens]
        offsets, at = [], self._sent[index]
        for text, _ in shown:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": [text for text, _ in shown],
            "token_logprobs": [finite(logprob.logprob) for _, logprob in shown],
            "top_logprobs": [
                {self._texts.text(token): finite(value) for token, value in logprob.top} for _, logprob in shown
            ],
            "text_offset": offsets,
        }


def _joined(deltas: list[TypedDelta]) -> TextDelta:
    texts = [delta for delta in deltas if isinstance(delta, TextDelta)]
    return TextDelta(
        "content",
        "".join(delta.text for delta in texts),
        [token for delta in texts for token in delta.tokens],
        [logprob for delta in texts for logprob in delta.logprobs],
    )
