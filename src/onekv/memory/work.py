"""The work of one launch of a decode kernel: a list of pieces, each of which is some rows that read some blocks.

Rows that start with the same blocks (a system prompt, the branches of a conversation) read these together, once. Blocks
that a row shares with others and its own blocks are different segments; a segment is divided into enough pieces for the
device. The result of a piece for one row is a part, and a row's output is joined from its parts. As one array of
integers:

    header [8]      pieces, and where the following begin: rows, ids, base, ranges, order; parts
    pieces [., 5]   first block, blocks, first row, rows, first part: that of its i-th row is i further on
    rows            of pieces, each a run of it
    ids, base       of the blocks of segments: where each lies in the pool, and the position of its first slot
    ranges [. + 1]  row r's parts are those of `order` from ranges[r] to ranges[r + 1]
    order           parts, row by row

Rows that are tokens of one sequence are read so that the result for each is bit for bit what it would be alone
(`Tokens`): they are divided in the same way as then, and only rows that are divided alike are in one piece, as many as
fit into one tile of queries.

The array's length and the numbers of pieces and parts are rounded up, so that a compiled function remains usable as
sequences grow; pieces beyond the real ones are skipped. The number of rows is rounded up as well: each padding row has
a piece of its own, over a block that it does not read.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

Integers = np.ndarray[Any, Any]
HEADER, PIECE = 8, 5


@dataclass(frozen=True)
class Kernel:
    """What work depends on besides the blocks: for whom it is cut."""

    # Of the layer: there is one launch for each KV head.
    heads: int
    # Rows that may be in one piece.
    most: int
    # Thread blocks that the device runs at a time, where each row reads for itself and where rows read together.
    alone: int
    together: int
    # How much longer a piece of `most` rows takes than one of a single row.
    heaviest: int
    # Rows of one sequence whose queries are in one tile, as that of a single row is; 0: there is no kernel for them.
    fit: int = 0

    def weight(self, rows: int) -> int:
        """How much longer a piece of this many rows takes. Its queries are in one, two or four tiles."""
        tiles = 4 if 2 * rows > self.most else 2 if 4 * rows > self.most else 1
        return max(1, self.heaviest * tiles // 4) if rows > 1 else 1


@dataclass(frozen=True)
class Shape:
    """What of a `Work` a compiled function depends on."""

    length: int
    pieces: int
    parts: int
    # Whether any piece is of several rows, and whether these are tokens of one sequence that are read as each would be.
    together: bool
    several: bool = False


@dataclass(frozen=True)
class Work:
    table: mx.array
    shape: Shape
    # Whether each row is read as it would be if it were the only one of its sequence.
    exact: bool = True


class Tokens(NamedTuple):
    """Of rows of which some are tokens of one sequence: the first row of each one's sequence, and from which block to
    which it would read alone, if those are a run."""

    firsts: list[int]
    begins: Integers
    ends: Integers
    runs: bool = True


@dataclass(frozen=True)
class Segment:
    """Blocks `first` to `end` of each of `rows`, which are the same in all of them."""

    rows: list[int]
    first: int
    end: int


def find_segments(ids: Integers, counts: Integers, least: int, shareable: Integers | None = None) -> list[Segment]:
    """All blocks of all rows, each row's in order; what several rows share is one segment where it is `least` long.

    Only the first `shareable` blocks of a row may be in a segment with others; without it, all may.
    """
    if len(np.unique(ids[:, 0])) == len(ids):
        # No two rows begin with the same block.
        return [Segment([row], 0, int(count)) for row, count in enumerate(counts)]
    found: list[Segment] = []
    ends = counts if shareable is None else shareable

    def divide(rows: list[int], first: int) -> None:
        if len(rows) == 1:
            found.append(Segment(rows, first, int(counts[rows[0]])))
            return
        shortest = int(ends[rows].min())
        equal = (ids[rows, first:shortest] == ids[rows[0], first:shortest]).all(axis=0)
        end = first + (len(equal) if equal.all() else int(equal.argmin()))
        if end - first >= least:
            found.append(Segment(rows, first, end))
            first = end
        # Some of them may share more.
        further: dict[int, list[int]] = {}
        for row in rows:
            further.setdefault(int(ids[row, end]) if end < ends[row] else -1 - row, []).append(row)
        for some in further.values():
            if first < counts[some[0]]:
                divide(some, first)

    divide(list(range(len(ids))), 0)
    return found


def make_work(
    ids: Integers,
    base: Integers,
    counts: Integers,
    kernel: Kernel,
    least: int,
    shared: int,
    padding: int = 0,
    tokens: Tokens | None = None,
) -> Work:
    """About as many pieces as the device runs at a time, which take about as long as each other. Shorter jobs are a
    piece each and come last. Of one row, none is of fewer than `least` blocks.

    `ids` and `base` are [rows, blocks of the longest], of which the first `counts` count. Of blocks that several rows
    begin with, `shared` at least are read together; 0: each row reads its own. Behind these rows come `padding` ones,
    which read nothing. `tokens`: some rows are of one sequence.
    """
    shared = shared if kernel.most > 1 else 0
    several = False
    if tokens is not None and kernel.fit and tokens.runs and not _share_blocks(ids, tokens, shared):
        several = True
        jobs = _token_jobs(tokens, kernel.fit)
        weights, at_a_time = [1] * len(jobs), kernel.alone
        # Whoever is the only one of its sequence decides how all are cut.
        lengths = np.array([tokens.ends[row] - tokens.begins[row] for row in sorted(set(tokens.firsts))])
    else:
        jobs = _jobs(ids, counts, kernel, shared)
        weights = [kernel.weight(len(job.rows)) for job in jobs]
        at_a_time = kernel.together if any(len(job.rows) > 1 for job in jobs) else kernel.alone
        lengths = np.array([(job.end - job.first) * weight for job, weight in zip(jobs, weights, strict=True)])
    per = _share(lengths, max(1, at_a_time // kernel.heads), max(1, least))
    made: list[tuple[int, int, int, int, int]] = []
    row_list: list[int] = []
    parts_of: list[list[int]] = [[] for _ in range(len(ids) + padding)]
    blocks = parts = 0
    for job, weight in zip(jobs, weights, strict=True):
        length = job.end - job.first
        cuts = min(length, -(-length * weight // per))
        for cut in range(cuts):
            start, end = length * cut // cuts, length * (cut + 1) // cuts
            made.append((blocks + start, end - start, len(row_list), len(job.rows), parts))
            for index, row in enumerate(job.rows):
                parts_of[row].append(parts + index)
            parts += len(job.rows)
        row_list += job.rows
        blocks += length
    for row in range(len(ids), len(ids) + padding):
        made.append((0, 1, len(row_list), 1, parts))
        parts_of[row].append(parts)
        row_list.append(row)
        parts += 1
    return _pack(
        made,
        row_list,
        np.concatenate([ids[job.rows[0], job.first : job.end] for job in jobs]),
        np.concatenate([base[job.rows[0], job.first : job.end] for job in jobs]),
        parts_of,
        several,
        exact=several or tokens is None,
    )


def _jobs(ids: Integers, counts: Integers, kernel: Kernel, shared: int) -> list[Segment]:
    """What is to be read, the longest first; blocks of several rows together, from `shared` of them on."""
    if shared and len(ids) > 1:
        segments = find_segments(ids, counts, shared)
    else:
        segments = [Segment([row], 0, int(counts[row])) for row in range(len(ids))]
    jobs = [
        Segment(segment.rows[start : start + kernel.most], segment.first, segment.end)
        for segment in segments
        for start in range(0, len(segment.rows), kernel.most)
    ]
    return sorted(jobs, key=lambda job: (job.first - job.end) * kernel.weight(len(job.rows)))


def _token_jobs(tokens: Tokens, fit: int) -> list[Segment]:
    """The same of rows of which each is read as if it were alone: those of a sequence that read the same blocks."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for row, first in enumerate(tokens.firsts):
        alike.setdefault((first, int(tokens.begins[row]), int(tokens.ends[row])), []).append(row)
    return [
        Segment(rows[start : start + fit], begin, end)
        for (_, begin, end), rows in alike.items()
        for start in range(0, len(rows), fit)
    ]


