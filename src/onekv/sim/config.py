"""What a simulated server is like: layers, sizes and settings, chosen by a random generator."""

from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import mlx.core as mx

from ..memory.formats import PLAIN, parse
from ..memory.layout import Group, KVLayer, Layout, Leaf, Rule, StateLayer
from ..memory.plan import Device, Plan
from ..memory.table import blocks_needed
from ..tiers.store import LEAST_LIMIT
from .truth import VOCABULARY

RULES = (
    Rule(),
    Rule(window=2),
    Rule(window=5),
    Rule(window=9),
    Rule(window=6, keep=3),
    Rule(chunk=4),
    Rule(window=7, keep=4, ring=True),
)
FORMATS = ("q8", "q4", "tq4", "k8v4")
STATE = StateLayer("layer 9", (((8,), mx.uint8), ((8,), mx.uint8)))


@dataclass(frozen=True)
class Config:
    layout: Layout
    # Blocks of each group.
    blocks: tuple[int, ...]
    block_size: int
    chunk: int
    max_batch: int
    decode_steps: int
    snapshots: int
    prefix_cache: bool
    max_waiting: int
    max_wait: float
    # None: there is no disk cache.
    disk_limit: int | None
    # Parts that may wait to be written.
    staging: int
    write_through: bool
    write_budget: int | None
    # Whether tokens are chosen by MLX, as in earnest, or on the host.
    device: bool
    model: int = 0

    @cached_property
    def plan(self) -> Plan:
        return Plan(
            device=Device("simulated", 2**40, 2**40),
            layout=self.layout,
            weights=0,
            budget=2**30,
            blocks=self.blocks,
            block_size=self.block_size,
            max_batch=self.max_batch,
            prefill_chunk=self.chunk,
            workspace=0,
            snapshot_bytes=self.snapshots * self.layout.sequence_bytes,
            queue=0,
        )

    def describe(self) -> str:
        groups = ", ".join(
            f"{group.rule} ({group.layers[0].codecs}, {count} blocks)"
            for group, count in zip(self.layout.groups, self.blocks, strict=True)
        )
        disk = "no disk" if self.disk_limit is None else f"disk of {self.disk_limit} bytes"
        states = f", recurrent with {self.snapshots} snapshots" if self.layout.states else ""
        return (
            f"[{groups}{states}] blocks of {self.block_size}, chunks of {self.chunk}, batch of {self.max_batch}, {disk}"
        )


def make_config(random: Random) -> Config:
    rules = random.sample(RULES, random.choice((0, 1, 1, 1, 2, 2, 2, 3)))
    recurrent = not rules or random.random() < 0.3
    layers = [_layer(random, number) for number in range(len(rules))]
    groups = tuple(Group(rule, (layer,)) for rule, layer in zip(rules, layers, strict=True))
    # The model finds its place in the pool by itself; only states come to it through its caches.
    structure = (Leaf(-1, 0),) if recurrent else ()
    layout = Layout(groups, (STATE,) if recurrent else (), structure, VOCABULARY, 1)
    block_size, chunk, max_batch = random.choice((2, 4, 4, 8)), random.randint(2, 14), random.randint(1, 4)
    disk = random.random() < 0.6
    return Config(
        layout,
        tuple(_blocks(random, rule, block_size, chunk, max_batch) for rule in rules),
        block_size,
        chunk,
        max_batch,
        decode_steps=random.randint(1, 3),
        snapshots=random.randint(1, 12),
        prefix_cache=disk or random.random() < 0.95,
        max_waiting=random.choice((1, 4, 16)),
        max_wait=random.choice((0.05, 5.0, 600.0)),
        disk_limit=LEAST_LIMIT + random.choice((20_000, 60_000, 400_000, 2**25)) if disk else None,
        staging=random.choice((2, 4, 30)),
        write_through=random.random() < 0.3,
        write_budget=random.choice((None, None, None, 30_000)),
        device=random.random() < 0.01,
    )


def vary(config: Config, random: Random) -> Config:
    """The same folder with other settings, and now and then for another model."""
    return replace(
        config,
        max_batch=random.randint(1, 4),
        decode_steps=random.randint(1, 3),
        write_through=random.random() < 0.3,
        staging=random.choice((2, 4, 30)),
        model=random.choice((0, 0, 0, 1)),
        disk_limit=None
        if config.disk_limit is None
        else max(config.disk_limit // random.choice((1, 1, 2)), LEAST_LIMIT + 20_000),
    )


def _layer(random: Random, number: int) -> KVLayer:
    name = f"layer {number}"
    if random.random() < 0.15:
        return KVLayer(name, 1, 32, 32, mx.float32, parse(random.choice(FORMATS)))
    if random.random() < 0.1:
        # Wide ones fill a disk soon.
        return KVLayer(name, 1, 256, 0, mx.float32, PLAIN)
    dtype = random.choice((mx.float32, mx.bfloat16))
    # Keys that hold a whole hash; values may be anything, nothing too.
    least = 8 // dtype.size
    return KVLayer(
        name, random.choice((1, 1, 2)), random.choice((least, least + 1)), random.choice((0, 0, 1, 3)), dtype, PLAIN
    )


def _blocks(random: Random, rule: Rule, block_size: int, chunk: int, max_batch: int) -> int:
    """Room for some sequences: few, so that they get in each other's way."""
    if rule.span is None:
        return random.randint(6, 14) * 8 // block_size + random.randint(0, 5)
    return blocks_needed(rule, block_size, 2**62, chunk) * random.randint(1, max_batch + 1) + random.randint(0, 3)
