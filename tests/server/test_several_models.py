"""A real server with several models in one budget: who is loaded, who waits, what is never cut off or forgotten."""

import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import ollama
import openai
import pytest
from several import ONE, TWO, WORDS, cached, complete, rows, start_several, states, text
from test_stuck import eventually

from conftest import Server, start_server
from onekv.bench.soak import save_tiny
from onekv.llm import LLM
from onekv.memory.plan import MARGIN
from onekv.tiers.maintain import models as disk_models

# `onekv` in which the weights of a model are not loaded while there is a file NAME.wait in the folder that is the first
# argument, and streams that wait for a model say so at once.
LOADS = """
import sys, time
import onekv.models.loader as loader, onekv.server.models.choose
from pathlib import Path
onekv.server.models.choose.KEEP_ALIVE_S = 0.1
folder, load = Path(sys.argv.pop(1)), loader.load_model
def waiting_load(name, **options):
    while not options.get("lazy") and (folder / Path(name).name).with_suffix(".wait").exists():
        time.sleep(0.01)
    return load(name, **options)
loader.load_model = waiting_load
from onekv.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_tiny(folder / name, seed) for seed, name in enumerate(("a", "b", "c"))}


@pytest.fixture(scope="module")
def alone(models: dict[str, str]) -> dict[str, str]:
    """What each answers by itself."""
    found = {}
    for name, path in models.items():
        with LLM(path, kv_memory="32MiB", block_size=16, progress=False) as llm:
            found[name] = llm.generate(WORDS, 8).text
    assert len(set(found.values())) == 3, "else a wrong model would not be seen"
    return found


def tables(models: dict[str, str], **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {"model": path, **more.get(name, {})} for name, path in models.items()}


def test_each_model_answers_as_it_does_alone(
    models: dict[str, str], alone: dict[str, str], running: list[Server], tmp_path: Path
) -> None:
    """Two of three fit; the one that was used least recently goes."""
    server = start_several(tmp_path, tables(models))
    running.append(server)
    assert server.backend_name == "a"
    assert states(server) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
    assert text(complete(server, "b")) == alone["b"]
    assert states(server) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    assert text(complete(server, "default")) == alone["a"]
    assert text(complete(server, "c")) == alone["c"]
    assert states(server) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    assert text(complete(server, "b")) == alone["b"]
    budget = httpx.get(f"{server.url}/admin/models").json()["memory"]
    assert 0 < budget["counted"] <= budget["limit"]
    unknown = httpx.post(f"{server.url}/v1/completions", json={"model": "d", "prompt": "x"})
    assert unknown.status_code == 404 and "'a', 'b', 'c'" in unknown.text


def test_a_conversation_goes_on_after_a_swap(models: dict[str, str], running: list[Server], tmp_path: Path) -> None:
    disk = ["--disk-cache", str(tmp_path / "disk"), "--disk-limit", "300MB"]
    server = start_several(tmp_path, tables(models), *disk, memory=ONE)
    running.append(server)
    first = complete(server, "a")
    complete(server, "b")
    assert states(server)["a"] == "unloaded", "one fits"
    again = complete(server, "a")
    assert text(again) == text(first)
    # All of its full blocks, but for the token that has to be computed.
    assert cached(first) == 0 and cached(again) >= again["usage"]["prompt_tokens"] // 16 * 16 - 16
    assert {row["disk_cache"] for row in rows(server).values()} == {str(tmp_path / "disk")}
    tier = httpx.get(f"{server.url}/admin/cache").json()["models"]["a"]["tiers"][0]
    assert tier["limit"] == 300_000_000, "one limit for all"
    stored = {use.name: use.bytes for use in disk_models(tmp_path / "disk")}
    assert set(stored) == {"a", "b"} and all(stored.values())


def test_no_answer_is_cut_off_for_another_model(
    models: dict[str, str], alone: dict[str, str], running: list[Server], tmp_path: Path
) -> None:
    server = start_several(tmp_path, tables(models), memory=ONE)
    running.append(server)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)
    stream = client.completions.create(model="a", prompt="Go on.", max_tokens=300, stream=True, temperature=0)
    chunks = [next(stream)]
    others: list[str] = []
    asking = [threading.Thread(target=lambda: others.append(text(complete(server, "b")))) for _ in range(2)]
    for thread in asking:
        thread.start()
    # It may have no new requests now, and goes on with the one it has.
    eventually(lambda: states(server)["a"] == "unloading" or len(others) == 2)
    late = threading.Thread(target=lambda: others.append(text(complete(server, "a"))))
    late.start()
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    for thread in (*asking, late):
        thread.join()
    assert sorted(others) == sorted([alone["b"], alone["b"], alone["a"]])


def test_what_never_fits_is_refused_with_numbers(models: dict[str, str], running: list[Server], tmp_path: Path) -> None:
    wanted = tables(models, a={"keep": "pinned"}, c={"kv_memory": "700MiB"})
    server = start_several(tmp_path, wanted)
    running.append(server)
    assert "'c'" in server.log() and "requests for it will be rejected" in server.log()
    refused = httpx.post(f"{server.url}/v1/completions", json={"model": "c", "prompt": "x"}, timeout=60)
    error = refused.json()["error"]
    assert refused.status_code == 503 and error["type"] == "server_error"
    assert "beside what is pinned (a)" in error["message"] and "--memory is 1.17 GiB" in error["message"]
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.APIStatusError) as failed:
        claude.messages.create(model="c", max_tokens=4, messages=[{"role": "user", "content": "x"}])
    assert failed.value.status_code == 503 and "--memory" in str(failed.value)
    assert states(server) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}


def test_pinned_stays_and_what_idles_goes(models: dict[str, str], running: list[Server], tmp_path: Path) -> None:
    wanted = tables(models, b={"keep": "pinned"}, c={"keep": "1s"})
    server = start_several(tmp_path, wanted)
    running.append(server)
    assert states(server) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    complete(server, "c")
    assert states(server)["a"] == "unloaded" and states(server)["b"] == "loaded"
    assert eventually(lambda: states(server)["c"] == "unloaded")
    assert text(complete(server, "c")) and text(complete(server, "b"))


def test_clients_see_and_choose_them(models: dict[str, str], running: list[Server], tmp_path: Path) -> None:
    wanted = tables(models, b={"alias": ["small", "claude-haiku-9"]})
    # A copy of the same weights is the same model.
    wanted["again"] = {"model": str(shutil.copytree(models["c"], tmp_path / "copy of c"))}
    server = start_several(tmp_path, wanted, memory="1800MiB")
    running.append(server)
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)
    listed = {model.id: model.model_extra["state"] for model in api.models.list()}
    assert listed == {
        "a": "loaded",
        **dict.fromkeys(("b", "small", "claude-haiku-9", "c", "again"), "unloaded"),
    }
    for model in api.models.list():
        found = next(row for row in rows(server).values() if model.id in row["names"])
        assert model.model_extra["context_length"] == found["context_length"] > 0
        assert model.model_extra["memory"] == found["bytes"]["total"] + MARGIN > found["bytes"]["weights"] > 0
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", timeout=120)
    assert [model.id for model in claude.models.list()] == ["a", "b", "c"]
    question = [{"role": "user", "content": "Hello"}]
    assert claude.messages.create(model="claude-haiku-9", max_tokens=2, messages=question).model == "b"
    assert claude.messages.create(model="claude-opus-9", max_tokens=2, messages=question).model == "a"
    local = ollama.Client(server.url)
    assert {model.model for model in local.list().models} == set(listed)
    assert local.show("c").capabilities == ["completion", "tools"]
    assert states(server)["c"] == "unloaded", "what lists a model does not load it"
    assert {model.model for model in local.ps().models} == {"a", "b"}
    # Two names, the same weights: what one has computed the other finds.
    assert cached(complete(server, "c")) == 0
    assert cached(complete(server, "again")) > 0
    assert api.chat.completions.create(model="again", messages=question, max_tokens=2).model == "c"


def test_load_and_unload_by_hand(models: dict[str, str], running: list[Server]) -> None:
    """Of a server that was given its models on the command line."""
    server = start_server(*models.values(), "--memory", TWO, "--kv-memory", "32MiB", "--block-size", "16", keys=[])
    running.append(server)
    answer = httpx.post(f"{server.url}/admin/models/b/load", timeout=60)
    assert answer.status_code == 200 and states(server)["b"] == "loaded"
    assert httpx.post(f"{server.url}/admin/models/a/unload", timeout=60).status_code == 200
    assert states(server) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
    assert httpx.post(f"{server.url}/admin/models/d/load", timeout=60).status_code == 404
    body = httpx.get(f"{server.url}/health").json()
    assert (body["status"], [row["state"] for row in body["models"]]) == ("ok", ["unloaded", "loaded", "unloaded"])
    complete(server, "b")
    figures = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'onekv_model_state{model="a",state="unloaded"} 1.0' in figures
    assert 'onekv_requests_total{model="b",outcome="length"} 1.0' in figures
    assert 'onekv_weights_bytes{model="b"}' in figures and 'onekv_weights_bytes{model="a"}' not in figures
    assert figures.count("\nonekv_mlx_active_bytes") == 1
    httpx.post(f"{server.url}/admin/models/b/unload", timeout=60)
    figures = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert 'onekv_requests_total{model="b",outcome="length"} 1.0' in figures, "counters go on"
    assert httpx.get(f"{server.url}/admin/integrity").json()["ok"]
    assert httpx.delete(f"{server.url}/admin/cache").json() == {"freed_blocks": 0, "freed_bytes": 0}


def test_others_are_answered_while_one_is_loaded(
    models: dict[str, str], alone: dict[str, str], running: list[Server], tmp_path: Path
) -> None:
    """Requests for the one wait, are told their place when that takes too long, and are forgotten when they go."""
    wait = tmp_path / "b.wait"
    wait.touch()
    program = ("-c", LOADS, str(tmp_path))
    server = start_several(tmp_path, tables(models), "--max-wait", "1", "--max-waiting", "2", program=program)
    running.append(server)
    body = {"model": "b", "prompt": WORDS, "max_tokens": 8, "temperature": 0}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.2)
    eventually(lambda: rows(server)["b"]["requests"]["waiting"] == 0)
    assert states(server)["b"] == "loading"
    assert text(complete(server, "a")) == alone["a"]
    late = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert late.status_code == 429 and late.headers["retry-after"] == "10"
    assert "number 1 of 1" in late.text and "--max-wait" in late.text
    wait.unlink()
    eventually(lambda: states(server)["b"] == "loaded")
    assert text(complete(server, "b")) == alone["b"]


SAID: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
WAITING: Any = (
    ("/v1/chat/completions", SAID, 'data: {"id":"chatcmpl-'),
    ("/v1/messages", SAID, "event: ping"),
    ("/v1/responses", {"input": "Hello"}, "event: response.created"),
)


def respond(server: Server, model: str, events: list[Any]) -> None:
    """Adds the events of a response as they come."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client.responses.stream(model=model, input="Hello", max_output_tokens=4) as stream:
        events.extend(stream)


