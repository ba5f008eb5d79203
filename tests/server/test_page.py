"""The page in a real browser, over a real server."""

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from browser import AXE, CHROMIUM, Opened, open_browser
from live import until, watching
from several import start_several
from test_live import ADMINISTRATOR, ask

from conftest import KEYS, Server, start_server, stop_server
from onekv.bench.soak import save_tiny

OTHER = {"Authorization": f"Bearer {KEYS[1]}"}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="playwright is not installed")
    with open_browser() as opened:
        yield opened


@pytest.fixture
def opened(browser: Any, server: Server) -> Iterator[Opened]:
    """Signed in as the administrator; nothing went wrong by the end, and nobody else was asked."""
    page = Opened(browser, server.url, KEYS[0])
    page.page.wait_for_selector("[data-state=live]")
    yield page
    page.page.close()
    assert page.complaints == []
    assert page.hosts == {urlsplit(server.url).netloc}


def test_the_line_and_the_map(opened: Opened, server: Server) -> None:
    """The line gets points, also while nothing happens; after a burst the map counts what the server counts."""
    points = "document.querySelector('.line').plot.data[0].length"
    before = opened.page.evaluate(points)
    opened.until(lambda: opened.page.evaluate(points) > before + 2)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda i: ask(server, f"Burst {i}: " + "word " * 80, 10), range(6)))
    assert httpx.get(f"{server.url}/admin/integrity", headers=ADMINISTRATOR).json()["ok"]
    (known,) = httpx.get(f"{server.url}/admin/cache", headers=ADMINISTRATOR).json()["pools"]
    idle = {"cached": known["idle"], "pinned": known["pinned"], "free": known["free"]}
    wanted = {"held": 0, "shared": 0, "loading": 0, **idle}
    opened.until(lambda: opened.counts() == wanted)


def test_a_block_says_what_is_in_it(opened: Opened, server: Server) -> None:
    """By keyboard and by pointer; the words of another key stay with that key."""
    httpx.delete(f"{server.url}/admin/cache", headers=ADMINISTRATOR).raise_for_status()
    ask(server, "Where is the blue lighthouse?")
    opened.until(lambda: opened.counts()["cached"] > 0)
    canvas, chosen = opened.page.locator(".map canvas").first, opened.page.locator(".chosen").first
    canvas.focus()
    canvas.press("ArrowRight")
    opened.until(lambda: "blue lighthouse" in chosen.inner_text())
    facts = r"tokens 0 to \d+ · key 1 \(yours\) · last used .+ · in memory only"
    assert re.fullmatch(facts, chosen.locator(".facts").inner_text())
    assert chosen.locator("b").inner_text() == "Block 0: cached, not in use"
    httpx.delete(f"{server.url}/admin/cache", headers=ADMINISTRATOR).raise_for_status()
    ask(server, "Where is the red windmill?", headers=OTHER)
    opened.until(lambda: "key 2" in chosen.inner_text())
    assert "The text belongs to another key." in chosen.inner_text()
    assert "windmill" not in opened.page.locator("body").inner_text()
    canvas.hover(position={"x": 4, "y": 4})
    opened.until(lambda: "Block 0" in chosen.inner_text())
    opened.page.mouse.move(0, 0)
    opened.until(lambda: "Point at a block" in chosen.inner_text())


def test_conversations_are_a_tree_with_pin_and_drop(opened: Opened, server: Server) -> None:
    httpx.delete(f"{server.url}/admin/cache", headers=ADMINISTRATOR).raise_for_status()
    story = "The lighthouse keeper wrote a letter every evening. " * 20
    for end in ("Why?", "To whom?"):
        ask(server, story + end)
    page = opened.page
    rows = page.locator(".tree tbody tr")
    opened.until(lambda: rows.count() == 3)
    assert [row.get_attribute("data-depth") for row in rows.all()] == ["0", "1", "1"]
    assert "lighthouse keeper" in rows.first.inner_text() and "2 conversations" in rows.first.inner_text()
    rows.last.get_by_role("button", name="Pin").click()
    opened.until(lambda: opened.counts()["pinned"] > 0 and page.locator(".tree [data-pinned=true]").count() == 1)
    page.locator(".tree [data-pinned=true]").get_by_role("button", name="Unpin").click()
    opened.until(lambda: opened.counts()["pinned"] == 0)
    rows.first.get_by_role("button", name="Drop").click()
    opened.until(lambda: page.get_by_text("Nothing is cached in memory.").count() == 1)
    assert httpx.get(f"{server.url}/admin/integrity", headers=ADMINISTRATOR).json()["ok"]
    opened.until(lambda: opened.counts()["cached"] == 0)


