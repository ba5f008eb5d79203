"""Steps on the device: chunks of prompts are stored, and one decode step is in flight while the next is built.

A step is a forward pass, which computes logits, and sampling from them. Tokens are sampled when the next step is built:
by then those before them have been read, and all rules and constraints that depend on them are up to date. So the
device is busy with a forward pass while the host reads tokens, applies rules and builds the next step, for all requests
alike:

    device    | forward t + 1          | draw t + 1 | forward t + 2          | draw ...
    host      | read tokens t | draw t + 1, forward t + 2: built, started | read tokens t + 1 ...

If MLX operations write the pool (`KVMemory.writes`), a step is started when the one before has finished: otherwise MLX
would find the pool still being read and would copy it (measured on an H200: 4 GiB in every step). If kernels write, it
is started at once. If the memory is `eager`, a step is computed as its graph is built: building it early gains nothing,
and its tokens are read at once. The step in flight (`flight`) is landed before anything else touches the pool.

The runner knows nothing about scheduling or caching: room for new tokens has already been made (`Lease.grow`).
"""

from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..memory.compiled import CompiledDecode
from ..memory.device import settle
from ..memory.kv import KVMemory
from ..memory.looped import LoopedDecode
from ..memory.pool.sequence import Sequence
from ..models.draft import WithDraft
from ..models.freed import freed
from ..models.packed import is_eager
from .known import Known, Tried
from .request import Logprob, Request
from .sampling import Drawn, sample, scores
from .selftest import (
    Several,
    compile_decode,
    forward,
    set_direct,
    store,
    stores_together,
    try_several,
    why_one_by_one,
)
from .speculation.draft import Drafting
from .speculation.verify import Row, Verification


@dataclass
class Flight:
    """A step that was started: logits for each request, from which no token has been sampled yet."""

    requests: list[Request]
    logits: mx.array


