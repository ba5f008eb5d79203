"""A client of the simulated server: its requests, the answers, and whether these are right."""

from collections.abc import Callable, Sequence

import numpy as np

from ..engine import Delta, End, Event, Job, Request, Sampling, TextOutput
from ..errors import MemoryBudgetError, OneKVError, OverloadedError, RequestFailedError, TooLongError
from .faults import Faults, Injected
from .truth import STOP, VOCABULARY, Allowed, Truth

# What ends a request with an error that is not a fault.
REFUSALS = (OverloadedError, TooLongError, MemoryBudgetError)


def letter(token: int) -> str:
    return chr(ord("a") + token)


def every_third(answer: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Which tokens a constrained answer may continue with."""
    flags: np.ndarray[tuple[int], np.dtype[np.bool_]] = (np.arange(VOCABULARY) + len(answer)) % 3 != 0
    return flags


class Switching:
    """A constraint whose tokens change with every step."""

    def __init__(self, faults: Faults, blame: Callable[[], None]) -> None:
        self._faults, self._blame = faults, blame
        self._answer: list[int] = []

    def allowed(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        if self._faults.strikes("allowed"):
            self._blame()
            raise Injected("a constraint does not know")
        return every_third(self._answer)

    def advance(self, token: int) -> None:
        if self._faults.strikes("constraint"):
            self._blame()
            raise Injected("a constraint failed")
        self._answer.append(token)


class Letters:
    """A detokenizer that makes a letter of every token."""

    def __init__(self, faults: Faults, blame: Callable[[], None]) -> None:
        self._faults, self._blame = faults, blame
        self._text, self._read = "", 0

    def add_token(self, token: int) -> None:
        if self._faults.strikes("text"):
            self._blame()
            raise Injected("a detokenizer failed")
        self._text += letter(token)

    def finalize(self) -> None:
        pass

    @property
    def last_segment(self) -> str:
        new, self._read = self._text[self._read :], len(self._text)
        return new


class Client:
    def __init__(
        self,
        faults: Faults,
        prompt: list[int],
        max_tokens: int,
        salt: str = "",
        pin: bool = False,
        constrained: bool = False,
        logprobs: bool = False,
        stop: str | None = None,
        cancel_after: int | None = None,
    ) -> None:
        self._faults = faults
        self.cancel: Callable[[], None] = lambda: None
        self._cancel_after = cancel_after
        self.cancelled = self.blamed = self.deaf = self.gone = False
        constraint = Switching(faults, self.blame) if constrained else None
        self._allowed: Allowed | None = every_third if constrained else None
        self.request = Request(
            prompt,
            max_tokens,
            Sampling(logprobs=2 if logprobs else None),
            salt=salt,
            pin=pin,
            constraint=constraint,
        )
        self._stop = stop
        output = TextOutput(Letters(faults, self.blame), {STOP}, [stop] if stop else ())
        self.job = Job(self.request, output, self.emit)
        self.tokens: list[int] = []
        self.text = ""
        self.ends: list[End | OneKVError] = []

    @property
    def ended(self) -> bool:
        return bool(self.ends)

    def blame(self) -> None:
        self.blamed = True

    def forget(self) -> None:
        """The server is gone."""
        self.gone = True

    def emit(self, event: Event) -> None:
        assert not self.gone, "a client of a process that has ended heard of it again"
        if isinstance(event, Delta) and self._faults.strikes("emit"):
            self.deaf = self.cancelled = True
            raise Injected("nobody listens")
        if not isinstance(event, Delta):
            self.ends.append(event)
            return
        assert not self.ends, "a piece came after the end"
        assert not event.logprobs or len(event.logprobs) == len(event.tokens)
        self.tokens += event.tokens
        self.text += event.text
        if self._cancel_after is not None and len(self.tokens) >= self._cancel_after:
            self.cancelled = True
            self.cancel()

    def check(self, truth: Truth) -> None:
        """Whether it got what it should: the answer of a model without a cache, or as much of it as it let come."""
        assert len(self.ends) == 1, f"a client got {len(self.ends)} ends"
        end, request = self.ends[0], self.request
        if isinstance(end, OneKVError):
            known = isinstance(end, REFUSALS) or (isinstance(end, RequestFailedError) and self.blamed)
            assert known, f"a client got an error that is not its own: {end!r} ({end.__cause__!r})"
            if request.finish_reason == "error":
                return
        answer = truth.answer(request.prompt, request.max_tokens, self._allowed)
        got = request.tokens
        assert answer[: len(got)] == got, f"{got} was generated, {answer} is right"
        if isinstance(end, End) and end.finish_reason == "cancelled":
            assert self.cancelled, "a client was cancelled that did not ask for it"
        elif self._stop is not None and self._stop in "".join(map(letter, got)):
            assert request.finish_reason == "stop", f"a stop string ended it as {request.finish_reason}"
        else:
            assert got == answer, f"{got} was generated, {answer} is right; {end!r}"
            assert self.deaf or self.tokens == answer, f"{self.tokens} reached the client, {answer} was generated"
