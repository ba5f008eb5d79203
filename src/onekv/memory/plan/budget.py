"""How the KV budget is divided.

It is one number. Recurrent states for `max_batch` sequences come first; sliding windows get what `max_batch` sequences
need, at most half of the rest; full attention gets the remainder, because there more blocks always mean longer or more
conversations. Memory for blocks in flight to the disk is separate.
"""

import math

from ...config import Settings
from ...errors import MemoryBudgetError
from ...units import format_size, parse_size
from ..layout import Group, Layout
from ..pool.table import blocks_needed

# One array of a pool stays below what MLX indexes with 32 bits.
MAX_ELEMENTS = 2**31 - 1
# Sequences whose window is kept, for each that may run, if half of the budget allows.
WINDOWS = 4
# A generous estimate of the overhead of a block's file.
HEADER = 2**16
# The most memory for blocks on their way to the disk, unless it is set.
QUEUE = 256 * 2**20
# The most memory for blocks that have come from another machine.
ARRIVALS = 64 * 2**20


def divide(
    layout: Layout, budget: int, block_size: int, max_batch: int, chunk: int, snapshots: int = 0
) -> tuple[int, ...]:
    """How many blocks of each group fit into `budget` bytes, in addition to `snapshots` bytes of snapshots.

    Raises MemoryBudgetError if not even one sequence fits.
    """
    states = layout.sequence_bytes * max_batch + snapshots
    windows, full = _windows_and_full(layout)
    # Of each window: one sequence that is prefilled, and each further one, which is decoding.
    first = {group: _window_blocks(group, block_size, chunk) for group in windows}
    further = {group: _window_blocks(group, block_size, steady_chunk(group, chunk)) for group in windows}
    first_bytes = sum(group.token_bytes * block_size * first[group] for group in windows)
    further_bytes = sum(group.token_bytes * block_size * further[group] for group in windows)
    full_block_bytes = sum(group.token_bytes for group in full) * block_size

    least = least_bytes(layout, block_size, max_batch, chunk) + snapshots
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


def least_bytes(layout: Layout, block_size: int, max_batch: int, chunk: int) -> int:
    """The smallest budget: states of `max_batch` sequences, and room for one of them."""
    windows, full = _windows_and_full(layout)
    first = sum(group.token_bytes * block_size * _window_blocks(group, block_size, chunk) for group in windows)
    return layout.sequence_bytes * max_batch + first + sum(group.token_bytes for group in full) * block_size


def _windows_and_full(layout: Layout) -> tuple[list[Group], list[Group]]:
    windows = [group for group in layout.groups if group.rule.span is not None]
    return windows, [group for group in layout.groups if group.rule.span is None]


def steady_chunk(group: Group, chunk: int) -> int:
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


def largest_part(layout: Layout, block_size: int) -> int:
    """Bytes of the largest thing that moves between memory and disk as a whole, with its header."""
    blocks = [group.token_bytes * block_size for group in layout.groups]
    return max([*blocks, layout.sequence_bytes]) + HEADER


def queue_bytes(layout: Layout, settings: Settings, chunk: int) -> int:
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
    return way_bytes(layout, settings, chunk)


def way_bytes(layout: Layout, settings: Settings, chunk: int) -> int:
    """Room for about a chunk of a prompt on its way to a colder tier, and never less than for two parts."""
    token = sum(group.token_bytes for group in layout.groups)
    evicted = token * (chunk + 2 * settings.block_size) + 2 * layout.sequence_bytes
    return max(2 * largest_part(layout, settings.block_size), min(QUEUE, evicted))


def arrival_bytes(layout: Layout, settings: Settings, chunk: int) -> int:
    """Room for parts that have come from another machine and wait for the end of a step; four at least."""
    return max(4 * largest_part(layout, settings.block_size), min(ARRIVALS, way_bytes(layout, settings, chunk)))


def full_length_bytes(layout: Layout, settings: Settings, context: int, chunk: int) -> int:
    """What `max_batch` conversations of `context` tokens need."""
    each = layout.sequence_bytes
    for group in layout.groups:
        blocks = blocks_needed(group.rule, settings.block_size, context, chunk)
        each += blocks * settings.block_size * group.token_bytes
    return each * settings.max_batch
