"""Endpoints for operators: /health, /metrics, and /admin: the cache, its contents, probe, integrity, models, live."""

from fastapi import APIRouter

from . import cache, contents, health, integrity, live, metrics, models, probe
from .access import LOADED

router = APIRouter()
router.include_router(health.router)
for endpoint in (metrics, cache, contents, probe, integrity, models, live):
    router.include_router(endpoint.router, dependencies=LOADED)
