"""Faults planted into the engine, one at a time, to see that the simulation finds each of them.

    python tests/mutations.py                    # all, with the steps that it took
    python tests/mutations.py "hash without parent" --steps 200000

A mutation is a piece of a function's source and what stands there instead. Each is a mistake that somebody could make.
"""

import argparse
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from onekv.engine.engine import Engine
from onekv.engine.jobs import Jobs
from onekv.engine.scheduler import Scheduler
from onekv.memory.kv import KVMemory
from onekv.memory.pool import Pool
from onekv.memory.pool.blocks import Blocks
from onekv.memory.pool.table import Table
from onekv.prefix import restore
from onekv.prefix.events import Unsent
from onekv.prefix.find import Finder
from onekv.prefix.index import Index
from onekv.prefix.lease import Lease
from onekv.prefix.store import Store
from onekv.sim.script import run_seed
from onekv.tiers.limited import LimitedStore
from onekv.tiers.reader import Load
from onekv.tiers.remote.fetches import Fetches

SEED, STEPS_PER_SEED = 5000, 600


@dataclass(frozen=True)
class Mutation:
    owner: object
    function: str
    right: str
    wrong: str


MUTATIONS = {
    "a reference is not released": Mutation(
        Table, "close", "self.pool.release(self.held)", "self.pool.release(self.held[1:])"
    ),
    "a hash without its parent": Mutation(Index, "key_after", "_hash(parent + tokens)", "_hash(tokens)"),
    "a removed block is not reported": Mutation(
        Index, "remove", "self.listener is not None", "self.listener is not None and node.start"
    ),
    "a block that came back is reported as removed": Mutation(
        Unsent, "add", "self._since.pop(event.key, None) is None", "True"
    ),
    "all salts share one tree": Mutation(
        Index, "root", "if salt not in self.roots:", "salt = ''\n    if salt not in self.roots:"
    ),
    "a checksum is not checked": Mutation(Load, "_read", "digest.digest() != row.checksum", "False"),
    "a part that could not be read counts as read": Mutation(
        Load, "run", "self.ended = True", "self.ended, self.problem = True, None"
    ),
    "a store's block is used without verification": Mutation(
        Fetches, "_fetch", "sealer.problem(name, content, fetch.image, fetch.address)", "None"
    ),
    "a block that did not arrive counts as read": Mutation(
        Fetches, "read", "content is not None if f.ready", "True if f.ready"
    ),
    "a snapshot counts at a shorter length": Mutation(
        Finder, "_pieces", "end == node.end and self._snapshots", "self._snapshots"
    ),
    "a state from the wrong boundary": Mutation(
        Lease,
        "_keep_states",
        "self._store.memory.keep_states(self.sequence))",
        "self._store.__dict__.setdefault('_first', self._store.memory.keep_states(self.sequence)))",
    ),
    "a reservation is never released": Mutation(Table, "close", "self.pool.unreserve(self.reserved)", "pass"),
    "a window restores without its oldest block": Mutation(
        restore, "_readable", "piece.end > first", "piece.start > first"
    ),
    "a block is published before it is written": Mutation(
        Lease, "publish", "min(self.sequence.length, len", "min(self.sequence.length + self._size, len"
    ),
    "a node that a sequence continues from is evicted": Mutation(
        Store, "_evict", "if self.removable(node):", "if not node.children and not node.pins:"
    ),
    "a pinned tail is taken over": Mutation(
        Lease,
        "_continue_block",
        "sole and length == end.end and not (end.children or end.pins or end.leases)",
        "length == end.end and not end.children",
    ),
    "a tail's copy is the wrong way round": Mutation(
        Lease,
        "_continue_block",
        "pool.copy(end.blocks[group], table.blocks[-1])",
        "pool.copy(table.blocks[-1], end.blocks[group])",
    ),
    "a window forgets one block too many": Mutation(
        Table, "forget", "// self.pool.block_size, len", "// self.pool.block_size + 1, len"
    ),
    "a forgotten block is not reserved again": Mutation(Table, "forget", "    self._keep_in_reserve()", "    pass"),
    "a failed request's blocks are not closed": Mutation(
        Lease, "discard", "self._store.memory.close(self.sequence)", "pass"
    ),
    "a request that ends while waiting stays in the queue": Mutation(
        Scheduler, "move", 'state not in ("waiting", "looking")', 'state not in ("waiting", "looking", "finished")'
    ),
    "changes are lost when a step fails": Mutation(
        Engine, "_on_behalf_of", "self.runner.settle()", "self._changed.clear()\n        self.runner.settle()"
    ),
    "an end is reported twice": Mutation(
        Jobs,
        "_report",
        "self._jobs.pop(request)",
        "self._jobs[request] if request.cached_tokens else self._jobs.pop(request)",
    ),
    "a disk block goes to its neighbour's place": Mutation(Blocks, "write", "rows[:, block]", "rows[:, block - 1]"),
    "a loaded sequence has one token less": Mutation(
        Lease, "loaded", "self._continue(loading.length,", "self._continue(loading.length - 1,"
    ),
    "the disk limit is not enforced": Mutation(
        LimitedStore, "make_room", "if not victims:", "return True\n        if not victims:"
    ),
    "an unpinned block stays pinned": Mutation(
        Pool, "pin", "self.pinned[block] = pinned", "self.pinned[block] = self.pinned[block] or pinned"
    ),
    "what is behind a row's own tokens counts": Mutation(
        KVMemory, "step", "sequence.length += added", "sequence.length += max(counts)"
    ),
    "room is not made before blocks are taken": Mutation(
        Lease, "_extend", "self._store.make_room(group, table.lacking(end))", "pass"
    ),
    "a node that holds nothing stays": Mutation(Store, "_evict", "            self.prune(parent)", "            pass"),
    "a lease leaves its node twice": Mutation(Lease, "_move", "self._at.leases -= 1", "self._at.leases -= 2"),
    "a batch keeps the states of the one before": Mutation(
        KVMemory, "_load_states", "sequences == self._batch", "len(sequences) == len(self._batch)"
    ),
}


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """The function is another one inside."""
    original = vars(mutation.owner)[mutation.function]
    plain = inspect.unwrap(original)
    source = textwrap.dedent(inspect.getsource(plain))
    assert source.count(mutation.right) == 1, f"{mutation.function} does not have {mutation.right!r} once"
    changed: dict[str, object] = {}
    exec(compile(source.replace(mutation.right, mutation.wrong), "<mutation>", "exec"), plain.__globals__, changed)
    setattr(mutation.owner, mutation.function, changed[mutation.function])
    try:
        yield
    finally:
        setattr(mutation.owner, mutation.function, original)


def find(name: str, steps: int, seed: int = SEED) -> tuple[int, int, str | None]:
    """Simulate with a mutation until it is found: steps made, the seed that found it, and as what."""
    made = 0
    with planted(MUTATIONS[name]):
        while made < steps:
            outcome = run_seed(seed, STEPS_PER_SEED)
            made += max(1, outcome.turns)
            if outcome.problem is not None:
                return made, seed, outcome.problem
            seed += 1
    return made, seed, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    missed = 0
    for name in arguments.names or MUTATIONS:
        made, seed, problem = find(name, arguments.steps, arguments.seed)
        missed += problem is None
        verdict = "NOT FOUND in" if problem is None else "found in"
        print(f"{name:<50} {verdict:>12} {made:>8,} steps, seed {seed}: {problem}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
