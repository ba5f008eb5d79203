"""Decode speed with speculation (`--speculate auto`) and without (off), on one model object, in one process.

Each side has an engine of its own, and in a round each prompt runs on one side and then on the other. Only decoding is
timed. A ratio is the speed with speculation over the speed without in the same round; figures are medians over the
rounds, before which every prompt runs once to warm up. The result states whether both sides produced the same tokens.

Prompts are continued as text, because a small model follows such a pattern but not an instruction. Those that copy:

    edited file       a file of this package, then its first lines again with one name changed: the rest is the file
    changed JSON      records as JSON, then the same list with another value in the first record
    quoted passage    a passage of a book, then its first sentence in quotes

Those that are free: beginnings of texts of several kinds, most of them sampled with a temperature. None asks for a
copy, but an answer may repeat itself.

Every run has a salt of its own, so that lookup finds only the prompt and the run's own answer. Rows called "again" are
for a second request with the same prompt and salt, which finds the first one's answer.
"""

import argparse
import inspect
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlx.nn.layers.base import Module

from .. import units
from ..config import Settings
from ..engine import Engine, Request, Sampling
from ..memory.plan import make_plan
from ..models import load_model
from ..tables import table
from . import speculate_oracle
from .decode import about
from .texts import prose

BEGINNINGS = [
    ("dialogue", '"Where were you last night?" asked Tom.\n\n"At the harbour," said Anna. "', 0.8),
    (
        "instructions",
        "How to repot a house plant\n\n1. Choose a pot that is a little larger than the old one.\n2. ",
        0.8,
    ),
    ("list", "Things to pack for a week at the sea:\n\n- sun cream\n- a towel for each of us\n- ", 0.8),
    ("mail", "Subject: Meeting moved to Thursday\n\nHello everyone,\n\nbecause the large room is being painted, ", 0.8),
    ("code", 'def merge_intervals(intervals):\n    """Merge all overlapping intervals.\n\n    ', 0.0),
    ("comment", "# The cache is keyed by the hash of the request, not by its address, because\n# ", 1.0),
    ("review", "I bought these running shoes in March and have worn them almost every day since. ", 1.0),
    ("recipe", "Lentil soup for four\n\nIngredients: lentils, two carrots, an onion, stock.\n\nFirst, ", 1.0),
]


