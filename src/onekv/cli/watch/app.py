"""The screen of `onekv top`.

Top          the app: keeps the newest snapshot and the past, shows them, handles keys
Table        rows that keep their cursor while they change
Question     yes or no, before a model is loaded or unloaded
"""

import threading
import time
from typing import Any, ClassVar, Literal

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Label, Static

from ...errors import SettingError
from ...units import format_seconds, format_size
from .. import swapping
from ..asking import Asking
from . import figures
from .feed import Feed
from .figures import Past, Rows, Snapshot

# The width of a label.
LABEL = 10


class Came(Message):
    """A snapshot has arrived."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class Gone(Message):
    """There is no connection."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class Done(Message):
    """A request to the server has succeeded or failed."""

    def __init__(self, text: str, failed: bool = False) -> None:
        super().__init__()
        self.text, self.failed = text, failed


class Table(DataTable[Text]):
    """Its cursor stays with the row that it is on, by the row's key."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "Down", show=False),
        Binding("k", "cursor_up", "Up", show=False),
    ]

    def __init__(self, name: str) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=True)
        self._shown: tuple[list[str], Rows] = ([], [])

    def show(self, header: list[str], rows: Rows) -> None:
        if (header, rows) == self._shown:
            return
        key, top = self.chosen, self.scroll_y
        if header != self._shown[0]:
            self.clear(columns=True)
            self.add_columns(*(Text(name, justify=_side(name)) for name in header))
        else:
            self.clear()
        self._shown = header, rows
        for name, cells in rows:
            # Not as markup: names are the server's.
            texts = (Text(cell, justify=_side(column)) for column, cell in zip(header, cells, strict=True))
            self.add_row(*texts, key=name)
        keys = [name for name, _ in rows]
        if key in keys:
            self.move_cursor(row=keys.index(key), animate=False, scroll=False)
            self.scroll_to(y=top, animate=False)

    @property
    def chosen(self) -> str | None:
        """The key of the row that the cursor is on."""
        rows = self._shown[1]
        return rows[self.cursor_row][0] if 0 <= self.cursor_row < len(rows) else None


class Question(ModalScreen[bool]):
    """Answered by y or n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q", "dismiss(False)", "No"),
    ]
    CSS = """
    Question { align: center middle; }
    Question > Vertical { width: auto; max-width: 76; height: auto; border: round $accent; padding: 1 2; }
    Question Label { width: auto; max-width: 70; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(self._text, markup=False, id="question")
            yield Label("y: yes    n: no", markup=False)


class Top(App[None]):
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #status { height: 1; text-style: bold; }
    #status.away { color: $error; }
    #memory, #lines, #reuse, #tiers { height: auto; }
    #lines, #reuse { color: $text-muted; }
    Table { height: 1fr; min-height: 3; }
    #models { height: auto; max-height: 5; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("u", "ask('unload')", "Unload"),
        Binding("l", "ask('load')", "Load"),
        Binding("tab", "focus_next", "Other table", show=False),
    ]

    def __init__(self, server: Asking, snapshot: Snapshot | None = None) -> None:
        super().__init__()
        self.server, self.snapshot, self.past = server, snapshot, Past()
        self.paused = False
        # Why there is no connection, and since when.
        self.reason: str | None = None if snapshot is not None else "connecting"
        self._since = time.monotonic()
        self._feed = Feed(
            server, lambda snapshot: self.post_message(Came(snapshot)), lambda reason: self.post_message(Gone(reason))
        )

    def compose(self) -> ComposeResult:
        for name in ("status", "memory", "lines", "reuse", "tiers"):
            yield Static(id=name, markup=False)
        yield Table("requests")
        yield Table("models")
        yield Footer()

    def on_mount(self) -> None:
        self.title = f"onekv top {self.server.url}"
        self.query_one("#requests").focus()
        self._sample()
        self.set_interval(1.0, self._sample)
        self._feed.start()

    def on_unmount(self) -> None:
        self._feed.stop()

    def on_resize(self) -> None:
        # Not before the sizes of what is in it are known.
        self.call_after_refresh(self._draw)

    # What comes

    def on_came(self, message: Came) -> None:
        if self.reason is not None and self.snapshot is not None:
            self.notify(f"connected again after {format_seconds(time.monotonic() - self._since)}")
        self.snapshot, self.reason = message.snapshot, None
        self._draw()

    def on_gone(self, message: Gone) -> None:
        if self.reason is None:
            self._since = time.monotonic()
        self.reason = message.reason
        self._draw_status()

    def on_done(self, message: Done) -> None:
        self.notify(message.text, severity="error" if message.failed else "information", markup=False)

    def _sample(self) -> None:
        """The history continues while the screen is paused, but not while there is no connection."""
        if self.snapshot is not None and self.reason is None:
            self.past.add(self.snapshot)
        self._draw()

    # What keys do

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Models come and go only where there are several."""
        return action != "ask" or (self.snapshot is not None and figures.several(self.snapshot))

    def action_ask(self, action: str) -> None:
        name = self.query_one("#models", Table).chosen
        model = figures.of_model(self.snapshot, name) if self.snapshot is not None and name is not None else None
        if name is None or model is None:
            return
        wanted = {"load": "loaded", "unload": "unloaded"}[action]
        if model["state"] == wanted:
            self.notify(f"{name} is {wanted}", markup=False)
            return

        def answered(yes: bool | None) -> None:
            if yes:
                # A daemon, as it may take as long as the server lets it, and the app may end meanwhile.
                threading.Thread(target=self._change, args=(name, action, wanted), daemon=True).start()

        self.push_screen(Question(_question(model, action)), answered)

    def _change(self, name: str, action: str, wanted: str) -> None:
        try:
            swapping.ask(self.server, name, action)
        except SettingError as error:
            self.post_message(Done(str(error), failed=True))
        else:
            self.post_message(Done(f"{name} is {wanted}"))

    # What is shown

    def _draw(self) -> None:
        self._draw_status()
        if self._covered:
            return
        snapshot, width = self.snapshot, self.size.width
        if snapshot is None or self.paused or not width:
            return
        memory = [f"{'memory':<{LABEL}}{figures.memory_title(snapshot)}"]
        self._put("memory", [*memory, *(bar.line(width) for bar in figures.bars(snapshot))])
        self._put("lines", self._lines(snapshot, width))
        self._put("reuse", _labelled("reuse", figures.reuse(snapshot)))
        self._put("tiers", _labelled("tiers", figures.tiers(snapshot, self.past)))
        several = figures.several(snapshot)
        header = [*figures.REQUESTS, *(["model"] if several else [])]
        self.query_one("#requests", Table).show(header, figures.request_rows(snapshot))
        models = self.query_one("#models", Table)
        if models.display != several:
            self.refresh_bindings()
        models.display = several
        models.show(figures.MODELS, figures.model_rows(snapshot))

    def _put(self, name: str, lines: list[str]) -> None:
        self.query_one(f"#{name}", Static).update("\n".join(line[: self.size.width] for line in lines))

    def _lines(self, snapshot: Snapshot, width: int) -> list[str]:
        room = max(8, width - LABEL - 26)
        used, speed = list(self.past.in_use), list(self.past.speed)
        held, fast = snapshot["memory"]["held"], figures.speed(snapshot)
        whole, most = figures.pool_bytes(snapshot), max([*speed, fast])
        return [
            f"{'KV in use':<{LABEL}}{figures.line_of(used, whole, room)} {format_size(held):>10}"
            f"  {held / max(1, whole):.0%} of pool",
            f"{'tokens/s':<{LABEL}}{figures.line_of(speed, most, room)} {fast:>10.1f}  most {most:.1f}",
        ]

    @property
    def _covered(self) -> bool:
        """Whether a question covers the figures, or there is no screen yet."""
        return not self.is_running or len(self.screen_stack) != 1

    def _draw_status(self) -> None:
        if self._covered:
            return
        status = self.query_one("#status", Static)
        status.set_class(self.reason is not None, "away")
        status.update(self._status()[: self.size.width])

    def _status(self) -> str:
        if self.reason is not None:
            return f"not connected, retrying: {self.reason}"
        models: list[dict[str, Any]] = self.snapshot["models"] if self.snapshot is not None else []
        loaded = sum(model["state"] == "loaded" for model in models)
        named = models[0]["name"] if len(models) == 1 else f"{loaded} of {len(models)} models loaded"
        requests = sum(len(model["requests"]) for model in models)
        paused = "  PAUSED (p resumes)" if self.paused else ""
        return f"{self.server.url}  {named}  {requests} requests{paused}"


def _side(column: str) -> Literal["left", "right"]:
    return "left" if column in figures.WORDS else "right"


def _labelled(name: str, lines: list[str]) -> list[str]:
    return [f"{name if index == 0 else '':<{LABEL}}{line}" for index, line in enumerate(lines)]


def _question(model: dict[str, Any], action: str) -> str:
    if action == "unload":
        count = len(model["requests"])
        more = f" Its requests in flight ({count}) finish first." if count else ""
        return f"Unload {model['name']}?{more}"
    return f"Load {model['name']}? It takes {format_size(model['bytes']['total'])}; others may be unloaded for that."