def test_a_miss_shows_the_words_that_made_it(opened: Opened, server: Server) -> None:
    story = "The quick brown fox jumps over the lazy dog by the river. " * 12
    ask(server, f"It is 18:49 now. {story}")
    ask(server, f"It is 18:51 now. {story}")
    row = opened.page.locator(".misses tbody tr").first
    opened.until(lambda: row.locator("ins").count() == 1 and row.locator("ins").inner_text().startswith("51"))
    assert row.locator("del").inner_text().startswith("49") and "had to be recomputed" in row.inner_text()
    assert opened.page.locator(".chart rect[data-fill=cached]").count() > 0
    assert opened.page.locator(".chart rect[data-fill=missed]").count() > 0


def test_a_shared_prefix_lights_up(opened: Opened, server: Server) -> None:
    prefix = "Both of them have these words before their own. " * 30
    ask(server, prefix)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(ask, server, prefix + end, 300) for end in ("One.", "Two.")]
        opened.until(lambda: opened.counts()["shared"] > 0)
        opened.page.wait_for_selector("tr[data-state=running]")
        assert all(answer.result() for answer in both)


def test_the_chat_streams_stops_and_branches(opened: Opened) -> None:
    page = opened.page
    page.click("summary:text('Settings')")
    # So hot that the answer does not end by itself.
    page.fill("label:has-text('Temperature') input", "2")
    opened.send("Count from one to two hundred, in words.")
    page.wait_for_selector(".message[data-state=streaming]")
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector(".message[data-state=stopped]")
    assert page.locator(".message[data-state=stopped] .text").inner_text()
    # Known from the start of an answer, also of one that has no end.
    assert int(page.locator(".message[data-state=stopped] [data-figure=computed]").inner_text()) > 0
    page.fill("label:has-text('Max tokens') input", "12")
    page.click("text=Regenerate")
    opened.answered()
    assert "2 of 2" in page.locator("[data-role=assistant] .siblings").inner_text()
    page.click("[data-role=assistant] [aria-label='Previous branch']")
    assert page.locator(".message[data-state=stopped]").count() == 1
    page.click("[data-role=user] >> text=Edit")
    page.fill(".editor textarea", "Count from one to two hundred, in digits.")
    page.click("text=Send as a branch")
    opened.answered()
    assert "2 of 2" in page.locator("[data-role=user] .siblings").inner_text()
    figures = {name: page.locator(f"[data-figure={name}]").inner_text() for name in ("cached", "computed")}
    # What both questions begin with was computed once, and is stored once.
    assert int(figures["cached"]) > 0 and int(figures["computed"]) > 0
    assert re.match(r"[\d.]+ [KM]iB of KV shared", page.locator("[data-figure=saved]").inner_text())


def test_requests_are_listed_while_they_run_and_when_they_have_ended(opened: Opened, server: Server) -> None:
    """The cached share, the progress of prefill, speed; and in the end what the client was told."""
    prefix = "These words are in both of the requests that are listed. " * 12
    ask(server, prefix)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, server, f"{prefix} And these are new. " * 4, 60)
        opened.page.wait_for_selector("tr[data-state=running]")
        usage = asked.result()["usage"]
    prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < prompt
    opened.until(lambda: opened.page.locator("tr[data-state=running], tr[data-state=prefilling]").count() == 0)
    _, state, said, generated, speed, *_ = opened.table("requests")[0]
    assert state == "ended" and said.strip() == f"{cached:,} cached of {prompt:,}"
    assert generated.replace(" ", "") == "60/60" and float(speed) > 0
    shares = opened.page.locator(".requests tbody tr").first.locator(".bar i")
    widths = [float(share.get_attribute("style").removeprefix("width: ").rstrip("%;")) for share in shares.all()]
    assert abs(widths[0] - 100 * cached / prompt) < 0.1 and abs(sum(widths) - 100) < 0.1


def test_escape_does_not_lose_the_dialog_for_the_key(browser: Any, server: Server) -> None:
    page = Opened(browser, server.url)
    page.page.wait_for_selector("dialog[open]")
    for _ in range(3):
        page.page.keyboard.press("Escape")
    page.page.wait_for_selector("dialog[open]")
    page.give_key(KEYS[0])
    page.page.wait_for_selector("[data-state=live]")
    page.page.close()


def test_on_a_phone_all_of_a_row_is_on_the_screen(opened: Opened, server: Server) -> None:
    ask(server, "What fits on a phone? " * 8)
    ask(server, "What fits on a phone? " * 6 + "And what does not?")
    page = opened.page
    page.set_viewport_size({"width": 390, "height": 844})
    for selector in (".tree .actions button", ".tree .words", ".misses .said"):
        opened.until(lambda selector=selector: page.locator(selector).count() > 0)
        for each in page.locator(selector).all():
            box = each.bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390, selector


def test_a_tab_in_the_background_stops_watching(opened: Opened, server: Server) -> None:
    """After a minute; when it is looked at again, it goes on."""
    page = opened.page
    page.clock.install()

    def hide(hidden: str) -> None:
        page.evaluate(f"Object.defineProperty(document, 'hidden', {{ get: () => {hidden}, configurable: true }})")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    with watching(server.url, KEYS[0]) as snapshots:
        until(snapshots, lambda each: each["watchers"] == 2)
        hide("true")
        page.clock.fast_forward(61_000)
        until(snapshots, lambda each: each["watchers"] == 1)
        hide("false")
        page.clock.resume()
        until(snapshots, lambda each: each["watchers"] == 2)


