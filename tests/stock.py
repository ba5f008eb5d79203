"""Reference runs with mlx-lm's own caches, and the same runs on OneKV's memory."""

import gc
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from onekv.config import Settings
from onekv.engine import Engine
from onekv.engine.runner import Runner
from onekv.memory.kv import KVMemory
from onekv.memory.layout.reader import read_layout
from onekv.memory.plan import make_plan
from onekv.memory.pool.sequence import Sequence
from onekv.tiers.opening import open_tiers


def small_llama(seed: int, **shape: int) -> Any:
    """A random llama: little to compute, whatever it keeps."""
    mx.random.seed(seed)
    common = {"model_type": "llama", "hidden_size": 64, "rms_norm_eps": 1e-5, "vocab_size": 128}
    model = llama.Model(llama.ModelArgs.from_dict({**common, "num_attention_heads": 8, **shape}))
    mx.eval(model.parameters())
    return model


# What keys are calibrated with where their format wants that.
CALIBRATION = [7 * i % 61 + 1 for i in range(40)]


def engine_of(model: Any, make_runner: Any = Runner, **settings: Any) -> Engine:
    """An engine with these settings, as `LLM` makes one; no token ends an answer."""
    resolved = Settings(**settings)
    plan = make_plan(model, resolved, None, CALIBRATION)
    tiers, _ = open_tiers(resolved, plan, model, "a model")
    return Engine(model, plan, set(), resolved, tiers, make_runner=make_runner)


def stock_logits(model: Any, tokens: list[int], prompt: int, chunk: int, caches: Any = None) -> mx.array:
    """Logits of every token: the first `prompt` in chunks, the rest one by one, with mlx-lm's caches."""
    caches = caches or make_prompt_cache(model)
    outputs = []
    for start, end in pieces(len(tokens), prompt, chunk):
        outputs.append(model(mx.array(tokens[start:end])[None], cache=caches)[0])
        mx.eval(outputs[-1])
    return mx.concatenate(outputs)


def pieces(length: int, prompt: int, chunk: int) -> list[tuple[int, int]]:
    starts = [*range(0, prompt, chunk), *range(prompt, length)]
    return list(zip(starts, [*starts[1:], length], strict=True))


def make_memory(
    model: Any, blocks: int = 80, block_size: int = 16, chunk: int = 48, max_kv_size: int | None = None
) -> KVMemory:
    layout = read_layout(model, max_kv_size)
    return KVMemory(layout, (blocks,) * len(layout.groups), block_size, chunk)


def forward(model: Any, memory: KVMemory, sequences: list[Sequence], rows: list[list[int]]) -> mx.array:
    """Logits [rows, tokens, vocabulary] after the tokens of each row are stored in its sequence."""
    with memory.step(sequences, len(rows[0])) as caches:
        logits = model(mx.array(rows), cache=caches)
    mx.eval(logits, memory.arrays())
    return logits


def paged_logits(model: Any, memory: KVMemory, tokens: list[int], prompt: int, chunk: int) -> mx.array:
    """Like `stock_logits`, on a new sequence of `memory`, which is closed afterwards."""
    sequence = memory.open(len(tokens))
    outputs = []
    for start, end in pieces(len(tokens), prompt, chunk):
        outputs.append(forward(model, memory, [sequence], [tokens[start:end]])[0])
        if end == prompt:
            sequence.prefilled()
        memory.check_integrity()
    memory.close(sequence)
    return mx.concatenate(outputs)


def worst(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a - b).max())


def check_writes_in_place(model: Any, memory: KVMemory) -> None:
    """A prompt is stored without a second copy of the pool: nothing else refers to its arrays."""
    sequence = memory.open(100)
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with memory.step([sequence], 48) as caches:
        model(mx.array([[1] * 48]), cache=caches)
    mx.eval(memory.arrays())
    pool = sum(array.nbytes for array in memory.arrays())
    assert mx.get_active_memory() - before < pool / 20 and mx.get_peak_memory() - before < pool / 4
    memory.close(sequence)
