"""Several models as the one who runs the server meets them: /admin/models, and the commands that ask a real server."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from several import complete, rows, start_several, states
from swaps import spec
from test_launch import free_port
from test_stuck import eventually

from conftest import Server, stop_server
from onekv.bench.soak import save_tiny
from onekv.cli import main
from onekv.server.metrics import Metrics
from onekv.server.models.model import Model
from terminal import Terminal

# `onekv` that waits while there are files in the folder that is the first argument: NAME.wait, before it loads the
# model of that name, store.wait, before it stores anything on disk, and decode.wait, before it decodes a token.
SLOW = """
import sys, time
import onekv.models.loader as loader
from onekv.engine.runner import Runner
from onekv.tiers.disk import DiskTier
from pathlib import Path
folder, load, offer, decode = Path(sys.argv.pop(1)), loader.load_model, DiskTier.offer, Runner.decode
def wait(name):
    while (folder / f"{name}.wait").exists():
        time.sleep(0.01)
def slow_load(name, **options):
    if not options.get("lazy"):
        wait(Path(name).name)
    return load(name, **options)
def slow_offer(*given, **options):
    wait("store")
    return offer(*given, **options)
def slow_decode(*given):
    wait("decode")
    return decode(*given)
loader.load_model, DiskTier.offer, Runner.decode = slow_load, slow_offer, slow_decode
from onekv.bench.soak import save_tiny
from onekv.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Server]:
    """Two of its three models fit; `b` is to idle for an hour at most."""
    tables: dict[str, dict[str, Any]] = {
        name: {"model": save_tiny(folder / name, seed)} for seed, name in enumerate(("a", "b", "c"))
    }
    tables["b"]["keep"] = "1h"
    flags = ("--disk-cache", str(folder / "disk"), "--log-level", "info")
    server = start_several(folder, tables, *flags, program=("-c", SLOW, str(folder)))
    yield server
    said = stop_server(server)
    assert server.process.returncode == 0 and "Traceback" not in said, said


@pytest.fixture
def several(running: Server, folder: Path) -> Iterator[Server]:
    """As at the start: `a` is loaded, nothing is pinned."""
    yield running
    for file in folder.glob("*.wait"):
        file.unlink()
    for name in "abc":
        assert post(running, name, "unpin").status_code == 200
        assert post(running, name, "load" if name == "a" else "unload").status_code == 200


def post(server: Server, name: str, action: str) -> httpx.Response:
    return httpx.post(f"{server.url}/admin/models/{name}/{action}", timeout=120)


def onekv(*words: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "onekv", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, input=given)
    assert "Traceback" not in done.stderr
    return done


def in_background(server: Server, model: str, request: str, answers: list[httpx.Response]) -> threading.Thread:
    """A request for a model that is not loaded."""

    def ask() -> None:
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        headers = {"x-request-id": request}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


# Pins


def test_what_is_pinned_at_run_time_is_not_unloaded_for_another(several: Server) -> None:
    assert post(several, "b", "pin").status_code == 200
    assert states(several)["b"] == "unloaded", "pinning loads nothing"
    listed = {model["id"]: model for model in httpx.get(f"{several.url}/v1/models").json()["data"]}
    assert (rows(several)["b"]["keep"], listed["b"]["keep"], listed["a"]["keep"]) == ("pinned", "pinned", "lru")
    complete(several, "b")
    complete(several, "a")
    # The one that was used least recently would go.
    complete(several, "c")
    assert states(several) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
    assert post(several, "c", "pin").status_code == 200
    refused = post(several, "a", "pin")
    assert refused.status_code == 503
    assert "beside what is pinned (b, c)" in refused.text and "--memory is 1.17 GiB" in refused.text
    assert rows(several)["a"]["keep"] == "lru"
    assert httpx.post(f"{several.url}/v1/completions", json={"model": "a", "prompt": "x"}).status_code == 503
    answer = post(several, "b", "unpin").json()
    assert [row["keep"] for row in answer["models"]] == ["lru", "1h", "pinned"]
    complete(several, "a")
    assert states(several)["c"] == "loaded"
    assert post(several, "d", "pin").status_code == 404


def test_a_model_that_is_loaded_answers_also_where_it_would_not_fit_beside_what_is_pinned(several: Server) -> None:
    for name in "bc":
        assert post(several, name, "pin").status_code == 200
    complete(several, "a")
    assert states(several) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}


def test_what_was_configured_as_pinned_becomes_lru() -> None:
    for keep, after in (("pinned", "lru"), ("lru", "lru"), ("10m", "10m")):
        model = Model(spec("x", "nowhere", keep), Metrics([]))
        model.pin()
        model.used = 0.0
        assert model.pinned and model.expires == float("inf")
        model.unpin()
        assert model.keep == after


