"""The cost of the prefix index: time to match a long prompt in a large index, and memory per cached block."""

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
    _siblings(arguments)


def _siblings(arguments: argparse.Namespace) -> None:
    """Many conversations that part at the same place, the first token after it alike: a template makes such."""
    generator = np.random.default_rng(1)
    index = Index("bench", BLOCK)
    start = generator.integers(0, 50000, BLOCK).tolist()
    parent = index.add(index.root(""), as_bytes(start), [0])
    for _ in range(arguments.siblings):
        index.add(parent, as_bytes([7, *generator.integers(0, 50000, BLOCK - 1).tolist()]), [0])
    seconds = []
    for _ in range(arguments.rounds):
        data = as_bytes([*start, 7, *generator.integers(0, 50000, BLOCK - 1).tolist()])
        begin = time.perf_counter()
        match = index.match(data, "", 2 * BLOCK)
        seconds.append(time.perf_counter() - begin)
        assert match.length > BLOCK, "all of them have one token more in common"
    print(
        f"match beside {arguments.siblings:,} siblings with the same first token: "
        f"{statistics.median(seconds) * 1e6:.0f} us (median of {len(seconds)})"
    )


def _add(index: Index, tokens: list[int]) -> None:
    node: Node = index.root("")
    data = as_bytes(tokens)
    for start in range(0, len(data) - BLOCK * 4 + 1, BLOCK * 4):
        node = index.add(node, data[start : start + BLOCK * 4], [0])
