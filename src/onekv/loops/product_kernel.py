"""Products of a few rows with a matrix on CPU, compiled by numba: weights are read once, at the speed of memory, and
packed ones are unpacked in registers.

    multiply            weights in float32, float16 (as int16, numba has none) or bfloat16 (as uint16)
    multiply_packed4    weights packed by MLX's affine quantization, as bytes: 4 bits, low half first
    multiply_packed8    8 bits
    unpack4, unpack8    the same as float32, for many rows, which BLAS multiplies faster

A packed weight is q * scale + bias, each operation rounded, as in `mx.dequantize`. Products use exactly these weights,
so NaN and infinities propagate as usual. Where an instruction looks up sixteen numbers in a register (AVX-512), the
sixteen weights that a group of 4 bits can have are computed once, and codes are looked up.

Each result is one sum, whose order depends only on the length of a row: blocks of 32 numbers, one after the other, each
as two vectors of 16 that are multiplied and added to 16 sums; these are added in halves, those of 16 results at once;
then the numbers after the last whole block. So the result for a row is the same alone and in a batch, with one thread
and with several.

numba leaves the order of sums, and whether vector instructions are used at all, to LLVM. Here the innermost loops are
written in LLVM IR (`_tile`), on vectors of 16 floats, which LLVM splits if the processor's are shorter. A tile is the
product of a few rows with a few columns: the more rows, the less unpacking for each; and it stays in registers. No
fast-math rules are used. Compiled code is cached on disk and compiled again when this file changes, so it must not call
compiled functions of other files.
"""

from collections.abc import Callable, Sequence
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
# Bytes of weights that are asked of memory ahead, one line of the cache at a time: processors do not foresee enough by
# themselves while they multiply, and a line that is asked for twice takes as long as two products.
AHEAD, LINE = 8192, 64
# Whether a register has sixteen numbers, and an instruction looks up sixteen in it.
WIDE = bool(binding.get_host_cpu_features().get("avx512f"))
# Columns that are multiplied at a time with four rows if they are packed, and with eight if not: as many as there are
# registers for.
PACKED_COLUMNS, PLAIN_COLUMNS = (4, 3) if WIDE else (2, 2)
# Columns that are multiplied with the first rows before they are with the next ones, from the processor's cache.
NEAR = 24

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

    def sums(self, vectors: list[Any]) -> list[Any]:
        """Of each vector's numbers, in halves; of several vectors at once, so that no part of a vector is idle."""
        found: list[Any] = []
        for first in range(0, len(vectors), LANES):
            some = vectors[first : first + LANES]
            while len(some) & len(some) - 1:
                some.append(some[0])
            found += self._sums(some)
        return found[: len(vectors)]

    def _sums(self, vectors: list[Any]) -> list[Any]:
        """Of sixteen vectors, or eight, or four, two, one."""
        size = LANES
        while size > 1:
            size //= 2
            parts = range(0, vectors[0].type.count, 2 * size)
            # The vectors in pairs; at last there is one, of which the halves are added.
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else [(vectors[0], None)]
            vectors = [self._halves(one, other, parts, size) for one, other in pairs]
        (last,) = vectors
        return [self.builder.extract_element(last, WORD(place)) for place in range(last.type.count)]

    def _halves(self, one: Any, other: Any, parts: range, size: int) -> Any:
        """The two halves of each part added."""
        firsts = [part + i for part in parts for i in range(size)]
        if other is not None:
            firsts += [one.type.count + place for place in firsts]
        else:
            other = one
        return self.builder.fadd(self.pick(one, other, firsts), self.pick(one, other, [at + size for at in firsts]))

    def permute(self, table: Any, places: Any) -> Any:
        """Numbers of `table` at these places, of which the lowest four bits count."""
        kind = ir.FunctionType(FLOATS, [FLOATS, places.type])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        return self.builder.call(function, [table, places])


