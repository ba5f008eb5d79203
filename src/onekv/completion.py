"""The results of requests, and of queries about the cache."""

from dataclasses import dataclass

from .engine import Delta, End, FinishReason, Logprob, Request, Timings
from .prefix.branch import Branch

# Characters of a text in a repr.
SHOWN = 60


@dataclass(frozen=True, repr=False)
class Completion:
    """The result of a request. `tokens` are all generated ids, including the stop token; `text` is without it.

    `text` is empty if the LLM has no tokenizer. `stopped_by` is the stop string that ended it, if one did;
    `logprobs` has one entry for each token, if they were requested.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None
    timings: Timings
    stopped_by: str | None = None
    logprobs: list[Logprob] | None = None
    # Tokens that were guessed to be next, and those of them that were.
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else self.text[: SHOWN - 3] + "..."
        cached = f", {self.cached_tokens} of them cached" if self.cached_tokens else ""
        return (
            f"Completion({text!r}, {len(self.tokens)} tokens, {self.finish_reason or 'not ended'}, "
            f"after {self.prompt_tokens}{cached})"
        )


@dataclass(frozen=True)
class Probe:
    """What a prompt would find now: of its tokens so many cached, so many of those in memory, and why not more."""

    tokens: int
    cached: int
    cached_in_memory: int
    reason: str | None
    # Where it leaves the cached conversation in memory that it has most in common with.
    branch: Branch | None = None


@dataclass(frozen=True)
class Freed:
    """What clearing the cache gave back to the pool."""

    blocks: int
    bytes: int


class Answer:
    """What was read of one request so far."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._deltas: list[Delta] = []
        self.end: End | None = None

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)

    @property
    def completion(self) -> Completion:
        request, end = self._request, self.end
        logprobs = [each for delta in self._deltas for each in delta.logprobs]
        return Completion(
            text="".join(delta.text for delta in self._deltas),
            tokens=[token for delta in self._deltas for token in delta.tokens],
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            finish_reason=end.finish_reason if end is not None else None,
            timings=request.timings,
            stopped_by=end.stopped_by if end is not None else None,
            logprobs=logprobs if request.sampling.logprobs is not None else None,
            proposed_tokens=request.proposed,
            accepted_tokens=end.accepted if end is not None else request.accepted,
        )
