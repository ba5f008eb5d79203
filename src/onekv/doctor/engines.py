"""Engines for small models, built as `LLM` builds them."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..config import Settings
from ..engine import Engine, Request
from ..memory.device import kind
from ..memory.plan import make_plan
from ..tiers.files import FILES, Files
from ..tiers.opening import open_tier, stored_as
from .models import VOCAB, small_model

NAME = "onekv doctor"


def chat_model(**changes: Any) -> Any:
    """A small llama in the dtype that is usual on this device."""
    model = small_model("full attention", **changes)
    if kind() != "cpu":
        model.set_dtype(mx.bfloat16)
    return model


def make_engine(
    model: Module,
    settings: Settings,
    files: Files = FILES,
    context: int | None = None,
    calibration: Sequence[int] = (),
) -> Engine:
    """An engine without stop tokens; see `make_plan` for `context` and `calibration`."""
    plan = make_plan(model, settings, context, calibration)
    plan.check()
    tier = open_tier(settings, plan, stored_as(model, plan), NAME, files)
    try:
        return Engine(model, plan, set(), settings, [tier] if tier is not None else [])
    except BaseException:
        if tier is not None:
            tier.close()
        raise


def generate(engine: Engine, prompt: list[int], count: int, after_step: Callable[[], None] = lambda: None) -> Request:
    """A greedy answer of `count` tokens; `after_step` is called after each decode step. Raises the request's error."""
    request = Request(prompt, count)
    engine.submit(request)
    while not engine.idle:
        engine.step()
        if request.tokens:
            after_step()
    if request.error is not None:
        raise request.error
    return request


def random_prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(1, VOCAB, length).tolist()
    return tokens
