"""A model is loaded into the memory of the one before, and the process is never larger than it may be."""

import asyncio
import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import mlx.core as mx
import ollama
import openai
import pytest
from swaps import COMMON, spec

from onekv.bench.soak import save_tiny
from onekv.config import Settings
from onekv.footprint import footprint
from onekv.models import load_for, load_model
from onekv.models.freed import Freed, freed
from onekv.server.connections import Limits
from onekv.server.models.freeing import Parts
from onekv.server.models.registry import Models
from onekv.server.serve import make_server
from onekv.server.settings import ServerSettings

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="what is freed is kept by glibc")
# Freed, kept, and then in the way of something larger.
KEPT = """
import onekv
import mlx.core as mx
from onekv.footprint import footprint
from onekv.footprint import footprint
from onekv.models.freed import freed
MB = 1 << 20
mx.eval(mx.zeros(1)); before = footprint()
arrays = [mx.zeros(64 * MB, mx.uint8) for _ in range(8)]
mx.eval(arrays)
# What is small and stays lies between, so that nothing larger than a piece fits into what is freed.
small = [mx.zeros(1 << 18, mx.uint8) for _ in range(8)]
mx.eval(small)
del arrays
limit = footprint() + 100 * MB
freed.keep(limit, footprint)
freed.take(64 * MB)
assert freed.kept and footprint() - before > 500 * MB, "it fits in any case"
again = mx.zeros(64 * MB, mx.uint8); mx.eval(again)
assert footprint() <= limit
freed.take(700 * MB)
assert not freed.kept and footprint() - before < 100 * MB, "it does not fit beside what is kept"
large = mx.zeros(700 * MB, mx.uint8); mx.eval(large)
assert footprint() - before < 800 * MB
"""


@LINUX
def test_what_is_kept_goes_back_before_the_process_becomes_too_large() -> None:
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_nothing_is_given_back_while_there_is_room() -> None:
    kept, process = Freed(), 1000
    kept.take(2**40)
    assert not kept.kept
    kept.keep(1500, lambda: process)
    kept.take(500)
    assert kept.kept
    kept.take(501)
    assert not kept.kept
    # What has gone back cannot go back again.
    kept.take(2**40)
    kept.release()


def test_weights_take_no_more_than_they_need(tmp_path: Path) -> None:
    """Those that are as they are in the file are there once: what was freed would go back for nothing."""
    path = save_tiny(tmp_path / "a")
    parts = load_model(path, lazy=True).model.modules()
    largest = max(sum(each.nbytes for each in part.values() if isinstance(each, mx.array)) for part in parts)
    try:
        freed.keep(largest, lambda: 0)
        load_for(path, Settings(), progress=False)
        assert freed.kept
    finally:
        freed.release()


@LINUX
def test_models_in_turn_stay_below_the_budget(smollm2_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("swaps.py")), str(smollm2_path), "--turns"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    turns = json.loads(done.stdout)
    assert turns["trials"] == [1, 1]
    assert turns["peak"] <= turns["memory"]
    # The larger one needs more than the smaller one had; the smaller one finds all that it needs.
    packed = range(2, len(turns["mapped"]), 2)
    assert all(turns["mapped"][number] < turns["weights"][number] / 2 for number in packed)
    assert turns["loaded"] - turns["left"] >= turns["weights"][-1]


def test_nothing_is_kept_for_one_that_nobody_waits_for(tmp_path: Path) -> None:
    """As when the request for the next model goes away before that is loaded."""
    models = Models([spec("a", save_tiny(tmp_path / "a"))], "1GiB", COMMON)
    models.start()
    try:
        freed.keep(2**62, footprint)
        # Whatever happens next.
        models.unpin(models.first)
        deadline = time.monotonic() + 60
        while freed.kept and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not freed.kept
    finally:
        freed.release()
        models.stop(0)


@contextmanager
def served(models: Models) -> Iterator[str]:
    """In this process, whose objects can be looked at."""
    server = make_server(models, ServerSettings(grace=0), Limits(None, 60))
    listener = socket.create_server(("127.0.0.1", 0))
    models.start()
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


HELLO: Any = [{"role": "user", "content": "Hello"}]


def ask_openai(url: str, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(model="a", messages=HELLO, max_tokens=4, stream=stream)
    assert list(answer)


def ask_responses(url: str, background: bool) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    made = client.responses.create(model="a", input="Hello", max_output_tokens=4, background=background)
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    assert made.usage is not None and made.usage.output_tokens == 4


def ask_anthropic(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    with client.messages.stream(model="a", messages=HELLO, max_tokens=4) as answer:
        assert answer.get_final_message().usage.output_tokens == 4


def ask_ollama(url: str) -> None:
    assert list(ollama.Client(url).chat("a", HELLO, stream=True, options={"num_predict": 4}))


def go_away(url: str) -> None:
    body = {"model": "a", "messages": HELLO, "max_tokens": 1000, "stream": True, "logit_bias": {"2": -100}}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())


def be_refused(url: str) -> None:
    body = {"model": "a", "prompt": [10**6], "max_tokens": 1}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 400


WAYS: dict[str, Callable[[str], None]] = {
    "chat": lambda url: ask_openai(url, False),
    "streamed chat": lambda url: ask_openai(url, True),
    "response": lambda url: ask_responses(url, False),
    "background response": lambda url: ask_responses(url, True),
    "anthropic": ask_anthropic,
    "ollama": ask_ollama,
    "gone": go_away,
    "refused": be_refused,
}


def test_no_request_holds_the_model_that_answered_it(tmp_path: Path) -> None:
    """Not even in a cycle, for which all objects would have to be searched before the next model can be loaded."""
    models = Models([spec("a", save_tiny(tmp_path / "a"))], "1GiB", COMMON)
    with served(models) as url:
        gc.collect()
        gc.disable()
        try:
            for name, ask in WAYS.items():
                ask(url)
                backend = models.backends().get("a")
                assert backend is not None
                parts = Parts(backend)
                del backend
                models.unload(models.first)
                assert parts.gone, name
        finally:
            gc.enable()
