"""Products of a few rows with a matrix on CPU, compiled by numba: weights are read once, at the speed of memory, and
packed ones are unpacked in registers.

    multiply            weights in float32, float16 (as int16, numba has none) or bfloat16 (as uint16)
    multiply_packed4    weights packed by MLX's affine quantization, as bytes: 4 bits, low half first
    multiply_packed8    8 bits
    unpack4, unpack8    the same as float32, for many rows, which BLAS multiplies faster

A packed weight is q * scale + bias, each operation rounded, as in `mx.dequantize`. Products use exactly these weights,
so NaN and infinities propagate as usual.

Each result is one sum, whose order depends only on the length of a row: blocks of 32 numbers, one after the other, each
as two vectors of 16 that are multiplied and added to 16 sums; these are added in halves; then the numbers after the
last whole block. So the result for a row is the same alone and in a batch, with one thread and with several.

numba leaves the order of sums, and whether vector instructions are used at all, to LLVM. Here the innermost loops are
written in LLVM IR (`_tile`), on vectors of 16 floats, which LLVM splits if the processor's are shorter. A tile is the
product of a few rows with a few columns: the more rows, the less unpacking for each; and it stays in registers. No
fast-math rules are used. Compiled code is cached on disk and compiled again when this file changes, so it must not call
compiled functions of other files.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from . import kept

Array = np.ndarray[Any, Any]

# Numbers of a vector, and of a block; groups are whole blocks.
LANES, BLOCK = 16, 32
PLAIN = 0
# Rows of weights that are asked of memory ahead. Processors foresee float32 by themselves, but not fewer bytes at a
# time: without this, 8 bits were read from memory at two thirds of the speed.
AHEAD = 8
# Columns that are multiplied with eight rows at a time: as many as there are registers for their sums.
COLUMNS = 3 if binding.get_host_cpu_features().get("avx512f") else 2

FLOAT, HALF, BYTE, SHORT, WORD, LONG = ir.FloatType(), ir.HalfType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOATS = ir.VectorType(FLOAT, LANES)
EVEN, ODD = list(range(0, BLOCK, 2)), list(range(1, BLOCK, 2))
# Even and odd numbers of a block in turn, the first half of them and the second.
TURNS = [number // 2 + number % 2 * LANES for number in range(BLOCK)]

compiled = njit(nogil=True, error_model="numpy")


class _Emit:
    """Instructions on vectors, at the place of `builder`."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder

    def array(self, kind: Any, value: Any) -> tuple[Any, Any, Sequence[Any]]:
        """An array: the type of its numbers, where they are, and its shape."""
        array = self.context.make_array(kind)(self.context, self.builder, value)
        number = {"float32": FLOAT, "int16": HALF, "uint16": SHORT, "uint8": BYTE}[str(kind.dtype)]
        data = self.builder.bitcast(array.data, number.as_pointer())
        return number, data, cgutils.unpack_tuple(self.builder, array.shape)

    def at(self, data: Any, number: Any, kind: Any) -> Any:
        """Where a `kind` starts at this number of `data`."""
        return self.builder.bitcast(self.builder.gep(data, [number]), kind.as_pointer())

    def load(self, number: Any, data: Any, at: Any, count: int) -> Any:
        """Numbers in float32; one is no vector. Bytes become integers of 32 bits."""
        kind = number if count == 1 else ir.VectorType(number, count)
        size = {FLOAT: 4, HALF: 2, SHORT: 2, BYTE: 1}[number]
        loaded = self.builder.load(self.at(data, at, kind), align=size)
        floats, words = (FLOAT, WORD) if count == 1 else (ir.VectorType(FLOAT, count), ir.VectorType(WORD, count))
        if number == HALF:
            return self.builder.fpext(loaded, floats)
        if number == SHORT:
            high = self.builder.shl(self.builder.zext(loaded, words), self.all(words, 16))
            return self.builder.bitcast(high, floats)
        return self.builder.zext(loaded, words) if number == BYTE else loaded

    def prefetch(self, data: Any, at: Any) -> None:
        """Asks for what is there, or past the end, where nothing is read."""
        place = self.at(data, at, BYTE)
        kind = ir.FunctionType(ir.VoidType(), [place.type, WORD, WORD, WORD])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        # To read it; into all caches; data, not instructions.
        self.builder.call(function, [place, WORD(0), WORD(3), WORD(1)])

    def all(self, kind: Any, number: int) -> Any:
        """A constant; in a vector, at each place."""
        return kind([number] * kind.count) if isinstance(kind, ir.VectorType) else kind(number)

    def spread(self, number: Any) -> Any:
        """One float at each place of a vector."""
        one = self.builder.insert_element(FLOATS(ir.Undefined), number, WORD(0))
        return self.builder.shuffle_vector(one, FLOATS(ir.Undefined), ir.VectorType(WORD, LANES)([0] * LANES))

    def pick(self, a: Any, b: Any, places: Sequence[int]) -> Any:
        """These places of two vectors in a row."""
        return self.builder.shuffle_vector(a, b, ir.VectorType(WORD, len(places))(list(places)))

    def add_product(self, a: Any, b: Any, total: Any) -> Any:
        """a * b + total, rounded once where the processor can."""
        name = "llvm.fmuladd.f32" if a.type == FLOAT else f"llvm.fmuladd.v{LANES}f32"
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(a.type, [a.type, a.type, a.type]), name
        )
        return self.builder.call(function, [a, b, total])

    def sum(self, vector: Any) -> Any:
        """Of a vector's numbers, in halves."""
        count = vector.type.count
        while count > 1:
            count //= 2
            first, second = list(range(count)), list(range(count, 2 * count))
            vector = self.builder.fadd(self.pick(vector, vector, first), self.pick(vector, vector, second))
        return self.builder.extract_element(vector, WORD(0))


