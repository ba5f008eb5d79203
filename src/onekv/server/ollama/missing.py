"""Parts of Ollama's API that this server rejects, each with the reason."""

from fastapi import APIRouter

from ..errors import BadRequestError

router = APIRouter()


@router.post("/api/embed")
@router.post("/api/embeddings")
async def embed() -> None:
    raise BadRequestError("embeddings are not supported: this server's model generates text")


@router.post("/api/pull")
@router.post("/api/push")
@router.post("/api/create")
@router.post("/api/copy")
@router.delete("/api/delete")
async def change() -> None:
    raise BadRequestError("models cannot be changed: this server has the one it was started with (onekv serve MODEL)")
