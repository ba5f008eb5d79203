"""The memory plan: weights + KV pool + workspace + margin, compared with the memory of the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx.nn.layers.base import Module

from ...config import Settings
from ...errors import MemoryBudgetError
from ...units import format_size, parse_size
from ..device import kind
from ..formats import parse
from ..layout import Layout
from ..layout.calibration import centred
from ..layout.fingerprint import stored_as
from ..layout.reader import read_layout
from ..layout.stored import encoded
from ..pool.table import blocks_needed
from .budget import (
    arrival_bytes,
    divide,
    full_length_bytes,
    largest_part,
    least_bytes,
    queue_bytes,
    steady_chunk,
    way_bytes,
)
from .device import Device, read_device
from .workspace import SCORES, weight_bytes, workspace_bytes

# For the interpreter, the tokenizer, MLX's kernels and what else the process holds.
MARGIN = 256 * 2**20
# Snapshots of recurrent states to keep, for each sequence that may run, if a quarter of the budget allows.
SNAPSHOTS = 8
# Parts on their way from the disk: one for each of two threads that read, and states. On CUDA, two blocks and states.
UNPLACED = 3
# Parts in a store's client, in addition to our own buffers: one for each fetching thread, and one being sent.
REMOTE_UNPLACED = 5


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
    # For blocks on their way to the remote tier, and from there; 0 without one.
    remote_out: int = 0
    remote_in: int = 0

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
        return stored_as(self.layout, self.block_size)

    @property
    def staging(self) -> int:
        """Memory for blocks on their way to colder tiers and back."""
        return self.disk_staging + self.remote_staging

    @property
    def disk_staging(self) -> int:
        return self.queue + UNPLACED * largest_part(self.layout, self.block_size) if self.queue else 0

    @property
    def remote_staging(self) -> int:
        unplaced = REMOTE_UNPLACED * largest_part(self.layout, self.block_size)
        return self.remote_out + self.remote_in + unplaced if self.remote_in else 0

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
            others = blocks_needed(group.rule, self.block_size, length, steady_chunk(group, self.prefill_chunk))
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


def make_plan(
    model: Module,
    settings: Settings,
    context: int | None,
    calibration: Sequence[int] = (),
    available: int | None = None,
) -> Plan:
    """The plan for `model`; `context` is the longest conversation it is made for, if that is known.

    With tokens for `calibration`, the model is run on them where the format of its keys wants their centres. Where
    bytes are `available` for it, not what the device has free now counts.
    """
    layout = encoded(read_layout(model, settings.max_kv_size), parse(settings.kv_format), settings.kv_plain_layers)
    layout = centred(layout, model, calibration)
    device = read_device()
    weights = weight_bytes(model)
    chunk = settings.prefill_chunk or (512 if kind() == "cpu" else 2048)
    # Weights that are loaded are already missing from what is available.
    free = device.available + min(weights, mx.get_active_memory()) if available is None else available
    device = replace(device, available=free)
    rest = max(0, device.available - weights - MARGIN - SCORES)
    least = least_bytes(layout, settings.block_size, settings.max_batch, chunk)
    budget = _budget(layout, settings, context, chunk, rest, least)
    snapshots = 0
    if settings.prefix_cache:
        snapshots = min(budget // 4, SNAPSHOTS * settings.max_batch * layout.sequence_bytes, max(0, budget - least))
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
        queue=queue_bytes(layout, settings, chunk) if settings.disk_cache is not None else 0,
        remote_out=way_bytes(layout, settings, chunk) if settings.remote_tier is not None else 0,
        remote_in=arrival_bytes(layout, settings, chunk) if settings.remote_tier is not None else 0,
    )


def _budget(layout: Layout, settings: Settings, context: int | None, chunk: int, rest: int, least: int) -> int:
    """For KV, where weights, margin and scores leave `rest`: what is set in bytes, or else a share of that.

    No share is less than the `least`: where that is too much, the plan says by how much (`Plan.check`).
    """
    given = settings.kv_memory
    if given is None:
        budget = rest // 2
        if context is not None:
            budget = min(budget, full_length_bytes(layout, settings, context, chunk))
    else:
        # A share of nothing is nothing.
        budget = parse_size(given, whole=rest, name="--kv-memory", zero=True)
        if not (isinstance(given, str) and "%" in given):
            return budget
    return max(budget, least)
