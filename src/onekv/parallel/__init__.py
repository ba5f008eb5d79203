"""Tensor parallelism: one model on several machines or devices, started with `mlx.launch`.

Each rank holds a shard of the weights (mlx-lm's own `model.shard`) and a pool for the KV of its own heads. All pools
use the same block ids. Inside a forward pass the ranks communicate through MLX's collectives; everything else travels
over TCP connections of our own, because ranks that coordinate through collectives hang as soon as two of them disagree.

Ownership:

    rank 0      HTTP, requests, scheduler, prefix index, sampling, speculation: an ordinary `Engine`. Only its memory
                (leading.py) and its disk tier (tier.py) differ: whatever they do, they also tell the other ranks
    followers   model shard, pool arrays, a disk tier. They execute what rank 0 tells them, in order (follow.py), and
                make no decisions, so no decision can differ

What rank 0 sends is the complete list of things that change a rank's arrays:

    pass, go | drop                  a forward pass: tokens, lengths, and what changed in the block tables of its rows
    copy, erase                      blocks within the pool
    keep, keep_read, restore         recurrent states, by number
    close                            a sequence is gone
    has, offer, expect, read, ...    the rank's disk tier

The alternative, running the same engine on every rank and replaying requests, needs every nondeterministic input
replayed as well (clocks, tier answers, cancellations, sampled tokens, calls between steps), and a missed one goes
unnoticed until the outputs are garbage. Here a follower has no state of its own to drift; its tables are verified
against a digest whenever they change.

    group.py      who takes part, how ranks find each other    wire.py       authenticated messages
    links.py      both ends of the connections                 guard.py      ends all ranks if one fails
    sharding.py   a rank's share of the model                  planning.py   one plan for all ranks
    lead.py       start-up on rank 0                           follow.py     the other ranks
    sharded.py    memory: what all ranks have in common        tier.py       the disk tiers of all ranks as one
    leading.py    memory of rank 0                             following.py  memory of the others

A launch goes through these states, on all ranks together; a failure in any of them ends all ranks:

    connecting -> loading -> planning -> open (passes, copies, disk) -> closed
"""

from typing import TYPE_CHECKING

from ..errors import ParallelError
from .group import connect, launched_rank

if TYPE_CHECKING:
    from ..config import Settings
    from .lead import Leader

__all__ = ["follow_if_launched", "join", "launched_rank"]

_leaders: list["Leader"] = []


def join(settings: "Settings", model: object, limit: float) -> "Leader | None":
    """Connect to the other ranks of this launch; None if this process is the only one.

    Returns on rank 0 only. Any other rank follows rank 0 until it is done, then exits. `limit` is the maximum duration
    of a pass, in seconds. Raises SettingError or ParallelError.
    """
    follow_if_launched()
    if launched_rank() is None or (group := connect()) is None:
        return None
    from .lead import Leader

    if _leaders:
        raise ParallelError("a launch runs one model, once; start the ranks again to load another")
    _leaders.append(Leader(group, limit))
    _leaders[0].check(settings, model)
    return _leaders[0]


def follow_if_launched() -> None:
    """On any rank but 0, follow rank 0 and exit; otherwise do nothing."""
    if launched_rank() and (group := connect()) is not None:
        from .follow import follow

        follow(group)
