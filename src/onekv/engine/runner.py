"""Steps on the device: chunks of prompts are stored, and one step of decoding is in the air while the next is built.

The graph of step t + 1 is built from the tokens of step t while the device still works on step t, and is started as
soon as that has ended; only then are the tokens of step t read. It is not started earlier: MLX would find the pool
still read by step t and would copy it to write step t + 1 (measured on an H200: 4 GiB in every step). The step in the
air (`flight`) is landed before anything else touches the pool. Where the memory is `eager`, step t + 1 is computed as
its graph is built, so step t must have ended before.

The runner knows no scheduling, and nothing of what is cached: room for new tokens has been made before (`Lease.grow`).
"""

from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..memory.kv import KVMemory
from ..memory.pool.sequence import Sequence
from .request import Logprob, Request
from .sampling import Drawn, sample
from .selftest import set_direct, why_one_by_one


@dataclass
class Flight:
    """A decode step that was started: what each request gets is not read yet."""

    requests: list[Request]
    drawn: Drawn


@dataclass(frozen=True)
class Row:
    """What a step gave one request: its next tokens, and for each its log probabilities, if they were asked for."""

    request: Request
    tokens: list[int]
    logprobs: list[Logprob]
    # Whether the model's output is a number; if not, there are no tokens.
    sound: bool


class Runner:
    def __init__(self, model: Module, memory: KVMemory, max_batch: int) -> None:
        """Tries the model on `memory`: what it can do decides how rows are decoded."""
        self.model, self.memory = model, memory
        self.flight: Flight | None = None
        set_direct(model, memory)
        # Why rows are decoded one by one, if they are.
        self.one_by_one = why_one_by_one(model, memory) if max_batch > 1 else None

    def store(self, sequence: Sequence, tokens: list[int]) -> None:
        """Compute and store what `tokens` are after those of `sequence`. No step may be in the air."""
        with self.memory.step([sequence], len(tokens)) as caches:
            self.model(mx.array(tokens)[None], cache=caches)
        mx.eval(self.memory.arrays())

    def decode(self, requests: list[Request]) -> list[Row]:
        """Start a step for `requests`, and give what the one in the air, if there is one, has given the same."""
        flight = self.flight
        assert flight is None or flight.requests == requests, "the step in the air is of other requests"
        ahead = 0 if flight is None else 1
        inputs = mx.array([r.next_input for r in requests]) if flight is None else flight.drawn.tokens
        if flight is not None and self.memory.eager:
            mx.eval(flight.drawn.arrays())
        drawn = self.draw(requests, inputs, [len(r.tokens) + ahead for r in requests])
        if flight is not None:
            mx.eval(flight.drawn.arrays())
        mx.async_eval(drawn.arrays(), self.memory.arrays())
        self.flight = Flight(list(requests), drawn)
        return _rows(flight) if flight is not None else []

    def draw(self, requests: list[Request], inputs: mx.array, chosen: list[int]) -> Drawn:
        """The next token of each request after `inputs`; so many were chosen before."""
        return sample(self._forward([request.sequence for request in requests], inputs), requests, chosen)

    def _forward(self, sequences: list[Sequence], inputs: mx.array) -> mx.array:
        """Logits [rows, vocabulary] after one more token of each sequence."""
        if len(sequences) > 1 and self.one_by_one is not None:
            rows = []
            for index, sequence in enumerate(sequences):
                rows.append(self._forward([sequence], inputs[index : index + 1]))
                # The next row writes the pool: nothing may still be about to read it.
                mx.eval(rows[-1], self.memory.arrays())
            return mx.concatenate(rows)
        with self.memory.step(sequences, 1) as caches:
            logits: mx.array = self.model(inputs[:, None], cache=caches)
        return logits[:, -1]

    def land(self) -> list[Row]:
        """What the step in the air has given, if there is one; then there is none."""
        flight, self.flight = self.flight, None
        return _rows(flight) if flight is not None else []

    def settle(self) -> None:
        """After requests were ended from outside: nothing that was started or built is left to compute."""
        if self.flight is not None and all(request.finished for request in self.flight.requests):
            self.flight = None
        # What was built and not computed would keep its inputs alive.
        mx.eval(self.memory.arrays())

    def wait(self) -> None:
        """Until the step in the air, if there is one, has been computed."""
        if self.flight is not None:
            mx.eval(self.flight.drawn.arrays())


def _rows(flight: Flight) -> list[Row]:
    tokens: list[int] = flight.drawn.tokens.tolist()  # type: ignore[assignment]
    sound: list[bool] = flight.drawn.sound.tolist()  # type: ignore[assignment]
    rows = []
    for number, request in enumerate(flight.requests):
        top = request.sampling.logprobs
        logprobs = [flight.drawn.logprobs(number, top)] if top is not None and sound[number] else []
        rows.append(Row(request, [tokens[number]] if sound[number] else [], logprobs, sound[number]))
    return rows
