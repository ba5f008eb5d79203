"""The description of a model, loaded or not: the same for a single model as for several."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request

from ...memory.plan import MARGIN, Plan
from ..backend import Backend
from ..infill import marks_of
from ..sampling_defaults import SamplingDefaults
from .model import Model, Place, State
from .progress import unloading
from .registry import Models
from .settings import PINNED


@dataclass(frozen=True)
class About:
    name: str
    names: tuple[str, ...]
    state: State
    keep: str
    plan: Plan
    longest: int
    # The file or folder it is from, and what its config.json says.
    path: Path
    config: dict[str, Any]
    chats: bool
    thinks: bool
    inserts: bool
    template: str
    defaults: SamplingDefaults
    # Of an adapter, the model that it is for, and its folder.
    base: str | None = None
    adapter: Path | None = None
    # Bytes of the weights that other models have, too.
    shared: int = 0
    # In how many seconds it will have idled long enough to be unloaded, if it ever will.
    expires: float | None = None


def about_all(request: Request) -> list[About]:
    """All models there are, the first one first."""
    models: Models | None = request.app.state.models
    if models is None:
        return [_of_one(request.app.state.backend)]
    return [_of_model(models, model) for model in models.models]


def about(request: Request, name: str) -> About:
    """The model that `name` means, which is not loaded for that. Raises NotFoundError."""
    models: Models | None = request.app.state.models
    if models is not None:
        return _of_model(models, models.find(name))
    backend: Backend = request.app.state.backend
    backend.check_model(name)
    return _of_one(backend)


def _of_one(backend: Backend) -> About:
    llm, tokenizer = backend.llm, backend.tokenizer
    assert llm.path is not None, "a server's model is loaded by name"
    template = tokenizer.chat_template
    return About(
        name=backend.name,
        names=backend.names,
        state="loaded",
        # As long as the server runs.
        keep=PINNED,
        plan=llm.plan,
        longest=backend.longest,
        path=llm.path,
        config=llm.config,
        chats=tokenizer.has_chat_template,
        thinks=tokenizer.has_thinking,
        inserts=marks_of(tokenizer) is not None,
        template=template if isinstance(template, str) else "",
        defaults=backend.defaults,
        base=llm.base,
        adapter=_folder(llm.settings.adapter),
    )


def _of_model(models: Models, model: Model) -> About:
    planned = model.planned
    left = model.expires - time.monotonic() if model.state == "loaded" else float("inf")
    several = any(other.spec.weights == model.spec.weights for other in models.models if other is not model)
    return About(
        name=model.name,
        names=model.names,
        state=model.state,
        keep=model.keep,
        plan=planned.plan,
        longest=planned.longest,
        path=planned.path,
        config=planned.config,
        chats=planned.chats,
        thinks=planned.thinks,
        inserts=planned.inserts,
        template=planned.template,
        defaults=planned.defaults,
        base=model.spec.base,
        adapter=_folder(model.spec.engine.adapter),
        shared=planned.shared if several else 0,
        expires=None if left == float("inf") else left,
    )


def _folder(adapter: str | None) -> Path | None:
    return None if adapter is None else Path(adapter).expanduser()


def overview(models: Models) -> dict[str, Any]:
    """For /admin/models: the budget, what each model has of it, and who waits for one, the next first."""
    queue = models.queue()
    now = time.monotonic()
    return {
        "memory": {"limit": models.memory, "counted": models.counted},
        "models": [_row(models, model, queue) for model in models.models],
        "queue": [
            {
                "position": position,
                "model": place.model.name,
                "request": place.request,
                "waited_s": round(now - place.since, 3),
            }
            for position, place in enumerate(queue, 1)
        ],
    }


def overview_of_one(backend: Backend) -> dict[str, Any]:
    """The same of a server that has one model from its start to its end, and no budget for several."""
    found, stats = _of_one(backend), backend.thread.look().stats
    row = _said(found) | {
        "reason": None,
        "requests": {"holding": stats.running, "waiting": stats.waiting},
        "last_used_s": None,
        "expires_s": None,
        "disk_cache": backend.llm.settings.disk_cache,
    }
    return {"memory": {"limit": None, "counted": found.plan.total}, "models": [row], "queue": []}


def _row(models: Models, model: Model, queue: list[Place]) -> dict[str, Any]:
    found = _of_model(models, model)
    idle = time.monotonic() - model.used
    row = _said(found) | {
        "reason": model.reason,
        "requests": {"holding": model.uses, "waiting": sum(place.model is model for place in queue)},
        "last_used_s": None if idle == float("inf") else round(idle, 3),
        "expires_s": None if found.expires is None or model.uses else round(max(0.0, found.expires), 3),
        "disk_cache": model.spec.engine.disk_cache,
    }
    if model.state == "loading":
        row["loading"] = models.loads.so_far(model)
    elif model.state == "unloading":
        row["unloading"] = unloading(model)
    return row


def _said(found: About) -> dict[str, Any]:
    plan = found.plan
    return {
        "name": found.name,
        "names": list(found.names),
        "state": found.state,
        "keep": found.keep,
        "base": found.base,
        "bytes": {
            "weights": plan.weights,
            # Of these, those that other models have, too: in memory once.
            "shared": found.shared,
            "kv": plan.pool_bytes + plan.state_bytes,
            "workspace": plan.workspace + plan.staging,
            # The margin is the process's, whatever is loaded.
            "total": plan.total - MARGIN,
        },
        "context_length": found.longest,
        "block_size": plan.block_size,
    }


def health(models: Models, step_limit: float) -> dict[str, Any]:
    """As /health has it of one model, with a list of all: one that is stuck makes the server so."""
    rows, status = [], "ok" if models.ready else "loading"
    for model in models.models:
        row: dict[str, Any] = {"name": model.name, "state": model.state}
        backend = model.backend
        if backend is not None:
            doing = backend.thread.doing
            row["engine"] = {"doing": str(doing), "requests": doing.requests, "for_s": round(backend.thread.age(), 3)}
            # One that has ended by itself is loaded again on the next request.
            if backend.thread.stuck(step_limit):
                status = "stuck"
        rows.append(row)
    if models.stopping and status != "stuck":
        status = "shutting down"
    return {
        "status": status,
        "model": models.first.name,
        "models": rows,
        "uptime_s": round(time.monotonic() - models.started, 3),
        "step_limit_s": step_limit,
    }
