"""Sampling parameters: how tokens are chosen, and what ends an answer.

The names are those of vLLM's SamplingParams and of mlx-lm. A `Sampling` is self-contained and immutable; invalid values
are rejected when it is created, except for token ids that a model does not know (`check_ids`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import SettingError

# A temperature below this would divide logits to infinity: it is treated as 0.
COLD = 1e-4

# From all tokens so far (prompt and answer) and logits [1, vocabulary] to other logits, as in mlx-lm.
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class Rule(NamedTuple):
    """What rows must have in common to be drawn together."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when an answer ends. Sequences and mappings are kept as tuples."""

    # 0 takes the likeliest token.
    temperature: float = 0.0
    top_p: float = 1.0
    # 0 and -1: all tokens.
    top_k: int = 0
    min_p: float = 0.0
    # Makes sampling reproducible.
    seed: int | None = None
    # Above 1: tokens of the prompt and the answer become less likely.
    repetition_penalty: float = 1.0
    # Subtracted from the logits of the answer's tokens: once, and for every occurrence.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Added to the logit of a token id.
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    # Called in turn with all tokens and the model's logits, before any other rule.
    logits_processors: Sequence[LogitsProcessor] = ()
    # None: 256, in the server --default-max-tokens.
    max_tokens: int | None = None
    # No token ends the answer before it has this many.
    min_tokens: int = 0
    # One string or several that end the answer; they are not part of its text.
    stop: Sequence[str] = ()
    # Token ids that end the answer, besides the model's own.
    stop_token_ids: Sequence[int] = ()
    # The model's own stop tokens do not end the answer.
    ignore_eos: bool = False
    # How many of the likeliest tokens to report with each token; None: no log probabilities at all.
    logprobs: int | None = None

    def of_answer(self, index: int) -> "Sampling":
        """The sampling for one of several answers to a prompt: they differ even if there is a seed."""
        return self if self.seed is None else replace(self, seed=self.seed + index)

    @property
    def rule(self) -> Rule:
        return Rule(self.temperature, self.top_p, self.top_k, self.min_p)

    @property
    def looks_back(self) -> bool:
        """Whether the choice depends on the tokens before it."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or bool(self.logits_processors)

    def __post_init__(self) -> None:
        self._tidy()
        self._check_numbers()
        if self.temperature < COLD:
            object.__setattr__(self, "temperature", 0.0)
        if not 0 < self.top_p <= 1:
            raise SettingError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise SettingError(f"min_p is {self.min_p}; it must be from 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise SettingError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0 (1: none)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise SettingError(f"{name} is {getattr(self, name)}; it must be a number")
        if self.max_tokens is not None and self.min_tokens > max(self.max_tokens, 0):
            raise SettingError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")

    def _tidy(self) -> None:
        """However they are given, sequences are tuples from here on."""
        stop = (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop, "a string, or several")
        if not all(isinstance(each, str) for each in stop):
            raise SettingError(f"stop is {self.stop!r}; it must be a string, or several")
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        try:
            biases = tuple((_whole(token), float(bias)) for token, bias in pairs)
        except (TypeError, ValueError):
            wanted = "numbers by token id, such as {42: -100}"
            raise SettingError(f"logit_bias is {self.logit_bias!r}; it must be {wanted}") from None
        if not all(bias < math.inf for _, bias in biases):
            raise SettingError(f"logit_bias is {self.logit_bias!r}; each bias must be a number, or -inf")
        ids = _several("stop_token_ids", self.stop_token_ids, "a list of token ids")
        if not all(isinstance(token, Integral) for token in ids):
            raise SettingError(f"stop_token_ids is {self.stop_token_ids!r}; it must be a list of token ids")
        processors = _several("logits_processors", self.logits_processors, "a list of functions")
        if not all(map(callable, processors)):
            raise SettingError(f"logits_processors is {self.logits_processors!r}; it must be a list of functions")
        tidied = {"stop": stop, "logit_bias": biases, "stop_token_ids": tuple(int(token) for token in ids)}
        for name, value in {**tidied, "logits_processors": processors}.items():
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool):
                raise SettingError(f"{name} is {value!r}; it must be a number")
        if not 0 <= self.temperature < math.inf:
            raise SettingError(f"temperature is {self.temperature}; it must be at least 0")
        for name, least, note in (
            ("top_k", -1, " (0 or -1: no limit)"),
            ("seed", None, ""),
            ("max_tokens", None, ""),
            ("min_tokens", 0, ""),
            ("logprobs", 0, " (how many of the likeliest tokens come with each)"),
        ):
            value = getattr(self, name)
            if value is None and name in ("seed", "max_tokens", "logprobs"):
                continue
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise SettingError(f"{name} is {value!r}; it must be a whole number{note}")
            if least is not None and value < least:
                raise SettingError(f"{name} is {value}; it must be at least {least}{note}")
            object.__setattr__(self, name, int(value))

    def check_ids(self, vocabulary: int) -> None:
        """Raises SettingError for a token id that the model does not know."""
        for name, ids in (("logit_bias", dict(self.logit_bias)), ("stop_token_ids", self.stop_token_ids)):
            wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
            if wrong is not None:
                raise SettingError(f"{name} has token id {wrong}; the model knows ids 0 to {vocabulary - 1}")


def _several(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise SettingError(f"{name} is {value!r}; it must be {wanted}") from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)
