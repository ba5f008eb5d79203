"""A cluster on one machine: two OneKV replicas, the store that they share, and a proxy in front of them.

                        /-> replica-1 -\\
    client -> proxy ---<                 >-> store (Valkey or Redis)
                        \\-> replica-2 -/

The proxy (Caddy) sends a conversation to a replica by a rendezvous hash of the header `x-conversation`; what a replica
has computed the other reads from the store. All of them listen on 127.0.0.1 only and write into a temporary folder.

A replica may be stopped (SIGTERM): its conversations go to the other one. If one fails, or the proxy or the store
ends, all are stopped, and the reason is printed. What follows `--` are flags of `onekv serve` for both replicas.
"""

import argparse
import contextlib
import http.client
import json
import os
import queue
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

HOST = "127.0.0.1"
# Of a request: what is hashed. Of an answer: the replica that has given it.
HEADER, REPLICA = "x-conversation", "x-replica"
# What is needed: names of the program, and the Debian package that has it.
STORE, PROXY = (("valkey-server", "redis-server"), "redis-server"), (("caddy",), "caddy")
# Small blocks, so that even a short question fills one; every block is shared at once; no disk cache, which would be
# asked before the store.
FLAGS = ["--block-size", "16", "--kv-memory", "512MiB", "--remote-write", "all", "--hot-only", "on"]
# Seconds after which a part that was asked to stop is killed. A replica takes up to 20 s to write, after its requests.
PATIENCE = 90
QUESTION = "Explain in two sentences why a cache that several servers share saves work, and name one thing it costs."


class Failed(Exception):
    """The cluster cannot start or go on; the message says why."""


@dataclass(frozen=True)
class Ports:
    proxy: int
    store: int
    replicas: tuple[int, int]


