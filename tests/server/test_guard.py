"""What is refused before a route sees it: names that are not the server's, bodies of a shape no request has."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient

from conftest import start_server, stop_server
from onekv.errors import MemoryBudgetError, OverloadedError, RequestFailedError, SettingError
from onekv.server import shape
from onekv.server.app import create_app
from onekv.server.backend import Backend
from onekv.server.errors import (
    BadRequestError,
    ForbiddenError,
    MisdirectedError,
    NotFoundError,
    TooLargeError,
    UnauthorizedError,
    status_of,
)
from onekv.server.settings import ServerSettings
from onekv.server.shape import MAX_CONTAINERS, MAX_VALUES, check_shape

LONG_KEYS = [f"a-long-key-of-the-tests-{index:04d}" for index in range(40)]


def status(settings: ServerSettings, host: str, path: str = "/v1/nothing") -> tuple[int, Any]:
    # Its routes are not reached, or are not there: no model is needed.
    client = TestClient(create_app(Backend(), settings), base_url="http://localhost")
    answer = client.get(path, headers={"Host": host})
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("bound", "host", "allowed"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "LOCALHOST.", True),
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "127.1.2.3", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("::1", "[0:0:0:0:0:0:0:1]", True),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "evil.example:8000", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "192.168.1.7", False),
        ("127.0.0.1", "", False),
        ("192.168.1.7", "192.168.1.7:9000", True),
        ("192.168.1.7", "127.0.0.1", True),
        ("192.168.1.7", "192.168.1.8", False),
        ("fe80::7", "[FE80::7]:80", True),
        ("box.example", "box.example:8000", True),
        ("box.example", "192.168.1.7:8000", True),
        ("box.example", "evil.example", False),
        ("0.0.0.0", "192.168.1.7:8000", True),
        ("::", "[fe80::7]", True),
        ("0.0.0.0", "evil.example", False),
    ],
)
def test_a_server_without_keys_is_called_by_its_own_names_alone(bound: str, host: str, allowed: bool) -> None:
    code, body = status(ServerSettings(host=bound, insecure=True), host)
    assert code == (404 if allowed else 421)
    if not allowed:
        assert repr(host) in body["error"]["message"]
        assert "--allowed-hosts" in body["error"]["message"]


def test_names_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    more = ServerSettings(allowed_hosts="Box.example, [fe80::7]")
    assert status(more, "box.example:8000")[0] == 404
    assert status(more, "[fe80::7]:8000")[0] == 404
    assert status(more, "localhost")[0] == 404
    assert status(more, "evil.example")[0] == 421
    assert status(ServerSettings(allowed_hosts="*"), "evil.example")[0] == 404


def test_where_keys_are_needed_any_name_will_do_unless_some_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKV_API_KEYS", "a-key-of-the-tests")
    assert status(ServerSettings.resolve({"host": "0.0.0.0"}), "evil.example")[0] == 401
    assert status(ServerSettings.resolve({"allowed_hosts": "box.example"}), "evil.example")[0] == 421
    assert status(ServerSettings.resolve({"allowed_hosts": "box.example"}), "box.example")[0] == 401


def test_a_wrong_name_is_told_in_each_apis_format() -> None:
    assert status(ServerSettings(), "evil.example")[1]["error"]["type"] == "invalid_request_error"
    assert status(ServerSettings(), "evil.example", "/v1/messages")[1]["type"] == "error"


def test_a_page_that_rebinds_its_name_does_not_reach_a_real_server() -> None:
    server = start_server("--kv-memory", "64MiB", keys=[])
    try:
        for path in ("/health", "/v1/models", "/admin/cache", "/v1/responses/any"):
            assert httpx.get(server.url + path, headers={"Host": "evil.example:8000"}).status_code == 421
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
    finally:
        stop_server(server)


@pytest.mark.parametrize(("allowed", "granted"), [("https://mine.example", True), (None, False)])
def test_pages_of_other_origins_need_to_be_named(allowed: str | None, granted: bool) -> None:
    # Not started: such a question is answered before anything else is looked at.
    client = TestClient(create_app(Backend(), ServerSettings(cors_origin=allowed)))
    asked = {"Origin": "https://mine.example", "Access-Control-Request-Method": "POST"}
    answer = client.options("/v1/chat/completions", headers=asked)
    assert (answer.status_code == 200) == granted
    assert answer.headers.get("access-control-allow-origin") == ("https://mine.example" if granted else None)


def test_keys_may_be_longer_than_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKV_API_KEYS", ",".join(LONG_KEYS))
    assert ServerSettings.resolve({}).keys() == LONG_KEYS
    monkeypatch.setenv("ONEKV_API_KEYS", "~nobody-of-this-name/key")
    assert ServerSettings.resolve({}).keys() == ["~nobody-of-this-name/key"]


def test_no_message_has_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def message(**given: Any) -> str:
        with pytest.raises(SettingError) as caught:
            ServerSettings.resolve(given).keys()
        return str(caught.value)

    monkeypatch.delenv("ONEKV_API_KEYS", raising=False)
    assert "secret" not in message(api_keys="secret-in-the-wrong-place")
    assert "secret" not in message(api_keys="secret-key," * 100)
    assert "secret" not in message(api_keys=["secret-key-1", "secret-key-2"])
    for given in ({"api_key": "secret-key"}, {"api_keys": "secret-key-1,secret-key-2"}):
        assert "secret" not in repr(ServerSettings.resolve(given))
    (tmp_path / "keys").write_bytes(b"secret-key-\xff\xfe\n")
    assert "secret" not in message(api_keys=str(tmp_path / "keys"))
    for short in ("secret", "secret-k\u00e9y"):
        monkeypatch.setenv("ONEKV_API_KEYS", f"{short},{','.join(LONG_KEYS)}")
        assert "secret" not in message()


def refusal(body: bytes) -> str:
    with pytest.raises(BadRequestError) as caught:
        asyncio.run(check_shape(body))
    return str(caught.value)


def test_shapes_that_no_request_has_are_refused() -> None:
    assert "64 levels" in refusal(b"[" * 65)
    assert f"{MAX_CONTAINERS} arrays" in refusal(b"[" + b"[]," * MAX_CONTAINERS + b"[]]")
    assert f"{MAX_CONTAINERS} arrays" in refusal(b"[" + b'{"a": {}},' * MAX_CONTAINERS + b"1]")
    assert f"{MAX_VALUES} values" in refusal(b"[" + b"1," * (MAX_VALUES + 1) + b"1]")
    assert "UTF-8" in refusal("[[1]]".encode("utf-16"))
    inside = json.dumps({"content": '[{,\\"' * MAX_VALUES}).encode()
    asyncio.run(check_shape(inside))


async def turns(body: bytes) -> int:
    """How often others have their turn while `body` is looked at."""
    looking = asyncio.create_task(check_shape(body))
    count = 0
    while not looking.done():
        count += 1
        await asyncio.sleep(0)
    looking.exception()
    return count


def test_others_get_their_turn_while_a_large_body_is_looked_at() -> None:
    assert asyncio.run(turns(b'"' + b"[" * (8 * shape.SLICE) + b'"')) >= 8


@pytest.mark.parametrize("body", [b"[" * (8 * shape.SLICE), b"[]," * (4 * shape.SLICE), b"1," * (8 * shape.SLICE)])
def test_a_body_is_left_at_the_first_piece_that_has_too_much(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    slices = shape._slices

    def counted(body: bytes) -> Iterator[tuple[int, int, int]]:
        for found in slices(body):
            looked.append(found[0])
            yield found

    monkeypatch.setattr(shape, "_slices", counted)
    assert refusal(body) and len(looked) <= 2


def test_a_piece_may_end_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps([{"a\\": ['"[[', "\\", [1, {"b": "]"}]]}, '\\\\"']).encode()
    for size in (1, 2, 3, 7):
        monkeypatch.setattr(shape, "SLICE", size)
        assert shape.nesting(text) == 5


def test_the_documented_statuses_are_those_that_are_sent() -> None:
    table = (Path(__file__).parents[2] / "docs" / "errors.md").read_text().partition("| Status | When |")[2]
    found = re.findall(r"^\| ([\d, ]+) \| (.*) \|$", table, re.M)
    rows = {int(code): text for codes, text in found for code in codes.split(",")}
    sent = {
        status_of(error)
        for error in (
            BadRequestError("x"),
            UnauthorizedError("x"),
            ForbiddenError("x"),
            NotFoundError("x"),
            TooLargeError("x"),
            MisdirectedError("x"),
            OverloadedError("x", 1),
            MemoryBudgetError("x"),
            RequestFailedError("x"),
        )
    }
    wrong_method = TestClient(create_app(Backend(), ServerSettings()), base_url="http://localhost").put("/health")
    # And by a connection, before there is a request.
    assert set(rows) == sent | {408, wrong_method.status_code}
    assert "too many requests are queued" in rows[status_of(OverloadedError("x", 1))]
    assert "Retry-After" in rows[status_of(OverloadedError("x", 1))]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_what_fails_inside_is_logged_and_told_as_an_id(path: str, caplog: pytest.LogCaptureFixture) -> None:
    # A model that is said to be loaded and was not has no name: an error that no handler knows.
    backend = Backend()
    backend.loaded = True
    client = TestClient(create_app(backend, ServerSettings()), base_url="http://localhost")
    body = {"model": "m", "prompt": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    answer = client.post(path, json=body)
    assert answer.status_code == 500
    told = answer.json()["error"]["message"]
    (found,) = re.findall(r"req_\w+", told)
    assert "Attribute" not in told and "Backend" not in told
    (record,) = [record for record in caplog.records if found in record.getMessage() and record.exc_info]
    assert isinstance(record.exc_info[1], AttributeError)
