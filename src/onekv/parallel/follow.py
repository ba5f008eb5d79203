"""A follower: executes what rank 0 tells it, in order.

    connected -> loaded -> planned -> open: passes, block copies, disk reads and writes -> ended

It owns its model shard, the pool arrays of its heads and its disk tier. It knows no requests, no prefix index and no
clock. An order that it cannot carry out ends all ranks (guard.py).
"""

import math
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import mlx.core as mx

from ..config import Settings
from ..errors import OneKVError
from ..memory.device import settle
from ..memory.plan import Plan
from ..memory.pool.blocks import BlockContent, Blocks, StatesContent
from ..memory.pool.sequence import State
from ..models import LoadedModel
from ..models.cpu import evaluate
from ..prefix.loading import Loader, Loading
from ..tiers.base import STATES, Address
from ..tiers.disk import DiskTier
from .following import Change, FollowingMemory
from .group import Group, device_of_rank, meet
from .guard import Guard
from .links import Link
from .planning import facts_of, plan_share
from .sharding import files_digest, open_share
from .tier import open_rank_tier


def follow(group: Group) -> NoReturn:
    """Follow rank 0 until it shuts down, then exit."""
    (wire,) = meet(group)
    guard = Guard(group.rank, group.size, {0: wire})
    link = Link(wire, guard)
    _end_with_rank_0(link)
    guard.start()
    try:
        Follower(group, link).run()
    except OneKVError as error:
        guard.fail(str(error))
    except Exception as error:  # noqa: BLE001  ends the process, and all other ranks
        guard.broke("an order of rank 0", error)
    raise SystemExit(0)


