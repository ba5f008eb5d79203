"""A store that is killed, hangs, is full, closed to us, damaged or forged: no wrong token, no failed request, and it is
used again without a restart.
"""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import remote_rounds
from remote_parts import (
    SECRET,
    SLOW,
    Cluster,
    Valkey,
    ask,
    flush,
    llm_of,
    prompt_of,
    reading_is_worth_it,
    remote,
    until,
)

from onekv import LLM
from onekv.tiers.remote import health, opening
from onekv.tiers.remote.seal import SEAL, Sealer
from onekv.tiers.remote.stores import Trouble
from onekv.tiers.remote.url import parse


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    server = Valkey(tmp_path)
    yield server
    server.stop()


def stored(url: str, seed: int = 1) -> list[int]:
    """A prompt that is in the store."""
    with llm_of(url=url) as llm:
        ask(llm, prompt_of(seed))
        flush(llm)
        assert remote(llm).writes == 9
    return prompt_of(seed)


def recovers(llm: LLM, prompt: list[int], right: LLM) -> None:
    """It is in use again, and reads what is there."""
    until(lambda: remote(llm).failed is None)
    hits = remote(llm).hits
    end = iter(range(1000, 9000))

    def read() -> bool:
        reading_is_worth_it(llm)
        llm.engine.prefix.forget()
        asked = [*prompt, *prompt_of(next(end), 5)]
        assert ask(llm, asked)[0] == ask(right, asked)[0]
        return remote(llm).hits > hits

    until(read)


def state_lines(caplog) -> list[str]:
    words = ("is paused", "in use again", "rejects writes", "accepts writes")
    return [record.getMessage() for record in caplog.records if any(word in record.getMessage() for word in words)]


def test_a_store_that_is_killed_and_comes_back_empty(valkey, right, caplog, no_thread_dies):
    prompt = stored(valkey.url())
    with llm_of(url=valkey.url(timeout="2s")) as llm:
        until(lambda: remote(llm).latency)
        valkey.stop()
        for seed in range(3):
            assert ask(llm, prompt_of(seed))[0] == ask(right, prompt_of(seed))[0]
        assert "paused" in str(remote(llm).failed) and remote(llm).pauses == 1
        assert len(state_lines(caplog)) == 1 and "127.0.0.1" in state_lines(caplog)[0]
        valkey.start()
        until(lambda: remote(llm).failed is None)
        with llm_of(url=valkey.url()) as other:
            ask(other, prompt)
        recovers(llm, prompt, right)
    assert len(state_lines(caplog)) == 2


def test_a_store_that_is_not_there_at_the_start(valkey, right):
    valkey.stop()
    with llm_of(url=valkey.url(timeout="2s")) as llm:
        assert ask(llm, prompt_of(1))[0] == ask(right, prompt_of(1))[0]
        until(lambda: remote(llm).failed)
        valkey.start()
        with llm_of(url=valkey.url()) as other:
            ask(other, prompt_of(2))
        recovers(llm, prompt_of(2), right)


def test_a_cluster_that_is_killed(tmp_path, right, caplog, no_thread_dies):
    """Before it was ever asked, and after: all that a store raises is `Trouble`."""
    cluster = Cluster(tmp_path)
    place = parse(cluster.url())
    asked, new = (opening._open_store(place, 2.0) for _ in range(2))
    assert asked.heads(["onekv/none"], 3) == [None]
    prompt = stored(cluster.url())
    with llm_of(url=cluster.url(timeout="2s")) as llm:
        until(lambda: remote(llm).latency)
        cluster.stop()
        for store in (asked, new):
            for ask_it in (
                lambda store=store: store.heads(["onekv/a", "onekv/b"], 3),
                lambda store=store: store.get("onekv/a", 3),
                lambda store=store: store.put("onekv/a", memoryview(b"abc")),
                lambda store=store: store.delete("onekv/a"),
            ):
                with pytest.raises(Trouble):
                    ask_it()
            store.close()
        assert ask(llm, prompt)[0] == ask(right, prompt)[0]
        until(lambda: "paused" in str(remote(llm).failed))
        assert not any("should not happen" in record.getMessage() for record in caplog.records)
        cluster.start()
        cluster.wait()
        with llm_of(url=cluster.url()) as other:
            ask(other, prompt)
        recovers(llm, prompt, right)
    cluster.stop()


def test_a_store_that_hangs(valkey, right, no_thread_dies):
    prompt = stored(valkey.url())
    with llm_of(url=valkey.url(timeout="500ms")) as llm:
        until(lambda: remote(llm).latency)
        valkey.signal(signal.SIGSTOP)
        for seed in range(3):
            assert ask(llm, prompt_of(seed))[0] == ask(right, prompt_of(seed))[0]
        assert "longer than 0.50 s" in str(remote(llm).failed) or "paused" in str(remote(llm).failed)
        assert remote(llm).late >= 1
        valkey.signal(signal.SIGCONT)
        recovers(llm, prompt, right)


def test_a_store_that_hangs_in_the_midst_of_a_transfer(valkey, right, no_thread_dies):
    prompt = stored(valkey.url())
    with llm_of(url=valkey.url(timeout="500ms")) as llm:
        until(lambda: remote(llm).latency)
        # What is there is known; then it hangs.
        assert llm.probe(prompt).cached == 144
        valkey.signal(signal.SIGSTOP)
        assert ask(llm, prompt) == (ask(right, prompt)[0], 0)
        assert remote(llm).late >= 1 and remote(llm).hits == 0
        valkey.signal(signal.SIGCONT)
        recovers(llm, prompt, right)


