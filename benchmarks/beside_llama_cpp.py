"""Prefill and decode of one sequence, OneKV beside llama.cpp: the same file, two processes, in turn.

    pip install llama-cpp-python
    python benchmarks/beside_llama_cpp.py

SmolLM2-135M, 2,048 random tokens, then 32 tokens decoded; tokens per second.
"""

import subprocess
import sys
import time

PROMPT, TOKENS = 2048, 32


def onekv() -> None:
    import numpy as np

    from onekv.bench.decode import _OneKV, bench_model

    side = _OneKV(bench_model("smollm2-135m", None), 1, PROMPT + 2 * TOKENS, 64, 0)
    prompt = np.random.default_rng(0).integers(100, 49000, (1, PROMPT)).tolist()
    # The first round warms up.
    for _ in range(2):
        begin = time.perf_counter()
        running = side.start(prompt, 2 * TOKENS)
        next(running)
        prefill = PROMPT / (time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(TOKENS):
            next(running)
        decode = TOKENS / (time.perf_counter() - begin)
        running.close()
    print(f"OneKV      prefill {prefill:.0f}, decode {decode:.1f}")


def llama_cpp() -> None:
    import numpy as np
    from llama_cpp import Llama

    from onekv.models.fetch import KNOWN_FILES, fetch

    file = str(fetch(KNOWN_FILES["smollm2-135m"]))
    llama = Llama(file, n_ctx=PROMPT + 2 * TOKENS, n_batch=512, n_threads=2, n_threads_batch=2, verbose=False)
    prompt = np.random.default_rng(0).integers(100, 49000, PROMPT).tolist()
    for _ in range(2):
        llama.reset()
        begin = time.perf_counter()
        llama.eval(prompt)
        prefill = PROMPT / (time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(TOKENS):
        llama.eval([llama.sample(temp=0.0)])
    print(f"llama.cpp  prefill {prefill:.0f}, decode {TOKENS / (time.perf_counter() - begin):.1f}")


if __name__ == "__main__":
    sides = {"onekv": onekv, "llama_cpp": llama_cpp}
    if sys.argv[1:]:
        sides[sys.argv[1]]()
    else:
        for name in ("onekv", "llama_cpp") * 2:
            subprocess.run([sys.executable, __file__, name], check=True)