def _share_blocks(ids: Integers, tokens: Tokens, shared: int) -> bool:
    """Whether different sequences begin with `shared` blocks or more that are the same: those are read together."""
    own = sorted(set(tokens.firsts))
    if not shared or len(own) == 1:
        return False
    return any(len(segment.rows) > 1 for segment in find_segments(ids[own], tokens.ends[own], shared))


def _share(lengths: Integers, pieces: int, least: int) -> int:
    """The smallest length of a piece, from `least` on, with which there are no more than `pieces`: a few more would
    have the device to themselves when all others have ended. Jobs shorter than that follow each other in one place.
    """
    low = max(least, -(-int(lengths.sum()) // pieces))
    high = max(low, int(lengths.max()))
    while low < high:
        middle = (low + high) // 2
        places = np.where(lengths < middle, lengths / middle, -(-lengths // middle))
        if places.sum() <= pieces:
            high = middle
        else:
            low = middle + 1
    return low


def _pack(
    pieces: list[tuple[int, int, int, int, int]],
    rows: list[int],
    ids: Integers,
    base: Integers,
    parts_of: list[list[int]],
    several: bool,
    exact: bool,
) -> Work:
    order = [part for parts in parts_of for part in parts]
    ranges = np.cumsum([0, *map(len, parts_of)])
    fields = [np.array(pieces).reshape(-1), np.array(rows), ids, base, ranges, np.array(order)]
    starts = HEADER + np.cumsum([len(field) for field in fields])
    joined = any(piece[3] > 1 for piece in pieces)
    length, count, parts = (rounded(size) for size in (int(starts[-1]), len(pieces), len(order)))
    shape = Shape(length, count, parts, joined and not several, joined and several)
    header = [len(pieces), *starts[:5], shape.parts, 0]
    table = np.zeros(shape.length, np.int32)
    table[: starts[-1]] = np.concatenate([header, *fields])
    return Work(mx.array(table), shape, exact)


def rounded(count: int) -> int:
    """The next of a few numbers: at most a quarter more, or 8."""
    step = max(8, 1 << max(0, count.bit_length() - 3))
    return -(-count // step) * step
