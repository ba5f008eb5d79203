"""What two ranks cost on this machine's CPU: prefill, decoding and memory of one rank and of two.

    python benchmarks/ranks.py

A Llama with random weights, 8 layers of width 512, and heads that two ranks can divide, unlike those of SmolLM2-135M.
One rank runs its decode steps outside MLX, as OneKV does alone, and then in MLX, as two ranks have to.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import onekv  # noqa: F401  (before MLX)

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
PROMPT, DECODED, ROUNDS = 256, 32, 3


def measure(folder: str, kernels: str) -> None:
    """In each process: rank 0 prints the medians."""
    import mlx.core as mx

    from onekv import LLM

    # Of the ranks, only the first gets past this.
    with LLM(folder, kv_memory="256MiB", prefix_cache=False, kernels=kernels, progress=False) as llm:
        times: list[tuple[float, float]] = []
        for turn in range(ROUNDS + 1):
            prompt = [(turn + 7 * each) % 40000 + 1 for each in range(PROMPT)]
            seconds = []
            for count in (1, DECODED + 1):
                begin = time.perf_counter()
                llm.generate(prompt, count, temperature=0.0, ignore_eos=True)
                seconds.append(time.perf_counter() - begin)
            times.append((seconds[0], seconds[1] - seconds[0]))
        prefill, decode = (statistics.median(column) for column in zip(*times[1:], strict=True))
        figures = {
            "prefill": PROMPT / prefill,
            "decode": DECODED / decode,
            "peak": mx.get_peak_memory() / 2**20,
            "uncompiled": llm.stats().uncompiled,
        }
    print(json.dumps(figures), flush=True)


def launch(folder: str, ranks: int, kernels: str) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as hosts, ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(ranks)]
        json.dump([[f"127.0.0.1:{each.getsockname()[1]}"] for each in listeners], hosts)
        hosts.flush()
        held.close()
        # What `mlx.launch --backend ring` sets.
        ring = {"MLX_HOSTFILE": hosts.name} if ranks > 1 else {}
        command = [sys.executable, __file__, folder, kernels]
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **ring, "MLX_RANK": str(rank)})
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    figures: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return figures


def main() -> None:
    import mlx.core as mx
    from mlx_lm.models import llama

    from onekv.bench.clients import save
    from onekv.models import DEFAULT_MODEL, load_model

    with tempfile.TemporaryDirectory() as folder:
        mx.random.seed(0)
        model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
        save(Path(folder), model, CONFIG, load_model(DEFAULT_MODEL, lazy=True, progress=False).tokenizer)
        for ranks, kernels in ((1, "auto"), (1, "off"), (2, "auto")):
            figures = launch(folder, ranks, kernels)
            print(
                f"{ranks} rank(s), kernels {kernels}: prefill {figures['prefill']:.0f} tokens/s, decode "
                f"{figures['decode']:.1f} tokens/s, peak {figures['peak']:.0f} MiB on rank 0 ({figures['uncompiled']})",
                flush=True,
            )


if __name__ == "__main__":
    measure(*sys.argv[1:]) if len(sys.argv) > 1 else main()
