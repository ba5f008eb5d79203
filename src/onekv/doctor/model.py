"""A real model: does it fit, does it decode the tokens that mlx-lm's own caches give, and how fast.

OneKV's answer is fed to the same weights with mlx-lm's caches. Each of its tokens must have the largest logit there, up
to rounding; this way a difference does not hide what follows it.
"""

import os

import mlx.core as mx
import numpy as np

from ..bench.roofline import bandwidth, step_bytes
from ..config import Settings
from ..engine import Engine, Request
from ..errors import MemoryBudgetError
from ..memory.formats import parse
from ..memory.layout.calibration import calibration_tokens
from ..memory.plan import Plan
from ..memory.plan.device import read_device
from ..models import DEFAULT_MODEL, context_length, load_for
from ..models.fetch import KNOWN_FILES, fetched
from ..report import plan_of
from .base import Case, Check, Notes, switch
from .bounds import bounds, name_of
from .choices import overlap, several
from .engines import generate, make_engine
from .reference import stock_logits

PROMPT, COMPARED, TIMED = 128, 24, 48
# With encoded KV, rounding decides which code a number gets, in every layer: SmolLM2's tokens were up to 0.16 standard
# deviations from the largest logit. Wrong tokens are several away.
ENCODED = 1.0
# Figure that the verdict quotes.
SHARE = "decode, of what memory allows"


def run(case: Case, notes: Notes) -> None:
    name = case.model or _on_disk()
    if name is None:
        notes.skip(
            f"no model was named, and {DEFAULT_MODEL} is not on disk; `onekv doctor {DEFAULT_MODEL}` downloads it"
        )
        return
    settings = _alone(case.settings)
    case.doing(f"planning {name}")
    title, _, _, plan = plan_of(name, settings)
    notes.figure("model", title)
    _plan(plan, notes)
    try:
        plan.check()
    except MemoryBudgetError as error:
        notes.fail(f"{title} does not fit: {error}", switch("kv_memory", "SIZE"))
        return
    case.doing("measuring memory bandwidth")
    fastest = bandwidth(read_device().available // 4)
    notes.figure("memory bandwidth", fastest, "B/s")
    _run(name, settings, fastest, case, notes)


def _alone(settings: Settings) -> Settings:
    """The settings without disk cache, remote tier and speculation."""
    left_out = {
        each.name for each in Settings.defined() if each.name.startswith(("disk_", "remote_", "tier_", "draft_"))
    }
    kept = {each.name: getattr(settings, each.name) for each in Settings.defined() if each.name not in left_out}
    return Settings(**kept | {"speculate": "off"})


def _on_disk() -> str | None:
    wanted = KNOWN_FILES[DEFAULT_MODEL].file_name
    return DEFAULT_MODEL if any(file.name == wanted and complete for file, complete in fetched().items()) else None


def _plan(plan: Plan, notes: Notes) -> None:
    notes.figure("weights", plan.weights, "B")
    notes.figure("KV pool and states", plan.pool_bytes + plan.state_bytes, "B")
    notes.figure("plan", plan.total, "B", plan.device.available)
    if plan.longest < 2**62:
        notes.figure("tokens in the pool", plan.longest, "tokens")


def _run(name: str, settings: Settings, fastest: float, case: Case, notes: Notes) -> None:
    case.doing(f"loading {name}")
    loaded = load_for(name, settings, adapter=settings.adapter)
    tokens = calibration_tokens(loaded.tokenizer)
    calibration = tokens if parse(settings.kv_format).centred else ()
    engine = make_engine(loaded.model, settings, context=context_length(loaded.config), calibration=calibration)
    prompt = tokens[:PROMPT]
    case.doing("decoding, cold and after a cache hit")
    cold = generate(engine, prompt, COMPARED)
    warm = generate(engine, prompt, TIMED)
    engine.check_integrity()
    if settings.prefix_cache and not warm.cached_tokens:
        notes.fail("a repeated prompt was not found in the prefix cache", switch("prefix_cache", "off"))
    if settings.max_kv_size is not None and settings.max_kv_size < PROMPT + COMPARED:
        notes.skip(f"tokens were not compared: --max-kv-size {settings.max_kv_size} is shorter than the conversation")
    else:
        case.doing("decoding with mlx-lm's caches")
        _compare(engine, cold, "cold", switch("kernels", "off"), notes)
        if warm.tokens[:COMPARED] != cold.tokens:
            _compare(engine, warm, "after a cache hit", switch("prefix_cache", "off"), notes)
    _speeds(engine, cold, warm, fastest, notes)
    notes.ok(overlap(engine.runner))
    reason = engine.runner.uncompiled
    notes.ok("compile: yes" if reason is None else f"compile: no, {reason}")
    notes.ok(several(engine.runner))


def _compare(engine: Engine, request: Request, when: str, remedy: str, notes: Notes) -> None:
    """Compare the tokens of an answer with those of mlx-lm's caches."""
    layout, prompt, answer = engine.plan.layout, request.prompt, request.tokens[:COMPARED]
    fed, last = prompt + answer[:-1], len(prompt) - 1
    logits = stock_logits(engine.runner.model, layout, fed, last, engine.plan.prefill_chunk).astype(mx.float32)
    ours = mx.take_along_axis(logits, mx.array(answer)[:, None], axis=1)[:, 0]
    gaps: list[float] = ((logits.max(axis=1) - ours) / logits.std(axis=1)).tolist()  # type: ignore[assignment]
    equal, worst, limit = gaps.count(0.0), float(np.max(gaps)), _limit(engine)
    notes.figure(f"tokens equal to mlx-lm's, {when}", equal, f"of {COMPARED}")
    notes.figure(f"largest logit gap, {when}", worst, "relative", limit)
    if not worst <= limit:
        number = next(number for number, gap in enumerate(gaps, 1) if not gap <= limit)
        notes.fail(
            f"{when}, token {number} of an answer differs from mlx-lm's: its logit is {worst:.2g} standard deviations "
            f"below the largest, rounding explains at most {limit:.2g}",
            remedy,
        )
    elif equal == COMPARED:
        notes.ok(f"{when}: all {COMPARED} tokens equal mlx-lm's")
    else:
        notes.ok(f"{when}: {equal} of {COMPARED} tokens equal mlx-lm's, the others are ties up to rounding")


def _limit(engine: Engine) -> float:
    """How far from the largest logit a token may be."""
    layers = [layer for group in engine.plan.layout.groups for layer in group.layers if layer.heads]
    if not all(layer.plain for layer in layers):
        return ENCODED
    limits = [bounds(name_of(layer.dtype), True, engine.memory.device).memory for layer in layers]
    return max(limits, default=bounds("float32", True, engine.memory.device).memory)


def _speeds(engine: Engine, cold: Request, warm: Request, fastest: float, notes: Notes) -> None:
    notes.figure("prefill", (len(cold.prompt) - 1) / cold.timings.prefill, "tokens/s")
    seconds = warm.timings.decode / (TIMED - 1)
    notes.figure("decode", 1 / seconds, "tokens/s")
    token_bytes = sum(group.token_bytes for group in engine.plan.layout.groups)
    least = step_bytes(engine.runner.model, token_bytes, PROMPT + TIMED // 2) / fastest
    notes.figure(SHARE, least / seconds, "share")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 1:
        notes.ok(f"other programs are busy (load average {load:.1f} on {cores} cores), so speeds are too low")


CHECK = Check(
    "model",
    "a model fits, decodes the tokens of mlx-lm's caches cold and after a cache hit, and how fast",
    run,
    failed="MODEL FAILED",
)