class _Weights:
    """A matrix, as blocks of 32 weights of a row: two vectors. Those of 4 bits are the even and the odd ones."""

    def __init__(
        self, emit: _Emit, bits: int, kinds: Sequence[Any], values: Sequence[Any], shift: Any, held: bool = True
    ) -> None:
        """`held`: there are registers for what unpacks a group."""
        self.emit, self.bits, self.held = emit, bits, bits != PLAIN and held
        self.looks_up = bits == 4 and WIDE
        # Blocks of a group are 1 << shift.
        self.shift = shift if bits else LONG(0)
        self.number, self.data, (_, self.width) = emit.array(kinds[0], values[0])
        if bits != PLAIN:
            self.scale, self.scales, (_, self.groups) = emit.array(kinds[1], values[1])
            self.bias, self.biases, _ = emit.array(kinds[2], values[2])

    def each_block(self, rows: list[Any], count: Any, do: Callable[[Any, list[Any]], None]) -> None:
        """Code that does it with each of `count` blocks, and with what unpacks it in each of `rows`, which is made for
        each block again unless it is held."""
        builder = self.emit.builder
        if not self.held:
            with cgutils.for_range(builder, count) as loop:
                group = builder.lshr(loop.index, self.shift)
                do(loop.index, [self.group(row, group) for row in rows])
            return
        with cgutils.for_range(builder, builder.lshr(count, self.shift)) as outer:
            unpackers = [self.group(row, outer.index) for row in rows]
            first = builder.shl(outer.index, self.shift)
            with cgutils.for_range(builder, builder.shl(LONG(1), self.shift)) as loop:
                do(builder.add(first, loop.index), unpackers)

    def group(self, row: Any, group: Any) -> Any:
        """What a group's codes are unpacked with: what each of the 16 stands for, or scale and bias."""
        if self.bits == PLAIN:
            return None
        emit, builder = self.emit, self.emit.builder
        at = builder.add(builder.mul(row, self.groups), group)
        scale = emit.spread(emit.load(self.scale, self.scales, at, 1))
        bias = emit.spread(emit.load(self.bias, self.biases, at, 1))
        if self.looks_up:
            return builder.fadd(builder.fmul(FLOATS([float(code) for code in range(LANES)]), scale), bias)
        return scale, bias

    def block(self, row: Any, block: Any, group: Any) -> tuple[Any, Any]:
        emit, builder = self.emit, self.emit.builder
        at = builder.add(builder.mul(row, self.width), builder.mul(block, LONG(self._numbers)))
        first = emit.load(self.number, self.data, at, LANES)
        if self.bits == 4:
            words = first.type
            if self.looks_up:
                return emit.permute(group, first), emit.permute(group, builder.lshr(first, emit.all(words, 4)))
            low, high = builder.and_(first, emit.all(words, 15)), builder.lshr(first, emit.all(words, 4))
            return self._scaled(group, low, high)
        second = emit.load(self.number, self.data, builder.add(at, LONG(LANES)), LANES)
        return self._scaled(group, first, second) if self.bits else (first, second)

    def ask(self, row: Any, rows: int, block: Any) -> None:
        """Asks memory for as much as this block of `rows` rows has, of what is multiplied later."""
        emit, builder = self.emit, self.emit.builder
        size, numbers = {FLOAT: 4, HALF: 2, SHORT: 2, BYTE: 1}[self.number], rows * self._numbers
        at = builder.add(builder.mul(row, self.width), builder.mul(block, LONG(numbers)))
        for first in range(0, numbers * size, LINE):
            emit.prefetch(self.data, builder.add(at, LONG((AHEAD + first) // size)))

    @property
    def _numbers(self) -> int:
        """How many of the array's numbers a block has."""
        return BLOCK * self.bits // 8 if self.bits else BLOCK

    def _scaled(self, group: Any, first: Any, second: Any) -> tuple[Any, Any]:
        builder, (scale, bias) = self.emit.builder, group
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
            held = WIDE or (bits == 8 and rows == 1)
            weights = _Weights(emit, bits, kinds[1:4], values[1:4], values[4], held)
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

    def add(block: Any, unpackers: list[Any]) -> None:
        weights.ask(column, size[1], block)
        both = [weights.block(*each) for each in zip(columns, [block] * size[1], unpackers, strict=True)]
        for i, start in enumerate(starts):
            at = builder.add(start, builder.mul(block, LONG(BLOCK)))
            first = emit.load(FLOAT, inputs, at, LANES)
            second = emit.load(FLOAT, inputs, builder.add(at, LONG(LANES)), LANES)
            for j, (a, b) in enumerate(both):
                total = emit.add_product(first, a, builder.load(sums[i, j]))
                builder.store(emit.add_product(second, b, total), sums[i, j])

    weights.each_block(columns, builder.lshr(k, LONG(5)), add)
    added = emit.sums([builder.load(sums[pair]) for pair in pairs])
    totals = {pair: cgutils.alloca_once_value(builder, total) for pair, total in zip(pairs, added, strict=True)}
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


def _tiles(bits: int, rows: int, columns: int) -> Any:
    """Numba's function for up to `rows` rows from `row` on and the columns from `start` to `end`.

    It is a function of its own because LLVM would keep fewer sums in registers if it had all tiles in one.
    """
    tile = _tile(bits, rows, columns)

    @compiled
    def tiles(
        x: Array, weight: Array, scales: Array, biases: Array, shift: int, out: Array, row: int, start: int, end: int
    ) -> None:
        for column in range(start, end, columns):
            tile(x, weight, scales, biases, shift, out, row, column, end)

    return tiles


def _columns(bits: int) -> Any:
    """Numba's function for all rows and the columns from `start` to `end`."""
    one, two, four = _tiles(bits, 1, 4), _tiles(bits, 2, 4), _tiles(bits, 4, PACKED_COLUMNS if bits else 2)
    # What weights are unpacked with takes registers.
    most, eight = (4, four) if bits else (8, _tiles(bits, 8, PLAIN_COLUMNS))

    @compiled
    def columns(
        x: Array, weight: Array, scales: Array, biases: Array, shift: int, out: Array, start: int, end: int
    ) -> None:
        rows = x.shape[0]
        step = end - start if rows <= most else NEAR
        for first in range(start, end, step):
            last = min(first + step, end)
            for row in range(0, rows, most):
                left = min(rows - row, most)
                if left > 4:
                    eight(x, weight, scales, biases, shift, out, row, first, last)
                elif left > 2:
                    four(x, weight, scales, biases, shift, out, row, first, last)
                elif left == 2:
                    two(x, weight, scales, biases, shift, out, row, first, last)
                else:
                    one(x, weight, scales, biases, shift, out, row, first, last)

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
                group = weights.group(values[5], builder.lshr(loop.index, weights.shift))
                first, second = weights.block(values[5], loop.index, group)
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
