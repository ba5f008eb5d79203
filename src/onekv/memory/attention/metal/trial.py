"""Decides whether the Metal kernels are used, by trying them on this device when a model is loaded.

The kernels have never run on Metal, so they are used only if they run here, agree with MLX's operations (`Shared`,
`Paged`), and are faster, for the shapes of the model. A kernel that goes wrong may abort the process, so the trial runs
in a child process:

    in_child     starts it and turns whatever happens to it into an Outcome
    attempt      runs in it: compares small steps, then times steps of a realistic size
    why_not      draws the conclusion
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import cast

import mlx.core as mx

from ...device import Kind
from ...layout import Group, KVLayer, Rule
from ...pool import LayerArrays, Pool
from ...pool.table import Table
from ...step import GroupStep
from ..base import Backend, Call
from ..layer import LayerKV, Pair
from ..paged import Paged
from ..shared import Shared
from ..turns import Turns
from .plain import attend

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
# Largest difference to the output of MLX's operations, relative to the largest output.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.02, "float16": 0.005}
# Rows and tokens per row of the steps that are timed; fewer tokens if the pool would exceed MOST_BYTES.
TIMED = ((1, 2048), (4, 2048))
MOST_BYTES = 64 << 20
# Several steps are evaluated at once, so that launching and waiting count less.
REPEATS, CALLS = 5, 8
# Seconds.
LIMIT = 120.0


@dataclass(frozen=True)
class Shape:
    """The layers that the kernels are tried for. `shared` query heads share a KV head; `dtype` is a name."""

    heads: int
    shared: int
    k_dim: int
    v_dim: int
    dtype: str
    block_size: int
    window: int | None
    keep: int

    @classmethod
    def of(cls, layer: KVLayer, block_size: int, rule: Rule, query_heads: int) -> "Shape":
        name = next(name for name, dtype in DTYPES.items() if dtype == layer.dtype)
        shared = max(1, query_heads // layer.heads)
        return cls(layer.heads, shared, layer.k_dim, layer.v_dim, name, block_size, rule.window, rule.keep)

    @property
    def rule(self) -> Rule:
        return Rule(self.window, self.keep)

    @property
    def layer(self) -> KVLayer:
        return KVLayer("layer 0", self.heads, self.k_dim, self.v_dim, DTYPES[self.dtype])


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step, by the kernels and by MLX's operations; each row has `tokens` tokens."""

    rows: int
    tokens: int
    ours: float
    theirs: float


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    `error`: why the kernels could not be compiled or run. `stores`: whether new tokens end up in their slots, and
    nothing else in the pool changes.
    """

    error: str | None = None
    difference: float = 0.0
    tolerance: float = 0.0
    stores: bool = True
    timings: tuple[Timing, ...] = ()

    @classmethod
    def parsed(cls, text: str) -> "Outcome":
        fields = json.loads(text)
        return cls(**fields | {"timings": tuple(Timing(**timing) for timing in fields["timings"])})


def why_not(outcome: Outcome) -> str | None:
    """Why the kernels are not used; None if they are."""
    if outcome.error is not None:
        return f"the Metal kernel does not run here: {outcome.error}"
    # NaN must not pass.
    if not outcome.difference <= outcome.tolerance:
        return (
            f"the Metal kernel's output differs from that of MLX's operations by {outcome.difference:.2g} "
            f"({outcome.tolerance:.2g} is allowed)"
        )
    if not outcome.stores:
        return "the Metal kernel does not store new tokens as it should"
    for timing in outcome.timings:
        if timing.ours >= timing.theirs:
            return (
                f"the Metal kernel is slower than MLX's operations: {timing.ours:.3f} ms against "
                f"{timing.theirs:.3f} ms for {timing.rows} x {timing.tokens} tokens"
            )
    return None


@cache
def in_child(shape: Shape, on: Kind) -> Outcome:
    """Run `attempt` in a child process, which may crash or hang."""
    program = f"from {__name__} import main; main()"
    return outcome_of([sys.executable, "-c", program, json.dumps(asdict(shape)), on], LIMIT)


def outcome_of(command: list[str], limit: float) -> Outcome:
    """Run a command that prints an Outcome in its last line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Outcome(error=f"it was still running after {limit:.0f} s")
    except OSError as error:
        return Outcome(error=f"it could not be started ({error.strerror})")
    if done.returncode < 0:
        return Outcome(error=f"it was killed by signal {-done.returncode}")
    if done.returncode > 0:
        said = done.stderr.strip().splitlines() or ["it printed nothing"]
        return Outcome(error=f"it exited with status {done.returncode}: {said[-1][:200]}")
    return Outcome.parsed(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """The child process."""
    shape, on = Shape(**json.loads(sys.argv[1])), sys.argv[2]
    try:
        outcome = attempt(shape, cast(Kind, on))
    except (RuntimeError, ValueError) as error:
        # MLX could not compile or launch a kernel.
        outcome = Outcome(error=" ".join(str(error).split())[:300])
    print(json.dumps(asdict(outcome)))


def attempt(shape: Shape, on: Kind) -> Outcome:
    """Try the kernels in this process. Raises whatever MLX raises if they cannot be compiled or launched."""
    small = [
        Trial(shape, on, (33,)),
        Trial(shape, on, (700, 1, 65), with_sinks=True),
        Trial(shape, on, (300, 20), (5, 1)),
    ]
    if shape.window is None:
        small.append(Trial(shape, on, (600, 530, 640), prefix=512))
    compared = [trial.compare() for trial in small]
    differences = [difference for difference, _ in compared]
    # The largest, or NaN if there is one.
    worst = next((x for x in differences if x != x), max(differences))
    outcome = Outcome(None, worst, TOLERANCES[shape.dtype], all(stores for _, stores in compared))
    if why_not(outcome) is not None:
        return outcome
    token_bytes = shape.layer.plain_bytes
    timings = []
    for rows, tokens in TIMED:
        tokens = min(tokens, max(shape.block_size, MOST_BYTES // (rows * token_bytes)))
        timings.append(Timing(rows, tokens, *Trial(shape, on, (tokens,) * rows).time()))
    return Outcome(None, worst, outcome.tolerance, True, tuple(timings))


class Trial:
    """One step, by the kernels and by MLX's operations, each with a pool of its own.

    There is a sequence of each of `lengths`. Its last token is new, or its last `counts` tokens are. All sequences
    share the first `prefix` tokens.
    """

    def __init__(
        self,
        shape: Shape,
        on: Kind,
        lengths: tuple[int, ...],
        counts: tuple[int, ...] = (),
        prefix: int = 0,
        with_sinks: bool = False,
    ) -> None:
        size, layer, heads = shape.block_size, shape.layer, shape.heads
        pool = Pool(Group(shape.rule, (layer,)), sum(length // size + 2 for length in lengths), size)
        tables: list[Table] = []
        for length in lengths:
            table = Table(pool, length, length, tables[0].blocks[: prefix // size] if tables else None)
            table.advance(0, length)
            tables.append(table)
        new = zip(tables, lengths, counts or (1,) * len(lengths), strict=True)
        rows = [(table, length - count + i) for table, length, count in new for i in range(count)]
        step = GroupStep([table for table, _ in rows], [position for _, position in rows], [1] * len(rows), None)

        def random(*sizes: int) -> mx.array:
            return mx.random.normal(sizes).astype(layer.dtype)

        mx.random.seed(len(rows))
        queries = random(len(rows), heads * shape.shared, 1, shape.k_dim)
        self._call = Call(step, queries, shape.k_dim**-0.5, None, random(heads * shape.shared) if with_sinks else None)
        self._new: Pair = (random(len(rows), heads, 1, shape.k_dim), random(len(rows), heads, 1, shape.v_dim))
        self._ours, self._theirs = (
            LayerKV(layer, LayerArrays(layer, pool.blocks * size), Turns(), on) for _ in range(2)
        )
        stored = [random(*array.shape) for array in self._ours.arrays.all]
        # Copies, because the kernels write in place without MLX knowing.
        self._ours.arrays.all, self._theirs.arrays.all = ([array + 0 for array in stored] for _ in range(2))
        self._operations: list[Backend] = [
            backend(self._theirs) for backend in (Shared, Paged) if backend.supports(layer, size, on)
        ]
        mx.eval(self._call.queries, self._call.sinks, self._new, self._ours.arrays.all, self._theirs.arrays.all)

    def compare(self) -> tuple[float, bool]:
        """The difference of the outputs, relative to the largest, and whether both pools are equal afterwards."""
        self._theirs.write(self._call.step, *self._new)
        expected = self._by_operations().astype(mx.float32)
        found = self._by_kernel(self._new).astype(mx.float32)
        mx.eval(expected, found, self._theirs.arrays.all)
        pools = zip(self._ours.arrays.all, self._theirs.arrays.all, strict=True)
        same = all(mx.array_equal(ours, theirs).item() for ours, theirs in pools)
        return float(mx.abs(found - expected).max() / mx.abs(expected).max()), same

    def time(self) -> tuple[float, float]:
        """Milliseconds of a step in which nothing is stored, by the kernels and by MLX's operations, interleaved."""
        ours, theirs = [], []
        for repeat in range(REPEATS + 1):
            times = _milliseconds(lambda: self._by_kernel(None)), _milliseconds(self._by_operations)
            # The first time includes compilation.
            if repeat:
                ours.append(times[0])
                theirs.append(times[1])
        return median(ours), median(theirs)

    def _by_kernel(self, new: Pair | None) -> mx.array:
        out = attend(self._ours, self._call, new)
        assert out is not None, "the kernels are tried only for shapes that they support"
        return out

    def _by_operations(self) -> mx.array:
        found = (backend.decode(self._call, None) for backend in self._operations)
        return next(out for out in found if out is not None)


def _milliseconds(make: Callable[[], mx.array]) -> float:
    start = time.perf_counter()
    mx.eval([make() for _ in range(CALLS)])
    return (time.perf_counter() - start) * 1000 / CALLS
