"""The list of work of a decode kernel: every row reads each of its blocks exactly once, shared ones with the others."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onekv.memory.work import HEADER, PIECE, Kernel, Tokens, find_segments, make_work, rounded


@st.composite
def branches(draw):
    """Rows of blocks that branch off each other, as ids [rows, longest] and counts."""
    rows, fresh = [], 0
    for _ in range(draw(st.integers(1, 9))):
        start = []
        if rows and draw(st.booleans()):
            parent = draw(st.sampled_from(rows))
            start = parent[: draw(st.integers(0, len(parent) - 1))]
        new = draw(st.integers(1, 12))
        rows.append(start + list(range(fresh, fresh + new)))
        fresh += new
    counts = np.array([len(row) for row in rows])
    ids = np.full((len(rows), counts.max()), 10**6, np.uint32)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return ids, counts


def read(work) -> tuple[list[tuple[list[int], list[int], list[int], int]], list[list[int]]]:
    """Pieces as (rows, ids, base, first part), and each row's parts; what a kernel would make of the table."""
    table = np.array(work.table)
    count, rows, ids, base, ranges, order, parts, _ = table[:HEADER].tolist()
    assert count <= work.shape.pieces and parts == work.shape.parts and len(table) == work.shape.length
    pieces = []
    for number in range(count):
        first, blocks, first_row, many, part = table[HEADER + number * PIECE :][:PIECE].tolist()
        pieces.append(
            (
                table[rows + first_row :][:many].tolist(),
                table[ids + first :][:blocks].tolist(),
                table[base + first :][:blocks].tolist(),
                part,
            )
        )
    bounds = table[ranges:order].tolist()
    return pieces, [table[order + a : order + b].tolist() for a, b in itertools.pairwise(bounds)]


@given(branches(), st.integers(1, 40), st.integers(1, 4), st.integers(0, 3), st.integers(1, 5), st.integers(0, 3))
def test_every_row_reads_its_blocks_once(rows, pieces, least, shared, most, padding):
    ids, counts = rows
    base = np.arange(ids.shape[1])[None] * 16 + np.zeros((len(ids), 1), np.int64)
    work = make_work(ids, base, counts, Kernel(1, most, pieces, 2 * pieces, 2), least, shared, padding)
    made, parts_of = read(work)
    seen = [[] for _ in range(len(counts) + padding)]
    given_to = {}
    for members, blocks, positions, part in made:
        assert blocks and len(members) <= most
        for index, row in enumerate(members):
            seen[row] += zip(blocks, positions, strict=True)
            assert given_to.setdefault(part + index, row) == row
    for row, count in enumerate(counts):
        assert sorted(seen[row], key=lambda read: read[1]) == [
            (int(block), place * 16) for place, block in enumerate(ids[row, :count])
        ]
        assert parts_of[row] == sorted(part for part, owner in given_to.items() if owner == row)
    for row in range(len(counts), len(counts) + padding):
        # Something to start from; a kernel reads nothing of it.
        assert len(seen[row]) == len(parts_of[row]) == 1
    assert sorted(given_to) == list(range(len(given_to))) and len(given_to) <= work.shape.parts


def test_what_rows_share_is_read_together_and_branches_of_branches_too():
    ids = np.array([[1, 2, 3, 4, 9], [1, 2, 3, 5, 6], [1, 2, 3, 5, 7], [8, 8, 8, 8, 8]], np.uint32)
    segments = find_segments(ids, np.array([4, 5, 5, 2]), 1)
    found = {(tuple(segment.rows), segment.first, segment.end) for segment in segments}
    assert found == {((0, 1, 2), 0, 3), ((0,), 3, 4), ((1, 2), 3, 4), ((1,), 4, 5), ((2,), 4, 5), ((3,), 0, 2)}


def test_what_is_shared_is_read_together_only_where_it_is_long_enough():
    ids = np.array([[1, 2, 3, 4], [1, 2, 3, 5]], np.uint32)
    counts = np.array([4, 4])
    assert len(find_segments(ids, counts, 3)) == 3
    assert [(segment.rows, segment.first) for segment in find_segments(ids, counts, 4)] == [([0], 0), ([1], 0)]


def test_no_few_pieces_are_left_when_all_others_have_ended():
    """Of eight rows of 66 blocks, the device runs 33 pieces at a time: four of each row, not five."""
    counts, kernel = np.full(8, 66), Kernel(8, 1, 264, 264, 1)
    ids = np.arange(8 * 66, dtype=np.uint32).reshape(8, 66)
    base = np.tile(np.arange(66) * 64, (8, 1))
    pieces, _ = read(make_work(ids, base, counts, kernel, 4, 0))
    assert len(pieces) == 32 and {len(blocks) for _, blocks, _, _ in pieces} <= {16, 17}
    # More rows than that: each is one piece.
    rows = np.repeat(ids, 6, axis=0)
    pieces, _ = read(make_work(rows, np.repeat(base, 6, axis=0), np.full(48, 66), kernel, 4, 0))
    assert len(pieces) == 48


