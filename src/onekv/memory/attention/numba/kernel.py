"""Decode attention over encoded blocks on CPU, compiled by numba: 64 tokens at a time are dequantized into a buffer
that stays in the processor's cache; nothing larger is ever in plain form.

For each row of a batch, one after the other, by one thread:

    new token   its keys, without their centre, and values are rotated, encoded and stored, with the arithmetic of
                `Codec.encode`, operation by operation: the same row gets the same bytes (`exact`)
    queries     are rotated; with centres, also made into factors of the table of turns (`formats.centre`)
    tiles       for each head: keys to numbers, scores; values to numbers, weighted sums. A running softmax, in powers
                of 2: sums are scaled when a larger score comes
    output      the sums over the sum of weights, unrotated

What a row gives does not depend on the rows beside it. Arguments come in plain tuples:

    inputs      KV heads; queries [rows, query heads, dim]; the new token's keys and values [rows, heads, dim], or none:
                [0, heads, dim]; the scale of scores; sinks [query heads], scores of nothing, or [0]
    rotations   of keys and of values: signs [dim] and the Hartley matrix (`formats.rotation`)
    keys,       kind, the bits of a code, and AFFINE if they are such; slots of a head; bytes of a row's codes; groups
    values      of a row; and, all flat, codes [heads, slots, bytes], scales and biases [heads, slots, groups] (float16,
                as integers). For a codebook: the numbers of each pair of codes [256], two floats in a double; the book
                [2 ^ bits]; the edges between its entries. It has no biases, affine codes no book: there any will do
    centres     mean [heads, dim]; the first and the second channels of RoPE's pairs, and those that stay; turns [rows
                or 1, slots of a row, dim]. Without centres, mean and turns are empty
    reads       blocks [rows, n], and the position of the first slot of each; each row's position: it sees those up to
                it; window: what is this many tokens back, and more, it sees only below position keep; block size

Where codes are read, pairs of 4-bit affine ones are taken apart into first the even, then the odd channels (`_place`).
Rows that have one scale and bias are left without them, which are applied to scores and weights instead. Tokens are
taken four at a time: where fewer are left, rows of zeros stand in for them.

numba. An index that may be negative is taken for one from the end, and small integers for large ones; then there are no
vector instructions. So indices of inner loops are unsigned, into flat arrays, and codes are narrowed before they become
floats. Using an array of a tuple counts references: not in inner loops. Of the fast-math rules, those that would lose
NaN are left out. Loops that store are compiled twice, for arrays that lie apart in memory and for others; results must
not depend on that, so only loops that store nothing may choose the order in which they add (`adding`). What is compiled
is kept on disk, and made again when this file changes: so it calls nothing compiled that is elsewhere, and takes no
tuple with a class of its own, which a later version may not have.
"""

from typing import Any

import numpy as np
from numba import njit

from ....loops import kept

Array = np.ndarray[Any, Any]

# Tokens that are in plain form at a time; a multiple of 4.
TILE = 64
AFFINE = 16
LOG2E = np.float32(np.log2(np.e))
# Of weights: 2 to this and lower is taken for it, which is nothing beside the largest, 1.
SMALLEST = np.float32(-126)
LOWEST = np.float32(-3e38)
# 2 ** x for x from 0 to 1, within 2e-9 before rounding; highest power first.
POWERS = tuple(
    np.float32(factor)
    for factor in (0.000217022549, 0.0012439688, 0.00967884098, 0.055483342, 0.240229836, 0.693146984, 1.0)
)
# Of numbers, scales, biases and norms.
LARGEST = np.float32(65504)
SMALLEST_SCALE, SMALLEST_NORM = np.float32(1e-7), np.float32(1e-30)
# What takes a float16's exponent, moved into place, to that of a float32.
EXPONENT = np.float32(2.0**112)
# The smallest float16 with all its digits; 1 over what lies between two that have not.
SMALLEST_HALF, HALF_STEPS = np.float32(2.0**-14), np.float32(2.0**24)

