"""How often, and by how much, answers after hits differ from those of uncached runs in the same format.

    python tests/extended_hits.py [--prompts 20] [--format q4 ...] [--way extended ...]

A first turn leaves a prompt and its answer in the cache. Then the prompt comes again (repeated), or with its answer and
more after it: from the pool (extended), four at a time (batch), and from disk after a restart (disk).
"""

import argparse
import tempfile
from dataclasses import dataclass
from typing import Any

from onekv import LLM
from onekv.bench.texts import prose
from onekv.engine import Request, Sampling

MODEL = "smollm2-135m"
FORMATS = ("auto", "q8", "k8v4", "q4", "tq4")
WAYS = ("repeated", "extended", "batch", "disk")
# Tokens of the shortest prompt, of a first turn's answer, and of the answer that is compared.
PROMPT, FIRST, ANSWER = 90, 16, 16
MORE = "\n\nWhat happens next is that"


@dataclass(frozen=True)
class Difference:
    """Of an answer to that of an uncached run."""

    # The first token that is another one, and how far apart the uncached run's two likeliest were there.
    at: int | None
    margin: float
    # The largest difference of a log probability of its ten likeliest tokens, as long as all before were the same.
    drift: float


def run(llm: LLM, prompts: list[list[int]], count: int, together: bool = False) -> list[Request]:
    requests = [Request(prompt, count, Sampling(logprobs=20)) for prompt in prompts]
    for request in requests:
        llm.engine.submit(request)
        while not (together or llm.engine.idle):
            llm.engine.step()
    while not llm.engine.idle:
        llm.engine.step()
    llm.check_integrity()
    return requests


def apart(found: Request, wanted: Request, token: int = 0) -> list[float]:
    """By how much the log probabilities of `wanted`'s ten likeliest tokens differ."""
    shown = dict(found.logprobs[token].top)
    return [abs(shown[other] - log) for other, log in wanted.logprobs[token].top[:10] if other in shown]


def difference(found: Request, wanted: Request) -> Difference:
    pairs = zip(found.tokens, wanted.tokens, strict=False)
    at = next((i for i, (own, other) in enumerate(pairs) if own != other), None)
    alike = len(wanted.tokens) if at is None else at + 1
    drift = max(max(apart(found, wanted, token)) for token in range(alike))
    top = wanted.logprobs[at].top if at is not None else [(0, 0.0), (0, 0.0)]
    return Difference(at, top[0][1] - top[1][1], drift)


def longer_of(llm: LLM, first: list[Request]) -> list[list[int]]:
    """Each prompt with its answer and more."""
    more = [int(token) for token in llm.tokenizer.encode(MORE)]
    return [request.prompt + request.tokens + more for request in first]


def prompts_of(llm: LLM, count: int) -> list[list[int]]:
    tokens = [int(token) for token in llm.tokenizer.encode(prose()[:100_000])]
    return [tokens[i * 1000 : i * 1000 + PROMPT + i] for i in range(count)]


def measure(llm: LLM, kv_format: str, count: int, ways: tuple[str, ...]) -> dict[str, list[Difference]]:
    """By way; `llm` gives the model."""
    settings: dict[str, Any] = {"kv_format": kv_format, "kv_memory": "128MB", "max_batch": 4, "block_size": 16}
    settings["progress"] = False

    def opened(**more: Any) -> LLM:
        return LLM(llm.model, tokenizer=llm.tokenizer, **settings, **more)

    found: dict[str, list[Difference]] = {}

    def compare(way: str, requests: list[Request], wanted: list[Request]) -> None:
        assert all(request.cached_tokens > 0.8 * len(request.prompt) for request in requests)
        found[way] = [difference(*pair) for pair in zip(requests, wanted, strict=True)]

    prompts = prompts_of(llm, count)
    with tempfile.TemporaryDirectory() as folder:
        with opened(disk_cache=folder, disk_limit="512MB", disk_policy="write_through") as warm:
            # Prompts that share nothing: this is an uncached run, too.
            first = run(warm, prompts, FIRST)
            if "repeated" in ways:
                compare("repeated", run(warm, prompts, FIRST), first)
        longer = longer_of(llm, first)
        with opened(prefix_cache=False) as cold:
            wanted = run(cold, longer, ANSWER)
        if "disk" in ways:
            with opened(disk_cache=folder, disk_limit="512MB") as warm:
                compare("disk", run(warm, longer, ANSWER), wanted)
    for way in {"extended", "batch"} & set(ways):
        with opened() as warm:
            run(warm, prompts, FIRST, way == "batch")
            compare(way, run(warm, longer, ANSWER, way == "batch"), wanted)
    return {way: found[way] for way in WAYS if way in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--format", action="append")
    parser.add_argument("--way", action="append", choices=WAYS)
    arguments = parser.parse_args()
    llm = LLM(MODEL, kv_memory="16MB", progress=False)
    for kv_format in arguments.format or FORMATS:
        for way, differences in measure(llm, kv_format, arguments.prompts, tuple(arguments.way or WAYS)).items():
            others = [each for each in differences if each.at is not None]
            drift = max(each.drift for each in differences)
            margin = max((each.margin for each in others), default=0.0)
            print(
                f"{kv_format:6} {way:9} {len(others):2} of {len(differences)} differ; log probabilities by up to "
                f"{drift:.1e}, two likeliest at most {margin:.1e} apart where tokens differ",
                flush=True,
            )


if __name__ == "__main__":
    main()