class _Weights:
    """A matrix, as blocks of 32 weights of a row: two vectors. Those of 4 bits are the even and the odd ones."""

    def __init__(self, emit: _Emit, bits: int, kinds: Sequence[Any], values: Sequence[Any], shift: Any) -> None:
        self.emit, self.bits, self.shift = emit, bits, shift
        self.number, self.data, (_, self.width) = emit.array(kinds[0], values[0])
        if bits != PLAIN:
            self.scale, self.scales, (_, self.groups) = emit.array(kinds[1], values[1])
            self.bias, self.biases, _ = emit.array(kinds[2], values[2])

    def block(self, row: Any, block: Any) -> tuple[Any, Any]:
        emit, builder = self.emit, self.emit.builder
        bytes_of_block = BLOCK * self.bits // 8 if self.bits else BLOCK
        at = builder.add(builder.mul(row, self.width), builder.mul(block, LONG(bytes_of_block)))
        if self.number != FLOAT:
            emit.prefetch(self.data, builder.add(at, builder.mul(self.width, LONG(AHEAD))))
        first = emit.load(self.number, self.data, at, LANES)
        if self.bits == 4:
            words = first.type
            low, high = builder.and_(first, emit.all(words, 15)), builder.lshr(first, emit.all(words, 4))
            return self._scaled(row, block, low, high)
        second = emit.load(self.number, self.data, builder.add(at, LONG(LANES)), LANES)
        return self._scaled(row, block, first, second) if self.bits else (first, second)

    def _scaled(self, row: Any, block: Any, first: Any, second: Any) -> tuple[Any, Any]:
        emit, builder = self.emit, self.emit.builder
        group = builder.add(builder.mul(row, self.groups), builder.lshr(block, self.shift))
        scale = emit.spread(emit.load(self.scale, self.scales, group, 1))
        bias = emit.spread(emit.load(self.bias, self.biases, group, 1))
        codes = (builder.sitofp(first, FLOATS), builder.sitofp(second, FLOATS))
        a, b = (builder.fadd(builder.fmul(each, scale), bias) for each in codes)
        return a, b


