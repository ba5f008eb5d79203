"""`onekv top` over real servers: driven by textual's own pilot, and as a person has it, in a terminal."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx2 as httpx
import pytest
from several import WORDS, complete, start_several, states
from test_launch import free_port
from textual.pilot import Pilot
from textual.widgets import Static

from conftest import KEYS, Server, start_server, stop_server
from onekv.bench.soak import save_tiny
from onekv.cli.asking import Asking
from onekv.cli.watch import figures
from onekv.cli.watch.app import Question, Table, Top
from onekv.cli.watch.feed import first
from onekv.cli.watch.figures import filled, line_of
from terminal import Terminal

# Names are shown as they are, and not as markup.
RED, BLUE = "[b]red", "blue"
SMALL = (80, 24)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two")
    tables: dict[str, dict[str, Any]] = {RED: {"model": tiny}, BLUE: {"model": save_tiny(folder / "blue", 1)}}
    tiers = ["--disk-cache", str(folder / "disk"), "--disk-limit", "1GB", "--remote-tier", f"file://{folder}/shared"]
    server = start_several(folder, tables, *tiers)
    yield server
    assert "Traceback" not in stop_server(server)


def text(app: Top, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).content)


def table(app: Top, name: str) -> list[list[str]]:
    found = app.query_one(f"#{name}", Table)
    return [[str(cell) for cell in found.get_row_at(index)] for index in range(found.row_count)]


def notices(app: Top) -> list[str]:
    return [notice.message for notice in app._notifications]


async def until(pilot: Pilot[None], wanted: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not wanted():
        assert time.monotonic() < deadline, pilot.app.export_screenshot(simplify=True)
        await pilot.pause(0.05)


def drive(server: Asking, use: Callable[[Top, Pilot[None]], Awaitable[None]], size: tuple[int, int] = SMALL) -> None:
    """Have `use` use the app."""

    async def run() -> None:
        app = Top(server, first(server))
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: text(app, "memory"))
            await use(app, pilot)

    asyncio.run(run())


def test_memory_reuse_tiers_and_models_fit_into_a_small_terminal(two: Server) -> None:
    for _ in range(2):
        complete(two, RED)
    complete(two, BLUE)

    async def use(app: Top, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "never seen 2" in text(app, "reuse") and len(table(app, "models")) == 2)
        names = [line.split("  ")[0].strip() for line in text(app, "memory").splitlines()]
        assert [name.split(" █")[0].split(" ▏")[0][:9].strip() for name in names] == [
            *("memory", "weights", "KV in use", "KV cached", "KV free", "process")
        ]
        assert "of the 1.17 GiB budget" in text(app, "memory")
        assert "hits 1 (" in text(app, "reuse")
        disk, remote = text(app, "tiers").splitlines()
        assert " disk " in disk and " of 953.67 MiB; read 0 B" in disk
        # What a shared store holds is not known here.
        assert remote.strip().startswith("remote: read 0 B") and " of " not in remote
        assert [row[:3] for row in table(app, "models")] == [[RED, "loaded", "lru"], [BLUE, "loaded", "lru"]]
        assert "2 of 2 models loaded" in text(app, "status")
        # All of it is on the screen, with some room for requests.
        await pilot.pause()
        shown = {each.id or "footer": each.region for each in app.screen.children if each.display}
        assert all(region.y >= 0 and region.bottom <= SMALL[1] for region in shown.values()), shown
        assert shown["requests"].height >= 5
        for name in ("status", "memory", "lines", "reuse", "tiers"):
            assert max(map(len, text(app, name).splitlines())) <= SMALL[0]
        await pilot.resize_terminal(132, 40)
        await until(pilot, lambda: max(map(len, text(app, "memory").splitlines())) > 100)

    drive(Asking(two.url), use)


def test_tiers_have_the_rates_of_now_and_requests_their_accepted_proposals(two: Server) -> None:
    snapshot, past = first(Asking(two.url)), figures.Past()
    tiers = {tier["name"]: tier for model in snapshot["models"][:1] for tier in model["tiers"]}
    for other in snapshot["models"][1:]:
        other["tiers"] = []
    for second in range(6):
        # Reads end after the first seconds; what was read long ago is no rate of now.
        tiers["disk"] |= {"promoted_bytes": min(second, 2) * 2**30, "written_bytes": second * 3 * 2**20}
        past.add(snapshot)
    assert past.rates("disk") == (0.0, 3 * 2**20) and past.rates("remote") == (0.0, 0.0)
    disk, remote = figures.tiers(snapshot, past)
    assert "; read 2.00 GiB; written 15.00 MiB (3.00 MiB/s)" in disk and "/s" not in remote
    tokens = {f"{name}_tokens": 10 for name in ("prompt", "cached", "stored", "generated", "max", "proposed")}
    request = {"id": 1, "state": "running", **tokens, "accepted_tokens": 7, "tokens_per_second": None, "age_s": 1.0}
    snapshot["models"][0]["requests"] = [request, {**request, "id": 2, "proposed_tokens": 0, "accepted_tokens": 0}]
    at = figures.REQUESTS.index("accepted")
    assert [cells[at] for _, cells in figures.request_rows(snapshot)][:2] == ["7/10", "-"]


def test_requests_are_listed_and_keys_move_and_pause(two: Server) -> None:
    # Each goes on until its client is gone, so that there are some for as long as they are looked at.
    ended = threading.Event()

    def ask(number: int) -> None:
        body = {"model": BLUE, "prompt": f"{number} {WORDS}", "max_tokens": 1000, "stream": True, "ignore_eos": True}
        while not ended.is_set():
            with (
                suppress(httpx.HTTPError),
                httpx.stream("POST", f"{two.url}/v1/completions", json=body, timeout=120) as answer,
            ):
                for _ in answer.iter_lines():
                    if ended.is_set():
                        return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]

    async def use(app: Top, pilot: Pilot[None]) -> None:
        for thread in threads:
            thread.start()
        await until(pilot, lambda: any(row[1] == "running" and row[6] != "-" for row in table(app, "requests")))
        row = next(row for row in table(app, "requests") if row[1] == "running")
        assert int(row[2]) > 50 and row[3].endswith("%") and row[4].endswith("/1,000") and row[8] == BLUE
        await until(pilot, lambda: len(table(app, "requests")) > 1)
        requests = app.query_one("#requests", Table)
        await pilot.press("p")
        assert "PAUSED" in text(app, "status")
        before = table(app, "requests")
        await pilot.press("j")
        assert requests.cursor_row == 1
        await pilot.press("k", "down", "up")
        assert requests.cursor_row == 0
        seen = app.snapshot
        await until(pilot, lambda: app.snapshot is not seen)
        assert table(app, "requests") == before, "it is paused"
        await pilot.press("p")
        await until(pilot, lambda: table(app, "requests") != before)
        await until(pilot, lambda: any(app.past.speed) and any(app.past.in_use))
        await until(pilot, lambda: any(level in text(app, "lines").splitlines()[1] for level in "▁▂▃▄▅▆▇█"))

    try:
        drive(Asking(two.url), use)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_a_model_is_unloaded_and_loaded_after_a_question(two: Server) -> None:
    complete(two, BLUE)

    async def use(app: Top, pilot: Pilot[None]) -> None:
        async def answer(key: str, word: str, reply: str) -> None:
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, Question))
            asked = str(app.screen.query_one("#question", Static).content)
            assert asked.startswith(f"{word} {BLUE}?")
            await pilot.press(reply)
            await until(pilot, lambda: not isinstance(app.screen, Question))

        await pilot.press("tab", "j")
        assert app.query_one("#models", Table).chosen == BLUE
        await answer("u", "Unload", "n")
        await answer("u", "Unload", "escape")
        assert states(two)[BLUE] == "loaded"
        await answer("u", "Unload", "y")
        await until(pilot, lambda: f"{BLUE} is unloaded" in notices(app))
        assert states(two)[BLUE] == "unloaded"
        await until(pilot, lambda: table(app, "models")[1][1] == "unloaded")
        assert app.query_one("#models", Table).chosen == BLUE, "the cursor stays where it was"
        await pilot.press("u")
        await until(pilot, lambda: notices(app).count(f"{BLUE} is unloaded") > 1)
        await answer("l", "Load", "y")
        await until(pilot, lambda: table(app, "models")[1][1] == "loaded")
        assert states(two) == {RED: "loaded", BLUE: "loaded"}

    drive(Asking(two.url), use)


def test_it_connects_again_when_the_server_restarts(tiny: str) -> None:
    flags = ["--model", tiny, "--kv-memory", "32MiB", "--port", str(free_port())]
    servers = [start_server(*flags)]

    async def use(app: Top, pilot: Pilot[None]) -> None:
        assert not app.query_one("#models").display
        await pilot.press("u")
        assert not isinstance(app.screen, Question), "a single model is not unloaded"
        await asyncio.to_thread(stop_server, servers[0])
        await until(pilot, lambda: text(app, "status").startswith("not connected, retrying: "))
        servers.append(await asyncio.to_thread(start_server, *flags))
        await until(pilot, lambda: app.reason is None)
        await until(pilot, lambda: any(said.startswith("connected again after ") for said in notices(app)))
        assert text(app, "status").startswith(servers[1].url)

    try:
        drive(Asking(servers[0].url, KEYS[0]), use)
    finally:
        for server in servers:
            assert "Traceback" not in stop_server(server)


def onekv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "onekv", *arguments]


def test_the_command_shows_something_and_quits(two: Server, terminal: Callable[..., Terminal]) -> None:
    screen = terminal(*onekv("top", "--url", two.url))
    screen.until("KV in use")
    screen.until("models loaded")
    screen.send("q")
    assert screen.end() == 0


def test_a_wrong_key_and_no_server_are_said_before_the_screen_is_taken(
    server: Server, terminal: Callable[..., Terminal]
) -> None:
    refused = terminal(*onekv("top", "--url", server.url, "--api-key", "not-one-of-the-keys"))
    refused.until("returned 401: it requires a different API key; set it with --api-key")
    assert refused.end() == 1
    alone = terminal(*onekv("top", "--url", f"http://127.0.0.1:{free_port()}"))
    alone.until("start one with onekv serve, or set its address with --url")
    assert alone.end() == 1
    assert "\x1b[?1049h" not in refused.seen.getvalue() + alone.seen.getvalue()


def test_without_a_terminal_or_textual_it_says_what_to_do() -> None:
    piped = subprocess.run(onekv("top"), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert piped.returncode == 1 and "onekv top needs a terminal" in piped.stderr
    program = "import sys; sys.modules['textual'] = None; from onekv.cli import main; sys.exit(main(['top']))"
    bare = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert bare.returncode == 1
    assert bare.stderr.startswith("onekv: onekv top needs textual; install it with: pip install 'onekv[top]'")


def test_bars_and_lines() -> None:
    assert filled(0, 4) == "····" and filled(1, 4) == "████" and filled(2, 4) == "████"
    assert filled(0.5, 4) == "██··" and filled(1e-9, 4) == "▏···"
    assert line_of([0, 1, 4, 8], 8, 6) == "   ▂▅█"
    assert line_of([1, 2, 3], 0, 2) == "▁▁" and line_of([], 1, 3) == "   "