def test_a_stream_that_waits_is_told_its_place(
    models: dict[str, str], alone: dict[str, str], running: list[Server], tmp_path: Path
) -> None:
    """In comments, which clients ignore, beside events that they count."""
    (tmp_path / "b.wait").touch()
    wanted = tables({name: models[name] for name in "ab"})
    server = start_several(tmp_path, wanted, program=("-c", LOADS, str(tmp_path)))
    running.append(server)
    body = {"model": "b", "prompt": WORDS, "max_tokens": 8, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        said = next(line for line in lines if "loading" in line)
        assert said.startswith(": number 1 of 1 request waiting for models; the model b has been loading for "), said
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-request-id"]
        # Whatever the API, it is an event of its own.
        for path, given, event in WAITING:
            with httpx.stream("POST", f"{server.url}{path}", json={"model": "b", "stream": True, **given}) as other:
                assert next(line for line in other.iter_lines() if not line.startswith(":") and line).startswith(event)
        response: list[Any] = []
        asked = threading.Thread(target=respond, args=(server, "b", response))
        asked.start()
        eventually(lambda: len(response) > 2)
        (tmp_path / "b.wait").unlink()
        chunks = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert chunks[-1] == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1]) == alone["b"]
    assert eventually(lambda: re.search(r"POST /v1/completions 200 .* waited=\d+\.\d+s end=length ", server.log()))
    asked.join()
    assert [event.type for event in response].count("response.created") == 1 and len(response) > 5
    assert [event.sequence_number for event in response] == list(range(len(response)))
    assert {event.response.id for event in response if hasattr(event, "response")} == {response[0].response.id}
    assert response[-1].type in ("response.completed", "response.incomplete")