f32, i32, u8, u16, u32, u64 = np.float32, np.int32, np.uint8, np.uint16, np.uint32, np.uint64
ONE, TWO, THREE, FOUR = u64(1), u64(2), u64(3), u64(4)

RULES = {"contract", "nsz"}
# What encodes rows: each operation is rounded, as MLX's are. Said explicitly, or it would inherit its caller's rules.
exact = njit(nogil=True, error_model="numpy", fastmath=False)
compiled = njit(nogil=True, error_model="numpy", fastmath=RULES)
# Sums may be added up in any order, which is then the same for all sums of that length.
adding = njit(nogil=True, error_model="numpy", fastmath={*RULES, "reassoc"})


@kept(fastmath=RULES)
def decode(inputs: Any, rotations: Any, keys: Any, values: Any, centres: Any, reads: Any, out: Array) -> None:
    """`out` [rows, query heads, value dim]."""
    heads, queries, new_keys = inputs[0], inputs[1], inputs[2]
    query_heads, dim, width = queries.shape[1], queries.shape[2], out.shape[2]
    # For each query: itself, in the order in which keys are read; the sum of its numbers; the factors of turns.
    query, added = np.empty(query_heads * dim, np.float32), np.empty(query_heads, np.float32)
    factors = np.empty(query_heads * dim, np.float32)
    # Its weighted values, in the order in which values are read; the largest score, the sum of weights, and that of
    # weight times bias.
    sums, state = np.empty(query_heads * width, np.float32), np.empty(query_heads * 3, np.float32)
    for row in range(out.shape[0]):
        if new_keys.shape[0]:
            _store_new(inputs, rotations, keys, values, centres, reads, row)
        _prepare(inputs, rotations[0], keys[0], centres, row, query, added, factors)
        _reset(inputs[5], sums, state)
        _attend(keys, values, centres[4], reads, row, heads, (query, added, factors), (sums, state))
        for i in range(query_heads):
            for j in range(width):
                number = sums[i * width + _place(values[0], j, width)] + state[i * 3 + 2]
                out[row, i, j] = number / state[i * 3 + 1]
            _unrotate(out[row, i], rotations[1])


@compiled
def _store_new(inputs: Any, rotations: Any, keys: Any, values: Any, centres: Any, reads: Any, row: int) -> None:
    heads, _, new_keys, new_values, _, _ = inputs
    mean, turns = centres[0], centres[4]
    ids, base, positions, _, _, size = reads
    block = 0
    while base[row, block] + size <= positions[row]:
        block += 1
    inside = positions[row] - base[row, block]
    slot = ids[row, block] * size + inside
    for head in range(heads):
        new = new_keys[row, head].copy()
        if mean.size:
            _take_off(new, centres, head, turns[min(row, turns.shape[0] - 1), block * size + inside])
        _rotate(new, rotations[0])
        _store(new, keys, head, slot)
        new = new_values[row, head].copy()
        _rotate(new, rotations[1])
        _store(new, values, head, slot)


@exact
def _take_off(row: Array, centres: Any, head: int, turn: Array) -> None:
    """The head's mean, turned to the position whose cosines and sines are `turn`."""
    mean, first, second, still, _ = centres
    for i in range(first.size):
        a, b = first[i], second[i]
        row[a] -= mean[head, a] * turn[a] - mean[head, b] * turn[b]
        row[b] -= mean[head, a] * turn[b] + mean[head, b] * turn[a]
    for j in still:
        row[j] -= mean[head, j] * turn[j]


