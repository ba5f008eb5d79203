"""`benchmarks/scale.py` at a small size: what must hold of any load; and docs/scale.md has the recorded figures."""

import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "scale-2026-11-18.json"
SERVERS, REQUESTS = 4, 24


@functools.cache
def scale() -> Any:
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["scale"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def result(routing: str, write: str, stored: int = 2048) -> dict[str, Any]:
    """Counted from the first request on."""
    found: dict[str, Any] = scale().simulate(SERVERS, REQUESTS, routing, write, seed=7, stored=stored, warm=0.0)
    return found


def test_affinity_computes_less_than_random_routing() -> None:
    affinity, random = result("affinity", "none"), result("random", "none")
    assert affinity["prompt_tokens"] == random["prompt_tokens"]
    assert 0 < affinity["computed_tokens"] < random["computed_tokens"]


def test_what_a_store_is_given_is_not_computed_again() -> None:
    none, twice, every = (result("random", write)["computed_tokens"] for write in ("none", "twice", "all"))
    assert every < twice < none
    assert result("affinity", "twice")["computed_tokens"] <= result("affinity", "none")["computed_tokens"]
    # With all in the store, it hardly matters who is asked: but for parts of blocks, which are not there.
    requests = SERVERS * REQUESTS
    assert every - result("affinity", "none")["computed_tokens"] <= requests * scale().BLOCK


@pytest.mark.parametrize("case", [("affinity", "none"), ("affinity", "twice"), ("random", "twice"), ("random", "all")])
def test_tokens_blocks_and_bytes_add_up(case: tuple[str, str]) -> None:
    found = result(*case)
    sources = [found[f"{source}_tokens"] for source in ("pool", "store", "computed")]
    assert sum(sources) == found["prompt_tokens"] and min(sources) >= 0
    assert found["store_tokens"] == found["gets"] * scale().BLOCK
    assert found["keys"] == found["puts"] - found["keys_evicted"]
    seconds = REQUESTS * scale().SECONDS
    for way, blocks in (("in", found["puts"]), ("out", found["gets"])):
        total = found[f"bytes_{way}_per_server_s"] * SERVERS * seconds
        assert total == pytest.approx(blocks * scale().BLOCK * scale().TOKEN_BYTES)
    assert (found["puts"] > 0) == (found["gets"] > 0) == (case[1] != "none")


def test_a_store_that_is_too_small_evicts() -> None:
    large, small = result("random", "all"), result("random", "all", stored=64)
    assert small["keys_evicted"] and not large["keys_evicted"]
    assert small["keys"] == 64 * SERVERS and small["keys"] == small["puts"] - small["keys_evicted"]
    assert small["computed_tokens"] > large["computed_tokens"]
    # What was evicted between look-up and transfer is read in part, and computed.
    assert 0 < small["store_tokens"] <= small["gets"] * scale().BLOCK


def test_the_same_seed_gives_the_same_figures() -> None:
    first, second = (scale().simulate(2, 6, "random", "all", seed=3) for _ in range(2))
    assert first == second != scale().simulate(2, 6, "random", "all", seed=4)


def test_the_document_has_the_recorded_figures() -> None:
    document = (ROOT / "docs" / "scale.md").read_text()
    results = json.loads(RECORDED.read_text())["results"]
    rows = [scale().row(each) for each in results]
    rows += [row for servers in (100, 10000) for row in scale().multiplied(results, servers)]
    for row in rows:
        assert f"\n| {' | '.join(row)} |\n".replace("  ", " ") in document, row
    computed = {
        (each["routing"], each["write"]): round(each["computed_tokens"] / each["requests"])
        for each in results
        if each["servers"] == 100
    }
    words = " ".join(document.split())
    affinity, random = computed["affinity", "none"], computed["random", "none"]
    assert (
        f"{affinity} of them are computed with affinity and {random:,} without; "
        f"with a store, {computed['affinity', 'twice']} (`twice`) and {computed['random', 'all']} (`all`)"
    ) in words
