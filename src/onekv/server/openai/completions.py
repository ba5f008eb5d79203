"""POST /v1/completions: text goes on where a prompt ends."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ...engine import Delta
from ..backend import Backend, Generation, Prompt
from ..errors import BadRequestError, for_client, openai_body
from ..streaming import sse, stream, until_gone
from .common import TokenTexts, fingerprint, finite, merged, new_id, usage
from .schema import MAX_GENERATIONS, CompletionBody

router = APIRouter()
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    backend: Backend = request.app.state.backend
    backend.check_model(body.model)
    prompts = await asyncio.to_thread(_prompts, body, backend, request.state.salt)
    async with AsyncExitStack() as stack:
        generations = await stack.enter_async_context(backend.generate(prompts))
        answer = _Answer(backend, body, generations)
        if body.stream:
            return stream(answer.events(), stack.pop_all())
        return JSONResponse(await until_gone(request, answer.whole()))


def _prompts(body: CompletionBody, backend: Backend, salt: str) -> list[Prompt]:
    """All generations of the first prompt, then those of the second, and so on."""
    n = body.n or 1
    if n * len(body.prompt) > MAX_GENERATIONS:
        asked = f"{len(body.prompt)} prompts with n = {n}"
        raise BadRequestError(f"{asked} are more than {MAX_GENERATIONS} generations", "n")
    sampling = body.sampling(backend.llm.plan.layout.vocabulary)
    return [
        Prompt(
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


class _Answer:
    """The generations of one request, in one piece or as chunks."""

    def __init__(self, backend: Backend, body: CompletionBody, generations: list[Generation]) -> None:
        self._backend, self._body, self._generations = backend, body, generations
        self._texts = TokenTexts(backend)
        # Characters sent so far, by generation.
        self._sent = [0] * len(generations)
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": backend.name,
            "system_fingerprint": fingerprint(backend),
        }

    def _usage(self) -> dict[str, Any]:
        ends = [generation.end for generation in self._generations if generation.end is not None]
        return usage(ends[:: self._body.n or 1], ends)

    async def whole(self) -> dict[str, Any]:
        texts = [""] * len(self._generations)
        tokens: list[Delta] = [Delta("") for _ in self._generations]
        async for index, piece in merged(self._generations):
            if piece is not None:
                texts[index] += piece.text
                tokens[index].tokens.extend(piece.tokens)
                tokens[index].logprobs.extend(piece.logprobs)
        choices = [
            self._choice(index, Delta(texts[index], tokens[index].tokens, tokens[index].logprobs), self._reason(index))
            for index in range(len(texts))
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        try:
            async for index, piece in merged(self._generations):
                if piece is None:
                    yield self._event([self._choice(index, Delta(""), self._reason(index))])
                elif piece.text or self._body.logprobs is not None:
                    yield self._event([self._choice(index, piece, None)])
            if self._body.wants_usage:
                yield self._event([], self._usage())
        except Exception as error:  # noqa: BLE001  it is told, or logged and told
            yield sse(openai_body(for_client(error)))
        yield sse("[DONE]")

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        counted = {"usage": usage} if self._body.wants_usage else {}
        return sse({**self._head, "choices": choices, **counted})

    def _reason(self, index: int) -> str:
        end = self._generations[index].end
        assert end is not None
        return end.finish_reason

    def _choice(self, index: int, piece: Delta, finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(index, piece) if self._body.logprobs is not None and piece.tokens else None
        self._sent[index] += len(piece.text)
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, piece: Delta) -> dict[str, Any]:
        stop_tokens = self._backend.llm.stop_tokens
        pairs = zip(piece.tokens, piece.logprobs, strict=True)
        shown = [(self._texts.text(token), logprob) for token, logprob in pairs if token not in stop_tokens]
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
