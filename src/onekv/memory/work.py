"""Who reads what in one launch of a decode kernel: a list of pieces of work, each of some rows over some blocks.

Rows that start with the same blocks (one system prompt, the branches of a conversation) read those together, once.
Blocks that a row shares with others and those of its own are different segments; a segment is cut into pieces so that
there are enough of them for the device. What a piece gives a row is a part, and a row's output is joined from its
parts. As one array of integers:

    header [8]      pieces, and where the following begin: rows, ids, base, ranges, order; parts
    pieces [., 5]   first block, blocks, first row, rows, first part: that of its i-th row is i further on
    rows            of pieces, each a run of it
    ids, base       of the blocks of segments: where each lies in the pool, and the position of its first slot
    ranges [. + 1]  row r's parts are those of `order` from ranges[r] to ranges[r + 1]
    order           parts, row by row

The array's length and the numbers of pieces and of parts are rounded up: a function that was compiled for them serves
while sequences grow. Pieces beyond the real ones are to be skipped.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

Integers = np.ndarray[Any, Any]
HEADER, PIECE = 8, 5


@dataclass(frozen=True)
class Shape:
    """What of a `Work` a compiled function depends on."""

    length: int
    pieces: int
    parts: int


@dataclass(frozen=True)
class Work:
    table: mx.array
    shape: Shape


@dataclass(frozen=True)
class Segment:
    """Blocks `first` to `end` of each of `rows`, which are the same in all of them."""

    rows: list[int]
    first: int
    end: int


def find_segments(ids: Integers, counts: Integers, least: int) -> list[Segment]:
    """All blocks of all rows, each row's in order; what several rows share is one segment where it is `least` long."""
    found: list[Segment] = []

    def divide(rows: list[int], first: int) -> None:
        if len(rows) == 1:
            found.append(Segment(rows, first, int(counts[rows[0]])))
            return
        shortest = int(counts[rows].min())
        equal = (ids[rows, first:shortest] == ids[rows[0], first:shortest]).all(axis=0)
        end = first + (len(equal) if equal.all() else int(equal.argmin()))
        if end - first >= least:
            found.append(Segment(rows, first, end))
            first = end
        # Some of them may share more.
        further: dict[int, list[int]] = {}
        for row in rows:
            further.setdefault(int(ids[row, end]) if end < counts[row] else -1 - row, []).append(row)
        for some in further.values():
            if first < counts[some[0]]:
                divide(some, first)

    divide(list(range(len(ids))), 0)
    return found


def make_work(ids: Integers, base: Integers, counts: Integers, pieces: int, least: int, shared: int, most: int) -> Work:
    """Pieces of about as many blocks each, about `pieces` of them, but none of fewer than `least` blocks.

    `ids` and `base` are [rows, blocks of the longest], of which the first `counts` count. Of blocks that several rows
    begin with, `shared` at least are read together, by at most `most` rows in one piece; 0: each row reads its own.
    """
    rows = range(len(ids))
    if shared and len(ids) > 1:
        segments = find_segments(ids, counts, shared)
    else:
        segments = [Segment([row], 0, int(counts[row])) for row in rows]
    jobs = [
        Segment(segment.rows[start : start + most], segment.first, segment.end)
        for segment in segments
        for start in range(0, len(segment.rows), most)
    ]
    total = sum(job.end - job.first for job in jobs)
    per = max(-(-total // pieces), least, 1)
    made: list[tuple[int, int, int, int, int]] = []
    row_list: list[int] = []
    parts_of: list[list[int]] = [[] for _ in rows]
    blocks = parts = 0
    for job in jobs:
        length = job.end - job.first
        cuts = -(-length // per)
        for cut in range(cuts):
            start, end = length * cut // cuts, length * (cut + 1) // cuts
            made.append((blocks + start, end - start, len(row_list), len(job.rows), parts))
            for index, row in enumerate(job.rows):
                parts_of[row].append(parts + index)
            parts += len(job.rows)
        row_list += job.rows
        blocks += length
    return _pack(
        made,
        row_list,
        np.concatenate([ids[job.rows[0], job.first : job.end] for job in jobs]),
        np.concatenate([base[job.rows[0], job.first : job.end] for job in jobs]),
        parts_of,
    )


def _pack(
    pieces: list[tuple[int, int, int, int, int]],
    rows: list[int],
    ids: Integers,
    base: Integers,
    parts_of: list[list[int]],
) -> Work:
    order = [part for parts in parts_of for part in parts]
    ranges = np.cumsum([0, *map(len, parts_of)])
    fields = [np.array(pieces).reshape(-1), np.array(rows), ids, base, ranges, np.array(order)]
    starts = HEADER + np.cumsum([len(field) for field in fields])
    shape = Shape(rounded(int(starts[-1])), rounded(len(pieces)), rounded(len(order)))
    header = [len(pieces), *starts[:5], shape.parts, 0]
    table = np.zeros(shape.length, np.int32)
    table[: starts[-1]] = np.concatenate([header, *fields])
    return Work(mx.array(table), shape)


def rounded(count: int) -> int:
    """The next of a few numbers: at most a quarter more, or 8."""
    step = max(8, 1 << max(0, count.bit_length() - 3))
    return -(-count // step) * step
