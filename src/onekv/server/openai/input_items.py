"""GET /v1/responses/{id}/input_items: the input of a stored response, in the API's format, page by page."""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from ..errors import NotFoundError
from .common import new_id
from .responses_schema import Item
from .store import stored_responses

router = APIRouter()
_PREFIXES = {"message": "msg_", "reasoning": "rs_"}


@router.get("/v1/responses/{name}/input_items")
async def list_input_items(
    name: str,
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    items = stored_responses(request.app).get(request.state.salt, name).items
    items = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise NotFoundError(f"the response {name!r} has no input item {after!r}")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


def described(items: list[Item]) -> list[dict[str, Any]]:
    """`items` as the API lists them; text that was given in parts is one part."""
    return [
        {"id": new_id(_PREFIXES.get(item.type, "fc_")), "type": item.type, "status": "completed", **_fields(item)}
        for item in items
        if not item.left_out
    ]


def _fields(item: Item) -> dict[str, Any]:
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        return {"role": item.role, "content": [{"type": kind, "text": item.content}]}
    if item.type == "reasoning":
        parts = [{"type": "reasoning_text", "text": item.content}] if item.content else []
        return {"summary": [], "content": parts}
    if item.output is not None:
        return {"call_id": item.call_id, "output": item.output}
    if item.type == "custom_tool_call":
        return {"call_id": item.call_id, "name": item.name, "input": item.input}
    given = item.arguments
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {"call_id": item.call_id, "name": item.name, "arguments": text}
