"""Anthropic's Messages API: /v1/messages, /v1/messages/count_tokens."""

from fastapi import APIRouter

from . import count_tokens, messages

router = APIRouter()
for endpoint in (messages, count_tokens):
    router.include_router(endpoint.router)
