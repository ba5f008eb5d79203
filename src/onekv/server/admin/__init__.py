"""For those who run the server: /health, /metrics, /admin/cache, /admin/cache/probe, /admin/integrity."""

from fastapi import APIRouter

from . import cache, health, integrity, metrics, probe

router = APIRouter()
for endpoint in (health, metrics, cache, probe, integrity):
    router.include_router(endpoint.router)