@compiled
def _prepare(
    inputs: Any, rotation: Any, kind: int, centres: Any, row: int, query: Array, added: Array, factors: Array
) -> None:
    heads, queries, _, _, scale, _ = inputs
    mean, first, second, still, _ = centres
    query_heads, dim = queries.shape[1], queries.shape[2]
    for i in range(query_heads):
        own, head, to = queries[row, i].copy(), i // (query_heads // heads), i * dim
        for j in range(dim):
            own[j] *= f32(scale) * LOG2E
        if mean.size:
            for pair in range(first.size):
                a, b = first[pair], second[pair]
                factors[to + a] = own[a] * mean[head, a] + own[b] * mean[head, b]
                factors[to + b] = own[b] * mean[head, a] - own[a] * mean[head, b]
            for j in still:
                factors[to + j] = own[j] * mean[head, j]
        _rotate(own, rotation)
        added[i] = _sum(own, u64(0), u64(dim))
        for j in range(dim):
            query[to + _place(kind, j, dim)] = own[j]


@compiled
def _reset(sinks: Array, sums: Array, state: Array) -> None:
    for j in range(sums.size):
        sums[j] = 0
    for i in range(state.size // 3):
        state[i * 3] = sinks[i] * LOG2E if sinks.size else LOWEST
        state[i * 3 + 1] = 1 if sinks.size else 0
        state[i * 3 + 2] = 0


@compiled
def _attend(keys: Any, values: Any, turns: Array, reads: Any, row: int, heads: int, queries: Any, results: Any) -> None:
    (query, added, factors), (sums, state) = queries, results
    ids, base, positions, window, keep, size = reads
    group, dim, width = added.size // heads, query.size // added.size, sums.size // added.size
    groups, position, oldest = max(keys[3], values[3]), positions[row], positions[row] - window
    flat, first_turn = turns.reshape(-1), min(row, turns.shape[0] - 1) * turns.shape[1]
    numbers, scores = np.empty(TILE * max(dim, width), np.float32), np.zeros(group * TILE, np.float32)
    scale, bias = np.empty(TILE * groups, np.float32), np.empty(TILE * groups, np.float32)
    powers = np.empty(TILE, np.float32)
    for block in range(ids.shape[1]):
        end = min(size, position + 1 - base[row, block])
        for start in range(0, end, TILE):
            count, first, slot = min(TILE, end - start), base[row, block] + start, ids[row, block] * size + start
            if first + count - 1 <= oldest and first >= keep:
                continue
            turn = u64((first_turn + block * size + start) * dim)
            for head in range(heads):
                _read(keys, head, slot, count, dim, numbers, scale, bias)
                _score(query, added, head, count, dim, numbers, scale, bias, scores)
                if flat.size:
                    _add_centres(factors, head, flat, turn, count, dim, scores)
                if first <= oldest:
                    _hide(scores, first, count, oldest, keep)
                _read(values, head, slot, count, width, numbers, scale, bias)
                for g in range(group):
                    _weigh(scores, g, head * group + g, count, width, numbers, scale, bias, powers, sums, state)


# Scores


@compiled
def _score(
    queries: Array,
    added: Array,
    head: int,
    count: int,
    dim: int,
    numbers: Array,
    scale: Array,
    bias: Array,
    scores: Array,
) -> None:
    """Of all queries of a head: scale * <q, numbers> + bias * sum(q)."""
    group = scores.size // TILE
    for g in range(group):
        query, to = head * group + g, u64(g * TILE)
        _products(queries, u64(query * dim), numbers, u64(0), u64(count), u64(dim), scores, to, False)
        more = added[query]
        for t in range(u64(count)):
            scores[to + t] = scores[to + t] * scale[t] + bias[t] * more


@compiled
def _add_centres(factors: Array, head: int, turns: Array, at: int, count: int, dim: int, scores: Array) -> None:
    """`at` is where the turns of the first token are."""
    group = scores.size // TILE
    for g in range(group):
        query = head * group + g
        _products(factors, u64(query * dim), turns, at, u64(count), u64(dim), scores, u64(g * TILE), True)


@adding
def _products(
    a: Array, a_at: int, b: Array, b_at: int, count: int, dim: int, out: Array, out_at: int, more: bool
) -> None:
    """Of one row of `a` with `count` rows of `b`; added to what is there if there is `more`."""
    for t in range(u64(0), count, FOUR):
        first = b_at + t * dim
        second = first + dim
        third = second + dim
        fourth = third + dim
        s0, s1, s2, s3 = f32(0), f32(0), f32(0), f32(0)
        for j in range(dim):
            x = a[a_at + j]
            s0 += x * b[first + j]
            s1 += x * b[second + j]
            s2 += x * b[third + j]
            s3 += x * b[fourth + j]
        to = out_at + t
        if more:
            s0, s1, s2, s3 = s0 + out[to], s1 + out[to + ONE], s2 + out[to + TWO], s3 + out[to + THREE]
        out[to], out[to + ONE], out[to + TWO], out[to + THREE] = s0, s1, s2, s3


@compiled
def _hide(scores: Array, first: int, count: int, oldest: int, keep: int) -> None:
    """Tokens from position `first` on that are too old to be seen."""
    for g in range(scores.size // TILE):
        for t in range(count):
            if keep <= first + t <= oldest:
                scores[g * TILE + t] = -np.inf


# Weights


@compiled
def _weigh(
    scores: Array,
    g: int,
    query: int,
    count: int,
    dim: int,
    numbers: Array,
    scale: Array,
    bias: Array,
    powers: Array,
    sums: Array,
    state: Array,
) -> None:
    """Adds values to the sums of one query, the g-th of its head."""
    at, to, of, n, d = u64(g * TILE), u64(query * dim), u64(query * 3), u64(count), u64(dim)
    top = _largest(scores, at, n, state[of])
    if top > state[of]:
        factor = f32(2) ** (state[of] - top)
        for j in range(d):
            sums[to + j] *= factor
        state[of], state[of + ONE], state[of + TWO] = top, state[of + ONE] * factor, state[of + TWO] * factor
    _power(scores, at, n, top, powers)
    state[of + ONE] += _sum(scores, at, n)
    state[of + TWO] += _product(scores, at, bias, n)
    for t in range(n):
        scores[at + t] *= scale[t]
    for t in range(u64(0), n, FOUR):
        w0, w1, w2, w3 = scores[at + t], scores[at + t + ONE], scores[at + t + TWO], scores[at + t + THREE]
        first = t * d
        second = first + d
        third = second + d
        fourth = third + d
        for j in range(d):
            added = sums[to + j] + w0 * numbers[first + j]
            added += w1 * numbers[second + j]
            added += w2 * numbers[third + j]
            sums[to + j] = added + w3 * numbers[fourth + j]


@adding
def _sum(a: Array, at: int, count: int) -> Any:
    total = f32(0)
    for i in range(count):
        total += a[at + i]
    return total


@adding
def _product(a: Array, at: int, b: Array, count: int) -> Any:
    total = f32(0)
    for i in range(count):
        total += a[at + i] * b[i]
    return total


@njit(nogil=True, error_model="numpy", fastmath=True)
def _largest(scores: Array, at: int, count: int, most: Any) -> Any:
    """Of the scores and `most`. NaN need not be found here: it stays in the weights."""
    for t in range(count):
        most = max(most, scores[at + t])
    return most


@compiled
def _power(scores: Array, at: int, count: int, top: Any, powers: Array) -> None:
    """2 ** (score - top) instead of each score."""
    bits = powers.view(np.uint32)
    for t in range(count):
        x = scores[at + t] - top
        if x < SMALLEST:
            x = SMALLEST
        whole = np.floor(x)
        x -= whole
        bits[t] = u32(i32(whole) + i32(127)) << u32(23)
        y = POWERS[0]
        y = y * x + POWERS[1]
        y = y * x + POWERS[2]
        y = y * x + POWERS[3]
        y = y * x + POWERS[4]
        y = y * x + POWERS[5]
        scores[at + t] = y * x + POWERS[6]
    for t in range(count):
        scores[at + t] *= powers[t]


# Reading codes


@compiled
def _place(kind: int, channel: int, dim: int) -> int:
    """Where a channel's number lies in a row that was read."""
    return (channel & 1) * (dim // 2) + channel // 2 if kind == AFFINE + 4 else channel


@compiled
def _read(side: Any, head: int, slot: int, count: int, dim: int, numbers: Array, scale: Array, bias: Array) -> None:
    """`count` tokens from `slot` on: `numbers` [TILE * dim], and what each row is multiplied with and moved by."""
    kind, slots, row_bytes, parts, codes, scales, biases, table, _, _ = side
    groups, first, n, d = u64(parts), u64(head * slots + slot), u64(count), u64(dim)
    _floats(scales, first * groups, n * groups, scale)
    if kind >= AFFINE:
        _floats(biases, first * groups, n * groups, bias)
        if kind == AFFINE + 8:
            _octets(codes, first * d, n * d, numbers)
        elif kind == AFFINE + 4:
            _nibbles(codes, first, n, d, numbers)
        else:
            _planes(u64(kind - AFFINE), codes, first, n, d, u64(row_bytes), numbers)
        if groups > ONE:
            _apply(n, d, groups, kind == AFFINE + 4, numbers, scale, bias)
    else:
        for t in range(n):
            bias[t] = 0
        _entries(kind, codes, first, n, d, u64(row_bytes), table, numbers)
    for j in range(n * d, (n + THREE) // FOUR * FOUR * d):
        numbers[j] = 0


@compiled
def _floats(halves: Array, first: int, count: int, floats: Array) -> None:
    """float16 as float32."""
    bits = floats.view(np.uint32)
    for i in range(count):
        half = u32(halves[first + i])
        # Not a finite number: it stays one that is not, even when its exponent is moved.
        high = u32(0x7F800000) if (half & u32(0x7C00)) == u32(0x7C00) else u32(0)
        bits[i] = ((half & u32(0x8000)) << u32(16)) | ((half & u32(0x7FFF)) << u32(13)) | high
    for i in range(count):
        floats[i] *= EXPONENT


@compiled
def _octets(codes: Array, first: int, count: int, numbers: Array) -> None:
    for j in range(count):
        numbers[j] = f32(codes[first + j])


@compiled
def _nibbles(codes: Array, first: int, count: int, dim: int, numbers: Array) -> None:
    half = dim // TWO
    for t in range(count):
        at, even = (first + t) * half, t * dim
        odd = even + half
        for j in range(half):
            numbers[even + j] = f32(u8(codes[at + j] & 15))
        for j in range(half):
            numbers[odd + j] = f32(u8(codes[at + j] >> 4))


@compiled
def _planes(bits: int, codes: Array, first: int, count: int, dim: Any, width: int, numbers: Array) -> None:
    """5 or 6 bits, see `formats.packing`: first what lies above, times 16, then the low four bits are added.

    Shifts are by constants: by others, there are no vector instructions for bytes.
    """
    half = dim // TWO
    for t in range(count):
        at, to = (first + t) * width, t * dim
        upper = at + half
        if bits == 5:
            size = dim // u64(8)
            for j in range(size):
                numbers[to + j] = f32(u8((codes[upper + j] << 4) & 16))
            to += size
            for j in range(size):
                numbers[to + j] = f32(u8((codes[upper + j] << 3) & 16))
            to += size
            for j in range(size):
                numbers[to + j] = f32(u8((codes[upper + j] << 2) & 16))
            to += size
            for j in range(size):
                numbers[to + j] = f32(u8((codes[upper + j] << 1) & 16))
            to += size
            for j in range(size):
                numbers[to + j] = f32(u8(codes[upper + j] & 16))
            to += size
            for j in range(size):
                numbers[to + j] = f32(u8((codes[upper + j] >> 1) & 16))
            to += size
            for j in range(size):
                numbers[to + j] = f32(u8((codes[upper + j] >> 2) & 16))
            to += size
            for j in range(size):
                numbers[to + j] = f32(u8((codes[upper + j] >> 3) & 16))
        else:
            size = dim // u64(4)
            for j in range(size):
                numbers[to + j] = f32(u8((codes[upper + j] << 4) & 48))
            to += size
            for j in range(size):
                numbers[to + j] = f32(u8((codes[upper + j] << 2) & 48))
            to += size
            for j in range(size):
                numbers[to + j] = f32(u8(codes[upper + j] & 48))
            to += size
            for j in range(size):
                numbers[to + j] = f32(u8((codes[upper + j] >> 2) & 48))
        to = t * dim
        for j in range(half):
            numbers[to + j] += f32(u8(codes[at + j] & 15))
        to += half
        for j in range(half):
            numbers[to + j] += f32(u8(codes[at + j] >> 4))


@compiled
def _apply(count: int, dim: int, groups: int, apart: bool, numbers: Array, scale: Array, bias: Array) -> None:
    """Scales and biases of rows that have several; then they are 1 and 0."""
    parts = TWO if apart else ONE
    size = dim // (groups * parts)
    for t in range(count):
        for part in range(parts):
            for g in range(groups):
                factor, more, to = scale[t * groups + g], bias[t * groups + g], t * dim + (part * groups + g) * size
                for j in range(size):
                    numbers[to + j] = numbers[to + j] * factor + more
    for t in range(count):
        scale[t], bias[t] = 1, 0


@compiled
def _entries(
    bits: int, codes: Array, first: int, count: int, dim: int, width: int, table: Array, numbers: Array
) -> None:
    """See `formats.packing` for where the pairs are."""
    pairs, last = numbers.view(np.float64), dim // TWO - width
    for t in range(count):
        at, to = (first + t) * width, t * (dim // TWO)
        for j in range(width):
            pairs[to + j] = table[codes[at + j]]
        to += width
        if bits == 2:
            for j in range(width):
                pairs[to + j] = table[codes[at + j] >> 4]
        elif bits == 3:
            for j in range(last):
                low, middle, high = codes[at + j] >> 6, codes[at + last + j] >> 6, codes[at + last + last + j] >> 6
                pairs[to + j] = table[low | (middle << 2) | (high << 4)]


# Rotation


@exact
def _rotate(row: Array, rotation: Any) -> None:
    """In place."""
    signs, hartley = rotation
    for j in range(row.size):
        row[j] *= signs[j]
    _transform(row, hartley)


@exact
def _unrotate(row: Array, rotation: Any) -> None:
    signs, hartley = rotation
    _transform(row, hartley)
    for j in range(row.size):
        row[j] *= signs[j]


@exact
def _transform(row: Array, hartley: Array) -> None:
    odd = hartley.shape[0]
    power = row.size // odd
    step = 1
    while step < power:
        for start in range(0, row.size, 2 * step):
            for j in range(start, start + step):
                a, b = row[j], row[j + step]
                row[j], row[j + step] = a + b, a - b
        step *= 2
    scale = f32(1 / np.sqrt(np.float64(power)))
    for j in range(row.size):
        row[j] *= scale
    if odd == 1:
        return
    before = row.copy()
    for i in range(odd):
        for j in range(power):
            total = f32(0)
            for k in range(odd):
                total += hartley[i, k] * before[k * power + j]
            row[i * power + j] = total


# Writing


@exact
def _store(row: Array, side: Any, head: int, slot: int) -> None:
    """One rotated row, which is changed."""
    kind, slots, row_bytes, groups, codes, scales, biases, _, book, edges = side
    own, at = np.empty(row.size, np.uint8), head * slots + slot
    stored = codes[at * row_bytes : (at + 1) * row_bytes]
    if kind >= AFFINE:
        size = row.size // groups
        for g in range(groups):
            scale, bias = _quantize(row, g * size, size, kind - AFFINE, own)
            scales[at * groups + g], biases[at * groups + g] = _half(scale), _half(bias)
        if kind == AFFINE + 8:
            for j in range(row.size):
                stored[j] = own[j]
        elif kind == AFFINE + 4:
            _pack(own, 4, stored)
        else:
            _pack_planes(own, kind - AFFINE, stored)
    else:
        scales[at] = _half(_find(row, book, edges, own))
        _pack(own, kind, stored)


@exact
def _quantize(row: Array, first: int, size: int, bits: int, codes: Array) -> tuple[Any, Any]:
    """Codes of one group; its scale and bias, as `mx.quantize` chooses them."""
    most, high, low = f32(2**bits - 1), -LARGEST, LARGEST
    for j in range(first, first + size):
        if row[j] != row[j]:
            codes[first : first + size] = 0
            return row[j], row[j]
        row[j] = min(max(row[j], -LARGEST), LARGEST)
        high, low = max(high, row[j]), min(low, row[j])
    scale, edge, bias = max((high - low) / most, SMALLEST_SCALE), low, f32(0)
    if abs(low) <= abs(high):
        scale, edge = -scale, high
    zero = np.rint(edge / scale)
    if zero != 0:
        scale, bias = edge / zero, edge
    for j in range(first, first + size):
        codes[j] = u8(min(max(np.rint((row[j] - bias) / scale), f32(0)), most))
    return scale, bias


@exact
def _find(row: Array, book: Array, edges: Array, codes: Array) -> Any:
    """Codes of the nearest entries of the book; the corrected norm."""
    squares = f32(0)
    for j in range(row.size):
        squares += row[j] * row[j]
    if squares != squares:
        codes[:] = edges.size
        return squares
    norm = np.sqrt(squares)
    scale, length = np.sqrt(f32(row.size)) / max(norm, SMALLEST_NORM), f32(0)
    for j in range(row.size):
        code = 0
        # What is not a number, as of a row whose norm is infinite, comes after all: `mx.searchsorted` has it so.
        while code < edges.size and not edges[code] >= row[j] * scale:
            code += 1
        codes[j] = u8(code)
        length += book[code] * book[code]
    return min(norm / np.sqrt(length), LARGEST)


@compiled
def _pack(codes: Array, bits: int, out: Array) -> None:
    """Like `formats.packing.pack`."""
    count = codes.size // 2
    for j in range(out.size):
        out[j] = codes[2 * j] | (codes[2 * j + 1] << bits)
    if bits == 2:
        for j in range(out.size):
            k = out.size + j
            out[j] |= (codes[2 * k] | (codes[2 * k + 1] << 2)) << 4
    elif bits == 3:
        last = count - out.size
        for j in range(last):
            k = out.size + j
            pair = codes[2 * k] | (codes[2 * k + 1] << 3)
            out[j] |= (pair & 3) << 6
            out[last + j] |= ((pair >> 2) & 3) << 6
            out[2 * last + j] |= (pair >> 4) << 6


@compiled
def _pack_planes(codes: Array, bits: int, out: Array) -> None:
    """Like `formats.packing.pack_planes`."""
    more, half = bits - 4, codes.size // 2
    size = codes.size * more // 8
    for j in range(half):
        out[j] = (codes[j] & 15) | ((codes[half + j] & 15) << 4)
    for j in range(size):
        above = 0
        for part in range(8 // more):
            above |= (codes[part * size + j] >> 4) << (part * more)
        out[half + j] = above


@compiled
def _half(x: Any) -> Any:
    """A float32 of at most LARGEST, or NaN, as the bits of a float16, rounded to even."""
    if x != x:
        return u16(0x7E00)
    one = np.empty(1, np.float32)
    one[0] = abs(x)
    bits = u32(one.view(np.uint32)[0])
    if one[0] >= SMALLEST_HALF:
        half = (bits - u32(0x38000000) + u32(0xFFF) + ((bits >> u32(13)) & u32(1))) >> u32(13)
    else:
        half = u32(np.rint(one[0] * HALF_STEPS))
    return u16(half | u32(0x8000)) if x < 0 else u16(half)
