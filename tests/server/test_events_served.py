"""`onekv serve --kv-events`: settings, real servers, and the reader of docs/events.md."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import pytest
import zmq
from router import Router
from several import TWO, WORDS, cached, complete, start_several

from conftest import start_server, stop_server
from onekv.bench.soak import save_tiny
from onekv.errors import SettingError
from onekv.server.events.opening import open_publishers
from onekv.server.settings import ServerSettings

PAGE = Path(__file__).parents[2] / "docs" / "events.md"

# Settings


def test_off_there_is_nothing():
    assert open_publishers(ServerSettings(), ["a", "b"], 8000) == [None, None]
    code = (
        "import sys; from onekv.server import serve; from onekv.server.settings import ServerSettings;"
        "serve.open_publishers(ServerSettings(), ['a'], 1); sys.exit('zmq' in sys.modules or 'msgspec' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_events": "5557"}, "--kv-events is '5557'; it must be a ZeroMQ endpoint such as tcp://127.0.0.1:5557"),
        ({"kv_events": "tcp://192.0.2.1:5557"}, "--kv-events is 'tcp://192.0.2.1:5557', which cannot be bound"),
        ({"kv_events": "ipc:///nowhere/at/all"}, "--kv-events is 'ipc:///nowhere/at/all', which cannot be bound"),
        ({"kv_events": "tcp://127.0.0.1:65535"}, "model number 2 would have port 65536"),
        (
            {"kv_events_replay": "tcp://127.0.0.1:*"},
            "--kv-events-replay is 'tcp://127.0.0.1:*', but --kv-events is not",
        ),
        (
            {"kv_events": "tcp://127.0.0.1:*", "kv_events_replay": "udp://127.0.0.1:1"},
            "--kv-events-replay is 'udp://127.0.0.1:1'; it must be",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(given, said):
    with pytest.raises(SettingError) as error:
        open_publishers(ServerSettings(**given), ["a", "b"], 8000)
    assert said in str(error.value)
    assert "onekv-events" not in {thread.name for thread in threading.enumerate()}


def test_an_endpoint_that_is_taken():
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(SettingError, match=f":{port}', which cannot be bound: Address already in use"):
            open_publishers(ServerSettings(kv_events=f"tcp://127.0.0.1:{port}"), ["a"], 8000)
        other.close(0)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "onekv.server.events.publisher")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(SettingError, match=r"--kv-events needs zmq; install it with: pip install 'onekv\[events\]'"):
        open_publishers(ServerSettings(kv_events="tcp://127.0.0.1:*"), ["a"], 8000)


def test_topics_and_endpoints_of_several_models(caplog):
    settings = ServerSettings(host="0.0.0.0", insecure=True, kv_events="tcp://*:0", kv_events_topic="kv@{port}@{model}")
    opened = open_publishers(settings, ["a/b", "{host}"], 9000)
    try:
        assert [each.topic for each in opened] == ["kv@9000@a/b", "kv@9000@{host}"]
        assert len({each.endpoint for each in opened}) == 2
        assert "anyone who can reach it can read the token ids" in caplog.text
    finally:
        for each in opened:
            each.close()


# A server


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("models")
    return {name: {"model": save_tiny(folder / name, seed)} for seed, name in enumerate(("a", "b"))}


def until(reader: Router, question: Callable[[], bool]) -> None:
    """Read until that is so."""
    deadline = time.monotonic() + 60
    while not question():
        assert time.monotonic() < deadline, f"{len(reader.blocks)} blocks, {reader.events[-1:]}"
        if not reader.read(0.1):
            # It may not have been connected yet.
            reader.catch_up()


def tokens_of(reader: Router) -> list[list[int]]:
    """All that it knows of: the tokens up to each block."""
    found = []
    for tokens in reader.blocks.values():
        parent, *path = tokens
        while parent is not None:
            parent, before = reader.blocks[parent]
            path.insert(0, before)
        found.append([token for part in path for token in part])
    return found


def test_a_server_with_two_models(models, tmp_path, sockets):
    flags = ["--kv-events", f"{sockets}/e", "--kv-events-replay", f"{sockets}/r"]
    server = start_several(tmp_path, models, *flags, memory=TWO)
    readers = {"a": Router(f"{sockets}/e", f"{sockets}/r"), "b": Router(f"{sockets}/e.1", f"{sockets}/r.1")}
    try:
        prompt = httpx.post(f"{server.url}/tokenize", json={"content": WORDS}).json()["tokens"]
        whole = prompt[: (len(prompt) - 1) // 16 * 16]
        for name, reader in readers.items():
            complete(server, name)
            until(reader, lambda reader=reader: whole in tokens_of(reader))
            assert reader.topics == {f"kv@127.0.0.1:{httpx.URL(server.url).port}@{name}"}
        told = httpx.get(f"{server.url}/metrics").text
        assert f'onekv_kv_event_blocks{{model="b"}} {len(readers["b"].blocks)}.0' in told
        assert 'onekv_kv_events_total{kind="cleared",model="a"} 1.0' in told
        # Unloaded and loaded again: the stream goes on.
        before = readers["b"].last
        httpx.post(f"{server.url}/admin/models/b/unload", timeout=60)
        until(readers["b"], lambda: not readers["b"].blocks)
        complete(server, "b")
        until(readers["b"], lambda: whole in tokens_of(readers["b"]))
        assert readers["b"].last > before and readers["a"].blocks
        httpx.delete(f"{server.url}/admin/cache", timeout=60)
        for reader in readers.values():
            until(reader, lambda reader=reader: not reader.blocks and reader.events[-1] == ["AllBlocksCleared"])
        assert cached(complete(server, "a")) == 0
        until(readers["a"], lambda: whole in tokens_of(readers["a"]))
        server.process.terminate()
        while readers["a"].blocks:
            assert readers["a"].read(60)
    finally:
        said = stop_server(server)
        for reader in readers.values():
            reader.close()
    assert server.process.returncode == 0 and "Traceback" not in said, said
    assert f"events for routers: {sockets}/e.1, topic kv@" in said


def test_the_reader_of_the_page(models, tmp_path, sockets):
    """Over a restart of the server, too."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    flags = ["--kv-events", f"{sockets}/e", "--kv-events-replay", f"{sockets}/r", "--block-size", "16"]
    command = [sys.executable, "-c", program, f"{sockets}/e", f"{sockets}/r"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reading:
        assert reading.stdout is not None
        try:
            for _ in range(2):
                server = start_server(models["a"]["model"], "--kv-memory", "32MiB", *flags, keys=[])
                complete(server, "a")
                figures = httpx.get(f"{server.url}/metrics").text
                blocks = int(float(re.search(r"^onekv_kv_event_blocks (\S+)", figures, re.MULTILINE)[1]))
                assert blocks > 10
                while reading.stdout.readline() != f"{blocks} blocks\n":
                    assert reading.poll() is None
                stop_server(server)
        finally:
            reading.kill()