def _tile(bits: int, rows: int, columns: int) -> Any:
    """Numba's function for `rows` rows from `row` on and `columns` columns from `column` on, below `end`.

    What is past the last row or column is that one again, and so is its result.
    """

    @intrinsic
    def tile(
        typing: Any,
        x: Any,
        weight: Any,
        scales: Any,
        biases: Any,
        shift: Any,
        out: Any,
        row: Any,
        column: Any,
        end: Any,
    ) -> Any:
        number = types.intp
        kinds = (x, weight, scales, biases, number, out, number, number, number)

        def emitted(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit = _Emit(context, builder)
            weights = _Weights(emit, bits, kinds[1:4], values[1:4], values[4])
            _emit_tile(emit, weights, (x, values[0]), (out, values[5]), (rows, columns), values[6:])
            return context.get_dummy_value()

        return types.void(*kinds), emitted

    return tile


def _emit_tile(emit: _Emit, weights: _Weights, x: Any, out: Any, size: tuple[int, int], place: Sequence[Any]) -> None:
    builder, (row, column, end) = emit.builder, place
    _, inputs, (rows, k) = emit.array(*x)
    _, results, (_, n) = emit.array(*out)

    def up_to(first: Any, count: int, limit: Any) -> list[Any]:
        last, places = builder.sub(limit, LONG(1)), [builder.add(first, LONG(i)) for i in range(count)]
        return [builder.select(builder.icmp_signed("<", each, last), each, last) for each in places]

    own, columns = up_to(row, size[0], rows), up_to(column, size[1], end)
    starts = [builder.mul(each, k) for each in own]
    pairs = [(i, j) for i in range(size[0]) for j in range(size[1])]
    sums = {pair: cgutils.alloca_once_value(builder, emit.all(FLOATS, 0)) for pair in pairs}
    with cgutils.for_range(builder, builder.lshr(k, LONG(5))) as loop:
        blocks = [weights.block(each, loop.index) for each in columns]
        for i, start in enumerate(starts):
            at = builder.add(start, builder.mul(loop.index, LONG(BLOCK)))
            first = emit.load(FLOAT, inputs, at, LANES)
            second = emit.load(FLOAT, inputs, builder.add(at, LONG(LANES)), LANES)
            for j, (a, b) in enumerate(blocks):
                total = emit.add_product(first, a, builder.load(sums[i, j]))
                builder.store(emit.add_product(second, b, total), sums[i, j])
    totals = {pair: cgutils.alloca_once_value(builder, emit.sum(builder.load(sums[pair]))) for pair in pairs}
    if weights.bits == PLAIN:
        with cgutils.for_range(builder, k, start=builder.and_(k, LONG(-BLOCK))) as loop:
            for i, j in pairs:
                factor = emit.load(FLOAT, inputs, builder.add(starts[i], loop.index), 1)
                at = builder.add(builder.mul(columns[j], k), loop.index)
                weight = emit.load(weights.number, weights.data, at, 1)
                builder.store(emit.add_product(factor, weight, builder.load(totals[i, j])), totals[i, j])
    for i, j in pairs:
        at = builder.add(builder.mul(own[i], n), columns[j])
        builder.store(builder.load(totals[i, j]), emit.at(results, at, FLOAT))


def _columns(bits: int) -> Any:
    """Numba's function for all rows and the columns from `start` to `end`."""
    one, two, four, eight = _tile(bits, 1, 4), _tile(bits, 2, 4), _tile(bits, 4, 2), _tile(bits, 8, COLUMNS)

    @compiled
    def columns(
        x: Array, weight: Array, scales: Array, biases: Array, shift: int, out: Array, start: int, end: int
    ) -> None:
        rows, row = x.shape[0], 0
        while row < rows:
            left = rows - row
            if left > 4:
                for column in range(start, end, COLUMNS):
                    eight(x, weight, scales, biases, shift, out, row, column, end)
                row += 8
            elif left > 2:
                for column in range(start, end, 2):
                    four(x, weight, scales, biases, shift, out, row, column, end)
                row += 4
            elif left == 2:
                for column in range(start, end, 4):
                    two(x, weight, scales, biases, shift, out, row, column, end)
                row += 2
            else:
                for column in range(start, end, 4):
                    one(x, weight, scales, biases, shift, out, row, column, end)
                row += 1

    return columns


_columns_plain, _columns4, _columns8 = _columns(PLAIN), _columns(4), _columns(8)


@kept(parallel=True)
def multiply(x: Array, weight: Array, out: Array, threads: int) -> None:
    """`out` [rows, n] = `x` [rows, k] @ `weight` [n, k].T"""
    n = weight.shape[0]
    # Alone, without waiting for a thread that has nothing to do: where other work runs, that takes milliseconds.
    if threads == 1:
        _columns_plain(x, weight, weight, weight, 0, out, 0, n)
        return
    for part in prange(threads):
        _columns_plain(x, weight, weight, weight, 0, out, n * part // threads, n * (part + 1) // threads)


@kept(parallel=True)
def multiply_packed4(
    x: Array, weight: Array, scales: Array, biases: Array, shift: int, out: Array, threads: int
) -> None:
    """`weight` [n, k / 2] in bytes; `scales` and `biases` [n, groups] in any of the types of `multiply`. A group has
    32 << shift weights.
    """
    n, apart = weight.shape[0], np.empty_like(x)
    _take_apart(x, apart)  # type: ignore[call-arg]
    if threads == 1:
        _columns4(apart, weight, scales, biases, shift, out, 0, n)
        return
    for part in prange(threads):
        _columns4(apart, weight, scales, biases, shift, out, n * part // threads, n * (part + 1) // threads)


@kept(parallel=True)
def multiply_packed8(
    x: Array, weight: Array, scales: Array, biases: Array, shift: int, out: Array, threads: int
) -> None:
    """The same with `weight` [n, k]."""
    n = weight.shape[0]
    if threads == 1:
        _columns8(x, weight, scales, biases, shift, out, 0, n)
        return
    for part in prange(threads):
        _columns8(x, weight, scales, biases, shift, out, n * part // threads, n * (part + 1) // threads)


@intrinsic
def _take_apart(typing: Any, x: Any, out: Any) -> Any:
    """Of each block the even numbers, then the odd ones: as weights of 4 bits are unpacked."""

    def emitted(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit = _Emit(context, builder)
        _, data, (rows, k) = emit.array(x, values[0])
        _, results, _ = emit.array(out, values[1])
        with cgutils.for_range(builder, builder.lshr(builder.mul(rows, k), LONG(5))) as loop:
            at = builder.mul(loop.index, LONG(BLOCK))
            after = builder.add(at, LONG(LANES))
            first, second = emit.load(FLOAT, data, at, LANES), emit.load(FLOAT, data, after, LANES)
            builder.store(emit.pick(first, second, EVEN), emit.at(results, at, FLOATS), align=4)
            builder.store(emit.pick(first, second, ODD), emit.at(results, after, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(x, out), emitted


def _unpack(bits: int) -> Any:
    """Numba's function for one row."""

    @intrinsic
    def unpack(typing: Any, weight: Any, scales: Any, biases: Any, shift: Any, out: Any, row: Any) -> Any:
        kinds = (weight, scales, biases, types.intp, out, types.intp)

        def emitted(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit = _Emit(context, builder)
            weights = _Weights(emit, bits, kinds[:3], values[:3], values[3])
            _, results, (_, k) = emit.array(out, values[4])
            start = builder.mul(values[5], k)
            with cgutils.for_range(builder, builder.lshr(k, LONG(5))) as loop:
                first, second = weights.block(values[5], loop.index)
                if bits == 4:
                    first, second = (emit.pick(first, second, part) for part in (TURNS[:LANES], TURNS[LANES:]))
                at = builder.add(start, builder.mul(loop.index, LONG(BLOCK)))
                builder.store(first, emit.at(results, at, FLOATS), align=4)
                builder.store(second, emit.at(results, builder.add(at, LONG(LANES)), FLOATS), align=4)
            return context.get_dummy_value()

        return types.void(*kinds), emitted

    return unpack


_unpack4, _unpack8 = _unpack(4), _unpack(8)


@kept()
def unpack4(weight: Array, scales: Array, biases: Array, shift: int, out: Array) -> None:
    """`out` [rows, k]; the rest as for `multiply_packed4`."""
    for row in range(weight.shape[0]):
        _unpack4(weight, scales, biases, shift, out, row)


@kept()
def unpack8(weight: Array, scales: Array, biases: Array, shift: int, out: Array) -> None:
    for row in range(weight.shape[0]):
        _unpack8(weight, scales, biases, shift, out, row)
