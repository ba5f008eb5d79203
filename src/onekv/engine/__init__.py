"""Runs requests on a model: prefill in chunks, decode in a batch. One thread drives an engine at a time."""

from .engine import Engine
from .jobs import End, Event, Job, Jobs
from .output import Delta, TextOutput
from .params import LogitsProcessor, Sampling
from .request import Constraint, FinishReason, Logprob, Request, Timings
from .thread import EngineThread

__all__ = [
    "Constraint",
    "Delta",
    "End",
    "Engine",
    "EngineThread",
    "Event",
    "FinishReason",
    "Job",
    "Jobs",
    "LogitsProcessor",
    "Logprob",
    "Request",
    "Sampling",
    "TextOutput",
    "Timings",
]