def test_who_waits_is_seen_and_is_told_when_a_pin_leaves_no_room(several: Server, folder: Path) -> None:
    (folder / "b.wait").touch()
    answers: list[httpx.Response] = []
    first = in_background(several, "b", "one", answers)
    eventually(lambda: states(several)["b"] == "loading")
    second = in_background(several, "c", "two", answers)
    eventually(lambda: rows(several)["c"]["requests"]["waiting"])
    found = httpx.get(f"{several.url}/admin/models").json()
    assert [(place["position"], place["model"], place["request"]) for place in found["queue"]] == [
        (1, "b", "one"),
        (2, "c", "two"),
    ]
    assert all(place["waited_s"] > 0 for place in found["queue"])
    said = onekv("ps", "--url", several.url)
    assert said.returncode == 0, said.stderr
    assert "\nc: unloaded; number 2 of 2 requests waiting for models\n" in said.stdout
    for name in "ab":
        assert post(several, name, "pin").status_code == 200
    second.join()
    assert answers[0].status_code == 503 and "beside what is pinned (a, b)" in answers[0].text
    (folder / "b.wait").unlink()
    first.join()
    assert answers[1].status_code == 200


# How far it is


def test_a_load_tells_how_far_it_is_and_how_long_it_may_take(
    several: Server, folder: Path, terminal: Callable[..., Terminal]
) -> None:
    log = several.log()
    assert re.search(r"loading the model a, \S+ MiB of weights: how long that takes is not known yet", log), log
    (folder / "c.wait").touch()
    command = terminal(sys.executable, "-m", "onekv", "load", "c", "--url", several.url)
    eventually(lambda: states(several)["c"] == "loading")
    row = rows(several)["c"]
    assert row["loading"].keys() == {"for_s", "estimate_s", "read_bytes", "weights_bytes"}
    assert row["loading"]["estimate_s"] > 0 and row["loading"]["read_bytes"] == 0
    assert row["loading"]["weights_bytes"] == row["bytes"]["weights"]
    assert re.search(r"\nc: loading for \S+ s, about \S+ s in total; 0 B of \S+ MiB of weights read\n", ps(several))
    command.until("c: loading for ")
    (folder / "c.wait").unlink()
    command.until("c is loaded (lru): ")
    assert command.end() == 0
    assert "loading" not in rows(several)["c"]
    assert re.search(r"loading the model c, .*: about \S+ s, at the speed of earlier loads", several.log())
    for action in ("unload", "load"):
        assert post(several, "c", action).status_code == 200
    assert re.search(r"loading the model c, .*: about \S+ s, as the last time", several.log())


def test_weights_are_counted_as_they_are_read(tmp_path: Path, smollm2_path: Path) -> None:
    """As many bytes as the plan has of them, whatever the file is like."""
    code = (
        "import sys; from onekv.llm import LLM; from onekv.models.reading import read\n"
        "for path in sys.argv[1:]:\n"
        "    before = read.bytes\n"
        "    with LLM(path, kv_memory='32MiB', progress=False) as llm: print((read.bytes - before) / llm.plan.weights)"
    )
    command = [sys.executable, "-c", code, str(smollm2_path), save_tiny(tmp_path / "tiny", 1)]
    shares = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.split()
    assert [float(share) for share in shares] == [pytest.approx(1, abs=0.02)] * 2


def test_an_unload_tells_what_it_waits_for_and_what_it_stores(several: Server, folder: Path) -> None:
    complete(several, "a")
    client = openai.OpenAI(base_url=f"{several.url}/v1", api_key="none", timeout=120)
    stream = client.completions.create(model="a", prompt="Go on.", max_tokens=400, stream=True, temperature=0)
    next(stream)
    (folder / "decode.wait").touch()
    (folder / "store.wait").touch()
    done: list[Any] = []
    unloading = threading.Thread(target=lambda: done.append(onekv("unload", "a", "--url", several.url)))
    unloading.start()
    row = eventually(lambda: rows(several)["a"].get("unloading"))
    assert row["doing"] == "waiting for 1 request in flight"
    (folder / "decode.wait").unlink()
    for _ in stream:
        pass
    row = eventually(lambda: "stored_bytes" in (row := rows(several)["a"]["unloading"]) and row)
    assert re.fullmatch(r"storing the cache: 0 B of \S+ [KM]iB", row["doing"])
    assert row["stored_bytes"] == 0 < row["store_bytes"]
    assert re.search(r"\na: unloading for \S+ s: storing the cache: 0 B of ", ps(several))
    (folder / "store.wait").unlink()
    unloading.join()
    assert done[0].returncode == 0 and done[0].stdout.startswith("a is unloaded; "), done[0]
    size = r"\d\S* ([KMG]i)?B"
    freed = re.search(
        rf"the model a is unloaded: .*; active {size} -> {size}, buffer cache {size} -> {size}, "
        rf"process {size} -> {size}\n",
        several.log(),
    )
    assert freed, several.log()