class Part:
    """One process. Its lines, and then None when it has ended, are put into `events`."""

    def __init__(
        self, name: str, command: Sequence[str], events: "queue.SimpleQueue[Event]", variables: Mapping[str, str]
    ) -> None:
        self.name, self._events = name, events
        # In a session of its own: Ctrl-C in the terminal is for the cluster, which stops its parts in order.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **variables},
        )
        self.ended = False
        threading.Thread(target=self._read, name=name, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put((self, line.decode(errors="replace").rstrip()))
        self.process.wait()
        self._events.put((self, None))

    def signal(self, number: int) -> None:
        if not self.ended:
            self.process.send_signal(number)

    @property
    def reason(self) -> str:
        status = self.process.returncode
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


# A part's line or its end; or that the cluster itself is to stop, with the signal's number.
Event = tuple[Part | None, str | int | None]


class Cluster:
    def __init__(self, folder: Path, ports: Ports, model: str, flags: Sequence[str]) -> None:
        self._folder, self._ports, self._model, self._flags = folder, ports, model, flags
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._parts: list[Part] = []
        self._stopping = False

    def run(self) -> None:
        """Until a signal; raises Failed if it does not start, or if a part has failed."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._asked_to_stop)
        try:
            if self._start():
                say(self._greeting())
                while not self._stopping:
                    self._handle(self._events.get())
        finally:
            self._stop()

    def _asked_to_stop(self, number: int, _: FrameType | None) -> None:
        self._events.put((None, number))

    # Starting

    def _start(self) -> bool:
        """Whether all are ready; False if the cluster is to stop before that."""
        ports = self._ports
        self._add("store", self._store_command())
        ready = self._wait(lambda: pong(ports.store))
        if ready:
            variables = {"ONEKV_TIER_SECRET": secrets.token_hex(16)}
            for number, port in enumerate(ports.replicas, 1):
                self._add(f"replica-{number}", self._replica_command(port), variables)
            ready = self._wait(lambda: all(healthy(port) for port in ports.replicas))
        if ready:
            # Caddy keeps certificates and its last configuration in the home folder, unless told otherwise.
            home = {"XDG_CONFIG_HOME": str(self._folder), "XDG_DATA_HOME": str(self._folder)}
            config = self._folder / "Caddyfile"
            caddy = program(PROXY)
            version = subprocess.run([caddy, "version"], capture_output=True, text=True, check=True).stdout
            config.write_text(caddyfile(ports, version))
            self._add("proxy", [caddy, "run", "--config", str(config), "--adapter", "caddyfile"], home)
            ready = self._wait(lambda: healthy(ports.proxy))
        return ready

    def _add(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        part = Part(name, command, self._events, variables or {})
        self._parts.append(part)
        say(f"{name:9} | process {part.process.pid}")

    def _store_command(self) -> list[str]:
        where = ["--port", str(self._ports.store), "--bind", HOST, "--dir", str(self._folder)]
        keep = ["--save", "", "--appendonly", "no", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
        return [program(STORE), *where, *keep, "--loglevel", "warning"]

    def _replica_command(self, port: int) -> list[str]:
        where = ["--host", HOST, "--port", str(port), "--remote-tier", self._store_url()]
        return [sys.executable, "-m", "onekv", "serve", self._model, *where, *FLAGS, *self._flags]

    def _store_url(self) -> str:
        return f"valkey://{HOST}:{self._ports.store}/0"

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """Print what the parts say until `ready`; False if the cluster is to stop before that."""
        while not self._stopping:
            with contextlib.suppress(queue.Empty):
                self._handle(self._events.get(timeout=0.1))
                continue
            if ready():
                return True
        return False

    # Running

    def _handle(self, event: Event) -> None:
        """Print a line; note an end, which is a failure unless a replica was told to stop; note a signal."""
        part, said = event
        if part is None:
            if self._stopping:
                say("stopping at once")
                for each in self._parts:
                    each.signal(signal.SIGKILL)
            self._stopping = True
        elif said is not None:
            say(f"{part.name:9} | {said}")
        else:
            part.ended = True
            if not self._stopping:
                self._ended(part)

    def _ended(self, part: Part) -> None:
        if part not in self._replicas or part.process.returncode:
            raise Failed(f"{part.name} {part.reason}")
        left = [each.name for each in self._replicas if not each.ended]
        if not left:
            raise Failed("no replica is left")
        say(f"{part.name} has stopped; its conversations go to {left[0]}")

    @property
    def _replicas(self) -> list[Part]:
        return [part for part in self._parts if part.name.startswith("replica")]

    # Stopping

    def _stop(self) -> None:
        """First what asks, then what answers: the replicas write to the store until they end."""
        self._stopping = True
        say("stopping")
        try:
            for names in (("proxy",), ("replica-1", "replica-2"), ("store",)):
                self._stop_parts([part for part in self._parts if part.name in names])
        finally:
            for part in self._parts:
                if part.process.poll() is None:
                    part.process.kill()
                    part.process.wait()

    def _stop_parts(self, parts: Sequence[Part]) -> None:
        for part in parts:
            part.signal(signal.SIGTERM)
        end = time.monotonic() + PATIENCE
        while not all(part.ended for part in parts):
            try:
                self._handle(self._events.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                late = [part for part in parts if not part.ended]
                say(f"{' and '.join(part.name for part in late)} did not stop within {PATIENCE} s: killed")
                for part in late:
                    part.signal(signal.SIGKILL)
                end = time.monotonic() + PATIENCE

    def _greeting(self) -> str:
        url = f"http://{HOST}:{self._ports.proxy}"
        body = {"model": "default", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48}
        urls = [self._store_url(), *(f"http://{HOST}:{port}" for port in self._ports.replicas), url]
        pairs = zip(self._parts, urls, strict=True)
        where = [f"  {part.name:9}  {at:27}  process {part.process.pid}" for part, at in pairs]
        return "\n".join(
            [
                "The cluster is ready:",
                *where,
                f"Requests to the proxy with the same {HEADER} header go to the same replica. Try:",
                f"  curl -i {url}/v1/chat/completions -H 'content-type: application/json' -H '{HEADER}: 1' \\",
                f"    -d '{json.dumps(body)}'",
                f"{REPLICA} in the answer says which replica it came from. Stop that one (kill PROCESS) and ask again:",
                "the other one answers, and cached_tokens says how many tokens it has read from the store.",
                "Ctrl-C stops all.",
            ]
        )


def caddyfile(ports: Ports, version: str) -> str:
    """The sites are named: a foreign page whose name was pointed here (DNS rebinding) is not let in."""
    # A request whose replica has just stopped can be sent to the other one only if its body was kept.
    old = [int(number) for number in re.findall(r"\d+", version)[:3]] < [2, 6, 3]
    keep_body = "buffer_requests" if old else "request_buffers 32MB"
    replicas = " ".join(f"{HOST}:{port}" for port in ports.replicas)
    return f"""{{
	admin off
	auto_https off
	grace_period 10s
	log {{
		level WARN
	}}
}}
http://{HOST}:{ports.proxy}, http://localhost:{ports.proxy} {{
	bind {HOST}
	reverse_proxy {replicas} {{
		lb_policy header {HEADER}
		lb_try_duration 5s
		fail_duration 2s
		health_uri /health
		health_interval 1s
		health_timeout 30s
		flush_interval -1
		{keep_body}
		header_up Host {{upstream_hostport}}
		header_down {REPLICA} {{upstream_hostport}}
	}}
}}
"""


def say(text: str) -> None:
    # If nobody reads any more, the parts must still be stopped in order.
    with contextlib.suppress(OSError):
        print(text, flush=True)


def program(needed: tuple[Sequence[str], str]) -> str:
    names, _ = needed
    found = next((path for name in names if (path := shutil.which(name)) is not None), None)
    if found is None:
        raise Failed(missing([needed]))
    return found


def missing(needed: Sequence[tuple[Sequence[str], str]]) -> str:
    """Which of those are not installed, and how they are on Debian; empty if all are."""
    absent = [(names, package) for names, package in needed if not any(map(shutil.which, names))]
    if not absent:
        return ""
    names = ", ".join(" or ".join(names) for names, _ in absent)
    return f"not installed: {names}; on Debian: apt-get install {' '.join(package for _, package in absent)}"


def free_ports(count: int) -> list[int]:
    """All different, as all are taken before any is given back."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def pong(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="model of both replicas; default: %(default)s")
    parser.add_argument(
        "--ports", nargs=4, type=int, metavar=("PROXY", "STORE", "FIRST", "SECOND"), help="default: any that are free"
    )
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of onekv serve, for both replicas")
    arguments = parser.parse_args()
    proxy, store, first, second = arguments.ports or free_ports(4)
    try:
        if absent := missing([STORE, PROXY]):
            raise Failed(absent)
        with tempfile.TemporaryDirectory(prefix="onekv-cluster-") as folder:
            ports = Ports(proxy, store, (first, second))
            Cluster(Path(folder), ports, arguments.model, arguments.flags).run()
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
