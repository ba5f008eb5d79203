"""Turns a request's tokens into text, delta by delta, with stop strings.

Text that may be the beginning of a stop string is held back until it is known not to be. However the text is split,
the deltas add up to the text before the first complete stop string.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .request import Logprob, Request


@dataclass(frozen=True)
class Delta:
    """New text, and the tokens it was made from; text may lag behind its tokens."""

    text: str
    tokens: list[int] = field(default_factory=list)
    # One for each of `tokens`, if they were requested.
    logprobs: list[Logprob] = field(default_factory=list)
    # How many tokens of the prompt were found in the prefix cache.
    cached_tokens: int = field(default=0, compare=False)
    # With the first tokens: one for each token of the prompt but the first, if those were requested.
    prompt_logprobs: list[Logprob] = field(default_factory=list, compare=False)

    def __add__(self, later: "Delta") -> "Delta":
        """Both as one."""
        joined = self.text + later.text, self.tokens + later.tokens, self.logprobs + later.logprobs
        return Delta(*joined, later.cached_tokens, self.prompt_logprobs + later.prompt_logprobs)


class TextOutput:
    def __init__(self, detokenizer: Any, hidden: set[int], stops: Sequence[str] = ()) -> None:
        """`detokenizer` is a fresh one of the model's tokenizer; with None there are tokens and no text.

        `hidden` are tokens that are no part of the text, `stops` the strings that end it.
        """
        self._detokenizer, self._hidden = detokenizer, hidden
        self._stops = [stop for stop in stops if stop]
        self._read = 0
        self._held = ""
        # The stop string that was found, and tokens after the one that completed it: not part of the answer.
        self.stopped_by: str | None = None
        self.dropped = 0

    @property
    def silent(self) -> bool:
        """Whether there will be no text, only tokens."""
        return self._detokenizer is None

    def take(self, request: Request) -> Delta:
        """What is new since the last call; nothing once `stopped_by` is set."""
        tokens = request.tokens[self._read :]
        logprobs = request.logprobs[self._read :]
        of_prompt = [] if self._read else request.prompt_logprobs
        self._read += len(tokens)
        if self.stopped_by is not None:
            return Delta("")
        if self._detokenizer is None:
            return Delta("", tokens, logprobs, request.cached_tokens, of_prompt)
        text = ""
        for count, token in enumerate(tokens, 1):
            if token not in self._hidden:
                self._detokenizer.add_token(token)
            if self._stops and count < len(tokens):
                # Guessed tokens arrive several at once, and end where they would have ended one by one.
                text += self._release(last=False)
                if self.stopped_by is not None:
                    self.dropped = len(tokens) - count
                    return Delta(text, tokens[:count], logprobs[:count], request.cached_tokens, of_prompt)
        if request.finished:
            self._detokenizer.finalize()
        return Delta(text + self._release(request.finished), tokens, logprobs, request.cached_tokens, of_prompt)

    def _release(self, last: bool) -> str:
        """The new text that cannot be part of a stop string."""
        self._held += self._detokenizer.last_segment
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.stopped_by = min(found)
            text, self._held = self._held[:at], ""
            return text
        keep = 0 if last else max((overlap(self._held, stop) for stop in self._stops), default=0)
        end = len(self._held) - keep
        text, self._held = self._held[:end], self._held[end:]
        return text


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` are a beginning of `marker`, but not all of it."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
