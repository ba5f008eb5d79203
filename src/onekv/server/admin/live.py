"""GET /admin/live: live state as server-sent events: a snapshot now, and one whenever something has changed."""

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from ..live.feed import Feed
from .access import ADMINISTRATOR

router = APIRouter()


@router.get("/admin/live", dependencies=ADMINISTRATOR, response_class=StreamingResponse)
async def live(request: Request) -> StreamingResponse:
    """At most one every 250 ms, each a complete JSON object (docs/page.md); figures, never text."""
    feed: Feed = request.app.state.feed
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed.watch(), headers=headers, media_type="text/event-stream")