def test_short_jobs_take_no_places_from_long_ones_and_come_last():
    """Of 33 places, 32 rows of four blocks need as many as they fill; the row of 256 gets the others."""
    counts = np.array([4] * 32 + [256])
    ids = np.arange(33 * 256, dtype=np.uint32).reshape(33, 256)
    base = np.tile(np.arange(256) * 64, (33, 1))
    pieces, _ = read(make_work(ids, base, counts, Kernel(8, 1, 264, 264, 1), 4, 0))
    assert [members for members, *_ in pieces] == [[32]] * 22 + [[row] for row in range(32)]
    assert {len(blocks) for _, blocks, _, _ in pieces[:22]} == {11, 12}


def test_pieces_of_several_rows_take_longer():
    for heaviest, weights in ((2, [1, 1, 1, 1, 2, 2]), (4, [1, 1, 2, 2, 4, 4])):
        kernel = Kernel(8, 16, 264, 396, heaviest)
        assert [kernel.weight(rows) for rows in (1, 4, 5, 8, 9, 16)] == weights


def test_shapes_change_seldom():
    sizes = {rounded(count) for count in range(1, 100_001)}
    assert len(sizes) < 80 and all(count <= rounded(count) <= max(count * 1.25, count + 7) for count in range(1, 5000))


@st.composite
def sequences(draw):
    """For each of some sequences: the blocks that each of its tokens reads, as (begin, end)."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        begin, end = draw(st.integers(0, 5)), draw(st.integers(6, 40))
        tokens = [(begin, end)] * draw(st.integers(1, 9))
        # Later ones read a block more, and may have forgotten one.
        later = (begin + draw(st.integers(0, 1)), end + 1)
        found.append(tokens + [later] * draw(st.integers(0, 3)))
    return found


@given(sequences(), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_tokens_of_one_sequence_are_cut_as_each_would_be_alone(found, pieces, least, fit, padding):
    kernel, width = Kernel(1, 4 * fit, pieces, 2 * pieces, 2, fit), 42
    own = np.arange(len(found) * width).reshape(len(found), width)
    rows = [(number, span) for number, tokens in enumerate(found) for span in tokens]
    ids, base = own[[number for number, _ in rows]], np.tile(np.arange(width) * 16, (len(rows), 1))
    begins, ends = (np.array([span[side] for _, span in rows]) for side in (0, 1))
    numbers = [number for number, _ in rows]
    tokens = Tokens([numbers.index(number) for number in numbers], begins, ends)
    work = make_work(ids, base, np.full(len(rows), width), kernel, least, 4, padding, tokens)
    made, parts_of = read(work)
    assert work.exact and not work.shape.together
    blocks_of = {part + i: blocks for members, blocks, _, part in made for i in range(len(members))}
    for members, *_ in made:
        assert len(members) <= fit and len({numbers[row] for row in members if row < len(rows)}) <= 1
        # The one that ends last joins all rows of its piece.
        assert len({len(parts_of[row]) for row in members}) == 1
    # Each beside the first tokens of the other sequences, as in a step of one token of each.
    for row, (number, (begin, end)) in enumerate(rows):
        firsts = [tokens_of[0] for tokens_of in found]
        if (begin, end) != firsts[number]:
            assert [block for part in parts_of[row] for block in blocks_of[part]] == own[number, begin:end].tolist()
            continue
        plain_ids = [own[i, first:last] for i, (first, last) in enumerate(firsts)]
        counts = np.array(list(map(len, plain_ids)))
        padded = np.array([np.pad(some, (0, width - len(some)), constant_values=10**6) for some in plain_ids])
        plain, plain_parts = read(make_work(padded, base[: len(found)], counts, kernel, least, 4))
        plain_of = {part: blocks for _, blocks, _, part in plain}
        assert [blocks_of[part] for part in parts_of[row]] == [plain_of[part] for part in plain_parts[number]]


def test_tokens_are_read_together_with_sequences_that_share_a_prefix():
    ids = np.array([range(20)] * 3 + [[*range(10), *range(30, 40)]])
    tokens = Tokens([0, 0, 0, 3], np.zeros(4, int), np.full(4, 20))
    base, counts = np.tile(np.arange(20) * 16, (4, 1)), np.full(4, 20)
    for shared, exact in ((10, False), (11, True)):
        work = make_work(ids, base, counts, Kernel(1, 16, 40, 40, 2, 4), 1, shared, 0, tokens)
        assert work.exact is exact and work.shape.together is not exact and work.shape.several is exact
    assert not make_work(ids, base, counts, Kernel(1, 16, 40, 40, 2), 1, 11, 0, tokens).exact
