"""A function of MLX arrays as a list of steps that run outside of MLX, for few rows on a CPU.

A decode step of one row consists of some thousand small operations and some hundred products with weights. MLX hands
each evaluation to a separate thread, which costs more than most of these operations, and its products of one row reach
only a fraction of the memory bandwidth. So the function is called once, its graph is exported by MLX (`graph`), and
from then on it is run here:

    products    with weights, by the loops of `products`; weights are views of MLX's memory, never copies
    tapes       of small operations in float32, many in one call of a compiled loop (`tape_kernel`)
    views       reshaped, transposed, sliced: no work, resolved when the program is built
    the rest    by NumPy (`primitives`)

The place of every value is fixed in advance: float32 values are in one array, `arena`, whose space is reused once a
value is no longer read. A run allocates nothing, except inside NumPy. Outputs come in sections, in order: each section
computes what it needs and no earlier one has computed. Between two sections, the caller may use the outputs of the
first and set inputs that a later one needs: this is where attention takes place.

Only float32 (and integers) are supported: NumPy has no bfloat16. Anything unsupported raises Unsupported when the
program is built, never later.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from . import call, tapes
from .graph import Graph, Operation
from .primitives import Array, Shape

COMPILING = "onekv: compiling small operations for this processor; this is done once and takes some seconds"
# What gives a view of its input, where it can.
VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unflatten"}
# Constants up to this many numbers are copied where tapes find them.
SMALL = 1 << 16

Step = Callable[[], Any]


class Program:
    def __init__(
        self, function: Callable[..., Any], examples: list[mx.array], sections: Callable[[], list[int]]
    ) -> None:
        """`sections()`, asked for when the function has been called, says how many outputs each section has."""
        graph = Graph(function, examples)
        ordered = graph.sections(sections())
        # Inputs that the outputs depend on, as indices.
        self.used = graph.used
        self.operations = [operation for operations, _ in ordered for operation in operations]
        made = _Maker(graph, ordered)
        self._inputs = [made.arrays[number] for number in graph.inputs]
        self._sections = made.sections
        self._needs = [{number for operation in operations for number in operation.inputs} for operations, _ in ordered]
        self._numbers = graph.inputs

    def set(self, index: int, array: Array) -> None:
        """Give the next run its `index`-th input."""
        self._inputs[index][...] = array

    def run(self, section: int) -> list[Array]:
        """Compute the outputs of a section, which stay until the next one is run."""
        steps, outputs = self._sections[section]
        for step in steps:
            step()
        return outputs

    def needs(self, section: int, index: int) -> bool:
        """Whether a section, or one before it, needs the `index`-th input."""
        return any(self._numbers[index] in needs for needs in self._needs[: section + 1])


class _Maker:
    """Gives every value its place, and makes the steps."""

    def __init__(self, graph: Graph, ordered: list[tuple[list[Operation], list[int]]]) -> None:
        self._values = graph.values
        self._last = _last_uses(ordered)
        # Each as large as any place of it; pages that no place is in are never touched.
        sizes = (_lines(value.shape) for value in graph.values if _size(value.shape) <= SMALL or value.constant is None)
        self._arena, self._end = np.empty(2 * sum(sizes), np.float32), 0
        self._free: dict[int, list[int]] = defaultdict(list)
        self._held: list[tuple[int, int, int]] = []
        self.arrays: dict[int, Array] = {}
        self._lines: list[tapes.Line] = []
        self._tape: list[Array] = []
        self.sections: list[tuple[list[Step], list[Array]]] = []
        for number in graph.inputs:
            self.arrays[number] = self._place(graph.values[number].shape, graph.values[number].dtype, None)
        now = 0
        for operations, outputs in ordered:
            self._steps: list[Step] = []
            for operation in operations:
                self._recycle(now)
                self._add(operation, now)
                now += 1
            self._flush()
            self.sections.append((self._steps, [self._array(number) for number in outputs]))

    # Places

    def _place(self, shape: Shape, dtype: Any, until: int | None) -> Array:
        """Room for an array that is read at `until` for the last time, or forever."""
        if dtype != np.float32:
            return np.empty(shape, dtype)
        size = _lines(shape)
        # What stays forever is not where operations before it, in the next run, would write.
        if until is not None and self._free[size]:
            start = self._free[size].pop()
        else:
            start, self._end = self._end, self._end + size
        if until is not None:
            self._held.append((until, start, size))
        return self._arena[start : start + _size(shape)].reshape(shape)

    def _recycle(self, now: int) -> None:
        left = []
        for until, start, size in self._held:
            if until < now:
                self._free[size].append(start)
            else:
                left.append((until, start, size))
        self._held = left

    def _array(self, number: int) -> Array:
        if number not in self.arrays:
            constant = self._values[number].constant
            assert constant is not None, "a value is used before it is computed"
            self.arrays[number] = constant
        return self.arrays[number]

    def _in_arena(self, number: int) -> Array | None:
        """The array where tapes can read it; None if that cannot be."""
        array = self._array(number)
        if array.dtype != np.float32:
            return None
        if self._values[number].constant is not None and not np.may_share_memory(array, self._arena):
            if array.size > SMALL:
                return None
            self.arrays[number] = self._place(array.shape, np.float32, None)
            self.arrays[number][...] = array
        return self.arrays[number]

    # Steps

    def _add(self, operation: Operation, now: int) -> None:
        value, until = self._values[operation.output], self._last[operation.output]
        inputs = [self._array(number) for number in operation.inputs]
        if operation.name in VIEWS:
            view = operation.call(inputs[0])
            if np.may_share_memory(view, inputs[0]):
                self.arrays[operation.output] = view
                return
        out = self.arrays[operation.output] = self._place(value.shape, value.dtype, until)
        if operation.product is not None:
            self._multiply(operation, inputs[0], out, now)
            return
        found = [self._in_arena(number) for number in operation.inputs]
        lines = None
        if value.dtype == np.float32 and all(one is not None for one in found):
            lines = tapes.lines(operation, self._arena, [one for one in found if one is not None], out)
        if lines is not None:
            self._lines += lines
        else:
            self._do(partial(_compute, operation.call, inputs, out))

    def _multiply(self, operation: Operation, x: Array, out: Array, now: int) -> None:
        product = operation.product
        assert product is not None
        if not x.flags.c_contiguous:
            copy = self._place(x.shape, np.float32, now)
            self._do(partial(np.copyto, copy, x))
            x = copy
        self._do(partial(product.multiply, x.reshape(-1, product.k), out.reshape(-1, product.n)))

    def _do(self, step: Step) -> None:
        self._flush()
        self._steps.append(step)

    def _flush(self) -> None:
        """What is on the tape becomes a step."""
        if self._lines:
            tape = np.array(self._lines, np.int64)
            self._lines = []
            self._do(partial(_run_tape, self._arena, tape))


def _run_tape(arena: Array, tape: Array) -> None:
    from .tape_kernel import run

    call(run, COMPILING, arena, tape)


def _compute(function: Callable[..., Any], inputs: list[Array], out: Array) -> None:
    out[...] = function(*inputs)


def _last_uses(ordered: list[tuple[list[Operation], list[int]]]) -> dict[int, int]:
    """When each value is read for the last time, also as a view of it; the outputs of a section, at its end."""
    last: dict[int, int] = {}
    views: list[Operation] = []
    now = 0
    for operations, outputs in ordered:
        for operation in operations:
            for number in (*operation.inputs, operation.output):
                last[number] = now
            if operation.name in VIEWS:
                views.append(operation)
            now += 1
        for number in outputs:
            last[number] = now - 1
    for operation in reversed(views):
        last[operation.inputs[0]] = max(last[operation.inputs[0]], last[operation.output])
    return last


def _lines(shape: Shape) -> int:
    """Numbers of whole cache lines for an array."""
    return -(-_size(shape) // 16) * 16


def _size(shape: Shape) -> int:
    return math.prod(shape)
