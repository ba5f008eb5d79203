"""Where the bytes go: weights + KV pool + workspace + margin, against what the device has.

The KV budget is one number. Recurrent states take their share for `max_batch` sequences first; sliding windows get what
`max_batch` sequences need of them, at most half of the rest; full attention gets all that is left, because there more
blocks always mean longer or more conversations.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from ..config import Settings
from ..errors import MemoryBudgetError
from ..units import format_size, parse_size
from .calibration import centred
from .formats import parse
from .formats.centre import centre_bytes
from .layout import Group, Layout, encoded, read_layout
from .table import blocks_needed
from .turns import UNIT

# For the interpreter, the tokenizer, MLX's kernels and what else the process holds.
MARGIN = 256 * 2**20
# One array of a pool stays below what MLX indexes with 32 bits.
MAX_ELEMENTS = 2**31 - 1
# Snapshots of recurrent states to keep, for each sequence that may run, if a quarter of the budget allows.
SNAPSHOTS = 8
# Sequences whose window is kept, for each that may run, if half of the budget allows.
WINDOWS = 4
# Parts on their way from the disk: one for each of two threads that read, and states. On CUDA, two blocks and states.
UNPLACED = 3
# What a block's file has beside its content, amply.
HEADER = 2**16
# The most memory for blocks on their way to the disk, unless it is set.
QUEUE = 256 * 2**20
# Attention scores of a prefill step stay below this: long contexts are read in smaller chunks.
SCORES = 256 * 2**20


@dataclass(frozen=True)
class Device:
    name: str
    # What this process may use at most, and how much of it is free now.
    total: int
    available: int


@dataclass(frozen=True)
class Plan:
    device: Device
    layout: Layout
    weights: int
    budget: int
    blocks: tuple[int, ...]
    block_size: int
    max_batch: int
    prefill_chunk: int
    workspace: int
    # For recurrent states kept in the prefix cache.
    snapshot_bytes: int
    # For blocks on their way to the disk; 0 without a disk cache.
    queue: int = 0

    @property
    def pool_bytes(self) -> int:
        pairs = zip(self.layout.groups, self.blocks, strict=True)
        return sum(group.token_bytes * self.block_size * count for group, count in pairs)

    @property
    def state_bytes(self) -> int:
        """Recurrent states: of running sequences, and snapshots of them."""
        return self.layout.sequence_bytes * self.max_batch + self.snapshot_bytes

    @property
    def stored_as(self) -> str:
        """Names what decides, besides the model, what the bytes of a stored block are."""
        return f"{self.layout} {self.layout.codecs} {self.block_size}"

    @property
    def staging(self) -> int:
        """Memory for blocks on their way to the disk and back."""
        return self.queue + UNPLACED * largest_part(self.layout, self.block_size) if self.queue else 0

    @property
    def total(self) -> int:
        return self.weights + self.pool_bytes + self.state_bytes + self.workspace + self.staging + MARGIN

    @property
    def longest(self) -> int:
        """The most tokens one sequence can have: what the full-attention group holds, else no limit."""
        full = [
            count * self.block_size
            for group, count in zip(self.layout.groups, self.blocks, strict=True)
            if group.rule.span is None
        ]
        return min(full, default=2**62)

    def conversations(self, length: int) -> int:
        """How many sequences of `length` tokens are held at once while they are generated."""
        counts = [self.max_batch]
        for group, count in zip(self.layout.groups, self.blocks, strict=True):
            first = blocks_needed(group.rule, self.block_size, length, self.prefill_chunk)
            others = blocks_needed(group.rule, self.block_size, length, _steady_chunk(group, self.prefill_chunk))
            counts.append(0 if first > count else 1 + (count - first) // others)
        return min(counts)

    def check(self) -> None:
        """Raises MemoryBudgetError if the device cannot hold all of it."""
        if self.total > self.device.available:
            raise MemoryBudgetError(
                f"the plan needs {format_size(self.total)} (weights {format_size(self.weights)}, "
                f"KV pool {format_size(self.pool_bytes + self.state_bytes)}, "
                f"workspace {format_size(self.workspace + self.staging)}, margin {format_size(MARGIN)}), "
                f"but {format_size(self.device.available)} of {self.device.name}'s memory is available; "
                f"lower --kv-memory (now {format_size(self.budget)}) or --prefill-chunk, or use a smaller model"
            )


def read_device() -> Device:
    """The default device and its memory."""
    info = mx.device_info()
    name = str(info.get("device_name", mx.default_device()))
    if mx.default_device() == mx.gpu:
        total = int(info.get("max_recommended_working_set_size", info.get("total_memory", 0)))
        total = total or int(info["memory_size"])
        return Device(name, total, total - mx.get_active_memory())
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(name, total, total - mx.get_active_memory())
    lines = (line.split() for line in meminfo.read_text().splitlines())
    fields = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    total, available = fields["MemTotal"], fields["MemAvailable"]
    for limit, used in _cgroup_limits():
        total, available = min(total, limit), min(available, limit - used)
    return Device(name, total, available)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """(limit, use) of the control groups this process is in, where a container sets them."""
    files = (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    )
    for limit, used in files:
        if Path(limit).exists() and Path(limit).read_text().strip() != "max":
            yield int(Path(limit).read_text()), int(Path(used).read_text())


def weight_bytes(model: Module) -> int:
    return sum(array.nbytes for array in _weights(model))


def _weights(model: Module) -> list[mx.array]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return [array for _, array in flat]


def workspace_bytes(
    model: Module,
    layout: Layout,
    blocks: tuple[int, ...],
    block_size: int,
    max_batch: int,
    chunk: int,
) -> int:
    """What a step needs beside weights and pool: activations, attention scores, logits, one gathered layer, centres."""
    shapes = [array.shape for array in _weights(model) if array.ndim >= 2]
    width = max((shape[-2] for shape in shapes if shape[-2] != layout.vocabulary), default=1)
    activations = chunk * width * 4 * 8
    logits = max_batch * layout.vocabulary * 4 * 4
    gathered = max(
        (
            max(layer.plain_bytes for layer in group.layers) * count * block_size
            for group, count in zip(layout.groups, blocks, strict=True)
        ),
        default=0,
    )
    return activations + logits + gathered + _centres(layout, blocks, block_size) + SCORES


def _centres(layout: Layout, blocks: tuple[int, ...], block_size: int) -> int:
    """Centres of keys, their table of all positions, and what is added to one gathered layer."""
    total = most = 0
    for group, count in zip(layout.groups, blocks, strict=True):
        layers = [layer for layer in group.layers if layer.wants_centre]
        total += sum(centre_bytes(layer.heads, layer.k_dim) for layer in layers)
        rows = [(layer.heads * 2 + 1) * layer.k_dim * 4 for layer in layers]
        most = max(most, max(rows, default=0) * (count * block_size + UNIT))
    return total + most


def chunk_tokens(layout: Layout, length: int, chunk: int) -> int:
    """How many tokens of a prompt to store in one step after `length` of them: fewer where scores are large.

    MLX's CPU attention makes the scores of a whole chunk, [query heads, chunk, length + chunk].
    """
    if mx.default_device() == mx.gpu:
        return chunk
    per_token = layout.query_heads * (length + chunk) * 4 * 2
    return max(1, min(chunk, SCORES // max(1, per_token)))


def divide(
    layout: Layout, budget: int, block_size: int, max_batch: int, chunk: int, snapshots: int = 0
) -> tuple[int, ...]:
    """How many blocks of each group `budget` bytes buy beside `snapshots` bytes of snapshots.

    Raises MemoryBudgetError if not even one sequence fits.
    """
    states = layout.sequence_bytes * max_batch + snapshots
    windows = [group for group in layout.groups if group.rule.span is not None]
    full = [group for group in layout.groups if group.rule.span is None]
    # Of each window: one sequence that is prefilled, and each further one, which is decoding.
    first = {group: _window_blocks(group, block_size, chunk) for group in windows}
    further = {group: _window_blocks(group, block_size, _steady_chunk(group, chunk)) for group in windows}
    first_bytes = sum(group.token_bytes * block_size * first[group] for group in windows)
    further_bytes = sum(group.token_bytes * block_size * further[group] for group in windows)
    full_block_bytes = sum(group.token_bytes for group in full) * block_size

    least = states + first_bytes + full_block_bytes
    if budget < least:
        raise MemoryBudgetError(
            f"--kv-memory is {format_size(budget)}, but this model needs at least {format_size(least)} "
            f"(block size {block_size}, prefill chunk {chunk}, max batch {max_batch}); "
            "raise --kv-memory, or lower --prefill-chunk or --max-batch"
        )
    share = (budget - states) // 2 if full else budget - states
    sequences = min(WINDOWS * max_batch, 1 + max(0, share - first_bytes) // max(1, further_bytes))
    window_bytes = first_bytes + further_bytes * (sequences - 1)
    full_blocks = (budget - states - window_bytes) // max(1, full_block_bytes)
    return tuple(
        _cap(
            group,
            full_blocks if group in full else first[group] + further[group] * (sequences - 1),
            block_size,
            first.get(group, 1),
        )
        for group in layout.groups
    )


def _steady_chunk(group: Group, chunk: int) -> int:
    """The steps a sequence needs room for once its prompt is stored: a ring keeps its whole reservation."""
    return chunk if group.rule.ring else 1


def _window_blocks(group: Group, block_size: int, chunk: int) -> int:
    """Blocks a sequence of any length holds of a window."""
    return blocks_needed(group.rule, block_size, 2**62, chunk)


def _cap(group: Group, blocks: int, block_size: int, least: int) -> int:
    """Fewer blocks where MLX's 32-bit indices or its CUDA attention ask for it, the latter not below `least`."""
    widest = max(layer.heads * max(layer.k_dim, layer.v_dim) for layer in group.layers)
    blocks = min(blocks, MAX_ELEMENTS // max(1, widest * block_size))
    # A stride of 33,088 tokens took 163 us on an H200, one of 33,792 = 132 * 256 tokens 57 us.
    unit = 256 // math.gcd(256, block_size)
    rounded = blocks - blocks % unit
    return rounded if rounded >= max(16 * unit, least) else blocks


def make_plan(model: Module, settings: Settings, context: int | None, calibration: Sequence[int] = ()) -> Plan:
    """The plan for `model`; `context` is the longest conversation it is made for, if that is known.

    With tokens for `calibration`, the model is run on them where the format of its keys wants their centres.
    """
    layout = encoded(read_layout(model, settings.max_kv_size), parse(settings.kv_format), settings.kv_plain_layers)
    layout = centred(layout, model, calibration)
    device = read_device()
    weights = weight_bytes(model)
    chunk = settings.prefill_chunk or (2048 if mx.default_device() == mx.gpu else 512)
    # Weights that are loaded are already missing from what is available.
    device = replace(device, available=device.available + min(weights, mx.get_active_memory()))
    rest = max(0, device.available - weights - MARGIN - SCORES)
    if settings.kv_memory is None:
        budget = rest // 2
        if context is not None:
            budget = min(budget, _full_length_bytes(layout, settings, context, chunk))
    else:
        budget = parse_size(settings.kv_memory, whole=rest, name="--kv-memory")
    snapshots = 0
    if settings.prefix_cache:
        snapshots = min(budget // 4, SNAPSHOTS * settings.max_batch * layout.sequence_bytes)
    blocks = divide(layout, budget, settings.block_size, settings.max_batch, chunk, snapshots)
    workspace = workspace_bytes(model, layout, blocks, settings.block_size, settings.max_batch, chunk)
    return Plan(
        device=device,
        layout=layout,
        weights=weights,
        budget=budget,
        blocks=blocks,
        block_size=settings.block_size,
        max_batch=settings.max_batch,
        prefill_chunk=chunk,
        workspace=workspace,
        snapshot_bytes=snapshots,
        queue=_queue_bytes(layout, settings, chunk) if settings.disk_cache is not None else 0,
    )


def largest_part(layout: Layout, block_size: int) -> int:
    """Bytes of the largest thing that moves between memory and disk as a whole, with its header."""
    blocks = [group.token_bytes * block_size for group in layout.groups]
    return max([*blocks, layout.sequence_bytes]) + HEADER


def _queue_bytes(layout: Layout, settings: Settings, chunk: int) -> int:
    """Room for what one chunk of a prompt may evict, and never less than for two parts."""
    least = 2 * largest_part(layout, settings.block_size)
    if settings.disk_queue is not None:
        queue = parse_size(settings.disk_queue, name="--disk-queue")
        if queue < least:
            raise MemoryBudgetError(
                f"--disk-queue is {format_size(queue)}, but two blocks of this model are {format_size(least)}; "
                "raise it to that, or lower --block-size"
            )
        return queue
    token = sum(group.token_bytes for group in layout.groups)
    evicted = token * (chunk + 2 * settings.block_size) + 2 * layout.sequence_bytes
    return max(least, min(QUEUE, evicted))


def _full_length_bytes(layout: Layout, settings: Settings, context: int, chunk: int) -> int:
    """What `max_batch` conversations of `context` tokens need."""
    each = layout.sequence_bytes
    for group in layout.groups:
        blocks = blocks_needed(group.rule, settings.block_size, context, chunk)
        each += blocks * settings.block_size * group.token_bytes
    return each * settings.max_batch
