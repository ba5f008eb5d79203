"""Reading from a shared store compared with computing, and decode speed while the store fails.

The store is a Valkey or Redis server that the benchmark starts on this machine, without persistence.

    first token   a prompt whose whole blocks are in the store, on an engine whose own cache is empty, compared with an
                  engine without a cache: for each KV format of the model, and for models with random weights that have
                  sliding windows and recurrent layers. `raw` is the time to get the same values with as many threads
    decoding      a sequence is decoded while a prompt arrives that is cached nowhere: `ratio` is its speed on an engine
                  with a store over that on one without. The store responds (up), takes 2 s for every call (slow), is
                  stopped (SIGSTOP), or killed

Sides are interleaved, figures are medians, and the first round warms up.
"""

import argparse
import importlib
import json
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..config import Settings
from ..engine import Engine, Request
from ..errors import OneKVError
from ..memory.formats import compared
from ..memory.plan import make_plan
from ..tables import table
from ..tiers.opening import open_tiers
from ..units import format_size
from .decode import about, bench_model
from .quality import asked
from .remote_store import Store

ADDED, ANSWER = 16, 8
# Tokens that the pool has room for in addition to the conversation.
SPARE = 1024
# The prompt that comes while another sequence is decoded, and what is decoded of that.
PROMPT, DECODED = 256, 64
# What a look-up may take where it is to be read in any case.
PATIENCE = "60s"
STATES = ("up", "slow", "stopped", "killed")
_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
_DELTA: dict[str, Any] = {
    "full_attention_interval": 4,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
# Models with random weights: what they have, mlx-lm's module, and their configuration.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": (
        "gemma3_text",
        {**_SHAPE, "query_pre_attn_scalar": 64, "sliding_window": 512, "sliding_window_pattern": 4},
    ),
    "recurrent": ("qwen3_5", {"text_config": {**_SHAPE, **_DELTA}}),
}


@dataclass(frozen=True)
class First:
    """Seconds to the first token, and to get the bytes that were read for it."""

    model: str
    kv_format: str
    prompt_tokens: int
    cached_tokens: int
    bytes: int
    seconds: float
    computed: float
    raw: float
    tokens_identical: bool


@dataclass(frozen=True)
class Decoding:
    """Tokens per second without a store, and the ratio of those with one."""

    store: str
    tokens_per_s: float
    ratio: float


def run(arguments: argparse.Namespace) -> int:
    names, rounds = asked(arguments.format or compared()), arguments.rounds
    with Store() as store:
        model = bench_model(arguments.model, arguments.dtype)
        decoding = [_decoding(model, store, state, rounds) for state in STATES]
        firsts = [_first(model, arguments.model, name, store, arguments.tokens, rounds) for name in names]
        firsts += [_first(_small(name), name, names[0], store, arguments.tokens, rounds) for name in SMALL]
    print(_format(firsts, decoding))
    if arguments.json:
        how = {"tokens": arguments.tokens, "rounds": rounds}
        results = {"first": [asdict(each) for each in firsts], "decoding": [asdict(each) for each in decoding]}
        Path(arguments.json).write_text(json.dumps({**about(arguments.model), **how, **results}, indent=2) + "\n")
    return 0 if all(each.tokens_identical for each in firsts) else 1


def _small(name: str) -> Module:
    module, config = SMALL[name]
    code = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(0)
    model: Module = code.Model(code.ModelArgs.from_dict({"model_type": module, **config}))
    mx.eval(model.parameters())
    return model


# What is measured


