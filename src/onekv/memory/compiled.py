"""Decode steps of one model as compiled functions: the graph of a step is built once, not for every token.

There is a function for each shape of a step (`traced`). Shapes are rounded up, so that they seldom change as sequences
grow; so is the number of rows, so that it seldom changes as requests start and end. A new function is built by calling
the model once, with placeholder arrays for everything that changes, which takes as long as several steps. Meanwhile the
model is traced (`traces`), so that kernels can include the operations that produce their inputs.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..cuda import products
from ..traces import watching
from .kv import KVMemory
from .pool.sequence import Sequence
from .step import Step
from .traced import GroupShape, Inputs, KeyAdded, Keys, TracedGroup, TracedStep, inputs_of

# Functions that are kept: those used last.
MOST = 64
# Rows of a step; more are a multiple of the next. One more costs next to nothing where weights are what takes time.
ROWS, MANY = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48), 32

# Gives logits, and the positions of a step after this one.
Function = Callable[[mx.array, mx.array, list[Inputs], list[list[mx.array]]], tuple[mx.array, mx.array]]


class CompiledDecode:
    eager = False

    def __init__(self, model: Module, memory: KVMemory) -> None:
        self._model, self._memory = model, memory
        self._keys = [Keys() for _ in memory.pools]
        self._functions: OrderedDict[Any, Function] = OrderedDict()
        # Whether each token of the last step comes to what it would as the only one of its sequence, if all depends on
        # the kernels that attend and multiply.
        self.exact = False
        # What comes after the last step where every row has one token more: these lengths, at these positions.
        self._following: tuple[list[int], mx.array] | None = None

    def __call__(self, sequences: list[Sequence], tokens: mx.array, counts: list[int]) -> mx.array:
        """Logits [rows, vocabulary] after each of `tokens`, of which sequence i has `counts[i]`.

        Raises Untraceable.
        """
        memory = self._memory
        with memory.step(sequences, counts, spread=True):
            step = memory.current
            rows = len(step.rows)
            padding = rounded_rows(rows) - rows
            if padding:
                tokens = mx.pad(tokens, (0, padding))
            positions = self._positions(step.lengths, padding)
            while True:
                made = [
                    inputs_of(group, keys, rows + padding) for group, keys in zip(step.groups, self._keys, strict=True)
                ]
                several = max(counts) > 1
                # One token of each of more sequences would not be multiplied by the kernel.
                self.exact = len(sequences) <= products.MOST and all(
                    group.grid.work(key, rows + padding).exact
                    for group, keys in zip(step.groups, self._keys, strict=True)
                    for key in keys.kernels
                )
                function = self._function(several, several and self.exact, tuple(shape for _, shape in made))
                inputs = [some for some, _ in made]
                try:
                    logits, following = function(tokens, positions, inputs, memory.layer_arrays)
                except KeyAdded:
                    self._functions.clear()
                else:
                    self._following = [length + 1 for length in step.lengths], following
                    return logits[:rows] if padding else logits

    def _positions(self, lengths: list[int], padding: int) -> mx.array:
        """Of each row its position; -1 for padding. Where they follow from those of the step before, they are already
        on the device: a kernel that reads what the host has just written waits for the page (30 to 120 us on an H200).
        """
        if self._following is not None and self._following[0] == lengths:
            return self._following[1]
        return mx.array(np.array([*lengths, *[-1] * padding], np.int32))

    def _function(self, several: bool, alike: bool, shapes: tuple[GroupShape, ...]) -> Function:
        """`several`: of some sequence there is more than one token; `alike`: each comes to what it would alone."""
        key = ((several, alike), shapes)
        function = self._functions.pop(key, None) or self._compile(alike, shapes)
        self._functions[key] = function
        if len(self._functions) > MOST:
            self._functions.popitem(last=False)
        return function

    def _compile(self, alike: bool, shapes: tuple[GroupShape, ...]) -> Function:
        def forward(
            tokens: mx.array, positions: mx.array, inputs: list[Inputs], arrays: list[list[mx.array]]
        ) -> tuple[mx.array, mx.array]:
            def traced(step: Step) -> TracedStep:
                groups = []
                for group, some, shape, keys in zip(step.groups, inputs, shapes, self._keys, strict=True):
                    groups.append(TracedGroup(group, positions, some, shape, keys))
                return TracedStep(step, groups)

            with self._memory.traced(traced, arrays) as caches, watching(alike):
                logits: mx.array = self._model(tokens[:, None], cache=caches)
            return logits[:, -1], mx.where(positions < 0, positions, positions + 1)

        return mx.compile(forward)


def rounded_rows(rows: int) -> int:
    return next((count for count in ROWS if count >= rows), -(-rows // MANY) * MANY)
