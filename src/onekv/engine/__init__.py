"""Runs requests on a model: prefill in chunks, decode in a batch. One thread drives an engine at a time."""

from .engine import Engine
from .output import Piece, TextOutput
from .request import Constraint, Logprob, Request, Sampling, Timings
from .thread import End, EngineThread, Event, Job

__all__ = [
    "Constraint",
    "End",
    "Engine",
    "EngineThread",
    "Event",
    "Job",
    "Logprob",
    "Piece",
    "Request",
    "Sampling",
    "TextOutput",
    "Timings",
]