@dataclass(frozen=True)
class Prompt:
    name: str
    # copy or free.
    kind: str
    text: str
    temperature: float = 0.0
    # Whether it is asked again, with the first answer there to look up.
    again: bool = False


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; `tokens` were timed, `proposed` and `accepted` are of the last round."""

    prompt: str
    kind: str
    tokens: int
    tokens_per_s: float
    tokens_per_s_off: float
    ratio: float
    # The same of processor seconds, which other work on the machine does not disturb.
    cpu_ratio: float
    proposed: int
    accepted: int
    same_tokens: bool


class Took(NamedTuple):
    """Seconds for a token, and seconds of processors."""

    wall: float
    cpu: float


def prompts() -> list[Prompt]:
    file = inspect.getsource(units).replace("Sizes", "Amounts", 1)
    changed = file.replace("format_size", "show_size")
    records = [
        {"id": 1000 + 7 * i, "name": name, "room": f"B{3 * i + 1}", "present": i % 3 > 0, "score": 60 + 11 * i % 37}
        for i, name in enumerate(["Ada", "Boris", "Chen", "Dalia", "Emil", "Fatou", "Goran", "Hana"])
    ]
    edited = [{**records[0], "room": "C9"}, *records[1:]]
    as_json, edited_json = (json.dumps(some, indent=2) for some in (records, edited))
    book = prose()
    passage = " ".join(book[20_000:21_500].split()[1:-1])
    begun = passage[: passage.index(" ", 120)]
    file_prompt = (
        f"units.py:\n\n```python\n{file}```\n\nunits.py after format_size was renamed to show_size:\n\n```python\n"
    )
    json_prompt = f"rooms.json:\n\n```json\n{as_json}\n```\n\nrooms.json after Ada moved to room C9:\n\n```json\n"
    quote = f"From the book:\n\n{passage}\n\nThe same passage again:\n\n{begun}"
    return [
        Prompt("edited file", "copy", file_prompt + changed[:300]),
        Prompt("changed JSON", "copy", json_prompt + edited_json[:130]),
        Prompt("quoted passage", "copy", quote),
        Prompt("letter", "free", "Dear Martha,\n\nSince I arrived in the mountains, the weather has been"),
        Prompt("essay", "free", "The history of the printing press begins in", temperature=0.8),
        Prompt("story", "free", " ".join(book[2000:3200].split()), temperature=0.8),
        *(Prompt(name, "free", text, temperature) for name, text, temperature in BEGINNINGS),
        Prompt("essay, again", "again", "The history of the printing press begins in", 0.8, again=True),
    ]


def run(arguments: argparse.Namespace) -> None:
    if arguments.oracle is not None:
        speculate_oracle.run(arguments)
        return
    # As `LLM` loads it.
    loaded = load_model(arguments.model, dtype=arguments.dtype, packed=True)
    wanted = [(prompt, [int(token) for token in loaded.tokenizer.encode(prompt.text)]) for prompt in prompts()]
    results = measure(loaded.model, wanted, arguments.tokens, arguments.rounds)
    print(_format(results))
    by_cpu = summary(results, "cpu_ratio")
    for kind, ratio in summary(results).items():
        print(f"{kind}: {ratio:.2f}x, by CPU time {by_cpu[kind]:.2f}x, the medians of its prompts")
    if arguments.json:
        how = {"tokens": arguments.tokens, "rounds": arguments.rounds, "summary": summary(results), "cpu": by_cpu}
        whole = {**about(arguments.model), **how, "results": [asdict(result) for result in results]}
        Path(arguments.json).write_text(json.dumps(whole, indent=2) + "\n")


def summary(results: list[Result], of: str = "ratio") -> dict[str, float]:
    """By kind, the median of its prompts."""
    kinds = dict.fromkeys(result.kind for result in results)
    return {kind: statistics.median(getattr(r, of) for r in results if r.kind == kind) for kind in kinds}


def measure(model: Module, prompts: list[tuple[Prompt, list[int]]], tokens: int, rounds: int) -> list[Result]:
    sides = [_Side(model, how, max(len(ids) for _, ids in prompts) + tokens) for how in ("auto", "off")]
    seconds: list[tuple[list[Took], list[Took]]] = [([], []) for _ in prompts]
    last: list[tuple[Request, Request]] = []
    same = [True] * len(prompts)
    for repeat in range(rounds + 1):
        print(f"round {repeat} of {rounds} ..." if repeat else "warming up ...", file=sys.stderr, flush=True)
        last = []
        for number, (prompt, ids) in enumerate(prompts):
            both: dict[int, Request] = {}
            # Who begins takes turns, too.
            for index in (0, 1) if repeat % 2 else (1, 0):
                both[index], took = sides[index].run(prompt, ids, tokens, f"{prompt.name} {repeat}")
                if repeat:
                    seconds[number][index].append(took)
            same[number] &= both[0].tokens == both[1].tokens
            last.append((both[0], both[1]))
    return [_result(prompt, last[number], seconds[number], same[number]) for number, (prompt, _) in enumerate(prompts)]


def _result(
    prompt: Prompt, last: tuple[Request, Request], seconds: tuple[list[Took], list[Took]], same: bool
) -> Result:
    request, median = last[0], statistics.median
    own, off = seconds
    return Result(
        prompt.name,
        prompt.kind,
        len(request.tokens),
        1 / median(took.wall for took in own),
        1 / median(took.wall for took in off),
        median(theirs.wall / ours.wall for ours, theirs in zip(own, off, strict=True)),
        median(theirs.cpu / ours.cpu for ours, theirs in zip(own, off, strict=True)),
        request.proposed,
        request.accepted,
        same,
    )


class _Side:
    def __init__(self, model: Module, how: str, length: int) -> None:
        common: dict[str, Any] = {"max_batch": 1, "speculate": how}
        probe = make_plan(model, Settings(kv_memory="1GiB", **common), None)
        token_bytes = sum(group.token_bytes for group in probe.layout.groups)
        # For three such requests.
        memory = -(-length // 256) * 256 * 3 * token_bytes + probe.state_bytes
        settings = Settings(kv_memory=memory, **common)
        self._engine = Engine(model, make_plan(model, settings, None), set(), settings)

    def run(self, prompt: Prompt, ids: list[int], tokens: int, salt: str) -> tuple[Request, Took]:
        for last in (False, True) if prompt.again else (True,):
            sampling = Sampling(temperature=prompt.temperature, seed=1)
            request = Request(ids, tokens, sampling, salt=salt)
            self._engine.submit(request)
            while not request.tokens:
                self._engine.step()
            begin, cpu, had = time.perf_counter(), time.process_time(), len(request.tokens)
            while not request.finished:
                self._engine.step()
            count = max(1, len(request.tokens) - had)
            took = Took((time.perf_counter() - begin) / count, (time.process_time() - cpu) / count)
            if last:
                break
        return request, took


def _format(results: list[Result]) -> str:
    rows = [
        [
            f"{r.prompt} ({r.kind})",
            f"{r.tokens}",
            f"{r.tokens_per_s:.1f}",
            f"{r.tokens_per_s_off:.1f}",
            f"{r.ratio:.2f}x",
            f"{r.cpu_ratio:.2f}x",
            f"{r.accepted} of {r.proposed}",
            "the same" if r.same_tokens else "NOT the same",
        ]
        for r in results
    ]
    return table(rows, ["prompt", "tokens", "tok/s", "off", "ratio", "by CPU time", "accepted", "answers"])
