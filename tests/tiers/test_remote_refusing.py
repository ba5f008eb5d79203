"""Stores that answer, but refuse: full, read-only, not there yet, or with empty values. What can be read is read."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from remote_parts import SLOW, Valkey, ask, flush, llm_of, object_store, prompt_of, reading_is_worth_it, remote, until
from test_remote_faults import recovers, stored

from onekv.errors import SettingError
from onekv.tiers.remote import opening
from onekv.tiers.remote.stores import Trouble
from onekv.tiers.remote.url import parse

Emptying = Callable[[], None]


@pytest.fixture
def valkey(server: Valkey) -> tuple[str, Emptying]:
    def empty() -> None:
        for name in server.names():
            server.client().set(name, b"")

    return server.url(), empty


@pytest.fixture
def file(tmp_path: Path) -> tuple[str, Emptying]:
    def empty() -> None:
        for path in (tmp_path / "shared").rglob("*.safetensors"):
            path.write_bytes(b"")

    return f"file://{tmp_path}/shared?timeout={SLOW}", empty


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Emptying]]:
    with object_store() as (known, client):
        for name, value in known.items():
            monkeypatch.setenv(name, value)

        def empty() -> None:
            for each in client.list_objects_v2(Bucket="kv-blocks")["Contents"]:
                if each["Key"].endswith(".safetensors"):
                    client.put_object(Bucket="kv-blocks", Key=each["Key"], Body=b"")

        yield f"s3://kv-blocks?timeout={SLOW}", empty


@pytest.mark.parametrize("kind", ["valkey", "file", "s3"])
def test_values_of_no_bytes_are_damaged_ones(kind, request, right, no_thread_dies):
    """They are removed and written again, and the store is not taken for one that fails."""
    url, empty = request.getfixturevalue(kind)
    prompt = stored(url)
    empty()
    with llm_of(url=url) as llm:
        until(lambda: remote(llm).latency)
        assert ask(llm, prompt) == (ask(right, prompt)[0], 0)
        flush(llm)
        assert remote(llm).corrupt >= 1 and remote(llm).pauses == 0 and remote(llm).failed is None
    for _ in range(9):
        with llm_of(url=url) as llm:
            _, cached = ask(llm, prompt)
            flush(llm)
            assert remote(llm).pauses == 0
            if cached == 144:
                break
    assert cached == 144


def test_a_folder_is_made_when_something_is_written(tmp_path, right):
    url = f"file://{tmp_path}/some/where?timeout={SLOW}"
    with llm_of(url=url, remote_write="off") as llm:
        assert ask(llm, prompt_of(1)) == (ask(right, prompt_of(1))[0], 0)
        assert remote(llm).failed is None and remote(llm).pauses == 0
    assert not (tmp_path / "some").exists()
    prompt = stored(url)
    with llm_of(url=url) as llm:
        assert ask(llm, prompt) == (ask(right, prompt)[0], 144)


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path, right, no_thread_dies):
    (tmp_path / "some").touch()
    with llm_of(url=f"file://{tmp_path}/some/where?timeout={SLOW}") as llm:
        assert ask(llm, prompt_of(1))[0] == ask(right, prompt_of(1))[0]
        until(lambda: "Not a directory" in str(remote(llm).failed))
        (tmp_path / "some").unlink()
        until(lambda: "paused" not in str(remote(llm).failed))
        prompt = stored(f"file://{tmp_path}/some/where?timeout={SLOW}", seed=2)
        recovers(llm, prompt, right)


@pytest.mark.parametrize(("refusing", "again"), [("size=9216k", "size=32m"), ("ro,size=32m", "rw,size=32m")])
def test_a_folder_that_is_full_or_read_only_is_still_read(refusing, again, tmp_path, mount, right):
    shared = tmp_path / "shared"
    mount(shared, "size=32m")
    url = f"file://{shared}?timeout={SLOW}"
    prompt = stored(url)
    filler = shared / "filler"
    if refusing.startswith("size"):
        filler.write_bytes(bytes(8 << 20))
        with pytest.raises(OSError, match="No space"), filler.open("ab", buffering=0) as more:
            subprocess.run(["mount", "-o", f"remount,{refusing}", str(shared)], check=True)
            while True:
                more.write(bytes(4096))
    else:
        subprocess.run(["mount", "-o", f"remount,{refusing}", str(shared)], check=True)
    with llm_of(url=url) as llm:
        until(lambda: remote(llm).latency)
        assert ask(llm, prompt_of(2))[0] == ask(right, prompt_of(2))[0]
        flush(llm)
        assert "rejects writes" in str(remote(llm).failed) and remote(llm).pauses == 0
        reading_is_worth_it(llm)
        assert ask(llm, prompt) == (ask(right, prompt)[0], 144)
        subprocess.run(["mount", "-o", f"remount,{again}", str(shared)], check=True)

        def written() -> bool:
            ask(llm, prompt_of(2))
            flush(llm)
            return remote(llm).failed is None

        until(written)


def test_a_server_that_refuses_every_write_is_still_read(server, right):
    """As without the replicas that it is to have."""
    prompt = stored(server.url())
    server.client().config_set("min-replicas-to-write", 1)
    with llm_of(url=server.url()) as llm:
        assert ask(llm, prompt_of(2))[0] == ask(right, prompt_of(2))[0]
        flush(llm)
        assert "rejects writes: NOREPLICAS" in str(remote(llm).failed) and remote(llm).pauses == 0
        reading_is_worth_it(llm)
        assert ask(llm, prompt) == (ask(right, prompt)[0], 144)


class Answering(BaseHTTPRequestHandler):
    """S3 that answers everything with one status."""

    status = 200

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>Reason</Code></Error>'
        self.send_response(self.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answering]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = f"http://127.0.0.1:{server.server_port}"
    known = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "AWS_ENDPOINT": where}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    yield Answering
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "refused"),
    [
        *((status, True) for status in (400, 401, 403, 404, 405, 411, 413, 501, 507)),
        *((status, False) for status in (408, 429, 500, 502, 503, 504)),
    ],
)
def test_which_answers_of_an_object_store_refuse_a_write(status, refused, answering, monkeypatch):
    monkeypatch.setattr(answering, "status", status)
    # Numbers in names are not statuses.
    store = opening._open_store(parse("s3://kv-507/404"), 10.0)
    with pytest.raises(Trouble, match=f"{status} .*\\(Reason\\)") as put:
        store.put("onekv/403", memoryview(b"abc"))
    assert put.value.refused == refused
    if status != 404:
        # Whatever the reason is why it cannot be read, it is not in use.
        with pytest.raises(Trouble, match=f"{status} .*\\(Reason\\)") as get:
            store.heads(["onekv/403"], 3)
        assert not get.value.refused
    store.close()


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"AWS_ENDPOINT": "localhost:9000"}, "AWS_ENDPOINT is 'localhost:9000'; it must begin with http://"),
        ({"AWS_ENDPOINT_URL": "minio.local"}, "AWS_ENDPOINT_URL is 'minio.local'; it must begin with http://"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, "--remote-tier is s3://kv-blocks, which cannot be opened: .*SecretAccessKey$"),
    ],
)
def test_variables_that_cannot_be_are_an_error_at_the_start(known, said, answering, monkeypatch):
    for name, value in known.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(SettingError, match=said):
        opening._open_store(parse("s3://kv-blocks"), 10.0)