class Runner:
    # Why rows are decoded one by one, if they are.
    one_by_one: str | None
    # Whether several prompts are stored in one pass: on a GPU; on CPU, one alone keeps all cores busy.
    together: bool
    # Decode steps, if they can be compiled, else why not.
    compiled: CompiledDecode | LoopedDecode | None
    uncompiled: str | None
    # Whether several tokens of one sequence can be decoded in one step.
    several: Several
    # What guesses the next tokens, if there is a draft model.
    drafting: Drafting | None

    def __init__(
        self,
        model: Module,
        memory: KVMemory,
        max_batch: int,
        together: bool | None = None,
        known: Known | None = None,
    ) -> None:
        """Tests the model on `memory`, unless it is `known`: what it supports decides how rows are decoded.

        `together`: whether several prompts are stored in one pass, if the model can; by default, what is faster.
        """
        if together is None:
            together = not memory.on_cpu and not memory.sharded
        known = known if known is not None else Known()
        self.model, self.memory = model, memory
        self.flight: Flight | None = None
        if known.tried is None:
            known.tried = self._try(max_batch, together)
            known.trials += 1
        else:
            self._recall(known.tried)
        # Whether a step is computed when it is built.
        self.eager = memory.eager or is_eager(model) or (self.compiled is not None and self.compiled.eager)

    def _try(self, max_batch: int, together: bool) -> Tried:
        model, memory = self.model, self.memory
        # Steps allocate what they need without asking.
        freed.release()
        set_direct(model, memory)
        self.one_by_one = why_one_by_one(model, memory) if max_batch > 1 else None
        self.together = together and max_batch > 1 and stores_together(model, memory, self.one_by_one)
        self.compiled, self.uncompiled = compile_decode(model, memory, self.one_by_one)
        self.several = try_several(model, memory, self.one_by_one, self.compiled)
        self.drafting = Drafting(model, memory, self.one_by_one, None) if isinstance(model, WithDraft) else None
        draft = self.drafting.compiled if self.drafting is not None else None
        return Tried(
            direct=tuple(memory.direct),
            one_by_one=self.one_by_one,
            together=self.together,
            compiled_by=type(self.compiled) if self.compiled is not None else None,
            uncompiled=self.uncompiled,
            draft_by=type(draft) if draft is not None else None,
            several=self.several,
        )

    def _recall(self, tried: Tried) -> None:
        model, memory = self.model, self.memory
        memory.direct = tried.direct
        self.one_by_one, self.together, self.several = tried.one_by_one, tried.together, tried.several
        self.compiled = tried.compiled_by(model, memory) if tried.compiled_by is not None else None
        self.uncompiled = tried.uncompiled
        self.drafting = Drafting(model, memory, tried.one_by_one, tried) if isinstance(model, WithDraft) else None

    def store(self, sequences: list[Sequence], tokens: list[list[int]]) -> None:
        """Compute and store the KV of each row of `tokens`, appended to its sequence. No step may be in flight."""
        store(self.model, self.memory, sequences, tokens)

    def score(self, sequence: Sequence, tokens: list[int], following: list[int], top: int) -> list[Logprob]:
        """Like `store`; returns the log probability of what follows each token, and of the `top` likeliest."""
        logits = self.memory.run(self.model, mx.array(tokens)[None], [sequence], [len(tokens)])[0]
        found = scores(logits, following, top)
        settle(self.memory.arrays())
        return found

    def decode(self, requests: list[Request]) -> list[Row]:
        """Start a step for `requests`, and return the results of the one in flight, if there is one, for them."""
        # It stays in place until the next one has started: an interrupted step is repeated.
        flight = self.flight
        assert flight is None or flight.requests == requests, "the step in flight has other requests"
        sequences = [request.sequence for request in requests]
        if flight is None:
            logits = self.forward(sequences, mx.array([request.next_input for request in requests]))
            if self.eager:
                return self._read(requests, logits)
            self._start(requests, logits)
            return []
        drawn = self.draw(requests, flight.logits, _numbers(requests))
        # Separately: what is started together can only be read when all of it has finished.
        mx.async_eval(drawn.arrays())
        logits = self.forward(sequences, drawn.tokens)
        if self.memory.writes:
            settle(drawn.arrays())
        self._start(requests, logits)
        return _rows(requests, drawn)

    def verify(self, requests: list[Request], proposals: list[list[int]]) -> Verification:
        """Compute what follows the last token of each request and each proposed token.

        No step may be in flight. The caller rolls back what is stored of wrong proposals.
        """
        assert self.flight is None, "the step in flight decides what is next"
        tokens = [
            token for request, some in zip(requests, proposals, strict=True) for token in (request.next_input, *some)
        ]
        counts = [1 + len(some) for some in proposals]
        logits = self.forward([request.sequence for request in requests], mx.array(tokens), counts)
        # The device starts while the sampling is built.
        mx.async_eval(logits, self.memory.arrays())
        exact = self.compiled is not None and self.compiled.exact and len(tokens) <= self.several.exact
        tolerance = None if exact else self.several.tolerance
        # On CPU, a draw from 49,152 tokens takes 1.3 ms, as a row of a model of 135 M parameters does.
        return Verification(self.draw, tolerance, requests, proposals, logits, costly=self.eager)

    def draft(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        """Guess the next `counts[i]` tokens of request i. No step may be in flight; there is room for them."""
        assert self.drafting is not None and self.flight is None, "there is no draft model, or a step is in flight"
        return self.drafting.guess(requests, counts)

    def _start(self, requests: list[Request], logits: mx.array) -> None:
        mx.async_eval(logits, self.memory.arrays())
        self.flight = Flight(list(requests), logits)

    def draw(
        self, requests: list[Request], logits: mx.array, drawn: list[int], tolerance: float | None = None
    ) -> Drawn:
        """The next token of each request, of which `drawn[i]` were drawn before; lazy."""
        return sample(logits, requests, drawn, tolerance)

    def forward(self, sequences: list[Sequence], inputs: mx.array, counts: list[int] | None = None) -> mx.array:
        """Logits [rows, vocabulary] after each of `inputs`, of which sequence i has `counts[i]`; lazy."""
        if counts is None:
            counts = [1] * len(sequences)
        if len(sequences) > 1 and self.one_by_one is not None:
            rows = []
            for index, sequence in enumerate(sequences):
                rows.append(self.forward([sequence], inputs[index : index + 1]))
                # The next row writes the pool: nothing may still be about to read it.
                settle(rows[-1], self.memory.arrays())
            return mx.concatenate(rows)
        if self.compiled is not None:
            return self.compiled(sequences, inputs, counts)
        return forward(self.model, self.memory, sequences, inputs, counts)

    def land(self) -> list[Row]:
        """Results of the step in flight, if there is one; none is in flight afterwards."""
        flight, self.flight = self.flight, None
        # A request that has ended gets no token, and its rules are not applied again.
        rows = [row for row, request in enumerate(flight.requests) if not request.finished] if flight else []
        if flight is None or not rows:
            return []
        requests = [flight.requests[row] for row in rows]
        logits = flight.logits if len(rows) == len(flight.requests) else flight.logits[mx.array(rows)]
        return self._read(requests, logits)

    def _read(self, requests: list[Request], logits: mx.array) -> list[Row]:
        drawn = self.draw(requests, logits, _numbers(requests))
        settle(drawn.arrays(), self.memory.arrays())
        return _rows(requests, drawn)

    def settle(self) -> None:
        """After requests were ended from outside: make sure that nothing started or built is left to compute."""
        if self.flight is not None and all(request.finished for request in self.flight.requests):
            self.flight = None
        # A graph that was built but not computed would keep its inputs alive.
        settle(self.memory.arrays())

    def wait(self) -> None:
        """Block until the step in flight, if there is one, has been computed."""
        if self.flight is not None:
            settle(self.flight.logits)


def _numbers(requests: list[Request]) -> list[int]:
    return [len(request.tokens) for request in requests]


def _rows(requests: list[Request], drawn: Drawn) -> list[Row]:
    tokens: list[int] = drawn.tokens.tolist()  # type: ignore[assignment]
    sound: list[bool] = drawn.sound.tolist()  # type: ignore[assignment]
    rows = []
    for number, request in enumerate(requests):
        top = request.sampling.logprobs
        logprobs = [drawn.logprobs(number, top)] if top is not None and sound[number] else []
        rows.append(Row(request, [tokens[number]] if sound[number] else [], logprobs, sound[number]))
    return rows
