"""GET /v1/models: all models, under each of their names, loaded or not.

Clients of Anthropic's API, which send its version, get them in its format.
"""

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from ..models.describe import About, about, about_all

router = APIRouter()
_STARTED = int(time.time())
# What every client of Anthropic's API sends.
ANTHROPIC = "anthropic-version"


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    found = about_all(request)
    if ANTHROPIC not in request.headers:
        return {"object": "list", "data": [_described(each, name) for each in found for name in each.names]}
    # All are on one page; the page after or before it is empty.
    paged = {"after_id", "before_id"} & request.query_params.keys()
    data = [] if paged else [_for_anthropic(each) for each in found]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": ends[0], "last_id": ends[1]}


@router.get("/v1/models/{model:path}")
async def get_model(model: str, request: Request) -> dict[str, Any]:
    if ANTHROPIC not in request.headers:
        return _described(about(request, model), model)
    # As in /v1/messages: whatever Claude model is requested, the first model answers.
    known = any(model in each.names for each in about_all(request))
    lenient = model.startswith("claude") and not known
    return _for_anthropic(about_all(request)[0] if lenient else about(request, model))


def _described(found: About, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "onekv",
        # Of an adapter, the model that it is for.
        "base": found.base,
        "context_length": found.longest,
        "state": found.state,
        "keep": found.keep,
        "memory": found.plan.total,
    }


def _for_anthropic(found: About) -> dict[str, Any]:
    created = datetime.fromtimestamp(_STARTED, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "model",
        "id": found.name,
        "display_name": found.name,
        "created_at": created,
        "max_input_tokens": found.longest,
        "state": found.state,
    }
