"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show, /api/ps, /api/version.

schema.py       bodies; `options` has Ollama's names for sampling
convert.py      from a body to the common `ChatCall`
output.py       lines of JSON, the last of them with what the answer took
chat.py, generate.py
models.py       the models of the server, under each of their names
missing.py      what is rejected, with the reason
"""

from fastapi import APIRouter

from . import chat, generate, missing, models

router = APIRouter()
for endpoint in (chat, generate, models, missing):
    router.include_router(endpoint.router)
