"""OpenAI's API: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models."""

from fastapi import APIRouter

from . import chat, completions, models, responses

router = APIRouter()
for endpoint in (chat, completions, models, responses):
    router.include_router(endpoint.router)
