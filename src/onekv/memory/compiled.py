"""Decode steps of one model as compiled functions: the graph of a step is made once, not for every token.

There is a function for each number of rows and each shape of a step (`traced`); shapes are rounded so that growing
sequences change them seldom. A function that is not there yet is made by calling the model once, with arrays that stand
for what changes. That takes about as long as building the graph of a step.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from .kv import KVMemory
from .pool.sequence import Sequence
from .step import Step
from .traced import GroupShape, Inputs, KeyAdded, Keys, TracedGroup, TracedStep, inputs_of

# Functions that are kept: those used last.
MOST = 64

Function = Callable[[mx.array, mx.array, list[Inputs], list[list[mx.array]]], mx.array]


class CompiledDecode:
    def __init__(self, model: Module, memory: KVMemory) -> None:
        self._model, self._memory = model, memory
        self._keys: list[Keys] = [[] for _ in memory.pools]
        self._functions: OrderedDict[Any, Function] = OrderedDict()

    def __call__(self, sequences: list[Sequence], tokens: mx.array) -> mx.array:
        """Logits [rows, vocabulary] after one more token of each sequence. Raises Untraceable."""
        memory = self._memory
        with memory.step(sequences, 1):
            step = memory.current
            while True:
                made = [inputs_of(group, keys) for group, keys in zip(step.groups, self._keys, strict=True)]
                function = self._function(len(sequences), tuple(shape for _, shape in made))
                inputs = [some for some, _ in made]
                try:
                    return function(tokens, step.groups[0].positions, inputs, memory.layer_arrays)
                except KeyAdded:
                    self._functions.clear()

    def _function(self, rows: int, shapes: tuple[GroupShape, ...]) -> Function:
        function = self._functions.pop((rows, shapes), None) or self._compile(shapes)
        self._functions[rows, shapes] = function
        if len(self._functions) > MOST:
            self._functions.popitem(last=False)
        return function

    def _compile(self, shapes: tuple[GroupShape, ...]) -> Function:
        def forward(
            tokens: mx.array, positions: mx.array, inputs: list[Inputs], arrays: list[list[mx.array]]
        ) -> mx.array:
            def traced(step: Step) -> TracedStep:
                groups = []
                for group, some, shape, keys in zip(step.groups, inputs, shapes, self._keys, strict=True):
                    groups.append(TracedGroup(group, positions, some, shape, keys))
                return TracedStep(step, groups)

            with self._memory.traced(traced, arrays) as caches:
                logits: mx.array = self._model(tokens[:, None], cache=caches)
            return logits[:, -1]

        return mx.compile(forward)
