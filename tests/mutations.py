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
from onekv.memory.blocks import Blocks
from onekv.memory.kv import KVMemory
from onekv.memory.pool import Pool
from onekv.memory.table import Table
from onekv.prefix import restore
from onekv.prefix.cache import PrefixCache
from onekv.prefix.eviction import Eviction
from onekv.prefix.index import Index
from onekv.sim.script import run_seed
from onekv.tiers.reader import Readers
from onekv.tiers.writer import Writer

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
    "all salts share one tree": Mutation(
        Index, "root", "if salt not in self.roots:", "salt = ''\n    if salt not in self.roots:"
    ),
    "a checksum is not checked": Mutation(Readers, "_load", "digest.digest() != row.checksum", "False"),
    "a part that could not be read counts as read": Mutation(
        Readers, "_load_one", "self._load(row, target) or True", "bool(self._load(row, target)) or True"
    ),
    "a snapshot counts at a shorter length": Mutation(
        PrefixCache, "_pieces", "end == node.end and self._has_snapshot(node)", "self._has_snapshot(node)"
    ),
    "a state from the wrong boundary": Mutation(
        PrefixCache,
        "_store_snapshot",
        "self._memory.states_of(sequence))",
        "self.__dict__.setdefault('_first', self._memory.states_of(sequence)))",
    ),
    "a promise is kept for ever": Mutation(Table, "close", "self.pool.unreserve(self.reserved)", "pass"),
    "a window restores without its oldest block": Mutation(
        restore, "_readable", "piece.end > first", "piece.start > first"
    ),
    "a block is published before it is written": Mutation(
        PrefixCache, "publish", "min(sequence.length, len(tokens))", "min(sequence.length + self._size, len(tokens))"
    ),
    "a node that a sequence goes on from is evicted": Mutation(
        Eviction, "_evict", "if self.removable(node):", "if not node.children and not node.pins:"
    ),
    "a pinned tail is taken over": Mutation(
        PrefixCache,
        "_continue_block",
        "sole and length == tail.end and not tail.children and not tail.pins",
        "length == tail.end and not tail.children",
    ),
    "a tail's copy is the wrong way round": Mutation(
        PrefixCache,
        "_continue_block",
        "pool.copy(tail.blocks[group], table.blocks[-1])",
        "pool.copy(table.blocks[-1], tail.blocks[group])",
    ),
    "a window forgets one block too many": Mutation(
        Table, "_forget", "first = min(first, len(self.blocks))", "first = min(first + 1, len(self.blocks))"
    ),
    "a forgotten block is not reserved again": Mutation(Table, "_forget", "    self._keep_in_reserve()", "    pass"),
    "ends beside longer siblings are overlooked": Mutation(
        PrefixCache, "_furthest", "-1 if self._mixed else len(match.nodes)", "len(match.nodes)"
    ),
    "a failed request's blocks are not closed": Mutation(Engine, "_discard", "self.memory.close(sequence)", "pass"),
    "who fails in admission stays in the queue": Mutation(
        Engine, "_on_behalf_of", "if not request.finished:", "if not request.finished and request.state != 'waiting':"
    ),
    "what changed is forgotten when a step fails": Mutation(
        Engine, "_on_behalf_of", "self._settle()", "self._changed.clear()\n        self._settle()"
    ),
    "an end is told twice": Mutation(
        Jobs,
        "_report",
        "self._jobs.pop(request)",
        "self._jobs[request] if request.cached_tokens else self._jobs.pop(request)",
    ),
    "a disk block goes to its neighbour's place": Mutation(
        Blocks, "write", "run.rows[:, :, block]", "run.rows[:, :, block - 1]"
    ),
    "a loaded sequence has one token less": Mutation(
        PrefixCache, "_loaded", "sequence.length = loading.length", "sequence.length = loading.length - 1"
    ),
    "the limit of the disk is not held": Mutation(
        Writer, "make_room", "if not victims:", "return True\n        if not victims:"
    ),
    "an unpinned block stays pinned": Mutation(
        Pool, "pin", "self.pinned[block] = pinned", "self.pinned[block] = self.pinned[block] or pinned"
    ),
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
