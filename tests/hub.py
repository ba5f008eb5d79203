"""A server that answers as the Hugging Face hub does, as far as downloading one model goes.

`Hub` serves the files of a folder as the repository `name`. A download of the weights stops in the middle while `hold`
is set, with the connection open; `ranges` has the Range header of every download of them, `keys` what it was asked
with.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40
WEIGHTS = "model.safetensors"


class Hub:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.hold, self.ended = threading.Event(), threading.Event()
        self.ranges: list[str | None] = []
        self.keys: set[str | None] = set()
        self.url = ""

    def listing(self) -> list[dict[str, object]]:
        files = [(file, hashlib.sha256(file.read_bytes()).hexdigest()) for file in sorted(self.folder.iterdir())]
        found: list[dict[str, object]] = []
        for file, digest in files:
            size = file.stat().st_size
            large = {"lfs": {"oid": digest, "size": size, "pointerSize": 130}} if file.name == WEIGHTS else {}
            found.append({"type": "file", "path": file.name, "size": size, "oid": digest[:40], **large})
        return found


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path == f"/api/models/{self.server.hub.name}/revision/main":
            self._send(json.dumps({"id": self.server.hub.name, "sha": COMMIT, "siblings": []}).encode(), body)
        elif path == f"/api/models/{self.server.hub.name}/tree/{COMMIT}":
            self._send(json.dumps(self.server.hub.listing()).encode(), body)
        elif path.startswith(f"/{self.server.hub.name}/resolve/{COMMIT}/"):
            self._file(self.server.hub.folder / path.rpartition("/")[2], body)
        else:
            self._send(b"{}", body, 404, {"X-Error-Code": "EntryNotFound"})

    def _file(self, file: Path, body: bool) -> None:
        (entry,) = [entry for entry in self.server.hub.listing() if entry["path"] == file.name]
        content, headers = file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{entry["oid"]}"'}
        if file.name == WEIGHTS:
            digest = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            if body:
                self.server.hub.ranges.append(self.headers.get("Range"))
                self.server.hub.keys.add(self.headers.get("Authorization"))
        given, status = self.headers.get("Range"), 200
        if body and given is not None:
            start = int(given.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content, status = content[start:], 206
        self._send(content, body, status, headers, held=file.name == WEIGHTS and self.server.hub.hold.is_set())

    def _send(
        self,
        content: bytes,
        body: bool,
        status: int = 200,
        headers: dict[str, str] | None = None,
        held: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and held:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.hub.ended.wait(120)
        elif body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    with _Server(hub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            hub.ended.set()
            server.shutdown()
            thread.join()