def _first(model: Module, name: str, kv_format: str, store: Store, tokens: int, rounds: int) -> First:
    _say(f"{name}, {kv_format}: first token from the store and computed")
    store.client.flushall()
    engine, alone = (_engine(model, kv_format, tokens, url) for url in (f"{store.url}?timeout={PATIENCE}", None))
    prompt = _random(engine, tokens, seed=0)
    tier = engine.prefix.tiers[0]
    times: list[tuple[float, float, float]] = []
    identical = True
    try:
        _generate(engine, prompt, 1)
        for turn in range(rounds + 1):
            while engine.prefix.unshared:
                engine.prefix.share(1.0)
            tier.flush()
            engine.prefix.forget()
            # Including what it knows about the store.
            tier.clear()
            # It is read even where computing would be faster, so that there is something to compare.
            engine.prefix.computed(1, 60.0)
            before = tier.stats()
            longer = prompt + _random(engine, ADDED, seed=turn + 1)
            read, computed = (_generate(each, longer, ANSWER) for each in (engine, alone))
            identical = identical and read.tokens == computed.tokens
            if turn:
                raw = store.get()
                times.append((read.first - read.created, computed.first - computed.created, raw))
        after = tier.stats()
        if not read.cached_tokens:
            raise OneKVError(f"nothing came from the store: {after.summary}")
    finally:
        engine.close()
        alone.close()
    seconds, computing, raw = (statistics.median(column) for column in zip(*times, strict=True))
    size = after.promoted_bytes - before.promoted_bytes
    return First(name, kv_format, len(longer), read.cached_tokens, size, seconds, computing, raw, identical)


def _decoding(model: Module, store: Store, state: str, rounds: int) -> Decoding:
    _say(f"decoding while the store is {state}")
    with store.slowed() if state == "slow" else nullcontext(store.url) as url:
        sides = [_engine(model, "auto", 8 * PROMPT, each) for each in (None, url)]
        try:
            for side in sides:
                _beside(side, seed=0)
            store.become(state)
            times = [[_beside(side, seed=turn + 1) for side in sides] for turn in range(rounds + 1)][1:]
        finally:
            store.become("up")
            for side in sides:
                side.close()
    plain = statistics.median(each[0] for each in times)
    return Decoding(state, DECODED / plain, statistics.median(without / having for without, having in times))


def _beside(engine: Engine, seed: int) -> float:
    """Seconds to decode a sequence while a prompt arrives that is cached nowhere."""
    talker, comer = (Request(_random(engine, PROMPT, 2 * seed + each), DECODED) for each in range(2))
    engine.submit(talker)
    while not talker.tokens:
        engine.step()
    begin = time.perf_counter()
    engine.submit(comer)
    while not talker.finished:
        engine.step()
    seconds = time.perf_counter() - begin
    while not engine.idle:
        engine.step()
    return seconds


# Engines


def _engine(model: Module, kv_format: str, tokens: int, url: str | None) -> Engine:
    def settings(memory: int | str) -> Settings:
        more: dict[str, Any] = {"remote_tier": url, "remote_write": "all"} if url else {"prefix_cache": False}
        return Settings(kv_memory=memory, max_batch=2, kv_format=kv_format, **more)

    layout = make_plan(model, settings("1GiB"), None, range(1, 65)).layout
    token_bytes = sum(group.token_bytes for group in layout.groups)
    chosen = settings((tokens + SPARE) * token_bytes + 64 * layout.sequence_bytes)
    plan = make_plan(model, chosen, None, range(1, 65))
    tiers, _ = open_tiers(chosen, plan, model, "bench")
    return Engine(model, plan, set(), chosen, tiers)


def _random(engine: Engine, count: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, engine.plan.layout.vocabulary, count).tolist()
    return tokens


def _generate(engine: Engine, prompt: list[int], count: int) -> Request:
    request = Request(prompt, count)
    engine.submit(request)
    while not engine.idle:
        engine.step()
    return request


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def _format(firsts: list[First], decoding: list[Decoding]) -> str:
    rows = [
        [
            f"{each.model}, {each.kv_format}",
            f"{each.cached_tokens:,} of {each.prompt_tokens:,}",
            f"{each.seconds:.3f} s",
            f"{each.computed:.3f} s",
            f"{each.computed / each.seconds:.1f}x" + ("" if each.tokens_identical else ", OTHER TOKENS"),
            f"{each.raw:.3f} s for {format_size(each.bytes)}",
        ]
        for each in firsts
    ]
    others = [[each.store, f"{each.tokens_per_s:.1f}", f"{each.ratio:.3f}"] for each in decoding]
    return "\n\n".join(
        [
            table(rows, ["first token", "cached", "from the store", "computed", "sooner (wanted: 5x)", "raw gets"]),
            table(others, ["decoding, store", "tokens/s without", "with it (wanted: 0.95)"]),
        ]
    )
