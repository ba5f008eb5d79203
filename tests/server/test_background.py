"""Background responses through the real client: they go on without it, and are looked at, followed and cancelled."""

import re
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from several import ONE, complete, start_several, states

from conftest import Server, start_server, stop_server
from onekv.bench.soak import save_tiny

# Without its end token the model goes on until it is stopped.
ENDLESS: Any = {"extra_body": {"logit_bias": {"2": -100}}, "max_output_tokens": 2500}


def client_of(server: Server, key: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys[key], max_retries=0, timeout=120)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return client_of(server)


def ended(client: openai.OpenAI, name: str) -> Response:
    """As OpenAI's own example polls."""
    while (response := client.responses.retrieve(name)).status in {"queued", "in_progress"}:
        time.sleep(0.05)
    return response


def test_create_poll_and_go_on_from_it(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "max_output_tokens": 12, "temperature": 0}
    question = "What is the capital of France?"
    whole = client.responses.create(input=question, **asked)
    made = client.responses.create(input=question, background=True, **asked)
    assert made.background and made.status == "in_progress" and made.output == []
    response = ended(client, made.id)
    assert (response.status, response.output_text) == (whole.status, whole.output_text)
    assert response.usage is not None and whole.usage is not None
    assert response.usage.output_tokens == whole.usage.output_tokens
    later = client.responses.create(input="And of Italy?", previous_response_id=made.id, **asked)
    assert later.usage is not None
    assert later.usage.input_tokens_details.cached_tokens >= response.usage.total_tokens - 2
    # One that has ended is what it is.
    assert client.responses.cancel(made.id).status == response.status
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(made.id)


def test_it_runs_until_it_is_cancelled(client: openai.OpenAI, server: Server) -> None:
    made = client.responses.create(model="default", input="Tell a long story.", background=True, **ENDLESS)
    assert client.responses.retrieve(made.id).status == "in_progress"
    stranger = client_of(server, 1)
    for call in (stranger.responses.retrieve, stranger.responses.cancel, stranger.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.BadRequestError, match="in_progress") as early:
        client.responses.create(model="default", input="And then?", previous_response_id=made.id)
    assert early.value.param == "previous_response_id"
    for _ in range(2):
        assert client.responses.cancel(made.id).status == "cancelled"
    response = client.responses.retrieve(made.id)
    assert response.status == "cancelled" and all(item.status == "incomplete" for item in response.output)
    assert re.search(rf"BACKGROUND /v1/responses/{made.id} - model=\S+ prompt=\d+ .*end=cancelled", server.log())
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.responses.create(model="default", input="And then?", previous_response_id=made.id)


def test_one_that_is_deleted_ends(client: openai.OpenAI, server: Server) -> None:
    made = client.responses.create(model="default", input="Tell a long story.", background=True, **ENDLESS)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    assert re.search(rf"BACKGROUND /v1/responses/{made.id} .*end=cancelled", server.log())


def test_a_stream_goes_on_without_its_reader_and_is_followed_later(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "input": "Count to ten.", "max_output_tokens": 40, "temperature": 0}
    stream = client.responses.create(background=True, stream=True, **asked)
    first = next(iter(stream))
    assert first.type == "response.created" and first.sequence_number == 0
    stream.close()
    name = first.response.id
    followed = list(client.responses.retrieve(name, stream=True, starting_after=0))
    assert [event.sequence_number for event in followed] == list(range(1, len(followed) + 1))
    response = ended(client, name)
    text = "".join(event.delta for event in followed if event.type == "response.output_text.delta")
    assert text == response.output_text == client.responses.create(**asked).output_text
    assert followed[-1].type == f"response.{response.status}"
    again = list(client.responses.retrieve(name, stream=True, starting_after=3))
    assert [event.sequence_number for event in again] == list(range(4, len(followed) + 1))


def test_who_follows_one_that_is_cancelled_is_told(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="default", input="Tell a story.", background=True, stream=True, **ENDLESS)
    events = iter(stream)
    name = next(events).response.id
    while next(events).type != "response.output_text.delta":
        pass
    response = client.responses.cancel(name)
    *_, last = events
    assert last.response.status == response.status == "cancelled"
    assert last.response.output_text == response.output_text != ""


def test_what_is_refused_is_refused_at_once(client: openai.OpenAI, server: Server) -> None:
    lines = server.log().count("BACKGROUND")
    asked: Any = {"model": "default", "input": "Hi", "max_output_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="stored") as unstored:
        client.responses.create(background=True, store=False, **asked)
    assert unstored.value.param == "background"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.responses.create(**asked | {"max_output_tokens": 10**6}, background=True)
    assert too_long.value.code == "context_length_exceeded"
    assert server.log().count("BACKGROUND") == lines, "nothing was in the background"
    made = client.responses.create(**asked)
    with pytest.raises(openai.BadRequestError, match="not a background response"):
        client.responses.cancel(made.id)
    for name in (made.id, client.responses.create(background=True, **asked).id):
        with pytest.raises(openai.BadRequestError, match="background and stream"):
            client.responses.retrieve(name, stream=True)


def test_a_server_that_stops_does_not_wait_for_them() -> None:
    """Nobody could ask for what they say."""
    server = start_server("--kv-memory", "128MiB", "--grace", "600")
    made = client_of(server).responses.create(model="default", input="Tell a story.", background=True, **ENDLESS)
    log = stop_server(server)
    assert server.process.returncode == 0, log
    assert re.search(rf"BACKGROUND /v1/responses/{made.id} .*end=cancelled", log) and "Traceback" not in log


def test_a_model_of_several_stays_until_its_response_has_ended(tmp_path: Path) -> None:
    names = ("a", "b")
    models = {name: {"model": save_tiny(tmp_path / name, seed)} for seed, name in enumerate(names)}
    server = start_several(tmp_path, models, memory=ONE)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    asked: Any = {"model": "a", "input": "Hello", "extra_body": ENDLESS["extra_body"], "max_output_tokens": 300}
    made = client.responses.create(background=True, **asked)
    # There is room for one.
    complete(server, "b")
    assert states(server)["a"] == "unloaded"
    response = client.responses.retrieve(made.id)
    assert response.status == "incomplete" and response.usage is not None and response.usage.output_tokens == 300
    log = stop_server(server)
    assert server.process.returncode == 0 and "Traceback" not in log, log
