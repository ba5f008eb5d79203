"""What is cached, for whoever may see it: blocks, conversations, look-ups; text for the key that sent it alone."""

from collections.abc import Iterator
from itertools import combinations, takewhile
from typing import Any

import pytest
from starlette.testclient import TestClient

from conftest import KEYS
from onekv.bench.soak import save_tiny
from onekv.server.admin.trees import BEFORE
from onekv.server.app import create_app
from onekv.server.backend import Backend
from onekv.server.settings import ServerSettings

FIRST, SECOND = ({"Authorization": f"Bearer {key}"} for key in KEYS)
STORY = "A long story that two questions have in common, told in many words. " * 8
SECRET = "Xylophonic quokkas keep it."


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("contents")
    (folder / "keys").write_text("\n".join(KEYS))
    (folder / "tiny").mkdir()
    backend = Backend(
        save_tiny(folder / "tiny"), kv_memory="34MiB", block_size=16, disk_cache=str(folder / "kv"), progress=False
    )
    backend.start()
    settings = ServerSettings(api_keys=str(folder / "keys"))
    with TestClient(create_app(backend, settings), base_url="http://localhost") as client:
        yield client


@pytest.fixture
def client(app: TestClient) -> TestClient:
    """With an empty cache, and text shown to those who sent it."""
    app.app.state.show_text = False  # type: ignore[attr-defined]
    assert app.delete("/admin/cache", headers=FIRST).status_code == 200
    app.app.state.trees.forget(app.app.state.backend)  # type: ignore[attr-defined]
    return app


