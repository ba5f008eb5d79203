"""Start-up on rank 0.

    load -> plan -> open_tiers -> memory: the engine runs -> `LeadingMemory.close_all`
       \\_______\\__________\\_ an exception is raised here; `desert` makes the other ranks exit

In each of these steps all ranks work concurrently. Whatever rank 0 can reject by itself it rejects before it tells the
others to start.
"""

import atexit
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from mlx.nn.layers.base import Module

from ..config import Settings, flag
from ..errors import ParallelError, SettingError
from ..memory.layout import Layout
from ..memory.plan import Plan
from ..models import LoadedModel
from ..models.cpu import evaluate
from ..tiers.base import Tier
from ..tiers.turns import TurnsFile
from .group import Group, device_of_rank, meet
from .guard import Guard
from .leading import LeadingMemory
from .links import Links
from .planning import agreed, plan_share
from .sharding import files_digest, open_share
from .tier import RankedTier, open_rank_tier

# Settings that do not work with several ranks, and why.
_REFUSED = {
    "adapter": "adapters cannot be sharded",
    "draft_model": "draft models cannot be sharded; --speculate lookup works",
    "remote_tier": "a rank's blocks contain only its own heads; --disk-cache works",
}


def refusal(settings: Settings, model: object) -> str | None:
    """Why several ranks cannot run `model` with these settings, if they cannot."""
    if not isinstance(model, str | os.PathLike):
        return "under mlx.launch, pass the model as a name or folder: every rank loads its own share"
    for name, reason in _REFUSED.items():
        if getattr(settings, name) is not None:
            return f"{flag(name)} does not work under mlx.launch: {reason}"
    return None


class Leader:
    def __init__(self, group: Group, limit: float) -> None:
        """Connect to the other ranks; `limit` is the maximum duration of a pass, in seconds. Raises ParallelError."""
        self._group, self.ranks = group, group.size
        wires = meet(group)
        guard = Guard(0, group.size, dict(enumerate(wires, 1)), limit)
        self._links = Links(wires, guard)
        guard.start()
        # Per rank, how many ranks share its device.
        self._sharers: list[int] = []
        # For programs that never close their LLM.
        atexit.register(self._links.part_at_exit)

    def check(self, settings: Settings, model: object) -> None:
        """Raises SettingError for what does not work with several ranks; the others then exit."""
        if (reason := refusal(settings, model)) is not None:
            self.desert()
            raise SettingError(reason)

    def load(self, name: str, settings: Settings, progress: bool) -> LoadedModel:
        """Rank 0's share of the model, once all ranks have loaded theirs."""
        loaded = open_share(name, settings.dtype, self._group, progress)
        self._links.tell("load", model=name, settings=asdict(settings), limit=self._links.guard.limit)
        evaluate(loaded.model)
        answers = self._links.answers()
        ours = files_digest(loaded.path)
        for rank, answer in enumerate(answers, 1):
            if answer["digest"] != ours:
                raise ParallelError(
                    f"{name} on rank {rank} differs from rank 0's: config.json, or the names or sizes of its weights; "
                    "copy the same model to all machines"
                )
        devices = [device_of_rank(), *(answer["device"] for answer in answers)]
        counts = Counter(devices)
        self._sharers = [counts[device] for device in devices]
        return loaded

    def plan(self, model: Module, settings: Settings, context: int | None, calibration: Sequence[int]) -> Plan:
        self._links.tell("plan", context=context, calibration=list(calibration), sharers=self._sharers)
        plan = plan_share(model, settings, context, calibration, self._sharers[0])
        return agreed(plan, self._links.answers())

    def open_tiers(
        self, settings: Settings, plan: Plan, model: Module, name: str
    ) -> tuple[list[Tier], TurnsFile | None]:
        """Allocate all other ranks' pools, and open the disk tiers. If one rank cannot open its own, none is used."""
        self._links.tell("open", blocks=list(plan.blocks), name=name)
        tier = open_rank_tier(settings, plan, model, name, 0, self.ranks)
        everywhere = all(self._links.answers())
        if tier is not None and everywhere:
            return [RankedTier(tier, self._links)], tier.turns
        if tier is not None:
            tier.close()
        return [], None

    def memory(
        self, layout: Layout, blocks: tuple[int, ...], block_size: int, chunk: int, kernels: bool
    ) -> LeadingMemory:
        return LeadingMemory(self._links, layout, blocks, block_size, chunk, kernels)

    def desert(self) -> None:
        """The engine could not be started, which the caller reports: the other ranks exit."""
        self._links.desert()
