"""GET / for browsers, and the files that the page consists of, under /page/; none of them needs a key."""

import hashlib
import mimetypes
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..errors import NotFoundError

FOLDER = Path(__file__).parent / "static"
PREFIX = "/page/"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Asked for again each time, and sent again only if it is another one.
    "Cache-Control": "no-cache",
}
# The system's own table may lack some.
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".md": "text/plain"}

router = APIRouter()


@router.get(PREFIX + "{name:path}", include_in_schema=False)
async def file(name: str, request: Request) -> Response:
    if name not in names():
        raise NotFoundError(f"there is no {request.url.path}")
    return _sent(name, request)


def index(request: Request) -> Response:
    """The page itself."""
    response = _sent("index.html", request)
    # Other clients get another answer.
    response.headers["Vary"] = "Accept"
    return response


@cache
def names() -> frozenset[str]:
    """All files there are; no other path is ever looked up on disk."""
    return frozenset(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())


@cache
def _content(name: str) -> tuple[bytes, str]:
    content = (FOLDER / name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _sent(name: str, request: Request) -> Response:
    content, tag = _content(name)
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    suffix = Path(name).suffix
    kind = TYPES.get(suffix) or mimetypes.types_map.get(suffix, "text/plain")
    return Response(content, media_type=kind, headers=headers)
