"""What proposals by lookup cost: tokens added to a log, and a proposal in logs of several lengths, in microseconds.

    python benchmarks/lookup.py

`text` is the documentation, repeated with a word changed here and there, as tokens of the default model if its file is
there, else as bytes. `random` has tokens of a vocabulary of 49,152, in which hardly anything occurs twice; `crowded`
three tokens at random: every bucket has far more positions than are looked at. A proposal is asked for after every
token of an answer: of text, a piece of the log is said again, with changes. The shared log of the request's salt holds
as many tokens as its own, with other changes. `right`: how many answers' tokens were the first of those proposed.
"""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from onekv.engine.request import Request
from onekv.engine.speculation.log import TokenLog
from onekv.engine.speculation.lookup import Lookup
from onekv.models.gguf_header import read_header
from onekv.models.gguf_tokenizer import build_tokenizer
from onekv.models.paths import cache_dir

LENGTHS = (1_000, 10_000, 100_000)
VOCABULARY = 49_152
ANSWER, LIMIT, ROUNDS = 500, 8, 9
DOCS = Path(__file__).parents[1] / "docs"


def encoder() -> tuple[str, Callable[[str], list[int]]]:
    files = sorted((cache_dir() / "models").glob("*.gguf"))
    if not files:
        return "bytes", lambda text: list(text.encode())
    tokenizer = build_tokenizer(read_header(files[0]))
    return files[0].stem, lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def changed(tokens: list[int], seed: int, every: int = 40) -> list[int]:
    """The same with about one token of `every` replaced by another of them."""
    chance = random.Random(seed)
    return [chance.choice(tokens) if chance.randrange(every) == 0 else token for token in tokens]


def text_of(once: list[int], length: int, seed: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        seed += 1
        tokens += changed(once, seed)
    return tokens[:length]


def random_of(length: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(vocabulary) for _ in range(length)]


def microseconds(do: Callable[[], object], times: int = 1) -> float:
    """The median of some rounds."""
    took = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        do()
        took.append((time.perf_counter() - started) / times * 1e6)
    return statistics.median(took)


def appending(tokens: list[int]) -> float:
    log = TokenLog(1 << 17)
    log.extend(tokens[: len(tokens) // 2])
    return microseconds(lambda: [log.append(token) for token in tokens[:1000]], 1000)


def proposals(tokens: list[int], other: list[int], answer: list[int]) -> tuple[float, float, float]:
    """Median and 99th percentile of the time of a proposal, and the share of the tokens that were proposed right."""
    lookup, request = Lookup(), Request(tokens, len(answer) + 1)
    lookup.learn_tokens("", other)
    lookup.propose(request, LIMIT)
    took, right = [], 0
    for token in answer:
        started = time.perf_counter()
        match = lookup.propose(request, LIMIT)
        took.append((time.perf_counter() - started) * 1e6)
        right += match is not None and match.tokens[0] == token
        request.tokens.append(token)
    took.sort()
    return statistics.median(took), took[len(took) * 99 // 100], right / len(answer)


def main() -> None:
    name, encode = encoder()
    once = encode("\n".join(file.read_text() for file in sorted(DOCS.glob("*.md"))))
    print(f"text: {len(once):,} tokens ({name}), repeated with changes\n")
    kinds: dict[str, Callable[[int, int], list[int]]] = {
        "text": lambda length, seed: text_of(once, length, 1000 * seed),
        "random": random_of,
        "crowded": lambda length, seed: random_of(length, seed, 3),
    }
    print(f"{'microseconds':34}" + "".join(f"{kind:>10}" for kind in kinds))

    def row(what: str, values: list[float], form: str = ",.1f") -> None:
        print(f"{what:34}" + "".join(f"{value:10{form}}" for value in values))

    inputs = [make(LENGTHS[-1], 0) for make in kinds.values()]
    extending = [microseconds(lambda tokens=tokens: TokenLog(1 << 17).extend(tokens)) for tokens in inputs]
    row(f"extend by {LENGTHS[-1]:,} tokens", extending, ",.0f")
    row("append, a token", [appending(tokens) for tokens in inputs], ".2f")
    for length in LENGTHS:
        columns = []
        for kind, make in kinds.items():
            tokens = make(length, 0)
            again = changed(tokens[length // 4 :][: min(ANSWER, length // 2)], 7, 20)
            columns.append(proposals(tokens, make(length, 1), again if kind == "text" else make(ANSWER, 2)))
        medians, late, right = (list(figures) for figures in zip(*columns, strict=True))
        row(f"propose at {length:,}, median", medians)
        row(f"propose at {length:,}, p99", late)
        row("  right", right, ".0%")


if __name__ == "__main__":
    main()
