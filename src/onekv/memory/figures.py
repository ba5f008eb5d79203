"""The state of the memory at one moment, as plain figures."""

from dataclasses import dataclass

# What a block is, as a byte: free, cached or pinned while no sequence refers to it, else HELD and one for each further
# sequence that shares it, up to MOST. LOADING is held, too: its content is on its way from a colder tier.
FREE, CACHED, PINNED, HELD = range(4)
MOST, LOADING = 254, 255


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
