"""Attention over encoded blocks, written out in float32: what kernels are compared with."""

import mlx.core as mx

from onekv.memory.formats import parse
from onekv.memory.formats.centre import Centre
from onekv.memory.layout import Group, KVLayer
from onekv.memory.pool import Pool
from onekv.memory.step import GroupStep, visible
from test_cuda import tables_of

HEADS = 3


class Case:
    """A pool full of encoded rows, and a step of one token for sequences of these lengths.

    `forks` say where a sequence branches off another (`tables_of`), `counts` how many of a sequence's last tokens are
    new, each of them a row.
    """

    def __init__(
        self, kv_format, dtype, shared, lengths, rule, block_size, with_sinks, rope, dim, forks=None, counts=None
    ) -> None:
        chosen = parse(kv_format)
        mx.random.seed(sum(lengths))
        centre = Centre(mx.random.normal((HEADS, dim)), rope, "here") if rope and chosen.centred else None
        self.stored = stored = KVLayer("layer 0", HEADS, dim, dim, dtype, chosen, centre)
        self.rule, self.block_size, self.dim = rule, block_size, dim
        blocks = sum(-(-n // block_size) + 1 for n in lengths) + 3
        pool = Pool(Group(rule, (stored,)), blocks, block_size)
        self.arrays = pool.layers[0]
        # Keys of a model have a part that is the same for all tokens, and large channels.
        spread = 1 + 4 * (mx.arange(dim) % 16 == 3)
        k, v = (mx.random.normal((HEADS, blocks * block_size, dim)) * spread + 1 for _ in range(2))
        self.arrays.all[:] = [*stored.keys.encode(k), *stored.values.encode(v)]
        tables = zip(tables_of(pool, lengths, forks), lengths, counts or [1] * len(lengths), strict=True)
        # The table and position of each row.
        self.rows = rows = [(table, n - count + i) for table, n, count in tables for i in range(count)]
        mx.eval(self.arrays.all)
        self.step = GroupStep([table for table, _ in rows], [at for _, at in rows], [1] * len(rows), None)
        self.queries = mx.random.normal((len(rows), HEADS * shared, 1, dim)).astype(dtype)
        self.sinks = mx.random.normal((HEADS * shared,)).astype(dtype) if with_sinks else None
        self.new = tuple(mx.random.normal((len(rows), HEADS, 1, dim)).astype(dtype) for _ in range(2))

    def error(self, out: mx.array) -> float:
        """The largest difference of a kernel's output to the reference, relative to the largest output."""
        wanted = mx.stack([self._row(row) for row in range(len(self.rows))])
        return float(mx.abs(out.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())

    def _row(self, row: int) -> mx.array:
        stored, arrays, size, dim = self.stored, self.arrays, self.block_size, self.dim
        (table, at), shared = self.rows[row], self.queries.shape[1] // HEADS
        positions = [i * size + o for i in table.live() for o in range(size)]
        slots = mx.array([table.blocks[p // size] * size + p % size for p in positions])
        k = stored.keys.decode([part[:, slots] for part in arrays.keys], mx.float32)
        v = stored.values.decode([part[:, slots] for part in arrays.values], mx.float32)
        k, v = stored.keys.unrotate(k), stored.values.unrotate(v)
        if stored.centre is not None:
            k = k + stored.centre.rows(mx.array(positions), len(positions), 1)[:, :, 0].swapaxes(0, 1)
        q = self.queries[row].reshape(HEADS, shared, dim).astype(mx.float32) * dim**-0.5
        scores = (q[:, :, None] * k[:, None]).sum(axis=-1)
        scores = mx.where(visible(self.rule, None, at, mx.array(positions)), scores, -mx.inf)
        if self.sinks is not None:
            scores = mx.concatenate([scores, self.sinks.astype(mx.float32).reshape(HEADS, shared, 1)], axis=-1)
            v = mx.concatenate([v, mx.zeros_like(v[:, :1])], axis=1)
        weights = mx.softmax(scores, axis=-1)
        return (weights[..., None] * v[:, None]).sum(axis=2).reshape(HEADS * shared, 1, dim)

    def check_stored(self) -> None:
        """What the kernel stores is what the codec would have stored, but for a number on the edge of two codes."""
        stored, arrays = self.stored, self.arrays
        sides = ((stored.keys, arrays.keys, self.new[0]), (stored.values, arrays.values, self.new[1]))
        for row, (table, at) in enumerate(self.rows):
            slot = table.blocks[at // self.block_size] * self.block_size + at % self.block_size
            for codec, parts, rows in sides:
                if codec is stored.keys and stored.centre is not None:
                    rows = rows - stored.centre.rows(mx.array([at] * len(rows)), len(rows), 1)
                encoded = codec.encode(rows[row, :, 0])
                own = codec.decode([part[:, slot] for part in parts], mx.float32)
                theirs = codec.decode(encoded, mx.float32)
                away = mx.abs(own - theirs) > 0.004 * mx.abs(theirs).max()
                assert int(away.sum()) <= 3, f"{int(away.sum())} of {away.size} numbers differ"
