"""Decode attention over plain blocks on CPU, compiled by numba: keys and values are read once, in place.

Work is divided into pieces (`plain.Work`): some tokens of the pool, and the rows that read them, of which there are
several if rows begin with the same blocks. A piece and a KV head form an item. Items are assigned to threads in
advance, and the result of an item does not depend on the thread that computes it. For each item:

    queries     of all its rows, scaled, are laid out so that a vector has one number of each of LANES queries
    tiles       of up to 64 tokens, which stay in the processor's cache for all queries. Scores: each number of a key
                times such vectors, so that a vector has one score of each query, and nothing is added up across lanes
    weights     a running softmax in powers of 2: sums are scaled when a larger score comes
    values      four queries at a time, two vectors of values

Up to FEW queries are too few for that: then vectors have numbers of one key and one query, which are added up across
lanes, and scores of several tokens.

Then the parts of each row, one of each piece it is in, are joined by their largest scores and their sums of weights.
Hidden tokens are not read at all. Arguments come in plain tuples, arrays that inner loops use are flat:

    inputs      KV heads; queries [rows, query heads, key dim]; the scale of scores; sinks [query heads], scores of
                nothing, or [0]
    stores      bytes of the new token's keys and values [rows, heads, bytes], or none: [0, 0, 0]; blocks of each row
                [rows, n], and the position of the first slot of each; block size; the pool's bytes, keys and values,
                flat
    keys,       kind: FLOAT32, BFLOAT16 or FLOAT16; slots of a head; and twice [heads, slots, dim], flat, of which only
    values      the one that the kind says is looked at: float32, and the others as uint16
    work        pieces [., 5]: first run, runs, first of `rows`, rows, first part, that of its i-th row is i further on;
                runs [., 3]: first slot, position of its token, tokens; rows; parts of all rows, row by row; where each
                row's begin [rows + 1]; shares [threads + 1]: where each thread's items begin
    reads       each row's position: it sees those up to it; window: of what is this many tokens back, and more, it
                sees only what is below position keep

numba's own vectors are half as wide as the processor's, and it has no way to keep sums in registers while it reads. So
vectors are a type here, with the few operations that are needed, and the rest is written with them. What is compiled
is kept on disk, and made again when this file changes: so it calls nothing compiled that is elsewhere.
"""

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from ....loops import kept

Array = np.ndarray[Any, Any]

# Numbers of a vector: as many as a register has, or two.
LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
# Tokens of which scores are computed at a time: a multiple of 4.
TILE = 64
# Queries that are taken together where there are no more.
FEW = 4
LOG2E = np.float32(np.log2(np.e))
# Of weights: 2 to this and lower is taken for it, which is nothing beside the largest, 1.
SMALLEST = -126.0
LOWEST = np.float32(-3e38)
# 2 ** x for x from 0 to 1, within 2e-9 before rounding; highest power first.
POWERS = (0.000217022549, 0.0012439688, 0.00967884098, 0.055483342, 0.240229836, 0.693146984, 1.0)
# What takes a float16's exponent, moved into place, to that of a float32.
EXPONENT = np.float32(2.0**112)

FLOAT32, BFLOAT16, FLOAT16 = range(3)

f32, u32, u64 = np.float32, np.uint32, np.uint64
ONE, TWO, THREE, FOUR, SIXTEEN, WIDTH, SPAN = (u64(n) for n in (1, 2, 3, 4, 16, LANES, TILE))

RULES = {"contract", "nsz"}
compiled = njit(nogil=True, error_model="numpy", fastmath=RULES)


# Vectors


class VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"vector of {LANES} floats")


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)  # type: ignore[no-untyped-call]


vector = VectorType()
FLOAT, INTEGER = ir.FloatType(), ir.IntType(32)
VECTOR, INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(INTEGER, LANES)


def operation(function: Any) -> Any:
    """What makes machine code, typed for its callers."""
    return intrinsic(function)


def _same(number: float, kind: Any = VECTOR) -> Any:
    return ir.Constant(kind, [number] * LANES)


def _spread(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), number, ir.Constant(INTEGER, 0))
    return builder.shuffle_vector(first, first, _same(0, INTEGERS))


