"""What the answers of OpenAI's endpoints have in common."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from ... import __version__
from ...engine import End, Logprob
from ..backend import Backend

Item = TypeVar("Item")
# For a token that cannot come: JSON has no infinity.
_NEVER = -9999.0


def fingerprint(backend: Backend) -> str:
    """The same as long as the same requests get the same answers."""
    return "fp_" + hashlib.sha256(f"{__version__} {backend.name}".encode()).hexdigest()[:10]


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def usage(first: Sequence[End], ends: Sequence[End], reasoning_tokens: int = 0) -> dict[str, Any]:
    """`first` has one generation of each prompt, `ends` all there are."""
    prompt, generated = sum(end.prompt_tokens for end in first), sum(end.generated for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in first)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


class TokenTexts:
    """Tokens as the text they stand for."""

    def __init__(self, backend: Backend) -> None:
        self._tokenizer = backend.tokenizer

    def text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def chat(self, tokens: list[int], logprobs: list[Logprob]) -> list[dict[str, Any]]:
        """In the form of chat completions and responses."""
        return [
            self._entry(token, logprob.logprob)
            | {"top_logprobs": [self._entry(other, value) for other, value in logprob.top]}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        # Part of a character has no text of its own.
        as_bytes = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": as_bytes}


def finite(logprob: float) -> float:
    return max(logprob, _NEVER)


async def merged(sources: Sequence[AsyncIterator[Item]]) -> AsyncIterator[tuple[int, Item | None]]:
    """What `sources` give, as it comes, with the index of the source; None when a source has ended."""
    waiting = {asyncio.ensure_future(anext(source)): index for index, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    yield index, None
                    continue
                waiting[asyncio.ensure_future(anext(sources[index]))] = index
                yield index, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
