"""One memory plan for all ranks.

`--kv-memory` is the budget of each rank, for its own heads. Every rank plans for its own device; since block ids are
shared, all pools then get as many blocks as the smallest.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..config import Settings
from ..errors import ParallelError
from ..memory.device import kind
from ..memory.plan import Plan, make_plan
from ..memory.plan.device import read_device
from ..memory.plan.workspace import weight_bytes
from ..models.blas import share_cores


def plan_share(
    model: Module, settings: Settings, context: int | None, calibration: Sequence[int], sharers: int
) -> Plan:
    """This rank's own plan, if `sharers` ranks share its device. All ranks call this at the same time: formats that are
    calibrated run the model.
    """
    share_cores(sharers)
    # The weights are loaded on all ranks, so they are missing from what is free.
    free = read_device().available // sharers + min(weight_bytes(model), mx.get_active_memory())
    plan = make_plan(model, settings, context, calibration, free)
    plan.check()
    return plan


def facts_of(plan: Plan) -> dict[str, Any]:
    """What must be equal on all ranks, and what the smallest rank determines."""
    return {
        "stored_as": plan.stored_as,
        "chunk": plan.prefill_chunk,
        "device": kind(),
        "blocks": list(plan.blocks),
        "snapshots": plan.snapshot_bytes,
    }


def agreed(plan: Plan, others: Sequence[dict[str, Any]]) -> Plan:
    """Rank 0's plan, reduced to what every rank has room for. Raises ParallelError."""
    own = facts_of(plan)
    for rank, facts in enumerate(others, 1):
        for name in ("device", "chunk", "stored_as"):
            if facts[name] != own[name]:
                raise ParallelError(
                    f"rank {rank} does not match rank 0: {name} is {facts[name]} there and {own[name]} here; all ranks "
                    "need the same model and the same kind of device"
                )
    every = [own, *others]
    blocks = tuple(min(counts) for counts in zip(*(facts["blocks"] for facts in every), strict=True))
    return replace(plan, blocks=blocks, snapshot_bytes=min(facts["snapshots"] for facts in every))