def ask(client: TestClient, content: str, headers: dict[str, str] = FIRST, max_tokens: int = 4) -> dict[str, Any]:
    body = {"model": "default", "max_tokens": max_tokens, "messages": [{"role": "user", "content": content}]}
    answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def get(client: TestClient, path: str, headers: dict[str, str] = FIRST, **query: Any) -> dict[str, Any]:
    answer = client.get(f"/admin/cache/{path}", headers=headers, params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def tree(client: TestClient, headers: dict[str, str] = FIRST) -> dict[str, Any]:
    client.app.state.trees.forget(client.app.state.backend)  # type: ignore[attr-defined]
    return get(client, "conversations", headers)


def change(client: TestClient, what: str, node: str, headers: dict[str, str] = FIRST) -> Any:
    return client.post(f"/admin/cache/{what}", json={"node": node}, headers=headers)


def held(client: TestClient) -> dict[str, int]:
    assert client.get("/admin/integrity", headers=FIRST).json()["ok"]
    (pool,) = client.get("/admin/cache", headers=FIRST).json()["pools"]
    return dict(pool)


def test_what_two_conversations_share_is_one_row(client: TestClient) -> None:
    for end in ("Who was it?", "Where was it?"):
        ask(client, STORY + end)
    found = tree(client)
    shared, *branches = found["rows"]
    assert shared["parent"] is None and shared["start"] == 0 and shared["conversations"] == 2
    assert [row["parent"] for row in branches] == [shared["id"]] * 2 and found["conversations"] == 2
    assert all(row["start"] == shared["end"] for row in branches)
    assert shared["total_bytes"] == sum(row["bytes"] for row in found["rows"]) == found["bytes"]
    # Together they are all that is cached.
    pool = held(client)
    assert found["bytes"] == pool["idle"] * pool["block_bytes"]
    assert "long story" in shared["text"] and {"Who", "Where"} <= {
        word for row in branches for word in row["text"].split()
    }


def test_rows_show_where_they_differ(client: TestClient) -> None:
    """And not at length what they have in common: prefixes are shared by whole blocks, of 16 tokens here."""
    for words in (0, 4, 8):
        for end in ("Who was it?", "Where was it?"):
            ask(client, STORY + "And " * words + end)
    rows = tree(client)["rows"]
    # What stands after the mark is not the beginning of the row.
    assert any(row["text"].startswith("…") for row in rows)
    pairs = [(one, other) for one, other in combinations(rows, 2) if one["parent"] == other["parent"]]
    assert len(pairs) >= 3
    for one, other in pairs:
        same = takewhile(
            lambda words: words[0] == words[1], zip(one["text"].split(), other["text"].split(), strict=False)
        )
        assert len([*same]) <= BEFORE + 1


def test_text_is_for_the_key_that_sent_it(client: TestClient) -> None:
    ask(client, SECRET, SECOND)
    ask(client, "Mine.")
    rows = tree(client)["rows"]
    assert sorted((row["key"], row["own"], row["text"] is None) for row in rows) == [(1, True, False), (2, False, True)]
    assert [row["key"] for row in tree(client, SECOND)["rows"]] == [2]
    assert SECRET in tree(client, SECOND)["rows"][0]["text"]
    blocks = [get(client, f"blocks/0/{block}") for block in range(12)]
    texts = {block["key"]: block["text"] for block in blocks if not block["free"]}
    assert texts[2] is None and texts[1]
    found = get(client, "lookups")["lookups"][-2:]
    assert [(each["key"], each["words"] is None) for each in found] == [(2, True), (1, False)]
    assert [each["key"] for each in get(client, "lookups", SECOND)["lookups"][-1:]] == [2]
    # The administrator has to say so when the server starts.
    told = create_app(client.app.state.backend, ServerSettings.resolve({"show_text": "on"}))  # type: ignore[attr-defined]
    client.app.state.show_text = told.state.show_text  # type: ignore[attr-defined]
    assert all(row["text"] for row in tree(client)["rows"])
    assert [row["key"] for row in tree(client, SECOND)["rows"]] == [2]
    assert any("Xylophonic" in (get(client, f"blocks/0/{block}").get("text") or "") for block in range(12))


def test_others_see_and_change_nothing(client: TestClient) -> None:
    ask(client, "Mine alone.")
    (row,) = tree(client)["rows"]
    assert tree(client, SECOND)["rows"] == []
    assert client.get("/admin/cache/blocks/0/0", headers=SECOND).status_code == 403
    assert change(client, "drop", row["first"], SECOND).status_code == 404
    assert change(client, "pin", row["id"], SECOND).status_code == 403
    assert client.get("/admin/cache/lookups").status_code == 401
    ask(client, SECRET, SECOND)
    (own,) = tree(client, SECOND)["rows"]
    assert change(client, "drop", own["first"], SECOND).json()["dropped_blocks"] > 0
    assert tree(client, SECOND)["rows"] == [] and len(tree(client)["rows"]) == 1


def test_a_block_says_whose_it_is_and_where_else(client: TestClient) -> None:
    ask(client, STORY)
    (row,) = tree(client)["rows"]
    blocks = [get(client, f"blocks/0/{block}") for block in range(held(client)["blocks"])]
    full = [block for block in blocks if not block["free"]]
    assert len(full) == held(client)["idle"]
    # They are the conversation, piece by piece.
    assert sorted((block["start"], block["end"]) for block in full)[-1][1] == row["end"]
    assert {block["requests"] == [] and block["cached"] and block["tiers"] == [] for block in full} == {True}
    assert all(block["idle_s"] >= 0 for block in full)
    assert any("many words" in block["text"] for block in full)
    # On disk, too, when it has come back from there.
    thread = client.app.state.backend.thread  # type: ignore[attr-defined]
    thread.call(lambda engine: [*engine.prefix.store_all(), engine.prefix.forget()]).result()
    ask(client, STORY)
    again = [get(client, f"blocks/0/{block}") for block in range(held(client)["blocks"])]
    assert ["disk"] in [block.get("tiers") for block in again]


def test_pinned_stays_and_dropped_goes(client: TestClient) -> None:
    for end in ("Who was it?", "Where was it?"):
        ask(client, STORY + end)
    shared, one, other = tree(client)["rows"]
    assert change(client, "pin", one["id"]).json() == {"tokens": one["end"]}
    assert [row["pinned"] for row in tree(client)["rows"]].count(True) == 1 and held(client)["pinned"] > 0
    # All of it, of which the pinned path stays.
    assert (
        change(client, "drop", shared["first"]).json()["dropped_blocks"] == one["end"] // 16 - shared["end"] // 16 + 1
    )
    (left,) = tree(client)["rows"]
    assert left["end"] == one["end"] and left["pinned"]
    assert change(client, "drop", other["first"]).status_code == 404
    assert change(client, "unpin", one["id"]).status_code == 200 and held(client)["pinned"] == 0
    # On disk, too.
    thread = client.app.state.backend.thread  # type: ignore[attr-defined]
    thread.call(lambda engine: [*engine.prefix.store_all(), *(tier.flush() for tier in engine.prefix.tiers)]).result()
    assert change(client, "drop", shared["first"]).status_code == 200
    assert tree(client)["rows"] == [] and held(client)["idle"] == 0
    assert ask(client, STORY + "Who was it?")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_miss_has_its_reason_and_the_words_that_made_it(client: TestClient) -> None:
    last = max((each["number"] for each in get(client, "lookups")["lookups"]), default=0)
    ask(client, f"At 18:49 it was dark. {STORY}")
    ask(client, f"At 18:51 it was dark. {STORY}")
    first, second = get(client, "lookups", after=last)["lookups"]
    assert first["reason"] == second["reason"] == "never seen" and first["cached_tokens"] == 0
    assert 0 < second["cached_tokens"] < 60 < second["again"]
    words = second["words"]
    assert words["before"].endswith("18:") and words["had"].startswith("49") and words["came"].startswith("51")
    assert get(client, "lookups", after=second["number"])["lookups"] == []
    # What of it another key has is not told to this one.
    ask(client, f"At 18:51 it was dark. {STORY}", SECOND)
    assert get(client, "lookups", SECOND)["lookups"][-1]["reason"] == "never seen"
    assert get(client, "lookups")["lookups"][-1]["reason"] == "other salt"


def test_what_is_not_there_is_said(client: TestClient) -> None:
    for path in ("blocks/0/100000", "blocks/7/0", "blocks/0/-1", "conversations?model=none"):
        assert client.get(f"/admin/cache/{path}", headers=FIRST).status_code == 404, path
    assert change(client, "pin", "00" * 16).status_code == 404
    assert change(client, "pin", "no key").status_code == 400


def test_the_tree_is_read_once_for_all_who_look(client: TestClient) -> None:
    """The answer is made once for all who may see the same, until it is old or something was changed."""
    ask(client, STORY, max_tokens=1)
    trees, backend = client.app.state.trees, client.app.state.backend  # type: ignore[attr-defined]
    reading = []

    async def slices(begin: Any, real: Any = backend.in_slices) -> Any:
        reading.append(begin)
        return await real(begin)

    backend.in_slices = slices
    try:
        trees.forget(backend)
        found = [client.get("/admin/cache/conversations", headers=FIRST).content for _ in range(5)]
        assert len(set(found)) == 1 and len(reading) == 1
    finally:
        del backend.in_slices
