"""Takes the pictures of the page in the documentation, from a real server under load: python docs/screenshots.py.

Needs the system's Chromium and the package playwright; writes docs/page.png and docs/page-cache.png.
"""

import sys
import threading
from pathlib import Path

import httpx2 as httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "server"))

from browser import Opened, open_browser  # noqa: E402

from conftest import start_server, stop_server  # noqa: E402

NOTES = "These are the notes of a meeting, which all of the questions below are about. " * 24
QUESTIONS = ("Who was there?", "What was decided?", "When do they meet again?", "Who writes the minutes?")
FLAGS = ("--kv-memory", "256MiB", "--block-size", "16", "--max-batch", "6")


def ask(url: str, question: str) -> None:
    messages = [{"role": "user", "content": f"{NOTES}\n{question}"}]
    body = {"model": "default", "messages": messages, "max_tokens": 400, "logit_bias": {"0": -100, "2": -100}}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()


def ask_all(url: str) -> list[threading.Thread]:
    asking = [threading.Thread(target=ask, args=(url, question), daemon=True) for question in QUESTIONS]
    for thread in asking:
        thread.start()
    return asking


def main() -> None:
    server = start_server(*FLAGS, keys=[])
    # The first requests of a process load libraries and fill buffers: the line is that of one that has served some.
    for thread in ask_all(server.url):
        thread.join()
    httpx.delete(f"{server.url}/admin/cache", timeout=60).raise_for_status()
    with open_browser() as browser:
        page = Opened(browser, server.url, viewport={"width": 1360, "height": 860})
        page.page.wait_for_selector("[data-state=live]")
        page.send("Name three rivers in France, and say one thing about each.")
        page.answered()
        asking = ask_all(server.url)
        page.until(lambda: page.counts()["shared"] > 0)
        page.page.wait_for_timeout(4000)
        page.page.evaluate("scrollTo(0, 0)")
        page.page.screenshot(path=ROOT / "docs" / "page.png")
        for thread in asking:
            thread.join()
        page.page.set_viewport_size({"width": 1360, "height": 1000})
        page.page.wait_for_timeout(3000)
        first, last = (page.page.locator(f"section[aria-labelledby={name}-title]") for name in ("prefix", "tree"))
        begin, end = first.bounding_box(), last.bounding_box()
        height = end["y"] + end["height"] - begin["y"]
        clip = {"x": begin["x"] - 8, "y": begin["y"] - 8, "width": begin["width"] + 16, "height": height + 16}
        page.page.screenshot(path=ROOT / "docs" / "page-cache.png", full_page=True, clip=clip)
    stop_server(server)


if __name__ == "__main__":
    main()
