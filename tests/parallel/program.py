"""Runs jobs on an `LLM`, in whatever process: alone, or on each of several ranks.

python program.py FILE     JSON: a list of jobs. Prints an object for each, on rank 0 its result
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import onekv  # noqa: F401  (before MLX)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job: prompts in one batch, then each of `later` alone, all greedy.

    With `forget` only the disk has what the batch has computed when the others start.
    """
    import mlx.core as mx

    from onekv import LLM
    from onekv.errors import SettingError

    # Garbage that is collected later would make the peak look smaller.
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    try:
        llm = LLM(job["model"], progress=False, **job["settings"])
    except SettingError as error:
        return {"refused": str(error)}
    with llm:
        options = {"max_tokens": 5, "ignore_eos": True}
        first = llm.generate(job["prompts"], prediction=job.get("prediction"), **options)
        if job.get("forget"):
            llm.engine.prefix.tiers[0].flush()
            llm.engine.prefix.forget()
        later = [llm.generate(prompt, **options) for prompt in job.get("later", [])]
        stats = llm.stats()
        llm.check_integrity()
    return {
        "tokens": [completion.tokens for completion in (*first, *later)],
        "cached": [completion.cached_tokens for completion in (*first, *later)],
        "accepted": sum(completion.accepted_tokens for completion in first),
        "uncompiled": stats.uncompiled,
        "ranks": llm.ranks,
        "evicted": stats.prefix.evicted_blocks,
        "peak": mx.get_peak_memory() - before,
    }


def main() -> None:
    from onekv import parallel

    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            result = run(job)
        except SystemExit:
            # Another rank, which would end with its model; here it stays for the next one.
            import mlx.core as mx

            result = {"peak": mx.get_peak_memory()}
        print(json.dumps(result), flush=True)
        parallel._leaders.clear()


if __name__ == "__main__":
    main()
