"""How close a decode step comes to what memory allows: the bytes it must read, over the bandwidth of this machine."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding

from ..memory.plan.workspace import weight_bytes


def bandwidth(most: int = 2**62) -> float:
    """Bytes per second that this machine reads: the best of several tries, with at most this many bytes of memory."""
    return _gpu_bandwidth(most) if mx.default_device() == mx.gpu else _cpu_bandwidth(most)


def _gpu_bandwidth(most: int) -> float:
    array = mx.zeros((min(2**30, most // 4),), mx.uint16)
    mx.eval(array)
    best = 0.0
    for _ in range(10):
        begin = time.perf_counter()
        # Reads and writes everything.
        mx.eval(array + 1)
        best = max(best, 2 * array.nbytes / (time.perf_counter() - begin))
    return best


def _cpu_bandwidth(most: int) -> float:
    cores = os.cpu_count() or 1
    parts = np.ones((cores, min(2**25, most // (4 * cores))), np.float32)
    best = 0.0
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(10):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, parts.nbytes / (time.perf_counter() - begin))
    return best


def step_bytes(model: Module, token_bytes: int, tokens: int) -> int:
    """What a decode step must read: the weights, and the KV of this many tokens. All experts of a mixture count."""
    tables = [module for module in model.modules() if isinstance(module, Embedding | QuantizedEmbedding)]
    # One that is also the output layer is read; of another only a few rows are.
    tied = getattr(getattr(model, "args", None), "tie_word_embeddings", False)
    unread = 0 if tied else sum(weight_bytes(table) for table in tables)
    return weight_bytes(model) - unread + token_bytes * tokens
