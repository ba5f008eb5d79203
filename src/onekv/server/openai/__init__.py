"""OpenAI's API: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models; /v1/embeddings is rejected."""

from fastapi import APIRouter

from . import chat, completions, embeddings, input_items, models, responses

router = APIRouter()
for endpoint in (chat, completions, embeddings, input_items, models, responses):
    router.include_router(endpoint.router)
