"""What the prefix index costs: time to match a long prompt in a large index, and memory per cached block."""

import argparse
import gc
import statistics
import time
import tracemalloc

import numpy as np

from ..prefix.index import Index, Node, as_bytes

BLOCK = 64


def run(arguments: argparse.Namespace) -> None:
    per_prompt = arguments.tokens // BLOCK
    prompts = max(1, arguments.blocks // per_prompt)
    generator = np.random.default_rng(0)
    index = Index("bench", BLOCK)
    tracemalloc.start()
    for _ in range(prompts):
        _add(index, generator.integers(0, 50000, per_prompt * BLOCK).tolist())
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    wanted = generator.integers(0, 50000, arguments.tokens).tolist()
    _add(index, wanted)
    data = as_bytes(wanted)
    seconds = []
    for _ in range(arguments.rounds):
        begin = time.perf_counter()
        match = index.match(data, "", arguments.tokens)
        seconds.append(time.perf_counter() - begin)
    blocks = len(index.nodes)
    each = traced / (prompts * per_prompt) - BLOCK * 4
    print(f"{blocks:,} blocks in the index")
    print(f"match of {match.length:,} tokens: {statistics.median(seconds) * 1e3:.1f} ms (median of {len(seconds)})")
    print(f"memory: {each:.0f} bytes per block beside its {BLOCK * 4} bytes of tokens")


def _add(index: Index, tokens: list[int]) -> None:
    node: Node = index.root("")
    data = as_bytes(tokens)
    for start in range(0, len(data) - BLOCK * 4 + 1, BLOCK * 4):
        node = index.add(node, data[start : start + BLOCK * 4], [0])
