"""Decode steps of one model by NumPy and compiled loops, on CPU: the whole step, without MLX.

The model is called once for each number of rows, with placeholder arrays for everything that changes, and its
operations become a `Program`. Attention is not part of it: a layer's attention inputs are outputs of the program, and
its result is an input (`Recorder`). So a step is

    section 0    from tokens and positions to the first layer's queries, keys and values
    attention    stores the new token in the pool and attends over it, by compiled loops
    section 1    from there to the next layer's ...
    ...
    the last     to the logits

A program has no references to the pool, and views of the pool's arrays end with the call: otherwise MLX would copy the
pool at its next write. A step is complete when the call returns (`eager`).
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..loops.graph import Unsupported, traced
from ..loops.program import Program
from ..loops.threads import Choice, most
from .attention import Call, LayerKV
from .attention.layer import Pair
from .attention.loops import Attend, choose
from .kv import KVMemory
from .layers import PagedLayer
from .pool.sequence import Sequence
from .step import Step
from .traced import GroupShape, Inputs, Keys, TracedGroup, TracedStep, Untraceable

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Attention:
    """One attention call of a model: over which KV, and how. It has `outputs` of a section: queries, the new token's
    keys and values where they are to be stored, and sinks where there are any."""

    attend: Attend
    kv: LayerKV
    group: int
    scale: float
    reach: tuple[int, int]
    new: bool
    sinks: bool

    @property
    def outputs(self) -> int:
        return 1 + 2 * self.new + self.sinks


class Recorder:
    """Takes the place of attention while a model is traced: `attended[i]` is what the i-th call gives."""

    def __init__(self, attended: tuple[mx.array, ...] | None) -> None:
        """Without `attended`, arrays of the right shape stand in for it."""
        self._attended = attended
        self.calls: list[Attention] = []
        self.outputs: list[mx.array] = []
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, layer: PagedLayer, group: int, call: Call, new: Pair | None) -> mx.array:
        reach, attend = call.step.reach(call.mask), choose(layer.kv, call.step.block_size)
        if reach is None or attend is None or not layer.stock:
            raise Untraceable("a layer uses attention that loops do not support")
        how = (call.scale, reach, new is not None, call.sinks is not None)
        self.calls.append(Attention(attend, layer.kv, group, *how))
        self.outputs += [call.queries, *(new or ()), *([call.sinks] if call.sinks is not None else [])]
        shape = (*call.queries.shape[:3], layer.kv.layer.v_dim)
        self.shapes.append(shape)
        return self._attended[len(self.shapes) - 1] if self._attended is not None else mx.zeros(shape)


class LoopedDecode:
    eager = True
    # Several rows are added up in another order than one.
    exact = False

    def __init__(self, model: Module, memory: KVMemory) -> None:
        self._model, self._memory = model, memory
        self._programs: dict[int, tuple[Program, list[Attention]]] = {}
        self._threads: dict[int, Choice] = defaultdict(lambda: Choice(most()))

    def __call__(self, sequences: list[Sequence], tokens: mx.array, counts: list[int]) -> mx.array:
        """Logits [rows, vocabulary] after each of `tokens`, of which sequence i has `counts[i]`; computed.

        Raises Untraceable.
        """
        rows = sum(counts)
        with self._memory.step(sequences, counts, spread=True), np.errstate(all="ignore"):
            if rows not in self._programs:
                self._programs[rows] = self._make(rows)
            with self._threads[rows].step():
                return mx.array(self._run(*self._programs[rows], tokens))

    def _run(self, program: Program, calls: list[Attention], tokens: mx.array) -> Array:
        step = self._memory.current
        program.set(0, np.asarray(tokens))
        program.set(1, np.array(step.groups[0].lengths))
        for index, call in enumerate(calls):
            queries, *others = program.run(index)
            program.set(FIXED + index, _attend(call, step, queries, others))
        (logits,) = program.run(len(calls))
        return logits

    def _make(self, rows: int) -> tuple[Program, list[Attention]]:
        """The program of steps of this many rows; made in such a step."""
        fixed = [mx.zeros(rows, mx.int32), mx.zeros(rows, mx.int32), mx.zeros((rows, 1), mx.int32)]
        # Once for the shapes of what attention gives.
        with traced():
            shapes = self._trace(fixed, None)[1].shapes
        examples = [mx.zeros(shape) for shape in shapes]
        found: list[Recorder] = []

        def forward(*inputs: mx.array) -> list[mx.array]:
            logits, recorder = self._trace(list(inputs[:FIXED]), inputs[FIXED:])
            found.append(recorder)
            return [*recorder.outputs, logits]

        def sections() -> list[int]:
            return [*(call.outputs for call in found[-1].calls), 1]

        try:
            program = Program(forward, [*fixed, *examples], sections)
        except Unsupported as reason:
            raise Untraceable(f"the model has an operation that loops do not support: {reason}") from reason
        if BLOCKS in program.used:
            raise Untraceable("the model uses the mask of a decode step")
        for index in range(len(examples)):
            if program.needs(index, FIXED + index):
                raise Untraceable("the model attends to what it has not computed")
        return program, found[-1].calls

    def _trace(self, fixed: list[mx.array], attended: tuple[mx.array, ...] | None) -> tuple[mx.array, Recorder]:
        tokens, positions, blocks = fixed
        recorder = Recorder(attended)
        inputs: Inputs = ([blocks], [blocks], [])

        def make(step: Step) -> TracedStep:
            shape = GroupShape((blocks.shape[0], blocks.shape[1]), (), 0)
            groups = [TracedGroup(group, positions, inputs, shape, Keys()) for group in step.groups]
            for number, group in enumerate(groups):
                group.recorder = lambda layer, call, new, number=number: recorder(layer, number, call, new)
            return TracedStep(step, groups)

        with self._memory.traced(make, self._memory.layer_arrays) as caches:
            logits: mx.array = self._model(tokens[:, None], cache=caches)
        return logits[:, -1], recorder


# Inputs of a program before what attention gives: tokens, positions and what stands for blocks, of which nothing may
# depend.
BLOCKS, FIXED = 2, 3


def _attend(call: Attention, step: Step, queries: Array, others: list[Array]) -> Array:
    sinks = others.pop() if call.sinks else None
    new = (others[0][:, :, 0], others[1][:, :, 0]) if call.new else None
    group = step.groups[call.group]
    return call.attend(call.kv, group, queries[:, :, 0], new, call.reach, call.scale, sinks)[:, :, None]
