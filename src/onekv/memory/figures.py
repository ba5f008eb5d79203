"""What the memory holds at one moment, as plain figures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolStats:
    """Blocks of one group: held by running sequences, idle (cached, not in use), pinned and not in use, or free.

    `reserved` of the idle and free ones are promised to running sequences, `available` are not.
    """

    group: str
    layers: int
    block_bytes: int
    blocks: int
    held: int
    peak_held: int
    idle: int
    peak_idle: int
    pinned: int
    free: int
    reserved: int
    available: int


@dataclass(frozen=True)
class KVStats:
    """All pools, their bytes, and those of the recurrent states that are held."""

    pools: tuple[PoolStats, ...]
    pool_bytes: int
    state_bytes: int
