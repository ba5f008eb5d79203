"""POST /v1/completions: continues a prompt, or fills in the text between it and a suffix if the model can."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine import Delta, End, Logprob
from ...errors import OneKVError
from ..answer import Answer, AnswerResponse, Prepared, frame
from ..backend import Backend, Generation, Progress
from ..deltas import Finish, TextDelta, TypedDelta
from ..errors import BadRequestError, openai_body
from ..infill import around
from ..models.choose import choose
from .common import DONE, Storing, TokenTexts, fingerprint, finite, new_id, prompt_progress, usage
from .schema import MAX_GENERATIONS, CompletionBody

router = APIRouter()
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    backend = await choose(request, body.model, stream=body.stream)
    asked = partial(_prepare, body, backend, request.state.salt)
    return AnswerResponse(request, CompletionAnswer(backend, body), asked, body.stream)


def _prepare(body: CompletionBody, backend: Backend, salt: str) -> Prepared:
    """All choices of the first prompt, then those of the second, and so on."""
    n = body.n or 1
    if n * len(body.prompt) > MAX_GENERATIONS:
        asked = f"{len(body.prompt)} prompts with n = {n}"
        raise BadRequestError(f"{asked} exceed the limit of {MAX_GENERATIONS} generations", "n")
    sampling = body.sampling(backend)
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    generations, choices = [], []
    for prompt in body.prompt:
        tokens = around(backend, prompt, body.suffix) if body.suffix else backend.encode(prompt)
        echo = _Echo(prompt if isinstance(prompt, str) else backend.tokenizer.decode(tokens), tokens)
        for index in range(n):
            generations.append(
                Generation(
                    tokens,
                    wanted or 1,
                    sampling.of_answer(index),
                    body.stops,
                    body.logprobs,
                    salt=salt,
                    scored=bool(body.echo) and body.logprobs is not None,
                )
            )
            choices.append(_PlainChoice(echo if body.echo else None, silent=wanted == 0))
    return Prepared(generations, [*choices])


@dataclass(frozen=True)
class _Echo:
    """A prompt that comes before its answer."""

    text: str
    tokens: list[int]

    def delta(self, logprobs: list[Logprob]) -> TextDelta:
        return TextDelta("content", self.text, self.tokens, [Logprob(math.nan, []), *logprobs])


class _PlainChoice:
    """All text is content, with every token it came with; `silent`: none of it is wanted."""

    def __init__(self, echo: _Echo | None, silent: bool) -> None:
        self._echo, self._silent = echo, silent

    def read(self, event: Delta | End) -> list[TypedDelta]:
        if isinstance(event, End):
            finish = Finish.of(event)
            return [replace(finish, generated=0) if self._silent else finish]
        echo, self._echo = self._echo, None
        before = [echo.delta(event.prompt_logprobs)] if echo is not None else []
        said = [] if self._silent else [TextDelta("content", event.text, event.tokens, event.logprobs)]
        return [*before, *said]


class CompletionAnswer(Answer):
    def __init__(self, backend: Backend, body: CompletionBody) -> None:
        self._body, self._stop_tokens = body, backend.llm.stop_tokens
        self.wants_progress, self._storing = bool(body.return_progress), Storing()
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

    def begin(self, prompt_tokens: int) -> Iterable[str]:
        self._storing.begin(prompt_tokens)
        return ()

    def found(self, cached_tokens: int) -> Iterable[str]:
        return [self._told(self._storing.done(cached_tokens))] if self.wants_progress else []

    def add(self, index: int, delta: TypedDelta) -> Iterator[str]:
        if isinstance(delta, Finish):
            self._finished[index] = delta
            yield self._frame([self._choice(index, TextDelta("content", ""), delta.reason)])
        elif isinstance(delta, TextDelta) and (delta.text or self._body.logprobs is not None):
            yield self._frame([self._choice(index, delta, None)])

    def waiting(self) -> str:
        return self._frame([self._choice(0, TextDelta("content", ""), None)])

    def progress(self, progress: Progress) -> str:
        return self._told(prompt_progress(progress))

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

    def _told(self, progress: dict[str, Any]) -> str:
        return self._frame([self._choice(0, TextDelta("content", ""), None)], progress=progress)

    def _usage(self, finishes: list[Finish]) -> dict[str, Any]:
        return usage(finishes[:: self._body.n or 1], finishes)

    def _frame(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, progress: dict[str, Any] | None = None
    ) -> str:
        counted = {"usage": usage} if self._body.wants_usage else {}
        told = {} if progress is None else {"prompt_progress": progress}
        return frame({**self._head, "choices": choices, **counted, **told})

    def _choice(self, index: int, delta: TextDelta, finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(index, delta) if self._body.logprobs is not None and delta.tokens else None
        self._sent[index] += len(delta.text)
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, delta: TextDelta) -> dict[str, Any]:
        pairs = zip(delta.tokens, delta.logprobs, strict=True)
        # Every token of a prompt and its continuation is shown: programs that score texts count them.
        hidden = () if self._body.echo else self._stop_tokens
        shown = [(self._texts.text(token), logprob) for token, logprob in pairs if token not in hidden]
        offsets, at = [], self._sent[index]
        for text, _ in shown:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": [text for text, _ in shown],
            "token_logprobs": [finite(logprob.logprob) for _, logprob in shown],
            "top_logprobs": [
                None
                if math.isnan(logprob.logprob)
                else {self._texts.text(token): finite(value) for token, value in logprob.top}
                for _, logprob in shown
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