def _end_with_rank_0(link: Link) -> None:
    """Ctrl-C in a terminal reaches every rank. Rank 0 shuts down cleanly, for which it needs the followers."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # In a thread: the main thread may be in the middle of sending.
        threading.Thread(target=link.stop, daemon=True).start()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, stop)


class Follower:
    def __init__(self, group: Group, link: Link) -> None:
        self._group, self._link = group, link
        self._loaded: LoadedModel
        self._settings: Settings
        self._plan: Plan
        self._memory: FollowingMemory
        self._tier: DiskTier | None = None
        self._read_states: list[State] = []
        self._orders: dict[str, Callable[..., None]] = {
            "load": self._load,
            "plan": self._make_plan,
            "open": self._open,
            "pass": self._pass,
            "close": self._close,
            "keep": self._keep,
            "keep_read": self._keep_read,
            "restore": self._restore,
            "copy": self._copy,
            "erase": self._erase,
            "has": self._has,
            "offer": self._offer,
            "expect": self._expect,
            "unexpect": self._unexpect,
            "read": self._read,
            "touch": self._touch,
            "forget": self._forget,
            "clear": self._clear,
            "flush": self._flush,
        }

    def run(self) -> None:
        while (order := self._link.next())["do"] != "end":
            self._orders[order.pop("do")](**order)
        if self._tier is not None:
            self._tier.close()
        self._link.part()

    # Starting

    def _load(self, model: str, settings: dict[str, Any], limit: float) -> None:
        self._settings, self._link.guard.limit = Settings(**settings), limit
        self._loaded = open_share(model, self._settings.dtype, self._group, progress=False)
        evaluate(self._loaded.model)
        self._link.answer({"digest": files_digest(self._loaded.path), "device": device_of_rank()})

    def _make_plan(self, context: int | None, calibration: list[int], sharers: list[int]) -> None:
        shared = sharers[self._group.rank]
        self._plan = plan_share(self._loaded.model, self._settings, context, calibration, shared)
        if mx.default_device() == mx.gpu:
            mx.set_cache_limit(self._plan.workspace)
        self._link.answer(facts_of(self._plan))

    def _open(self, blocks: list[int], name: str) -> None:
        plan, model = self._plan, self._loaded.model
        kernels = self._settings.kernels != "off"
        sizes = (plan.layout, tuple(blocks), plan.block_size, plan.prefill_chunk, kernels)
        self._memory = FollowingMemory(self._link.guard, *sizes)
        self._blocks, self._loader = [Blocks(pool) for pool in self._memory.pools], Loader(self._memory)
        self._tier = open_rank_tier(self._settings, plan, model, name, self._group.rank, self._group.size)
        self._link.answer(self._tier is not None)

    # Passes

    def _pass(
        self,
        tokens: list[list[int]],
        rows: list[tuple[int, int]],
        counts: list[int],
        spread: bool,
        logits: bool,
        tables: list[tuple[int, list[Change]]] | None = None,
        digest: str = "",
        direct: list[bool] | None = None,
        unkept: list[int] | None = None,
    ) -> None:
        memory = self._memory
        if unkept is not None:
            memory.forget(unkept)
        if direct is not None:
            memory.direct = direct
        if tables is not None:
            memory.change(tables, digest)
        step = (rows, counts, spread, logits)
        memory.run_told(self._loaded.model, mx.array(tokens), *step, lambda: self._link.next()["do"] == "go")

    def _close(self, sequence: int) -> None:
        self._memory.end(sequence)

    def _keep(self, sequence: int, number: int) -> None:
        self._memory.keep_of(number, sequence)

    def _keep_read(self, number: int) -> None:
        self._memory.keep(number, self._read_states)

    def _restore(self, sequence: int, number: int) -> None:
        self._memory.restore_kept(sequence, number)

    def _copy(self, group: int, source: int, target: int) -> None:
        self._memory.pools[group].copy(source, target)

    def _erase(self, group: int, blocks: list[int]) -> None:
        self._memory.pools[group].erase(blocks)
        settle(self._memory.arrays())

    # The disk cache

    @property
    def _disk(self) -> DiskTier:
        assert self._tier is not None, "no disk tier is open on this rank"
        return self._tier

    def _has(self, keys: list[str]) -> None:
        names = [bytes.fromhex(key) for key in keys]
        found = self._disk.find(names)
        self._link.answer([sorted(found[name].parts) if name in found else [] for name in names])

    def _offer(self, key: str, parent: str, start: int, tokens: str, part: int, place: int, wait: bool) -> None:
        """`place` is a block id, or the number of recurrent states."""
        address = Address(bytes.fromhex(key), bytes.fromhex(parent), start, bytes.fromhex(tokens))
        states = part == STATES
        content = StatesContent(self._memory.kept(place)) if states else BlockContent(self._blocks[part], place)
        self._disk.offer(address, part, content, wait)

    def _expect(self, parts: list[tuple[str, int]]) -> None:
        self._disk.expect(_names(parts))

    def _unexpect(self, parts: list[tuple[str, int]]) -> None:
        self._disk.unexpect(_names(parts))

    def _read(self, parts: list[tuple[str, int, int]]) -> None:
        """Recurrent states, at most one sequence's, are kept if rank 0 says so next (`keep_read`)."""
        loading = Loading(0, {(bytes.fromhex(key), part): (self._disk, block) for key, part, block in parts})
        names = list(loading.left)
        self._loader.read_parts(loading, self._disk, names, math.inf)
        self._read_states = loading.states or []
        self._link.answer([key not in loading.failed for key, _ in names])

    def _touch(self, keys: list[str]) -> None:
        self._disk.touch([bytes.fromhex(key) for key in keys])

    def _forget(self, keys: list[str]) -> None:
        self._disk.drop([bytes.fromhex(key) for key in keys])

    def _clear(self) -> None:
        self._disk.clear()

    def _flush(self) -> None:
        self._disk.flush()
        self._link.answer(None)


def _names(parts: list[tuple[str, int]]) -> list[tuple[bytes, int]]:
    return [(bytes.fromhex(key), part) for key, part in parts]
