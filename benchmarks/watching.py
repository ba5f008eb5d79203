"""What it costs to be watched: a decode with 0, 1 and 10 readers of /admin/live, interleaved.

    python benchmarks/watching.py [ROUNDS] [--kv-memory SIZE]

Starts `onekv serve` with the default model; the readers are a separate process. For each answer of 300 tokens it
measures the speed, the CPU time of the server's two threads (engine, event loop) and the CPU time of the readers. On a
machine that does other things as well, compare CPU time: speed also suffers from whatever else runs, the readers
included. Needs Linux, where the kernel counts CPU time by thread.
"""

import argparse
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx

WATCHERS = (0, 1, 10)
TOKENS = 300


def read(url: str, count: int) -> None:
    """What a reader process does: it reads, and looks at nothing."""
    where, ready = urlsplit(url), selectors.DefaultSelector()
    for _ in range(count):
        connection = socket.create_connection((where.hostname, where.port))
        connection.sendall(f"GET /admin/live HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
        ready.register(connection, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in ready.select():
            assert isinstance(key.fileobj, socket.socket)
            if not key.fileobj.recv(1 << 16):
                return


def decode(url: str) -> float:
    """Tokens a second of one answer, after its first token."""
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0}
    body |= {"stream": True, "logit_bias": {"0": -100, "2": -100}}
    first = 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter()
        return (TOKENS - 1) / (time.perf_counter() - first)


def cpu(process: int) -> dict[int, float]:
    """CPU seconds of each thread so far."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except FileNotFoundError:
            # It has ended.
            continue
    return found


def measure(url: str, process: int, watchers: int) -> dict[str, float]:
    reader = None
    if watchers:
        command = [sys.executable, __file__, "--read", url, str(watchers)]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert reader.stdout is not None
        reader.stdout.readline()
        # Until the engine is looked at, too.
        time.sleep(0.5)
    before, readers = cpu(process), sum(cpu(reader.pid).values()) if reader else 0.0
    speed = decode(url)
    spent = {task: seconds - before.get(task, 0.0) for task, seconds in cpu(process).items()}
    if reader:
        readers = sum(cpu(reader.pid).values()) - readers
        reader.kill()
        reader.wait()
    loop = spent.pop(process)
    # The engine's thread computes, and so has most.
    return {"speed": speed, "engine": max(spent.values()), "loop": loop, "readers": readers}


def compare(url: str, process: int, rounds: int) -> None:
    decode(url)
    found: dict[int, dict[str, list[float]]] = {watchers: defaultdict(list) for watchers in WATCHERS}
    for _ in range(rounds):
        for watchers in WATCHERS:
            for name, value in measure(url, process, watchers).items():
                found[watchers][name].append(value)
    medians = {n: {name: statistics.median(values) for name, values in each.items()} for n, each in found.items()}
    alone = medians[0]
    print(f"medians of {rounds} answers of {TOKENS} tokens; CPU in ms per answer, and against no watcher")
    print("watchers   tokens/s       engine's thread        event loop    readers' own")
    for watchers, median in medians.items():
        cells = [f"{median['speed']:7.1f} {100 * median['speed'] / alone['speed'] - 100:+5.1f} %"]
        for name in ("engine", "loop"):
            more = 100 * (median[name] - alone[name]) / (alone["engine"] + alone["loop"])
            cells.append(f"{1000 * median[name]:7.0f} {more:+5.2f} %")
        print(f"{watchers:8}  " + "  ".join(cells) + f"  {1000 * median['readers']:7.1f}")


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2], int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--kv-memory", default="1GiB")
    arguments = parser.parse_args()
    with tempfile.NamedTemporaryFile() as log:
        flags = ["--port", "0", "--hot-only", "on", "--speculate", "off", "--kv-memory", arguments.kv_memory]
        # Without the threads of BLAS, which spin while they wait and so count time that nobody uses.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        server = subprocess.Popen([sys.executable, "-m", "onekv", "serve", *flags], stderr=log, env=environment)
        try:
            while (found := re.search(r"is served on (http://\S+)\. ", Path(log.name).read_text())) is None:
                if server.poll() is not None:
                    sys.exit(Path(log.name).read_text())
                time.sleep(0.1)
            compare(found[1], server.pid, arguments.rounds)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