def test_a_store_that_is_full_is_still_read(tmp_path, right, caplog):
    server = Valkey(tmp_path, "--maxmemory-policy", "noeviction")
    prompt = stored(server.url())
    server.client().config_set("maxmemory", 1)
    with llm_of(url=server.url()) as llm:
        assert ask(llm, [*prompt, 1, 2])[1] == 144
        assert ask(llm, prompt_of(2))[0] == ask(right, prompt_of(2))[0]
        flush(llm)
        assert "rejects writes" in str(remote(llm).failed) and remote(llm).discarded
        assert len(state_lines(caplog)) == 1
        server.client().config_set("maxmemory", 0)

        def written() -> bool:
            ask(llm, prompt_of(2))
            flush(llm)
            return remote(llm).failed is None

        until(written)
        assert len(state_lines(caplog)) == 2
    server.stop()


def test_a_folder_in_which_nothing_can_be_made(tmp_path, right):
    """As where it is full: files are in the place of the folders that are wanted, which stops root, too."""
    url = f"file://{tmp_path}/shared?timeout={SLOW}"
    prompt = stored(url)
    (model,) = (path.parent.parent for path in list((tmp_path / "shared").rglob("*.safetensors"))[:1])
    for number in range(256):
        if not (model / f"{number:02x}").exists():
            (model / f"{number:02x}").touch()
    with llm_of(url=url) as llm:
        assert ask(llm, prompt) == (ask(right, prompt)[0], 144)
        for seed in (2, 3):
            assert ask(llm, prompt_of(seed))[0] == ask(right, prompt_of(seed))[0]
            flush(llm)
        assert remote(llm).failed is not None and remote(llm).queued_bytes == 0


def test_a_folder_that_is_gone(tmp_path, right):
    url = f"file://{tmp_path}/shared?timeout={SLOW}"
    prompt = stored(url)
    with llm_of(url=url) as llm:
        assert llm.probe(prompt).cached == 144
        shutil.rmtree(tmp_path / "shared")
        assert ask(llm, prompt) == (ask(right, prompt)[0], 0)


def test_a_wrong_password(tmp_path, right, caplog):
    server = Valkey(tmp_path, password="right")
    with llm_of(url=server.url().replace(":right@", ":wrong@")) as llm:
        assert ask(llm, prompt_of(1))[0] == ask(right, prompt_of(1))[0]
        until(lambda: remote(llm).failed)
        assert "pas" in str(remote(llm).failed) and "wrong@" not in str(remote(llm).failed)
        assert all(":wrong@" not in record.getMessage() for record in caplog.records)
        server.client().config_set("requirepass", "wrong")
        until(lambda: remote(llm).failed is None)
    server.stop()


def test_damaged_values_are_computed_and_replaced(valkey, right, no_thread_dies):
    prompt = stored(valkey.url())
    client = valkey.client()
    for number, name in enumerate(valkey.names()):
        value = bytearray(client.get(name))
        if number % 3 == 0:
            value[len(value) // 2] ^= 1
        elif number % 3 == 1:
            value = value[:-1]
        client.set(name, bytes(value))
    with llm_of(url=valkey.url()) as llm:
        assert ask(llm, prompt)[0] == ask(right, prompt)[0]
        assert remote(llm).corrupt >= 1 and remote(llm).forged == 0 and remote(llm).failed is None
    # Each is found once at least, removed, and written again.
    for _ in range(9):
        with llm_of(url=valkey.url()) as llm:
            _, cached = ask(llm, prompt)
            flush(llm)
            if cached == 144:
                break
    assert cached == 144


def test_forged_values_are_never_used(valkey, right):
    """By who can write to the store and knows all but the secret: checksum and all are right, but for the MAC."""
    prompt = stored(valkey.url())
    client = valkey.client()
    for name in valkey.names():
        value = bytearray(client.get(name))
        space = name.decode().split("/")
        value[-SEAL - 64 : -SEAL] = bytes(64)
        Sealer(space[2], "not " + SECRET, 16).seal(name.decode(), memoryview(value))
        client.set(name, bytes(value))
    with llm_of(url=valkey.url()) as llm:
        assert ask(llm, prompt) == (ask(right, prompt)[0], 0)
        assert remote(llm).forged >= 1 and remote(llm).hits == 0


def test_values_that_were_swapped_are_never_used(valkey, right):
    prompt = stored(valkey.url())
    client, names = valkey.client(), valkey.names()
    values = [client.get(name) for name in names]
    for name, value in zip(names, values[1:] + values[:1], strict=True):
        client.set(name, value)
    with llm_of(url=valkey.url()) as llm:
        assert ask(llm, prompt) == (ask(right, prompt)[0], 0)
        assert remote(llm).corrupt >= 1 and remote(llm).hits == 0


def test_values_of_another_kind_and_of_any_size(valkey, right):
    prompt = stored(valkey.url())
    client = valkey.client()
    for number, name in enumerate(valkey.names()):
        client.delete(name)
        if number % 2:
            client.lpush(name, "a list")
        else:
            client.set(name, b"x" * 10**7)
    with llm_of(url=valkey.url()) as llm:
        assert ask(llm, prompt)[0] == ask(right, prompt)[0]
        assert remote(llm).hits == 0 and remote(llm).corrupt and remote(llm).pauses == 0


def test_some_random_rounds(valkey, monkeypatch):
    # The script changes these.
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(health, name, getattr(health, name))
    happened = remote_rounds.rounds(valkey, seed=7, count=6)
    assert sum(n for what, n in happened.items() if not what.startswith("(")) == 6 and happened["(hits)"] > 0
