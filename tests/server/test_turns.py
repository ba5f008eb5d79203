"""Turns that a server remembers: how many, for how long, and over a restart. And conversations through each API."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from conftest import KEYS, Server, start_server, stop_server
from onekv.server.turns import Said, Turns
from onekv.tiers.maintain import clear
from onekv.tiers.turns import LEAST, OVERHEAD, TurnsFile

ASKED = [{"role": "user", "content": "How are you?"}]


def talk(number: int) -> list[dict[str, Any]]:
    """A conversation that ends with a generated turn."""
    return [*ASKED, {"role": "assistant", "content": f"Turn {number}."}, {"role": "user", "content": "Go on."}]


def remember(turns: Turns, numbers: range, length: int = 10) -> None:
    for number in numbers:
        turns.remember("salt", ASKED, Said(f"Turn {number}."), [number] * length)


def known(turns: Turns, count: int) -> list[int]:
    return [number for number in range(count) if turns.known("salt", talk(number))]


def test_as_many_as_fit_the_least_recently_used_goes():
    turns = Turns(4 * (40 + OVERHEAD))
    remember(turns, range(4))
    assert turns.known("salt", talk(0)) == {1: [0] * 10}
    remember(turns, range(4, 6))
    assert known(turns, 6) == [0, 3, 4, 5] and turns.nbytes == 4 * (40 + OVERHEAD)
    # One that is larger than all there is room for.
    remember(turns, range(7, 8), 10_000)
    assert len(turns) == 0 == turns.nbytes


def test_a_turn_that_is_generated_again_is_there_once():
    turns = Turns(1 << 20)
    remember(turns, range(1))
    turns.remember("salt", ASKED, Said("Turn 0.", "I think."), [7, 8])
    assert turns.known("salt", talk(0)) == {1: [7, 8]} and turns.nbytes == 8 + OVERHEAD


def test_nothing_where_there_is_no_room_for_any():
    turns = Turns(0)
    remember(turns, range(3))
    assert len(turns) == 0 and known(turns, 3) == []


def test_they_are_there_after_a_restart(tmp_path):
    path = tmp_path / "turns"
    remember(Turns(1 << 20, TurnsFile(path)), range(5))
    assert path.stat().st_mode & 0o777 == 0o600
    again = Turns(1 << 20, TurnsFile(path))
    assert again.known("salt", talk(3)) == {1: [3] * 10} and known(again, 5) == list(range(5))
    # Less room than before: the most recent.
    assert known(Turns(2 * (40 + OVERHEAD), TurnsFile(path)), 5) == [3, 4]


@pytest.mark.parametrize("damage", ["cut", "flip", "noise"])
def test_what_was_damaged_is_dropped_and_what_comes_before_it_stays(tmp_path, damage, caplog):
    path = tmp_path / "turns"
    remember(Turns(1 << 20, TurnsFile(path)), range(5))
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-1:]
    elif damage == "flip":
        data[-20] ^= 4
    path.write_bytes(bytes(data) + (os.urandom(99) if damage == "noise" else b""))
    left = list(range(5 if damage == "noise" else 4))
    turns = Turns(1 << 20, TurnsFile(path))
    assert known(turns, 5) == left and "cannot be read" in caplog.text
    remember(turns, range(9, 10))
    assert known(Turns(1 << 20, TurnsFile(path)), 10) == [*left, 9]


def test_the_file_does_not_grow_for_ever(tmp_path):
    path, limit = tmp_path / "turns", 1 << 20
    turns = Turns(limit, TurnsFile(path))
    most = 0
    for _ in range(8):
        remember(turns, range(20), 20_000)
        most = max(most, path.stat().st_size)
    assert LEAST < most < 2 * LEAST + 100_000
    assert known(Turns(limit, TurnsFile(path)), 20) == known(turns, 20)


def test_a_disk_that_refuses_is_a_warning(tmp_path, caplog):
    turns = Turns(1 << 20, TurnsFile(tmp_path / "nowhere" / "turns"))
    remember(turns, range(3))
    assert known(turns, 3) == [0, 1, 2]
    assert caplog.text.count("not kept across restarts") == 1


# Real conversations: a hot model, whose tokens are often not those that its text would become.


def chat(
    server: Server, turns: int, seed: int, talked: list[dict[str, Any]] | None = None
) -> list[tuple[int, int, int]]:
    """Tokens of each turn: prompt, cached, generated."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0])
    talked = talked if talked is not None else [{"role": "system", "content": f"You are a poet, number {seed}."}]
    counts = []
    for turn in range(turns):
        talked.append({"role": "user", "content": f"Write a line about the number {turn}."})
        options = {"max_tokens": 40, "temperature": 1.6, "seed": seed + turn, "logit_bias": {"2": -100}}
        answer = client.chat.completions.create(model="default", messages=talked, **options)
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        counts.append((usage.prompt_tokens, cached, usage.completion_tokens))
        # As clients do.
        talked.append({"role": "assistant", "content": answer.choices[0].message.content.strip()})
    return counts


def check(counts: list[tuple[int, int, int]]) -> None:
    """All of a turn's prompt and answer is found by the next one; its last token was never fed back."""
    for (prompt, _, generated), (_, cached, _) in itertools.pairwise(counts):
        assert cached >= prompt + generated - 1


def test_a_conversation_is_never_computed_twice(server):
    check(chat(server, 5, seed=11))


def test_without_it_tokens_are_computed_again(smollm2_path: Path):
    """What the test before this one would see."""
    server = start_server(str(smollm2_path), "--kv-memory", "256MiB", "--turn-memory", "0")
    with pytest.raises(AssertionError):
        check(chat(server, 5, seed=11))
    stop_server(server)


def test_through_anthropics_api(server):
    client = Anthropic(base_url=server.url, api_key=KEYS[0])
    talked: list[Any] = []
    counts = []
    for turn in range(4):
        talked.append({"role": "user", "content": f"Write a line about the number {turn}, please."})
        answer = client.messages.create(model="default", system="You are a bard.", messages=talked, max_tokens=40)
        usage = answer.usage
        prompt = usage.input_tokens + usage.cache_read_input_tokens
        counts.append((prompt, usage.cache_read_input_tokens, usage.output_tokens))
        talked.append({"role": "assistant", "content": [{"type": "text", "text": answer.content[0].text.strip()}]})
    check([(prompt, cached, generated - 1) for prompt, cached, generated in counts])


def test_over_a_restart(smollm2_path: Path, tmp_path: Path):
    flags = [str(smollm2_path), "--kv-memory", "128MiB", "--disk-cache", str(tmp_path / "kv")]
    talked = [{"role": "system", "content": "You are a poet."}]
    server = start_server(*flags)
    before = chat(server, 2, 5, talked)
    stop_server(server)
    assert len(list((tmp_path / "kv").glob("*.turns"))) == 1
    server = start_server(*flags)
    after = chat(server, 1, 5, talked)
    stop_server(server)
    # What is on disk ends with a whole block.
    (prompt, _, generated), (_, cached, _) = before[-1], after[0]
    assert cached >= (prompt + generated - 1) // 64 * 64
    clear(tmp_path / "kv")
    assert list((tmp_path / "kv").glob("*.turns")) == []
