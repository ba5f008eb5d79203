"""The configuration of a simulated server: layers, sizes and settings, chosen by a random generator."""

from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import mlx.core as mx

from ..config import REMOTE_WRITES, Settings
from ..memory.formats import AUTO, parse
from ..memory.layout import Group, KVLayer, Layout, Leaf, Rule, StateLayer
from ..memory.plan import Plan
from ..memory.plan.device import Device
from ..memory.pool.table import blocks_needed
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
FORMATS = ("q8", "q4", "tq4", "k8v4", "k5v4")
STATE = StateLayer("layer 9", (((8,), mx.uint8), ((8,), mx.uint8)))


@dataclass(frozen=True)
class Kind:
    """A group of one layer: what it keeps, in which form, and how many blocks it has."""

    rule: Rule
    heads: int
    k_dim: int
    v_dim: int
    dtype: str
    format: str
    blocks: int = 0

    def layer(self, number: int) -> KVLayer:
        dtype: mx.Dtype = getattr(mx, self.dtype)
        return KVLayer(f"layer {number}", self.heads, self.k_dim, self.v_dim, dtype, parse(self.format))


@dataclass(frozen=True)
class Config:
    kinds: tuple[Kind, ...]
    recurrent: bool
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
    # Every n-th turn the tier has no answer yet; 0: it always has one at once.
    late_answers: int = 0
    # Every n-th step of a request has a guess at its next tokens, right or wrong; 0: there are none. And their number.
    guesses: int = 0
    draft_tokens: int = 3
    # Whether several prompts are stored in one pass.
    together: bool = False
    # What is written to a store that servers share; None: there is none.
    remote: str | None = None

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> "Config":
        """What `dataclasses.asdict` made of one."""
        kinds = tuple(Kind(**{**kind, "rule": Rule(**kind["rule"])}) for kind in kept["kinds"])
        return cls(**{**kept, "kinds": kinds})

    @cached_property
    def layout(self) -> Layout:
        groups = tuple(Group(kind.rule, (kind.layer(number),)) for number, kind in enumerate(self.kinds))
        # The model finds its place in the pool by itself; only states come to it through its caches.
        structure = (Leaf(-1, 0),) if self.recurrent else ()
        return Layout(groups, (STATE,) if self.recurrent else (), structure, VOCABULARY, 1)

    @cached_property
    def plan(self) -> Plan:
        return Plan(
            device=Device("simulated", 2**40, 2**40),
            layout=self.layout,
            weights=0,
            budget=2**30,
            blocks=tuple(kind.blocks for kind in self.kinds),
            block_size=self.block_size,
            max_batch=self.max_batch,
            prefill_chunk=self.chunk,
            workspace=0,
            snapshot_bytes=self.snapshots * self.layout.sequence_bytes,
            queue=0,
        )

    @cached_property
    def settings(self) -> Settings:
        return Settings(
            prefix_cache=self.prefix_cache,
            decode_steps=self.decode_steps,
            disk_policy="write_through" if self.write_through else None,
            speculate="auto" if self.guesses else "off",
            draft_tokens=self.draft_tokens,
        )

    def describe(self) -> str:
        groups = ", ".join(
            f"{group.rule} ({group.layers[0].codecs}, {kind.blocks} blocks)"
            for group, kind in zip(self.layout.groups, self.kinds, strict=True)
        )
        disk = "no disk" if self.disk_limit is None else f"disk of {self.disk_limit} bytes"
        states = f", recurrent with {self.snapshots} snapshots" if self.layout.states else ""
        disk += f", store ({self.remote})" if self.remote is not None else ""
        return (
            f"[{groups}{states}] blocks of {self.block_size}, chunks of {self.chunk}, batch of {self.max_batch}, {disk}"
        )


def make_config(random: Random) -> Config:
    # By itself: seeds at which something was found keep their scripts.
    apart = Random(repr(random.getstate()))
    together = apart.random() < 0.75
    rules = random.sample(RULES, random.choice((0, 1, 1, 1, 2, 2, 2, 3)))
    recurrent = not rules or random.random() < 0.3
    block_size, chunk, max_batch = random.choice((2, 4, 4, 8)), random.randint(2, 14), random.randint(1, 4)
    if together:
        # Room for several prompts in a pass.
        chunk *= apart.choice((2, 4, 8))
    kinds = tuple(
        replace(_kind(random, rule), blocks=_blocks(random, rule, block_size, chunk, max_batch)) for rule in rules
    )
    disk = random.random() < 0.6
    config = Config(
        kinds,
        recurrent,
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
        late_answers=random.choice((0, 0, 2, 5)),
        guesses=random.choice((0, 0, 1, 2)),
        draft_tokens=random.randint(1, 6),
        together=together,
    )
    return replace(config, remote=apart.choice((None, None, None, *REMOTE_WRITES)) if config.prefix_cache else None)


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
        together=random.random() < 0.75,
    )


def _kind(random: Random, rule: Rule) -> Kind:
    if random.random() < 0.15:
        return Kind(rule, 1, 32, 32, "float32", random.choice(FORMATS))
    if random.random() < 0.1:
        # Wide ones fill a disk soon.
        return Kind(rule, 1, 256, 0, "float32", AUTO)
    # Keys that hold a whole hash; values may be anything, nothing too.
    dtype, keys = random.choice((("float32", 2), ("bfloat16", 4)))
    return Kind(rule, random.choice((1, 1, 2)), keys + random.choice((0, 1)), random.choice((0, 0, 1, 3)), dtype, AUTO)


def _blocks(random: Random, rule: Rule, block_size: int, chunk: int, max_batch: int) -> int:
    """Room for some sequences: few, so that they get in each other's way."""
    if rule.span is None:
        return random.randint(6, 14) * 8 // block_size + random.randint(0, 5)
    needed = blocks_needed(rule, block_size, 2**62, chunk)
    return needed * random.choice((1, 1, 2, max_batch + 1)) + random.randint(0, 3)
