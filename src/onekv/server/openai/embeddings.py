"""POST /v1/embeddings: rejected with an explanation, since there is no embedding model."""

from fastapi import APIRouter, Request

from ..errors import NotFoundError
from ..models.describe import about_all

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> None:
    name = about_all(request)[0].name
    raise NotFoundError(
        f"this server has no embedding model: it serves {name!r}, which generates text; "
        "run another server for embeddings and point the client's embedding base URL at it"
    )