def _call(builder: Any, name: str, result: Any, arguments: Any) -> Any:
    """One of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function: Any = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments)


def _place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """The address of a number of a flat array."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [context.cast(builder, arguments[1], signature.args[1], types.uint64)])


@operation
def load(_: Any, array: Any, at: Any) -> Any:
    """LANES numbers from `at` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature, arguments)
        return builder.load(builder.bitcast(place, VECTOR.as_pointer()), align=4)

    return vector(array, at), generate


@operation
def store(_: Any, array: Any, at: Any, numbers: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature, arguments)
        builder.store(arguments[2], builder.bitcast(place, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, at, numbers), generate


@operation
def fetch(_: Any, array: Any, at: Any) -> Any:
    """Has it brought into the cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.bitcast(_place(context, builder, signature, arguments), ir.IntType(8).as_pointer())
        # To be read, and again, and it is data.
        how = [ir.Constant(INTEGER, number) for number in (0, 3, 1)]
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *how])
        return context.get_dummy_value()

    return types.void(array, at), generate


@operation
def spread(_: Any, array: Any, at: Any) -> Any:
    """One number of an array in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, builder.load(_place(context, builder, signature, arguments)))

    return vector(array, at), generate


@operation
def same(_: Any, number: Any) -> Any:
    """One number in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, context.cast(builder, arguments[0], signature.args[0], types.float32))

    return vector(number), generate


@operation
def more(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, f"llvm.fmuladd.v{LANES}f32", VECTOR, arguments)

    return vector(a, b, c), generate


@operation
def larger(_: Any, a: Any, b: Any) -> Any:
    """In each lane; b where a is not a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return vector(a, b), generate


@operation
def power(_: Any, a: Any, b: Any) -> Any:
    """2 ** (a - b) for b not below a."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x = builder.fsub(*arguments)
        x = builder.select(builder.fcmp_ordered("<", x, _same(SMALLEST)), _same(SMALLEST), x)
        whole = _call(builder, f"llvm.floor.v{LANES}f32", VECTOR, [x])
        x = builder.fsub(x, whole)
        y = _same(POWERS[0])
        for factor in POWERS[1:]:
            y = builder.fadd(builder.fmul(y, x, flags=("contract",)), _same(factor), flags=("contract",))
        exponent = builder.add(builder.fptosi(whole, INTEGERS), _same(127, INTEGERS))
        return builder.fmul(y, builder.bitcast(builder.shl(exponent, _same(23, INTEGERS)), VECTOR))

    return vector(a, b), generate


