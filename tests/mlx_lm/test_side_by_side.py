"""`install` and `LLM` in one process, in every order: both give the tokens that stock mlx-lm gives."""

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: what was installed or loaded before decides what can go wrong.
PROGRAM = """
import importlib, sys
import onekv.mlx_lm
import mlx.core as mx
mx.disable_compile()
from architectures import build

name, orders = sys.argv[1], sys.argv[2].split(",")
prompts = [[7 * i % 61 + 1 for i in range(70)], [5 * i % 59 + 2 for i in range(33)]]

def generated(model):
    steps = importlib.import_module("mlx_lm.generate").generate_step
    return [[int(token) for token, _ in steps(mx.array(prompt), model, max_tokens=8)] for prompt in prompts]

for order in orders:
    llm = model = None
    found = []
    for letter in order:
        if letter == "i":
            onekv.mlx_lm.install("64MB")
        elif letter == "u":
            onekv.mlx_lm.uninstall()
        else:
            from onekv import LLM
            model = build(name)
            llm = LLM(model, kv_memory="4MB", block_size=16, prefill_chunk=24, max_batch=2)
        if llm is not None:
            found += [[completion.tokens for completion in llm.generate(prompts, max_tokens=8)], generated(model)]
            llm.clear_cache()
    llm.close()
    onekv.mlx_lm.uninstall()
    expected = generated(model)
    assert all(tokens == expected for tokens in found), (order, found, expected)
print("same", len(orders))
"""


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
@pytest.mark.parametrize("orders", ["iLuiu", "Liu,iL", "iuL,iLu"])
def test_tokens_are_stock_in_every_order(name: str, orders: str) -> None:
    """i: install, u: uninstall, L: an LLM is made. Full attention, windows, and lists of caches."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, orders],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"same {len(orders.split(','))}\n"