def test_an_unload_during_a_load_is_not_forgotten(several: Server, folder: Path) -> None:
    """Who waited for the model is answered first."""
    (folder / "c.wait").touch()
    answers: list[httpx.Response] = []
    waiting = in_background(several, "c", "early", answers)
    eventually(lambda: states(several)["c"] == "loading")
    unloading = threading.Thread(target=lambda: answers.append(post(several, "c", "unload")))
    unloading.start()
    # It has arrived by then, or is slow and comes after the load.
    unloading.join(1)
    (folder / "c.wait").unlink()
    unloading.join()
    waiting.join()
    assert [answer.status_code for answer in answers] == [200, 200] and states(several)["c"] == "unloaded"


# The commands


def ps(server: Server, *flags: str) -> str:
    done = onekv("ps", "--url", server.url, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ps_load_and_unload(several: Server) -> None:
    said = onekv("load", "b", "--pin", "--url", several.url)
    assert (said.returncode, said.stderr) == (0, ""), said
    assert re.fullmatch(r"b is loaded \(pinned\): \S+ MiB; \S+ MiB of 1\.17 GiB \(--memory\) in use\n", said.stdout)
    table = {line.split()[0]: line.split() for line in ps(several).splitlines() if line}
    assert table["model"] == [
        "model",
        "state",
        "keep",
        "weights",
        "KV",
        "context",
        "running",
        "waiting",
        "idle",
        "unloaded",
        "in",
    ]
    assert table["b"][1:3] == ["loaded", "pinned"] and table["c"][1:3] == ["unloaded", "lru"]
    assert onekv("load", "b", "--no-pin", "--url", several.url).stdout.startswith("b is loaded (1h): ")
    found = json.loads(ps(several, "--json"))
    assert [row["state"] for row in found["models"]] == ["loaded", "loaded", "unloaded"]
    assert 3500 < found["models"][1]["expires_s"] <= 3600 and found["models"][0]["expires_s"] is None
    assert onekv("unload", "b", "--url", several.url + "/").stdout.startswith("b is unloaded; ")


def test_ctrl_c_gives_up_waiting(several: Server, folder: Path) -> None:
    (folder / "b.wait").touch()
    command = [sys.executable, "-m", "onekv", "load", "b", "--url", several.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: rows(several)["b"]["requests"]["waiting"])
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "\nonekv: interrupted\n")
    eventually(lambda: not rows(several)["b"]["requests"]["waiting"])


def test_what_is_wrong_is_one_line(
    several: Server, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ONEKV_API_KEYS", raising=False)
    nowhere = f"http://127.0.0.1:{free_port()}"
    wrong = "a-key-that-is-not-its-own"
    for words, message in (
        (["ps", "--url", nowhere], f"no server is listening on {nowhere} (["),
        (["ps", "--url", nowhere], "start one with onekv serve, or set its address with --url"),
        (["ps", "--url", "localhost:8000"], "--url is 'localhost:8000'; it must have the form http://127.0.0.1:8000"),
        (["ps", "--url", server.url], "it requires an API key; set it with --api-key or ONEKV_API_KEY"),
        (["ps", "--url", server.url, "--api-key", wrong], "it requires a different API key; set it with"),
        (["ps", "--url", server.url, "--api-key", server.keys[1]], "this requires the server's first API key"),
        (["load", "aa", "--url", several.url], f"the server on {several.url} has no model 'aa'; available: a, b, c"),
        (["unload", "smollm2-134m", "--url", server.url], "did you mean smollm2-135m?"),
        (["load", "default", "--url", server.url], "this server has a single model that stays loaded"),
    ):
        if "smollm2-134m" in words or "default" in words:
            words += ["--api-key", server.keys[0]]
        assert main(words) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("onekv: ") and err.count("\n") == 1
        assert message in err and not any(key in err for key in (wrong, *server.keys))


def test_ps_of_one_model_in_a_bare_install(server: Server) -> None:
    """It needs neither MLX nor what the server needs, and finds the server by the variables that start it."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'starlette', 'uvicorn', 'prometheus_client']))\n"
        "from onekv.cli import main; status = main(['ps'])\n"
        "assert not {'mlx', 'mlx_lm', 'numpy', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    port = server.url.rpartition(":")[2]
    variables = {**os.environ, "ONEKV_PORT": port, "ONEKV_API_KEYS": ",".join(server.keys)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=variables)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\nsmollm2-135m +loaded +pinned +109\.82 MiB ", done.stdout), done.stdout