@operation
def store_sums(_: Any, array: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sum of all lanes of each of FEW vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def mixed(x: Any, y: Any, lanes: tuple[int, ...]) -> Any:
            """Of each four lanes: those of `x` are 0 to 3, of `y` 4 to 7."""
            mask = [i - i % 4 + lanes[i % 4] % 4 + lanes[i % 4] // 4 * LANES for i in range(LANES)]
            return builder.shuffle_vector(x, y, ir.Constant(INTEGERS, mask))

        def halves(x: Any, y: Any, first: tuple[int, ...], second: tuple[int, ...]) -> Any:
            return builder.fadd(mixed(x, y, first), mixed(x, y, second))

        a, b, c, d = arguments[2:]
        ab, cd = (halves(x, y, (0, 4, 1, 5), (2, 6, 3, 7)) for x, y in ((a, b), (c, d)))
        total = halves(ab, cd, (0, 1, 4, 5), (2, 3, 6, 7))
        size = LANES
        while size > FEW:
            size //= 2
            kind = ir.VectorType(INTEGER, size)
            parts = [ir.Constant(kind, list(range(first, first + size))) for first in (0, size)]
            total = builder.fadd(*(builder.shuffle_vector(total, total, part) for part in parts))
        place = _place(context, builder, signature, arguments)
        builder.store(total, builder.bitcast(place, total.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, at, a, b, c, d), generate


@operation
def level(_: Any, a: Any) -> Any:
    """In each lane the largest of those that are FEW lanes apart."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (most,), step = arguments, LANES // 2
        while step >= FEW:
            mask = ir.Constant(INTEGERS, [(i + step) % LANES for i in range(LANES)])
            other = builder.shuffle_vector(most, most, mask)
            most, step = builder.select(builder.fcmp_ordered(">", most, other), most, other), step // 2
        return most

    return vector(a), generate


# Items


@kept(parallel=True, fastmath=RULES)
def decode(inputs: Any, stores: Any, keys: Any, values: Any, work: Any, reads: Any, out: Array) -> None:
    """`out` [rows, query heads, value dim]."""
    rows, query_heads, width = out.shape
    parts, starts, shares = work[3], work[4], work[5]
    _store_new(inputs[0], keys[1], stores, reads[0])
    # Of each part and query: weighted values; the largest score and the sum of weights.
    sums = np.empty((parts.size, query_heads, width), np.float32)
    state = np.empty((parts.size, query_heads, 2), np.float32)
    for thread in prange(shares.size - 1):
        _attend(inputs, keys, values, work, reads, shares[thread], shares[thread + 1], sums, state)
    # Little beside the rest.
    for row in range(rows):
        _join(inputs[3], parts[starts[row] : starts[row + 1]], sums, state, out[row])


@compiled
def _store_new(heads: int, slots: int, stores: Any, positions: Array) -> None:
    new_keys, new_values, ids, base, size, keys, values = stores
    for row in range(new_keys.shape[0]):
        block = base.shape[1] - 1
        while base[row, block] > positions[row]:
            block -= 1
        slot = ids[row, block] * size + positions[row] - base[row, block]
        for head in range(heads):
            at = head * slots + slot
            _copy(new_keys[row, head], keys, u64(at * new_keys.shape[2]))
            _copy(new_values[row, head], values, u64(at * new_values.shape[2]))


@compiled
def _copy(new: Array, to: Array, at: int) -> None:
    for j in range(u64(new.size)):
        to[at + j] = new[j]


@compiled
def _attend(
    inputs: Any, keys: Any, values: Any, work: Any, reads: Any, first: int, end: int, sums: Array, state: Array
) -> None:
    """Some items, one after the other."""
    heads, queries, scale, _ = inputs
    pieces, _, rows, _, _, _ = work
    group, most = queries.shape[1] // heads, 0
    for i in range(pieces.shape[0]):
        most = max(most, pieces[i, 3])
    most = -(-most * group // LANES) * LANES
    dim, width = queries.shape[2], sums.shape[2]
    # Dims with what is left of their last vectors.
    dims = dim, width, -(-dim // LANES) * LANES, -(-width // (2 * LANES)) * 2 * LANES
    laid, own = _aligned(most * dims[2]), np.empty(most * dims[3], np.float32)
    tops, totals = np.empty(most, np.float32), np.empty(most, np.float32)
    tile = np.zeros(TILE * dims[2], np.float32), np.zeros(TILE * dims[3], np.float32)
    scores = _aligned(2 * TILE * LANES)
    for item in range(first, end):
        head, piece = item % heads, pieces[item // heads]
        count = piece[3] * group
        laid[:] = 0
        for i in range(count):
            own_query = queries[rows[piece[2] + i // group], head * group + i % group]
            at, step = (i * dims[2], 1) if count <= FEW else (i // LANES * LANES * dims[2] + i % LANES, LANES)
            _lay(own_query, f32(scale) * LOG2E, u64(at), u64(step), laid)
        own[:] = 0
        tops[:] = LOWEST
        totals[:] = 0
        results = scores, own, tops, totals
        _read(keys, values, work[1], piece, head, rows[piece[2]], reads, dims, (count, laid), tile, results)
        for i in range(count):
            part, query = piece[4] + i // group, head * group + i % group
            total = totals[i]
            if count <= FEW:
                for lane in range(i + FEW, LANES, FEW):
                    total += totals[lane]
            state[part, query, 0], state[part, query, 1] = tops[i], total
            for j in range(width):
                sums[part, query, j] = own[i * dims[3] + j]


@compiled
def _aligned(size: int) -> Array:
    """Numbers of which a vector does not lie in two lines of the cache."""
    numbers = np.empty(size + LANES, np.float32)
    first = -(numbers.ctypes.data // 4) % LANES
    return numbers[first : first + size]


@compiled
def _lay(query: Array, scale: Any, at: int, step: int, laid: Array) -> None:
    for j in range(u64(query.size)):
        laid[at + j * step] = query[j] * scale


@compiled
def _read(
    keys: Any,
    values: Any,
    runs: Array,
    piece: Array,
    head: int,
    row: int,
    reads: Any,
    dims: Any,
    queries: Any,
    tile: Any,
    results: Any,
) -> None:
    """All that the row sees of a piece; if it is of several rows, they all see all of it."""
    positions, window, keep = reads
    oldest = positions[row] - window
    for run in range(piece[0], piece[0] + piece[1]):
        slot, base = runs[run, 0], runs[run, 1]
        start, end = base, min(base + runs[run, 2], positions[row] + 1)
        while start < end:
            if keep <= start <= oldest:
                start = oldest + 1
                continue
            stop = min(start + TILE, end)
            if start < keep <= oldest:
                stop = min(stop, keep)
            _take(keys, values, head, slot + start - base, stop - start, dims, queries, tile, results)
            start = stop


@compiled
def _take(
    keys: Any, values: Any, head: int, slot: int, count: int, dims: Any, queries: Any, tile: Any, results: Any
) -> None:
    """A tile: `count` tokens from `slot` on."""
    dim, width, d, w = dims
    number, laid = queries
    scores, own, tops, totals = results
    n = u64(count)
    k, k_at = _floats(keys, head, slot, n, u64(dim), u64(d), tile[0])
    v, v_at = _floats(values, head, slot, n, u64(width), u64(w), tile[1])
    if number <= FEW:
        _score_few(k, k_at, n, u64(d), laid, scores, v, v_at, u64(w))
        _weigh_few(scores, n, u64(w), own, tops, totals)
        for j in range(u64(0), u64(w), TWO * WIDTH):
            _add(scores, u64(0), FOUR, v, v_at + j, n, u64(w), own, j)
        return
    for first in range(0, number, LANES):
        here = u64(first // LANES % 2) * SPAN * WIDTH
        if here == 0:
            _score(k, k_at, n, u64(d), laid, u64(first * d), number - first > LANES, scores)
        _weigh(scores, here, n, u64(first), u64(w), own, tops, totals)
        for query in range(first, min(first + LANES, number), 4):
            for j in range(u64(0), u64(w), TWO * WIDTH):
                _add(scores, here + u64(query - first), WIDTH, v, v_at + j, n, u64(w), own, u64(query * w) + j)


@compiled
def _floats(side: Any, head: int, slot: int, count: int, dim: int, wide: int, tile: Array) -> Any:
    """An array with these tokens, rows of `wide` numbers, and where they begin: the pool's own if it has them so."""
    kind, slots, floats, shorts = side
    at = u64(head * slots + slot) * dim
    if kind == FLOAT32:
        if dim == wide:
            return floats, at
        for t in range(count):
            for j in range(dim):
                tile[t * wide + j] = floats[at + t * dim + j]
        return tile, u64(0)
    bits = tile.view(np.uint32)
    for t in range(count):
        if kind == BFLOAT16:
            for j in range(dim):
                bits[t * wide + j] = u32(shorts[at + t * dim + j]) << u32(16)
        else:
            _halves(shorts, at + t * dim, dim, bits, t * wide)
            for j in range(dim):
                tile[t * wide + j] *= EXPONENT
    return tile, u64(0)


@compiled
def _halves(shorts: Array, at: int, count: int, bits: Array, to: int) -> None:
    """float16 as float32, except for EXPONENT."""
    for j in range(count):
        half = u32(shorts[at + j])
        # Not a finite number: it stays one that is not, even when its exponent is moved.
        high = u32(0x7F800000) if (half & u32(0x7C00)) == u32(0x7C00) else u32(0)
        bits[to + j] = ((half & u32(0x8000)) << u32(16)) | ((half & u32(0x7FFF)) << u32(13)) | high


# Vectors of queries


@compiled
def _score(keys: Array, at: int, count: int, d: int, laid: Array, of: int, two: bool, scores: Array) -> None:
    """Of LANES queries, or, which takes fewer loads, of `two` times as many."""
    t = u64(0)
    while t + FOUR <= count:
        if two:
            _score_two(keys, at + t * d, d, laid, of, scores, t * WIDTH)
        else:
            _score_one(keys, at + t * d, d, laid, of, scores, t * WIDTH)
        t += FOUR
    while t < count:
        for n in range(TWO if two else ONE):
            total, first = same(f32(0)), of + n * d * WIDTH
            for j in range(d):
                total = more(spread(keys, at + t * d + j), load(laid, first + j * WIDTH), total)
            store(scores, (n * SPAN + t) * WIDTH, total)
        t += ONE


@compiled
def _score_one(keys: Array, k0: int, d: int, laid: Array, of: int, scores: Array, to: int) -> None:
    """With four keys."""
    k1, k2, k3 = k0 + d, k0 + TWO * d, k0 + THREE * d
    a0 = a1 = a2 = a3 = same(f32(0))
    for j in range(d):
        a = load(laid, of + j * WIDTH)
        a0, a1 = more(spread(keys, k0 + j), a, a0), more(spread(keys, k1 + j), a, a1)
        a2, a3 = more(spread(keys, k2 + j), a, a2), more(spread(keys, k3 + j), a, a3)
    _store_four(scores, to, a0, a1, a2, a3)


@compiled
def _score_two(keys: Array, k0: int, d: int, laid: Array, of: int, scores: Array, to: int) -> None:
    k1, k2, k3, second = k0 + d, k0 + TWO * d, k0 + THREE * d, of + d * WIDTH
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = same(f32(0))
    for j in range(d):
        a, b = load(laid, of + j * WIDTH), load(laid, second + j * WIDTH)
        number = spread(keys, k0 + j)
        a0, b0 = more(number, a, a0), more(number, b, b0)
        number = spread(keys, k1 + j)
        a1, b1 = more(number, a, a1), more(number, b, b1)
        number = spread(keys, k2 + j)
        a2, b2 = more(number, a, a2), more(number, b, b2)
        number = spread(keys, k3 + j)
        a3, b3 = more(number, a, a3), more(number, b, b3)
    _store_four(scores, to, a0, a1, a2, a3)
    _store_four(scores, to + SPAN * WIDTH, b0, b1, b2, b3)


@compiled
def _store_four(out: Array, at: int, a: Any, b: Any, c: Any, d: Any) -> None:
    store(out, at, a)
    store(out, at + WIDTH, b)
    store(out, at + TWO * WIDTH, c)
    store(out, at + THREE * WIDTH, d)


@compiled
def _weigh(scores: Array, at: int, count: int, first: int, w: int, own: Array, tops: Array, totals: Array) -> None:
    """Weights instead of scores of LANES queries; what they have so far is scaled to a larger score."""
    before = load(tops, first)
    top = before
    for t in range(count):
        top = larger(load(scores, at + t * WIDTH), top)
    factor = power(before, top)
    total = more(load(totals, first), factor, same(f32(0)))
    store(tops, first, top)
    # Their factors, for a moment.
    store(totals, first, factor)
    for i in range(first, first + WIDTH):
        if totals[i] != f32(1):
            for j in range(i * w, (i + ONE) * w):
                own[j] *= totals[i]
    for t in range(count):
        weight = power(load(scores, at + t * WIDTH), top)
        store(scores, at + t * WIDTH, weight)
        total = more(weight, same(f32(1)), total)
    store(totals, first, total)


@compiled
def _score_few(
    keys: Array, at: int, count: int, d: int, laid: Array, scores: Array, values: Array, v_at: int, w: int
) -> None:
    """Of FEW queries; two tokens at a time, the last of which may be there twice. Values are fetched meanwhile."""
    q1, q2, q3 = d, TWO * d, THREE * d
    for t in range(u64(0), count, TWO):
        k0 = at + t * d
        k1 = k0 + d if t + ONE < count else k0
        for j in range(t * w, (t + TWO) * w, SIXTEEN):
            fetch(values, v_at + j)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = same(f32(0))
        for j in range(u64(0), d, WIDTH):
            a, b = load(keys, k0 + j), load(keys, k1 + j)
            query = load(laid, j)
            a0, b0 = more(a, query, a0), more(b, query, b0)
            query = load(laid, q1 + j)
            a1, b1 = more(a, query, a1), more(b, query, b1)
            query = load(laid, q2 + j)
            a2, b2 = more(a, query, a2), more(b, query, b2)
            query = load(laid, q3 + j)
            a3, b3 = more(a, query, a3), more(b, query, b3)
        store_sums(scores, t * FOUR, a0, a1, a2, a3)
        store_sums(scores, (t + ONE) * FOUR, b0, b1, b2, b3)


@compiled
def _weigh_few(scores: Array, count: int, w: int, own: Array, tops: Array, totals: Array) -> None:
    """Like `_weigh`; totals are left in as many parts as vectors have tokens."""
    end = count * FOUR
    last = (end + WIDTH - ONE) // WIDTH * WIDTH
    for i in range(end, last):
        scores[i] = -np.inf
    before = load(tops, u64(0))
    top = before
    for i in range(u64(0), last, WIDTH):
        top = larger(load(scores, i), top)
    top = level(top)
    factor = power(before, top)
    total = more(load(totals, u64(0)), factor, same(f32(0)))
    store(tops, u64(0), top)
    # Their factors, for a moment.
    store(totals, u64(0), factor)
    for i in range(FOUR):
        if totals[i] != f32(1):
            for j in range(i * w, (i + ONE) * w):
                own[j] *= totals[i]
    for i in range(u64(0), last, WIDTH):
        weight = power(load(scores, i), top)
        store(scores, i, weight)
        total = more(weight, same(f32(1)), total)
    store(totals, u64(0), total)


@compiled
def _add(
    weights: Array, lane: int, lanes: int, values: Array, at: int, count: int, w: int, own: Array, to: int
) -> None:
    """Two vectors of weighted values of four queries."""
    to1, to2, to3 = to + w, to + TWO * w, to + THREE * w
    a0, b0 = load(own, to), load(own, to + WIDTH)
    a1, b1 = load(own, to1), load(own, to1 + WIDTH)
    a2, b2 = load(own, to2), load(own, to2 + WIDTH)
    a3, b3 = load(own, to3), load(own, to3 + WIDTH)
    for t in range(count):
        a, b = load(values, at + t * w), load(values, at + t * w + WIDTH)
        of = t * lanes + lane
        weight = spread(weights, of)
        a0, b0 = more(weight, a, a0), more(weight, b, b0)
        weight = spread(weights, of + ONE)
        a1, b1 = more(weight, a, a1), more(weight, b, b1)
        weight = spread(weights, of + TWO)
        a2, b2 = more(weight, a, a2), more(weight, b, b2)
        weight = spread(weights, of + THREE)
        a3, b3 = more(weight, a, a3), more(weight, b, b3)
    store(own, to, a0)
    store(own, to + WIDTH, b0)
    store(own, to1, a1)
    store(own, to1 + WIDTH, b1)
    store(own, to2, a2)
    store(own, to2 + WIDTH, b2)
    store(own, to3, a3)
    store(own, to3 + WIDTH, b3)


@compiled
def _join(sinks: Array, parts: Array, sums: Array, state: Array, out: Array) -> None:
    """A row's parts, to `out` [query heads, value dim]."""
    for query in range(out.shape[0]):
        top, total = LOWEST, f32(0)
        if sinks.size:
            top, total = sinks[query] * LOG2E, f32(1)
        for part in parts:
            top = max(top, state[part, query, 0])
        if sinks.size:
            total = f32(2) ** (sinks[query] * LOG2E - top)
        own = out[query]
        own[:] = 0
        for part in parts:
            factor = f32(2) ** (state[part, query, 0] - top)
            total += state[part, query, 1] * factor
            for j in range(own.size):
                own[j] += sums[part, query, j] * factor
        for j in range(own.size):
            own[j] /= total
