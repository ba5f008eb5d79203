"""Decode attention over plain blocks on CPU, compiled by numba: keys and values are read once, in place.

Work is divided into pieces (`plain.Work`): some tokens of the pool, and the rows that read them, of which there are
several if rows begin with the same blocks. A piece and a KV head form an item. Items are assigned to threads in
advance, and the result of an item does not depend on the thread that computes it. For each item:

    queries     of all its rows, scaled, are laid out so that a vector has one number of each of LANES queries; the last
                vector, if it would be at most half full, has them twice, and then scores of two tokens
    tiles       of up to 64 tokens, which stay in the processor's cache for all queries, and are fetched while the one
                before is computed with. Scores: each number of a key times such vectors, so that a vector has one
                score of each query, and nothing is added up across lanes
    weights     a running softmax in powers of 2: sums are scaled when a larger score comes
    values      four queries at a time, two vectors of values

Up to FEW queries are too few for that: then vectors have numbers of one key and one query, which are added up across
lanes, and scores of several tokens.

Then the parts of each row, one of each piece it is in, are joined by their largest scores and their sums of weights.
Hidden tokens are not read at all. Arguments come in plain tuples, arrays without gaps:

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

Inner functions take pointers: arrays that they pass on are counted, each time, in memory that all threads write, which
took a third of the time.

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
# To numbers of an array (`pointer`).
Pointer = Any

# Numbers of a vector: as many as a register has, or two.
LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
# Tokens of which scores are computed at a time: a multiple of 8.
TILE = 64
# Queries of half a vector, which then has scores of two tokens.
HALF = LANES // 2
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
ONE, TWO, THREE, FOUR, EIGHT, WIDTH, SPAN = (u64(n) for n in (1, 2, 3, 4, 8, LANES, TILE))
# Numbers of a line of the processor's cache.
LINE = u64(16)
# Numbers of a piece, and of a run.
PIECE, RUN = 5, 3

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
FLOAT, INTEGER, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR, INTEGERS = ir.VectorType(FLOAT, LANES), ir.VectorType(INTEGER, LANES)
MORE = f"llvm.fmuladd.v{LANES}f32"


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


@operation
def pointer(_: Any, array: Any, at: Any) -> Any:
    """To a number of an array without gaps, which must live on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        own = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.gep(own.data, [context.cast(builder, arguments[1], signature.args[1], types.uint64)])

    return types.CPointer(array.dtype)(array, at), generate


@operation
def bits_of(_: Any, numbers: Any) -> Any:
    """The same place, for integers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], INTEGER.as_pointer())

    return types.CPointer(types.uint32)(numbers), generate


def _place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """The address of the number that is so many further on."""
    return builder.gep(arguments[0], [context.cast(builder, arguments[1], signature.args[1], types.uint64)])


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
        return _call(builder, MORE, VECTOR, arguments)

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


def _level(lanes: int) -> Any:
    @operation
    def level(_: Any, a: Any) -> Any:
        """In each lane the largest of those that are `lanes` lanes apart."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (most,), step = arguments, HALF
            while step >= lanes:
                mask = ir.Constant(INTEGERS, [(i + step) % LANES for i in range(LANES)])
                other = builder.shuffle_vector(most, most, mask)
                most, step = builder.select(builder.fcmp_ordered(">", most, other), most, other), step // 2
            return most

        return vector(a), generate

    return level


_level_half, _level_few = _level(HALF), _level(FEW)


