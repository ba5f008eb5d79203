"""Real stores, as they are set up: with TLS, with little permission, slow, with several writers."""

import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from remote_parts import (
    SLOW,
    Cluster,
    SlowLink,
    Valkey,
    ask,
    flush,
    free_port,
    llm_of,
    object_store,
    prompt_of,
    remote,
    until,
)
from test_remote_faults import recovers, stored

from onekv.tiers.remote import opening
from onekv.tiers.remote.url import parse


@pytest.fixture
def valkey(server: Valkey) -> str:
    return server.url()


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shared?timeout={SLOW}"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with object_store() as (known, _):
        for name, value in known.items():
            monkeypatch.setenv(name, value)
        yield f"s3://kv-blocks?timeout={SLOW}"


@pytest.mark.parametrize("kind", ["valkey", "file", "s3"])
def test_of_two_writers_of_the_same_block_one_writes_it(kind, request):
    place = parse(request.getfixturevalue(kind))
    stores = [opening._open_store(place, 10.0) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for number in range(10):
            put = [
                threads.submit(s.put, f"onekv/{number}", memoryview(bytes([i]) * 9000)) for i, s in enumerate(stores)
            ]
            (winner,) = [i for i, each in enumerate(put) if each.result()]
            value = stores[0].get(f"onekv/{number}", 10000)
            assert value is not None and bytes(value) == bytes([winner]) * 9000
    assert stores[0].heads(["onekv/0", "onekv/none"], 3)[1] is None
    for name in ("onekv/0", "onekv/none"):
        stores[0].delete(name)
    assert stores[1].get("onekv/0", 10) is None
    for store in stores:
        store.close()


def test_a_store_that_takes_2_seconds_for_every_call(server, right, no_thread_dies):
    prompt = stored(server.url())
    link = SlowLink(server.port, 2.0)
    with llm_of(url=f"valkey://127.0.0.1:{link.port}/0?timeout=500ms") as llm:
        for seed in range(3):
            asked = [*prompt, seed + 1]
            assert ask(llm, asked)[0] == ask(right, asked)[0]
        until(lambda: "paused" in str(remote(llm).failed))
        assert remote(llm).hits == 0
        link.seconds = 0.0
        recovers(llm, prompt, right)
    link.close()


def test_no_permission_to_read(server, right, no_thread_dies):
    prompt = stored(server.url())
    allowed = ["~onekv/*", "+set", "+unlink", "+client|setname"]
    server.client().execute_command("ACL", "SETUSER", "me", "on", ">word", *allowed)
    with llm_of(url=server.url().replace("://", "://me:word@")) as llm:
        assert ask(llm, prompt) == (ask(right, prompt)[0], 0)
        until(lambda: "paused" in str(remote(llm).failed))
        assert "'getrange'" in str(remote(llm).failed)
        server.client().execute_command("ACL", "SETUSER", "me", "+getrange")
        recovers(llm, prompt, right)


class Skewed(BaseHTTPRequestHandler):
    """S3 for a client whose clock is wrong; and an empty bucket for one whose clock is right again."""

    wrong = True

    def _answer(self, status: int) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        text = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>RequestTimeTooSkewed</Code></Error>'
        body = text if self.wrong else b""
        self.send_response(403 if self.wrong else status)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", '"a"')
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(404)

    def do_PUT(self) -> None:
        self._answer(200)

    def log_message(self, *_: object) -> None:
        pass


def test_an_object_store_that_rejects_a_clock(monkeypatch, right, no_thread_dies):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Skewed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = f"http://127.0.0.1:{server.server_port}"
    known = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "AWS_ENDPOINT": where}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Skewed, "wrong", True)
    with llm_of(url=f"s3://kv-blocks?timeout={SLOW}") as llm:
        assert ask(llm, prompt_of(1))[0] == ask(right, prompt_of(1))[0]
        until(lambda: remote(llm).failed)
        assert str(remote(llm).failed).startswith("paused: ")
        assert str(remote(llm).failed).endswith("403 Forbidden (RequestTimeTooSkewed)")
        Skewed.wrong = False
        until(lambda: remote(llm).failed is None)
    server.shutdown()
    server.server_close()


def test_tls_and_a_certificate_that_nobody_has_signed(tmp_path, monkeypatch, right, no_thread_dies):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    what = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=a store"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *what, *names], check=True, capture_output=True)
    port, files = free_port(), ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    server = Valkey(tmp_path, "--tls-port", str(port), *files, "--tls-auth-clients", "no")
    url = f"rediss://127.0.0.1:{port}/0?timeout={SLOW}"
    with llm_of(url=url) as llm:
        assert ask(llm, prompt_of(1))[0] == ask(right, prompt_of(1))[0]
        until(lambda: "paused" in str(remote(llm).failed))
        assert "certificate verify failed" in str(remote(llm).failed) and server.names() == []
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with llm_of(url=url) as llm:
        ask(llm, prompt_of(1))
        flush(llm)
        assert remote(llm).writes == 9 and remote(llm).failed is None
    with llm_of(url=url) as llm:
        assert ask(llm, prompt_of(1)) == (ask(right, prompt_of(1))[0], 144)
    server.stop()


@pytest.mark.parametrize("kind", [Valkey, Cluster])
def test_the_permissions_of_the_documentation_are_enough(kind, tmp_path, right, no_thread_dies):
    """docs/scale.md: in another database than 0, and in a cluster."""
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    (line,) = re.findall(r"^ACL SETUSER onekv (on >PASSWORD .*)$", page, re.MULTILINE)
    server = kind(tmp_path)
    server.client().execute_command("ACL", "SETUSER", "onekv", *line.split())
    url = server.url().replace("://", "://onekv:PASSWORD@").replace("/0?", "/1?" if kind is Valkey else "/0?")
    prompt = stored(url)
    with llm_of(url=url) as llm:
        assert ask(llm, prompt) == (ask(right, prompt)[0], 144)
        assert remote(llm).failed is None
    # What is wrong is removed.
    store = opening._open_store(parse(url), 10.0)
    store.put("onekv/wrong", memoryview(b"wrong"))
    store.delete("onekv/wrong")
    assert store.heads(["onekv/wrong"], 3) == [None]
    store.close()
    server.stop()
