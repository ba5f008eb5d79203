"""A real browser: the system's Chromium, driven by playwright, which brings none of its own."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def open_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers have no room for its sandbox; it sees no page but ours.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page in a context of its own, with all that it complained about and all hosts that it asked."""

    def __init__(self, browser: Any, url: str, key: str | None = None, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._told)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.set_default_timeout(60_000)
        self.page.goto(url)
        if key is not None:
            self.give_key(key)

    def _told(self, message: Any) -> None:
        # Chromium reports every answer of 400 and more as an error.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def give_key(self, key: str) -> None:
        self.page.fill("#key", key)
        self.page.click("text=Use this key")

    def send(self, text: str) -> None:
        self.page.fill("#draft", text)
        self.page.click(".compose button.main")

    def answered(self, count: int = 1) -> Any:
        """Messages of the model, when so many are there and complete."""
        done = ".message[data-role=assistant][data-state=done]"
        self.until(lambda: self.page.locator(done).count() >= count)
        return self.page.locator(done)

    def until(self, true: Callable[[], bool]) -> None:
        """Playwright's own `wait_for_function` needs eval, which the page's policy forbids."""
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline, self.page.locator("body").inner_text()
            self.page.wait_for_timeout(50)

    def table(self, name: str) -> list[list[str]]:
        """The cells of a panel's table."""
        rows = self.page.locator(f"section[aria-labelledby={name}-title] tbody tr").all()
        return [row.locator("td").all_inner_texts() for row in rows]

    def counts(self) -> dict[str, int]:
        """What the legend of the map says."""
        cells = self.page.locator("[data-count]").all()
        return {cell.get_attribute("data-count"): int(cell.inner_text().replace(",", "")) for cell in cells}