def _scorer(keys: int, whole: int, half: bool) -> Any:
    """Scores of so many keys, an even number, with `whole` vectors of LANES queries, and one of HALF."""

    @operation
    def score(_: Any, array: Any, at: Any, left: Any, d: Any, laid: Any, of: Any, out: Any, token: Any) -> Any:
        """Keys from `at` on; the last of those that are left is taken for what is behind it."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def vector_at(start: Any, at: Any) -> Any:
                return builder.bitcast(builder.gep(start, [at]), VECTOR.as_pointer())

            array, at, left, d, laid, of, out, token = arguments
            last = builder.sub(left, LONG(1))
            rows = [builder.select(builder.icmp_unsigned("<", LONG(i), last), LONG(i), last) for i in range(keys)]
            starts = [builder.gep(array, [builder.add(at, builder.mul(row, d))]) for row in rows]
            further = [builder.add(of, builder.mul(d, LONG(i * LANES))) for i in range(whole + half)]
            vectors = [builder.gep(laid, [each]) for each in further]
            # Which lanes have the first of two keys: always HALF, but if LLVM knew, it would make permutations, not
            # blends, and those take the place of products.
            own = builder.trunc(builder.add(builder.lshr(left, LONG(60)), LONG(HALF)), INTEGER)
            one = builder.insert_element(ir.Constant(INTEGERS, ir.Undefined), own, ir.Constant(INTEGER, 0))
            lanes = ir.Constant(INTEGERS, list(range(LANES)))
            first = builder.icmp_unsigned("<", lanes, builder.shuffle_vector(one, one, _same(0, INTEGERS)))
            sums = [cgutils.alloca_once_value(builder, _same(0)) for _ in range(keys * whole + keys // 2 * half)]
            with cgutils.for_range(builder, d) as loop:
                numbers = [_spread(builder, builder.load(builder.gep(start, [loop.index]))) for start in starts]
                step = builder.mul(loop.index, LONG(LANES))
                queries = [builder.load(vector_at(each, step), align=4) for each in vectors]
                factors = [(number, query) for query in queries[:whole] for number in numbers]
                if half:
                    pairs = zip(numbers[::2], numbers[1::2], strict=True)
                    factors += [(builder.select(first, a, b), queries[-1]) for a, b in pairs]
                for total, (a, b) in zip(sums, factors, strict=True):
                    builder.store(_call(builder, MORE, VECTOR, [a, b, builder.load(total)]), total)
            # The first tokens of each vector of queries.
            to = [builder.mul(builder.add(token, LONG(i * TILE)), LONG(LANES)) for i in range(whole)]
            if half:
                to.append(builder.add(builder.mul(token, LONG(HALF)), LONG(whole * TILE * LANES)))
            for i, total in enumerate(sums):
                address = vector_at(out, builder.add(to[i // keys], LONG(i % keys * LANES)))
                builder.store(builder.load(total), address, align=4)
            return context.get_dummy_value()

        number = types.uint64
        return types.void(array, number, number, number, laid, number, out, number), generate

    return score


_score_two, _score_more, _score_one, _score_half = (
    _scorer(4, 2, False),
    _scorer(8, 1, True),
    _scorer(8, 1, False),
    _scorer(8, 0, True),
)


# Items


@kept(parallel=True, fastmath=RULES)
def decode(inputs: Any, stores: Any, keys: Any, values: Any, work: Any, reads: Any, out: Array) -> None:
    """`out` [rows, query heads, value dim]."""
    rows, query_heads, width = out.shape
    heads, queries = inputs[:2]
    parts, shares = work[3], work[5]
    _store_new(heads, keys[1], stores, reads[0])
    # Dims with what is left of their last vectors.
    dim = queries.shape[2]
    dims = dim, width, _whole(dim, LANES), _whole(width, 2 * LANES)
    most = _whole(work[0][:, 3].max() * query_heads // heads, LANES)
    # Of each part and query: weighted values; the largest score, and the sum of weights.
    state = parts.size * _whole(query_heads, LANES)
    sums, tops, totals = _aligned(parts.size * query_heads * dims[3]), _aligned(state), _aligned(state)
    size = most * (dims[2] + dims[3] + 2) + TILE * (dims[2] + dims[3] + 2 * LANES)
    space = _aligned(max((shares.size - 1) * size, dims[3] + 2 * _whole(query_heads, LANES)))
    results = sums, tops, totals
    for thread in prange(shares.size - 1):
        own = space, thread * size, most
        _attend(inputs, keys, values, work, reads, shares[thread], shares[thread + 1], dims, own, results)
    # Little beside the rest.
    for row in range(rows):
        _join(row, inputs[3], work, results, space, dims[3], out)


@compiled
def _whole(count: int, of: int) -> int:
    return -(-count // of) * of


@compiled
def _aligned(size: int) -> Array:
    """Numbers of which a vector does not lie in two lines of the cache."""
    numbers = np.empty(size + LANES, np.float32)
    first = -(numbers.ctypes.data // 4) % LANES
    return numbers[first : first + size]


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
    inputs: Any,
    all_keys: Any,
    all_values: Any,
    work: Any,
    reads: Any,
    first: int,
    end: int,
    dims: Any,
    space: Any,
    results: Any,
) -> None:
    """Some items, one after the other."""
    heads, queries, scale, _ = inputs
    query_heads, dim, d, w = queries.shape[1], dims[0], dims[2], dims[3]
    group, wide = query_heads // heads, _whole(query_heads, LANES)
    pieces, runs, rows, positions = pointer(work[0], 0), pointer(work[1], 0), pointer(work[2], 0), pointer(reads[0], 0)
    keys, values, asked = _side(all_keys), _side(all_values), pointer(queries, 0)
    sums, tops, totals = pointer(results[0], 0), pointer(results[1], 0), pointer(results[2], 0)
    numbers, at, most = space
    laid, own = pointer(numbers, at), pointer(numbers, at + most * d)
    at += most * (d + w)
    own_tops, own_totals, scores = pointer(numbers, at), pointer(numbers, at + most), pointer(numbers, at + 2 * most)
    at += 2 * (most + TILE * LANES)
    tile = pointer(numbers, at), pointer(numbers, at + TILE * d)
    for item in range(first, end):
        head, piece = item % heads, item // heads * PIECE
        row, count, part = pieces[piece + 2], pieces[piece + 3] * group, pieces[piece + 4]
        _clear(laid, _whole(count, FEW if count <= FEW else LANES) * d, f32(0))
        _clear(own, _whole(count, FEW) * w, f32(0))
        _clear(own_tops, count, LOWEST)
        _clear(own_totals, count, f32(0))
        for i in range(count):
            query = (rows[row + i // group] * query_heads + head * group + i % group) * dim
            _lay(asked, query, dim, f32(scale) * LOG2E, i, count, d, laid)
        # What is read next.
        after = min(item + 1, end - 1)
        then = after % heads * keys[1] + runs[pieces[after // heads * PIECE] * RUN]
        some = runs, pieces[piece], pieces[piece] + pieces[piece + 1]
        seen = positions[rows[row]], reads[1], reads[2]
        _read(keys, values, some, head, then, seen, dims, (count, laid), tile, (scores, own, own_tops, own_totals))
        for i in range(count):
            of, query = part + i // group, head * group + i % group
            tops[of * wide + query], totals[of * wide + query] = own_tops[i], _total(own_totals, i, count)
            for j in range(u64(0), u64(w), WIDTH):
                store(sums, u64((of * query_heads + query) * w) + j, load(own, u64(i * w) + j))


@compiled
def _side(side: Any) -> Any:
    kind, slots, floats, shorts = side
    return kind, slots, pointer(floats, 0), pointer(shorts, 0)


@compiled
def _clear(numbers: Pointer, count: int, to: Any) -> None:
    """Whole vectors of one number."""
    for i in range(u64(0), u64(count), WIDTH):
        store(numbers, i, same(to))


@compiled
def _lay(queries: Pointer, of: int, dim: int, scale: Any, i: int, count: int, d: int, laid: Pointer) -> None:
    """The i-th query: FEW lie one after the other, others in vectors, twice in one that has not more than HALF."""
    first = i // LANES * LANES
    at, step = (u64(i * d), ONE) if count <= FEW else (u64(first * d + i % LANES), WIDTH)
    for j in range(u64(dim)):
        laid[at + j * step] = queries[u64(of) + j] * scale
    # HALF may be FEW.
    if count > FEW and _per(count, first) == HALF:
        for j in range(u64(dim)):
            laid[at + u64(HALF) + j * step] = queries[u64(of) + j] * scale


@compiled
def _total(totals: Pointer, i: int, count: int) -> Any:
    """Of the i-th query: from the tokens of a vector."""
    first, total = i // LANES * LANES, f32(0)
    for lane in range(i, first + LANES, _per(count, first)):
        total += totals[lane]
    return total


@compiled
def _read(
    keys: Any,
    values: Any,
    some: Any,
    head: int,
    then: int,
    seen: Any,
    dims: Any,
    queries: Any,
    tile: Any,
    results: Any,
) -> None:
    """All that a row sees of some runs; if it is not the only one, the others see all of it, too."""
    position, window, keep = seen
    runs, first, last = some
    oldest, head_slot = position - window, head * keys[1]
    for run in range(first, last):
        slot, base, tokens = runs[run * RUN], runs[run * RUN + 1], runs[run * RUN + 2]
        start, end = base, min(base + tokens, position + 1)
        while start < end:
            if keep <= start <= oldest:
                start = oldest + 1
                continue
            stop = min(start + TILE, end)
            if start < keep <= oldest:
                stop = min(stop, keep)
            ahead = head_slot + slot + stop - base
            if stop == base + tokens:
                ahead = head_slot + runs[run * RUN + RUN] if run + 1 < last else then
            _take(keys, values, head_slot + slot + start - base, stop - start, ahead, dims, queries, tile, results)
            start = stop


@compiled
def _take(
    keys: Any, values: Any, slot: int, count: int, ahead: int, dims: Any, queries: Any, tile: Any, results: Any
) -> None:
    """A tile: `count` tokens from `slot` on, of a head. Meanwhile keys are fetched from `ahead` on."""
    dim, width, d, w = dims
    number, laid = queries
    scores, own, tops, totals = results
    n = u64(count)
    k, k_at = _floats(keys, slot, n, u64(dim), u64(d), tile[0])
    if number <= FEW:
        v, v_at = _floats(values, slot, n, u64(width), u64(w), tile[1])
        _score_few(k, k_at, n, u64(d), laid, scores, v, v_at, u64(w))
        _weigh(scores, u64(0), n, FOUR, u64(0), u64(w), own, tops, totals)
        for j in range(u64(0), u64(w), TWO * WIDTH):
            _add(scores, u64(0), FOUR, v, v_at + j, n, u64(w), own, j)
        return
    v, v_at, further = tile[1], u64(0), u64(ahead * dim)
    # In as many steps as values are added up.
    steps = _whole(min(number, 2 * LANES), FEW) // FEW * (w // (2 * LANES))
    step = u64(_whole(count * dim, steps) // steps)
    for first in range(0, number, LANES):
        per = u64(_per(number, first))
        here = u64(first // LANES % 2) * SPAN * WIDTH
        if here == 0:
            wanted = values, u64(slot * width), u64(width) if first == 0 else u64(0)
            _score((k, k_at), n, u64(d), laid, (u64(first * d), number - first), scores, wanted)
            if first == 0:
                v, v_at = _floats(values, slot, n, u64(width), u64(w), tile[1])
        _weigh(scores, here, n, per, u64(first), u64(w), own, tops, totals)
        for query in range(first, min(first + LANES, number), FEW):
            for j in range(u64(0), u64(w), TWO * WIDTH):
                if first < 2 * LANES:
                    _fetch(keys, further, step)
                    further += step
                _add(scores, here + u64(query - first), per, v, v_at + j, n, u64(w), own, u64(query * w) + j)


@compiled
def _fetch(side: Any, at: int, count: int) -> None:
    """So many numbers of the pool."""
    kind, _, floats, shorts = side
    if kind == FLOAT32:
        for i in range(at, at + count, LINE):
            fetch(floats, i)
    else:
        for i in range(at, at + count, TWO * LINE):
            fetch(shorts, i)


@compiled
def _floats(side: Any, slot: int, count: int, dim: int, wide: int, tile: Pointer) -> Any:
    """Where these tokens are, in rows of `wide` numbers, and where they begin: in the pool itself if it has them so."""
    kind, _, floats, shorts = side
    at = u64(slot) * dim
    if kind == FLOAT32:
        if dim == wide:
            return floats, at
        for t in range(count):
            for j in range(dim):
                tile[t * wide + j] = floats[at + t * dim + j]
    else:
        bits = bits_of(tile)
        for t in range(count):
            if kind == BFLOAT16:
                for j in range(dim):
                    bits[t * wide + j] = u32(shorts[at + t * dim + j]) << u32(16)
            else:
                _halves(shorts, at + t * dim, dim, bits, t * wide)
                for j in range(dim):
                    tile[t * wide + j] *= EXPONENT
    for t in range(count):
        for j in range(dim, wide):
            tile[t * wide + j] = f32(0)
    return tile, u64(0)


@compiled
def _halves(shorts: Pointer, at: int, count: int, bits: Pointer, to: int) -> None:
    """float16 as float32, except for EXPONENT."""
    for j in range(count):
        half = u32(shorts[at + j])
        # Not a finite number: it stays one that is not, even when its exponent is moved.
        high = u32(0x7F800000) if (half & u32(0x7C00)) == u32(0x7C00) else u32(0)
        bits[to + j] = ((half & u32(0x8000)) << u32(16)) | ((half & u32(0x7FFF)) << u32(13)) | high


# Vectors of queries


@compiled
def _per(number: int, first: int) -> int:
    """Queries of the vector that begins with the query `first`, of so many in all."""
    if number <= FEW:
        return FEW
    return HALF if number - first <= HALF else LANES


@compiled
def _score(keys: Any, count: int, d: int, laid: Pointer, queries: Any, scores: Pointer, values: Any) -> None:
    """Of LANES of the queries that are left, or two times as many, which takes fewer loads. Values are fetched
    meanwhile: so many numbers for each token."""
    k, at = keys
    of, left = queries
    side, v_at, width = values
    t, step = u64(0), FOUR if left > LANES + HALF else EIGHT
    while t < count:
        _fetch(side, v_at + t * width, min(step, count - t) * width)
        if left > LANES + HALF:
            _score_two(k, at + t * d, count - t, d, laid, of, scores, t)
        elif left > LANES:
            _score_more(k, at + t * d, count - t, d, laid, of, scores, t)
        elif left > HALF:
            _score_one(k, at + t * d, count - t, d, laid, of, scores, t)
        else:
            _score_half(k, at + t * d, count - t, d, laid, of, scores, t)
        t += step


@compiled
def _weigh(
    scores: Pointer, at: int, count: int, per: int, first: int, w: int, own: Pointer, tops: Pointer, totals: Pointer
) -> None:
    """Weights instead of scores of the queries of a vector, `per` of each token; what they have so far is scaled to a
    larger score. Totals are left in as many parts as a vector has tokens."""
    end = at + count * per
    last = at + (count * per + WIDTH - ONE) // WIDTH * WIDTH
    for i in range(end, last):
        scores[i] = -np.inf
    before = load(tops, first)
    top = before
    for i in range(at, last, WIDTH):
        top = larger(load(scores, i), top)
    if per < WIDTH:
        top = _level_few(top) if per == FOUR else _level_half(top)
    factor = power(before, top)
    total = more(load(totals, first), factor, same(f32(0)))
    store(tops, first, top)
    # Their factors, for a moment.
    store(totals, first, factor)
    for i in range(first, first + per):
        if totals[i] != f32(1):
            scaled = spread(totals, i)
            for j in range(i * w, (i + ONE) * w, WIDTH):
                store(own, j, more(load(own, j), scaled, same(f32(0))))
    for i in range(at, last, WIDTH):
        weight = power(load(scores, i), top)
        store(scores, i, weight)
        total = more(weight, same(f32(1)), total)
    store(totals, first, total)


# A few queries


@compiled
def _score_few(
    keys: Pointer, at: int, count: int, d: int, laid: Pointer, scores: Pointer, values: Pointer, v_at: int, w: int
) -> None:
    """Of FEW queries; two tokens at a time, the last of which may be there twice. Values are fetched meanwhile."""
    q1, q2, q3 = d, TWO * d, THREE * d
    for t in range(u64(0), count, TWO):
        k0 = at + t * d
        k1 = k0 + d if t + ONE < count else k0
        for j in range(t * w, (t + TWO) * w, LINE):
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
def _add(
    weights: Pointer, lane: int, lanes: int, values: Pointer, at: int, count: int, w: int, own: Pointer, to: int
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
def _join(row: int, sinks: Array, work: Any, results: Any, space: Array, w: int, out: Array) -> None:
    """A row's parts, whose largest scores become factors."""
    query_heads = out.shape[1]
    wide = _whole(query_heads, LANES)
    parts, first, last = pointer(work[3], 0), work[4][row], work[4][row + 1]
    sums, tops, totals = pointer(results[0], 0), pointer(results[1], 0), pointer(results[2], 0)
    own, all_totals, nothing = pointer(space, 0), pointer(space, w), pointer(space, w + wide)
    _clear(nothing, wide, LOWEST)
    for query in range(sinks.size):
        nothing[query] = sinks[query] * LOG2E
    for query in range(0, wide, LANES):
        top = load(nothing, query)
        for i in range(first, last):
            top = larger(load(tops, parts[i] * wide + query), top)
        total = power(load(nothing, query), top) if sinks.size else same(f32(0))
        for i in range(first, last):
            at = parts[i] * wide + query
            factor = power(load(tops, at), top)
            store(tops, at, factor)
            total = more(load(totals, at), factor, total)
        store(all_totals, query, total)
    for query in range(query_heads):
        for j in range(0, w, LANES):
            total = same(f32(0))
            for i in range(first, last):
                at = (parts[i] * query_heads + query) * w + j
                total = more(load(sums, at), spread(tops, parts[i] * wide + query), total)
            store(own, j, total)
        for j in range(out.shape[2]):
            out[row, query, j] = own[j] / all_totals[query]