def test_a_stream_that_waits_is_told_what_went_wrong(
    models: dict[str, str], running: list[Server], tmp_path: Path
) -> None:
    """The status is sent by then: it comes as an event."""
    broken = Path(save_tiny(tmp_path / "x", 7))
    (tmp_path / "x.wait").touch()
    wanted = {**tables({"a": models["a"]}), "x": {"model": str(broken)}}
    server = start_several(tmp_path, wanted, program=("-c", LOADS, str(tmp_path)))
    running.append(server)
    body = {"model": "x", "prompt": WORDS, "max_tokens": 8, "stream": True}
    (broken / "model.safetensors").write_bytes(b"too little")
    question: list[Any] = [{"role": "user", "content": "Hello"}]
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    told: list[str] = []

    def ask() -> None:
        with pytest.raises(openai.APIError) as failed:
            list(api.chat.completions.create(model="x", messages=question, stream=True))
        told.append(failed.value.message)

    def ask_for_response() -> None:
        with api.responses.stream(model="x", input="Hello") as stream:
            events = list(stream)
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.failed", kinds
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert {event.response.id for event in events if hasattr(event, "response")} == {events[0].response.id}
        told.append(events[-1].response.error.message)

    def ask_claude() -> None:
        with (
            pytest.raises(anthropic.APIError) as failed,
            claude.messages.stream(model="x", max_tokens=2, messages=question) as stream,
        ):
            stream.get_final_message()
        told.append(str(failed.value))

    asking = [threading.Thread(target=each) for each in (ask, ask_for_response, ask_claude)]
    for thread in asking:
        thread.start()
    eventually(lambda: rows(server)["x"]["requests"]["waiting"] == 3)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        assert re.match(
            r": number 4 of 4 requests waiting for models; the model x has been ", next(answer.iter_lines())
        )
    (tmp_path / "x.wait").unlink()
    for thread in asking:
        thread.join()
    assert len(told) == 3 and all("model.safetensors is damaged or truncated" in text for text in told), told