def test_a_hostile_prompt_is_text(opened: Opened) -> None:
    page = opened.page
    page.click("summary:text('Settings')")
    page.fill("label:has-text('Max tokens') input", "4")
    hostile = [
        "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><b>bold</b>",
        "\u202eright to left\u202c שלום &amp; ${document.title}",
        "x" * 2000,
    ]
    for number, text in enumerate(hostile, 1):
        opened.send(text)
        opened.answered(number)
        shown = page.locator("[data-role=user] .text").last
        assert shown.evaluate("element => element.textContent") == text
        assert shown.evaluate("element => element.childElementCount") == 0
    # Nor does it become anything else where cached text and misses are shown.
    opened.until(lambda: "onerror=" in page.locator(".tree").inner_text())
    opened.until(lambda: "onerror=" in page.locator(".misses").inner_text())
    assert page.locator(".tree img, .misses img, .tree script, .misses script, .tree b b").count() == 0
    assert page.title() == "OneKV"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_wrong_key_is_refused_and_asked_for_again(browser: Any, server: Server) -> None:
    page = Opened(browser, server.url, "not-the-key-at-all")
    page.page.wait_for_selector("text=The server rejected this key.")
    page.give_key(KEYS[1])
    # Known, but not the administrator's: it may chat.
    page.page.wait_for_selector("[data-state=forbidden]")
    page.send("Say yes.")
    page.answered()
    # What it has cached itself is its own to see, and to drop.
    page.page.wait_for_selector(".tree >> text=Say yes.")
    assert page.page.locator(".tree button:text('Pin')").count() == 0
    page.page.reload()
    page.page.wait_for_selector("[data-state=forbidden]")
    assert not page.page.locator("dialog").is_visible() and page.complaints == []
    page.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_for_axe(browser: Any, server: Server, scheme: str) -> None:
    """All panels have something in them; a dialog and a phone are looked at, too."""
    page = Opened(browser, server.url, color_scheme=scheme)
    page.page.wait_for_selector("dialog[open]")
    assert serious(page) == []
    page.give_key(KEYS[0])
    page.page.wait_for_selector("[data-state=live]")
    page.page.click("summary:text('Settings')")
    page.page.fill("label:has-text('Max tokens') input", "6")
    page.send("What is a pool? " + "A long question scrolls. " * 80)
    page.answered()
    ask(server, "Asked by somebody else.", headers=OTHER)
    page.page.wait_for_selector(".misses >> text=another key")
    page.page.locator(".map canvas").first.focus()
    page.page.keyboard.press("ArrowRight")
    page.page.wait_for_selector(".chosen .facts")
    assert serious(page) == []
    page.page.set_viewport_size({"width": 390, "height": 844})
    page.page.wait_for_timeout(100)
    assert serious(page) == []
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == []
    page.page.close()


def serious(page: Opened) -> list[str]:
    page.page.evaluate(AXE.read_text())
    found = page.page.evaluate("axe.run(document)")
    assert len(found["passes"]) > 15
    return [
        f"{each['id']}: {node['html']}"
        for each in found["violations"]
        for node in each["nodes"]
        if each["impact"] in ("serious", "critical")
    ]


def test_it_comes_back_after_a_restart(browser: Any, tmp_path: Path) -> None:
    """As another server, with other models: what it shows is that one's, and models are loaded and unloaded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    tables = {name: {"model": save_tiny(tmp_path / name, seed)} for seed, name in enumerate(("one", "two"))}
    shared = ["--remote-tier", f"file://{tmp_path}/shared"]
    first = start_server("--port", port, "--kv-memory", "32MiB", "--model", tables["one"]["model"], *shared, keys=[])
    page = Opened(browser, first.url, viewport={"width": 390, "height": 844})
    page.page.wait_for_selector("[data-state=live]")
    # On a phone, nothing is wider than the screen.
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.send("Hello.")
    page.answered()
    page.page.wait_for_selector(".tree tbody tr")
    # What a shared store holds is not known here.
    assert page.page.locator(".tier .note").inner_text().startswith("0 B read, ")
    assert page.page.locator(".tier .bar").count() == 0
    stop_server(first)
    page.page.wait_for_selector("[data-state=lost]")
    second = start_several(tmp_path, tables, "--port", port)
    page.page.wait_for_selector("[data-state=live]")
    page.page.wait_for_selector("text=Nothing is cached in memory.")
    states = {"one": "loaded", "two": "unloaded"}
    for action, name, wanted in (("Load", "two", "loaded"), ("Unload", "one", "unloaded")):
        page.page.get_by_role("button", name=f"{action} {name}").click()
        states[name] = wanted
        page.until(lambda: {row[0]: row[1] for row in page.table("models")} == states)
    assert page.complaints == []
    page.page.close()
    stop_server(second)
    assert second.process.returncode == 0
