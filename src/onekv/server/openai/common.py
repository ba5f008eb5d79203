"""What the answers of OpenAI's endpoints have in common."""

import hashlib
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ... import __version__
from ...engine import Logprob
from ..answer import frame
from ..backend import Backend, Progress
from ..deltas import Finish

# The last of a stream of chunks.
DONE = frame("[DONE]")
# For a token that cannot come: JSON has no infinity.
_NEVER = -9999.0


def fingerprint(backend: Backend) -> str:
    """The same as long as the same requests get the same answers."""
    return "fp_" + hashlib.sha256(f"{__version__} {backend.name}".encode()).hexdigest()[:10]


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def usage(first: Sequence[Finish], every: Sequence[Finish]) -> dict[str, Any]:
    """`first` has one choice of each prompt, `every` all there are."""
    prompt, generated = sum(finish.prompt_tokens for finish in first), sum(finish.generated for finish in every)
    accepted = sum(finish.accepted for finish in every)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(finish.cached_tokens for finish in first)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(finish.reasoning_tokens for finish in every),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(finish.proposed for finish in every) - accepted,
        },
    }


class Storing:
    """Tells a client how far its prompt is; the last time when all of it is stored."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._total = 0

    def begin(self, prompt_tokens: int) -> None:
        self._total = prompt_tokens

    def done(self, cached_tokens: int) -> dict[str, Any]:
        return prompt_progress(Progress(self._total, cached_tokens, self._total, time.perf_counter() - self._begun))


def prompt_progress(progress: Progress) -> dict[str, Any]:
    """Prefill progress in llama.cpp's format."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.stored,
        "time_ms": int(progress.seconds * 1000),
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
        # A token that is part of a character has no text by itself.
        as_bytes = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": as_bytes}


def finite(logprob: float) -> float | None:
    """None for what is no number: the first token of a prompt follows nothing."""
    return None if math.isnan(logprob) else max(logprob, _NEVER)
