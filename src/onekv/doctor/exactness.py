"""Exactness of attention backends, KV formats and compiled steps, on small models of every kind of layer.

Three comparisons, each with a bound:

    memory     logits of a model on OneKV's memory, with mlx-lm's attention over what is read from the pool, against
               mlx-lm's own caches. Covers blocks, tables, masks, prefill and stored formats
    backend    every attention call of a backend against the same attention in float32 by MLX operations, over the same
               blocks
    compiled   logits of compiled decode steps against those of the first comparison, over the same blocks

bounds.py has the bounds.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..errors import UnsupportedLayerError
from ..interrupts import pool_of
from ..memory import attention
from ..memory.attention import Backend
from ..memory.attention.decoded import Stock
from ..memory.attention.shared import Shared
from ..memory.device import Kind
from ..memory.device import kind as device_kind
from ..memory.formats import compared, parse
from ..memory.layout import Layout
from ..memory.layout.calibration import centred
from ..memory.layout.reader import read_layout
from ..memory.layout.stored import encoded
from ..memory.plan.device import read_device
from .base import Case, Check, Notes, switch
from .bounds import DTYPES, bounds
from .models import KINDS, VOCAB, small_model
from .reference import relative_error, stock_logits
from .trial import BLOCK, CHUNK, LENGTHS, texts, try_backend, try_compiled

FULL, PLAIN, DIM = "full attention", "auto", 128
# Full attention is tested with all formats, other kinds of layers with these: plain, affine, and with a codebook.
FEW = (PLAIN, "q8", "tq3")
# Kinds that are also tested in half precision.
HALF = (FULL, "sliding window", "attention sinks")
# Failed comparisons that are reported one by one.
MOST = 5
# Where processes compare: at least so many comparisons, at most so many processes, each with so much of the device.
FEW_COMPARISONS, MOST_WORKERS, WORKER_BYTES = 8, 12, 2 * 2**30
# Kind of layer, dtype, format, and whether OneKV's kernels are used.
Asked = tuple[str, str, str, bool]
# Tokens for formats whose keys are centred.
CALIBRATION = [7 * i % (VOCAB - 5) + 1 for i in range(64)]

# Relative squared error of each format on Gaussian rows (from theory for codebooks, otherwise measured), and the
# tolerated excess.
FORMAT, MORE = (
    {"q8": 3.6e-5, "q6": 5.9e-4, "q5": 2.4e-3, "q4": 1.0e-2, "tq4": 0.0095, "tq3": 0.0345, "tq2": 0.117},
    1.05,
)


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    kind: str
    dtype: str
    format: str
    # memory, compiled, or the name of a backend.
    way: str
    # Whether `--kernels off` avoids it.
    kernel: bool
    error: float
    limit: float
    # The exception, if one was raised; the error is then infinite.
    raised: str = ""

    @property
    def name(self) -> str:
        """Cells with the same name have the same bound."""
        return f"{self.way}, {self.dtype}" + (", encoded" if self.way == "memory" and self.format != PLAIN else "")

    @property
    def exact(self) -> bool:
        # False for NaN.
        return self.error <= self.limit


class NoReference(Exception):
    """MLX itself cannot run the model on this device, so there is nothing to compare with."""


def run(case: Case, notes: Notes) -> None:
    cells: list[Cell] = []
    asked = [(*cell, case.settings.kernels != "off") for cell in wanted(device_kind())]
    for (kind, dtype, format, _), found in zip(asked, _in_turn(asked, workers(len(asked))), strict=True):
        case.doing(f"{kind}, {format}, {dtype}")
        if isinstance(found, str):
            notes.skip(f"{kind} in {dtype}: {found}")
        else:
            cells += found
    for name in dict.fromkeys(cell.name for cell in cells):
        worst = max((cell for cell in cells if cell.name == name), key=_excess)
        notes.figure(name, worst.error, "relative", worst.limit)
    wrong = [cell for cell in cells if not cell.exact]
    for cell in sorted(wrong, key=_excess, reverse=True)[:MOST]:
        how = cell.raised or f"off by {cell.error:.2g}, rounding explains at most {cell.limit:.2g}"
        where = f"{cell.kind}, --kv-format {cell.format}, {cell.dtype}"
        notes.fail(f"{cell.way} is wrong for {where}: {how}", _avoiding(wrong))
    if len(wrong) > MOST:
        notes.fail(f"and {len(wrong) - MOST} more comparisons", _avoiding(wrong))
    _formats(notes)
    if cells and not wrong:
        backends = len({cell.way for cell in cells} - {"memory", "compiled"})
        kinds, formats = ({getattr(cell, field) for cell in cells} for field in ("kind", "format"))
        what = f"{len(kinds)} kinds of layers, {len(formats)} formats, {backends} backends"
        notes.ok(f"{len(cells)} comparisons ({what}) within rounding")


def workers(comparisons: int) -> int:
    """Processes that compare; 0: this one does. CUDA kernels take seconds each to compile, and MLX compiles one at a
    time, so there is a process for each core, as far as the device has room for their contexts."""
    if device_kind() != "cuda" or comparisons < FEW_COMPARISONS:
        return 0
    return max(0, min((os.cpu_count() or 1) - 1, MOST_WORKERS, read_device().available // WORKER_BYTES))


def _in_turn(asked: list[Asked], processes: int) -> Iterator[list[Cell] | str]:
    """The comparisons of each, or why there is nothing to compare with; by so many processes, or by this one."""
    if not processes:
        yield from map(_found, asked)
        return
    with pool_of(processes) as pool:
        yield from pool.imap(_found, asked)


def _found(asked: Asked) -> list[Cell] | str:
    try:
        return list(compare(*asked))
    except NoReference as error:
        return str(error)


def _excess(cell: Cell) -> float:
    return math.inf if math.isnan(cell.error) else cell.error / cell.limit


def _avoiding(wrong: list[Cell]) -> str:
    """The first switch that avoids everything that is wrong."""
    left = {
        switch("kernels", "off"): [cell for cell in wrong if not cell.kernel],
        switch("prefix_cache", "off"): [cell for cell in wrong if cell.way != Shared.__name__],
        switch("kv_format", PLAIN): [cell for cell in wrong if cell.format == PLAIN],
        switch("kv_format", "q8"): [cell for cell in wrong if cell.format == "q8"],
    }
    none = "no single switch; please report it"
    return next((each for each, cells in left.items() if not cells), none)


def _formats(notes: Notes) -> None:
    """Compare the error of each format with its expected value."""
    for name, expected in FORMAT.items():
        error = relative_error(parse(name).values(DIM, mx.float32))
        notes.figure(f"{name}, squared error", error, "relative", MORE * expected)
        if not error <= MORE * expected:
            text = f"has a relative squared error of {error:.3g}, at most {MORE * expected:.3g} is normal"
            notes.fail(f"--kv-format {name} {text}", switch("kv_format", PLAIN))


def _formats_tried() -> tuple[str, ...]:
    return compared()


def wanted(device: Kind) -> Iterator[tuple[str, str, str]]:
    """Kind of layer, dtype and format of all comparisons."""
    for kind in KINDS:
        for format in _formats_tried() if kind == FULL else (PLAIN,) if kind == "recurrent" else FEW:
            yield kind, "float32", format
    for kind in HALF:
        for dtype in ("bfloat16", "float16"):
            yield kind, dtype, PLAIN
    if device != "cpu":
        # Models on a GPU are rarely float32, and some kernels support half precision only.
        for kind in HALF:
            for format in _formats_tried()[1:] if kind == FULL else FEW[1:]:
                yield kind, "bfloat16", format


def compare(kind: str, dtype: str, format: str, kernels: bool) -> Iterator[Cell]:
    """All comparisons for one model and format; without `kernels`, of what `--kernels off` uses."""
    model, device = small_model(kind), device_kind()
    model.set_dtype(DTYPES[dtype])
    try:
        layout = centred(encoded(read_layout(model), parse(format), 0), model, CALIBRATION)
    except UnsupportedLayerError:
        return
    expected = _expected(model, layout)
    where, limits = (kind, dtype, format), bounds(dtype, format == PLAIN, device)
    memory = try_backend(model, layout, Stock, kernels).logits
    error = _apart(memory, expected)
    # Prefill uses compiled loops, too: are they to blame?
    loops = kernels and not error <= limits.memory
    loops = loops and _apart(try_backend(model, layout, Stock, False).logits, expected) <= limits.memory
    yield Cell(*where, "memory", loops, error, limits.memory)
    for backend in _backends(layout, dtype, device, kernels):
        way = (backend.__name__, backend.kernel)
        limit = limits.kernel if backend.kernel else limits.operations
        try:
            errors = try_backend(model, layout, backend, kernels).errors
        except (RuntimeError, TypeError, ValueError) as raised:
            # For example, a kernel that does not compile here.
            yield Cell(*where, *way, math.inf, limit, f"{type(raised).__name__}: {str(raised)[:300]}")
            continue
        if errors:
            # np.max propagates NaN.
            yield Cell(*where, *way, float(np.max(errors)), limit)
    if kernels and (compiled := try_compiled(model, layout)) is not None:
        yield Cell(*where, "compiled", True, _apart(compiled.logits, memory), limits.compiled)


def _expected(model: Module, layout: Layout) -> mx.array:
    """Logits [rows, steps, vocabulary] with mlx-lm's own caches."""
    rows = zip(texts(VOCAB), LENGTHS, strict=True)
    try:
        found = [stock_logits(model, layout, text, length, CHUNK) for text, length in rows]
    except RuntimeError as error:
        # MLX has no implementation of some operation here.
        raise NoReference(str(error).splitlines()[0]) from error
    return mx.stack(found).astype(mx.float32)


def _backends(layout: Layout, dtype: str, device: Kind, kernels: bool) -> list[type[Backend]]:
    """Backends to test; in half precision on CPU only kernels, because MLX lacks operations for it there."""
    layers = [layer for group in layout.groups for layer in group.layers]
    found = [backend for backend in attention.backends if backend is not Stock and (kernels or not backend.kernel)]
    found = [backend for backend in found if any(backend.supports(layer, BLOCK, device) for layer in layers)]
    return found if dtype == "float32" or device != "cpu" else [backend for backend in found if backend.kernel]


def _apart(logits: mx.array, expected: mx.array) -> float:
    return float(mx.abs(logits - expected).max() / expected.std())


CHECK = Check(
    "exactness",
    "attention backends, KV formats and compiled steps agree with MLX's own operations",
    run,
    passed="exact",
    failed="NOT EXACT",
)
