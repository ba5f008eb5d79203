"""Runs requests on a model: prefill in chunks, decode in a batch. One thread drives an engine at a time."""

from .engine import Engine
from .request import Request, Sampling, Timings

__all__ = ["Engine", "Request", "Sampling", "Timings"]
