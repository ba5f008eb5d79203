"""A thread that reads snapshots from a server, for as long as somebody wants them.

    connecting -> live -> away -> connecting ...     it continues until it is stopped, whatever the server does

`came` is called with every snapshot, `gone` with the reason each time that there is no connection: both in the thread.
"""

import threading
from collections.abc import Callable

from ...errors import SettingError
from ..asking import Asking
from .figures import Snapshot

PATH = "/admin/live"
# The server sends something at least every 5 seconds, so after this much silence the connection is lost.
SILENCE_S = 20.0
# How long it waits before it tries again.
RETRY_S = 1.0


def first(server: Asking) -> Snapshot:
    """One snapshot. Raises what `Asking.events` does."""
    events = server.events(PATH, SILENCE_S)
    try:
        for snapshot in events:
            return checked(server, snapshot)
    finally:
        events.close()
    raise SettingError(f"the server on {server.url} is shutting down")


def checked(server: Asking, snapshot: Snapshot) -> Snapshot:
    """Raises SettingError if it is not what this can read."""
    if not isinstance(snapshot, dict) or snapshot.get("version") != 1:
        raise SettingError(f"the server on {server.url} runs a different version of OneKV")
    return snapshot


class Feed:
    def __init__(self, server: Asking, came: Callable[[Snapshot], object], gone: Callable[[str], object]) -> None:
        self._server, self._came, self._gone = server, came, gone
        self._ended = threading.Event()

    def start(self) -> None:
        # A daemon: it may wait for the server's next word when the process is to end.
        threading.Thread(target=self._run, name="onekv-feed", daemon=True).start()

    def stop(self) -> None:
        """Nothing is called any more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            reason = "the server is shutting down"
            try:
                for snapshot in self._server.events(PATH, SILENCE_S):
                    if self._ended.is_set():
                        return
                    self._came(checked(self._server, snapshot))
            except SettingError as error:
                reason = str(error)
            if not self._ended.is_set():
                self._gone(reason)
            self._ended.wait(RETRY_S)
