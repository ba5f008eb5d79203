"""What is cached, and why more was not: a single block, conversations as a tree, recent lookups; pin and drop.

Every key sees what belongs to it; the administrator sees the figures of all keys. Text is shown to the key that sent it
(`access.Reader`). Models that are not loaded have nothing cached, and are not loaded for this.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field
from starlette.responses import Response

from ...engine import Engine
from ...engine.contents import read_block
from ...prefix.figures import NEVER_SEEN, OTHER_SALT
from ...prefix.index import Node, as_tokens
from ..backend import Backend
from ..body import Body, Str
from ..errors import NotFoundError
from ..explain import words_of
from ..live.feed import Feed
from ..lookups import Lookup
from ..models.registry import Models
from .access import ADMINISTRATOR, Asking, Reader
from .trees import Trees

router = APIRouter()


def _backends(request: Request) -> dict[str, Backend]:
    """Loaded models by name."""
    models: Models | None = request.app.state.models
    if models is not None:
        return models.backends()
    backend: Backend = request.app.state.backend
    return {backend.name: backend}


def _backend(request: Request, model: str | None = None) -> Backend:
    """The backend of `model`, or of the first loaded one."""
    backends = _backends(request)
    if model is None and backends:
        return next(iter(backends.values()))
    if model not in backends:
        raise NotFoundError(f"no model {model!r} is loaded" if model is not None else "no model is loaded")
    return backends[model]


Chosen = Annotated[Backend, Depends(_backend)]


@router.get("/admin/cache/blocks/{group}/{block}", dependencies=ADMINISTRATOR)
async def block(request: Request, backend: Chosen, asking: Asking, group: int, block: int) -> dict[str, Any]:
    """One block of a pool: its owner, tokens, requests, last use, and the tiers that have a copy."""
    pools = backend.thread.look().stats.pools
    if not 0 <= group < len(pools) or not 0 <= block < pools[group].blocks:
        raise NotFoundError(f"there is no block {block} in pool {group}")
    found = await backend.in_slices(partial(read_block, group=group, block=block))
    if found is None:
        return {"free": True}
    feed: Feed = request.app.state.feed
    tokens = as_tokens(found.tokens)
    return {
        "free": False,
        **asking.owner(found.salt),
        "start": found.start,
        "end": found.start + len(tokens),
        "requests": [feed.snapshots.id_of(backend.name, number) for number in found.requests],
        "cached": found.cached,
        "pinned": found.pins > 0,
        "idle_s": round(found.idle, 1) if found.idle is not None else None,
        "tiers": list(found.tiers),
        "text": await asyncio.to_thread(words_of, backend, tokens) if asking.reads(found.salt) else None,
    }


@router.get("/admin/cache/conversations", response_class=Response)
async def conversations(request: Request, backend: Chosen, asking: Asking) -> Response:
    """Cached conversations as a tree, largest first; a prefix shared by several is one row."""
    trees: Trees = request.app.state.trees
    return Response(await trees.answer(backend, asking), media_type="application/json")


class NodeBody(Body):
    """A row of the tree: its `id` to pin or unpin it, its `first` to drop it."""

    model: Str | None = None
    node: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


@router.post("/admin/cache/pin", dependencies=ADMINISTRATOR)
async def pin(request: Request, body: NodeBody, asking: Asking) -> dict[str, int]:
    """Never evict the conversation up to this node; answers with the number of tokens."""
    return {"tokens": await _change(request, body, asking, lambda engine, node: engine.prefix.pin_node(node))}


@router.post("/admin/cache/unpin", dependencies=ADMINISTRATOR)
async def unpin(request: Request, body: NodeBody, asking: Asking) -> dict[str, int]:
    """Remove a pin that ends at this node."""

    def change(engine: Engine, node: Node) -> int:
        engine.prefix.unpin_node(node)
        return node.end

    return {"tokens": await _change(request, body, asking, change)}


@router.post("/admin/cache/drop")
async def drop(request: Request, body: NodeBody, asking: Asking) -> dict[str, int]:
    """Drop this node and its continuations, except what is running or pinned, from memory and disk.

    A store that other servers read keeps them.
    """
    return {"dropped_blocks": await _change(request, body, asking, lambda engine, node: engine.prefix.drop_node(node))}


async def _change(request: Request, body: NodeBody, asking: Reader, change: Callable[[Engine, Node], int]) -> int:
    backend, key = _backend(request, body.model), bytes.fromhex(body.node)

    def order(engine: Engine) -> int:
        node = engine.prefix.index.nodes.get(key)
        # Another key must not even learn that it exists.
        if node is None or not asking.sees(engine.prefix.index.salt_of(node)):
            raise NotFoundError("this conversation is no longer cached")
        return change(engine, node)

    result = await asyncio.wrap_future(backend.thread.call(order))
    trees: Trees = request.app.state.trees
    trees.forget(backend)
    return result


@router.get("/admin/cache/lookups")
async def lookups(request: Request, asking: Asking, after: Annotated[int, Query(ge=0)] = 0) -> dict[str, Any]:
    """What recent requests found in the cache and why not more, oldest first, starting after the given number."""
    found = [
        (backend, each)
        for backend in _backends(request).values()
        for each in backend.metrics.lookups.after(after)
        if asking.sees(each.salt)
    ]
    found.sort(key=lambda one: one[1].number)
    return {"lookups": await asyncio.to_thread(lambda: [_lookup(asking, *each) for each in found])}


def _lookup(asking: Reader, backend: Backend, lookup: Lookup) -> dict[str, Any]:
    # What other keys asked is none of this key's business.
    hidden = lookup.missed == OTHER_SALT and not asking.administrator
    sides = {"before": lookup.before, "had": lookup.had, "came": lookup.came}
    words = (
        {name: words_of(backend, [*tokens]) for name, tokens in sides.items()} if asking.reads(lookup.salt) else None
    )
    return {
        "number": lookup.number,
        "time": round(lookup.time, 3),
        "model": backend.name,
        **asking.owner(lookup.salt),
        "prompt_tokens": lookup.prompt,
        "cached_tokens": lookup.cached,
        "reason": NEVER_SEEN if hidden else lookup.missed,
        "again": lookup.again,
        "words": words,
    }
