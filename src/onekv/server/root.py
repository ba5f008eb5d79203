"""GET /: the page for browsers; a line of text for clients that check whether there is a server (also with HEAD)."""

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from .page import files

router = APIRouter()
router.include_router(files.router)


@router.get("/")
async def root(request: Request) -> Response:
    # Only browsers ask for it by name.
    if "text/html" in request.headers.get("accept", ""):
        return files.index(request)
    text = "OneKV is running: OpenAI's API is under /v1, Anthropic's under /v1/messages.\n"
    return PlainTextResponse(text, headers={"Vary": "Accept"})
