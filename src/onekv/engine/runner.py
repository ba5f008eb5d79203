"""Steps on the device: chunks of prompts are stored, and one step of decoding is in the air while the next is built.

A step is a forward pass, which gives logits, and the drawing of tokens from them. Tokens are drawn when the next step
is built: by then those before them have been read, and whatever rule or constraint of a request depends on them is up
to date. So the device has a forward pass to do while the host reads tokens, follows rules and builds, for all requests
alike:

    device    | forward t + 1          | draw t + 1 | forward t + 2          | draw ...
    host      | read tokens t | draw t + 1, forward t + 2: built, started | read tokens t + 1 ...

Where operations of MLX write the pool (`KVMemory.writes`), a step is started when the one before has ended: MLX would
find the pool still being read and would copy it (measured on an H200: 4 GiB in every step). Where kernels write, it is
started at once. Where the memory is `eager`, a step is computed as its graph is built: nothing is gained by building it
early, and its tokens are read at once. The step in the air (`flight`) is landed before anything else touches the pool.

The runner knows no scheduling, and nothing of what is cached: room for new tokens has been made before (`Lease.grow`).
"""

from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..memory.kv import KVMemory
from ..memory.pool.sequence import Sequence
from .request import Logprob, Request
from .sampling import Drawn, sample
from .selftest import compile_decode, forward, set_direct, why_one_by_one


@dataclass
class Flight:
    """A step that was started: logits for each request, from which its token is not drawn yet."""

    requests: list[Request]
    logits: mx.array


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
        # Decode steps, if they can be compiled, else why not.
        self.compiled, self.uncompiled = compile_decode(model, memory, self.one_by_one)

    def store(self, sequence: Sequence, tokens: list[int]) -> None:
        """Compute and store what `tokens` are after those of `sequence`. No step may be in the air."""
        with self.memory.step([sequence], len(tokens)) as caches:
            self.model(mx.array(tokens)[None], cache=caches)
        mx.eval(self.memory.arrays())

    def decode(self, requests: list[Request]) -> list[Row]:
        """Start a step for `requests`, and give what the one in the air, if there is one, has given the same."""
        # It stays where it is until the next one has started: a step that is interrupted is made again.
        flight = self.flight
        assert flight is None or flight.requests == requests, "the step in the air is of other requests"
        sequences = [request.sequence for request in requests]
        if flight is None:
            logits = self.forward(sequences, mx.array([request.next_input for request in requests]))
            if self.memory.eager:
                return self._read(requests, logits)
            self._start(requests, logits)
            return []
        drawn = self.draw(requests, flight.logits)
        # By itself: what is started together can only be read when all of it has ended.
        mx.async_eval(drawn.arrays())
        logits = self.forward(sequences, drawn.tokens)
        if self.memory.writes:
            mx.eval(drawn.arrays())
        self._start(requests, logits)
        return _rows(requests, drawn)

    def _start(self, requests: list[Request], logits: mx.array) -> None:
        mx.async_eval(logits, self.memory.arrays())
        self.flight = Flight(list(requests), logits)

    def draw(self, requests: list[Request], logits: mx.array) -> Drawn:
        """The next token of each request; lazy."""
        return sample(logits, requests, [len(request.tokens) for request in requests])

    def forward(self, sequences: list[Sequence], inputs: mx.array) -> mx.array:
        """Logits [rows, vocabulary] after one more token of each sequence; lazy."""
        if len(sequences) > 1 and self.one_by_one is not None:
            rows = []
            for index, sequence in enumerate(sequences):
                rows.append(self.forward([sequence], inputs[index : index + 1]))
                # The next row writes the pool: nothing may still be about to read it.
                mx.eval(rows[-1], self.memory.arrays())
            return mx.concatenate(rows)
        if self.compiled is not None:
            return self.compiled(sequences, inputs)
        return forward(self.model, self.memory, sequences, inputs)

    def land(self) -> list[Row]:
        """What the step in the air has given, if there is one; then there is none."""
        flight, self.flight = self.flight, None
        # Who has ended gets no token, and its rules need not bear another one.
        rows = [row for row, request in enumerate(flight.requests) if not request.finished] if flight else []
        if flight is None or not rows:
            return []
        requests = [flight.requests[row] for row in rows]
        logits = flight.logits if len(rows) == len(flight.requests) else flight.logits[mx.array(rows)]
        return self._read(requests, logits)

    def _read(self, requests: list[Request], logits: mx.array) -> list[Row]:
        drawn = self.draw(requests, logits)
        mx.eval(drawn.arrays(), self.memory.arrays())
        return _rows(requests, drawn)

    def settle(self) -> None:
        """After requests were ended from outside: nothing that was started or built is left to compute."""
        if self.flight is not None and all(request.finished for request in self.flight.requests):
            self.flight = None
        # What was built and not computed would keep its inputs alive.
        mx.eval(self.memory.arrays())

    def wait(self) -> None:
        """Until the step in the air, if there is one, has been computed."""
        if self.flight is not None:
            mx.eval(self.flight.logits)


def _rows(requests: list[Request], drawn: Drawn) -> list[Row]:
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    sound: list[bool] = drawn.sound.tolist()  # type: ignore[assignment]
    rows = []
    for number, request in enumerate(requests):
        top = request.sampling.logprobs
        logprobs = [drawn.logprobs(number, top)] if top is not None and sound[number] else []
        rows.append(Row(request, [tokens[number]] if sound[number] else [], logprobs, sound[number]))
    return rows