def test_a_model_that_cannot_be_loaded(models: dict[str, str], running: list[Server], tmp_path: Path) -> None:
    """Whoever waits is told; the others go on, and the next request tries again."""
    broken = Path(save_tiny(tmp_path / "broken", 7))
    server = start_several(tmp_path, {"a": {"model": models["a"]}, "x": {"model": str(broken)}})
    running.append(server)
    weights, aside = broken / "model.safetensors", tmp_path / "aside"
    weights.rename(aside)
    weights.write_bytes(aside.read_bytes()[:5000])
    refused = httpx.post(f"{server.url}/v1/completions", json={"model": "x", "prompt": "x"}, timeout=60)
    assert refused.status_code == 500, refused.text
    row = rows(server)["x"]
    assert row["state"] == "failed" and row["reason"] in refused.json()["error"]["message"]
    assert text(complete(server, "a"))
    aside.replace(weights)
    assert text(complete(server, "x")) and rows(server)["x"]["reason"] is None


def test_the_end_does_not_wait_for_a_load(models: dict[str, str], running: list[Server], tmp_path: Path) -> None:
    """An answer of another model goes on to its end within the grace; who waits for the load is told."""
    (tmp_path / "b.wait").touch()
    server = start_several(tmp_path, tables(models), "--grace", "60", program=("-c", LOADS, str(tmp_path)))
    running.append(server)
    told: list[httpx.Response] = []
    body = {"model": "b", "prompt": "x"}
    waiting = threading.Thread(
        target=lambda: told.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))
    )
    waiting.start()
    eventually(lambda: rows(server)["b"]["requests"]["waiting"] == 1)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)
    stream = client.completions.create(model="a", prompt="Go on.", max_tokens=200, stream=True, temperature=0)
    chunks = [next(stream)]
    server.process.terminate()
    waiting.join()
    assert told[0].status_code == 429 and "shutting down" in told[0].text
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.process.wait(60) == 0
