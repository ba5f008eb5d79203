"""Shared by `onekv ps`, `load` and `unload`: the models of a server, from /admin/models, and changes to them."""

import sys
import threading
from typing import Any
from urllib.parse import quote

from tqdm import tqdm

from ..config import there_are
from ..errors import SettingError
from ..units import format_size
from .asking import Asking

Overview = dict[str, Any]
Row = dict[str, Any]
# How often the progress of a change is read.
LOOK_SECONDS = 0.5
_PATH = "/admin/models"


def overview(server: Asking) -> Overview:
    """Raises SettingError where there is no server, it wants another key, or is none of ours."""
    found = server.json(_PATH)
    if not isinstance(found, dict) or not {"memory", "models", "queue"} <= found.keys():
        raise server.not_ours()
    return found


def find(found: Overview, name: str, url: str) -> Row:
    """The model that `name` means. Raises SettingError with those there are."""
    rows: list[Row] = found["models"]
    for row in rows:
        if name in row["names"] or (name == "default" and row is rows[0]):
            return row
    known = [each for row in rows for each in row["names"]]
    raise SettingError(f"the server on {url} has no model {name!r}; {there_are(name, known)}")


def doing(found: Overview, row: Row) -> str:
    """What becomes of a model that is neither loaded nor unloaded; empty for others."""
    if (load := row.get("loading")) is not None:
        return _loading(load)
    if (unload := row.get("unloading")) is not None:
        return f"unloading for {unload['for_s']:.1f} s: {unload['doing']}"
    places = [str(place["position"]) for place in found["queue"] if place["model"] == row["name"]]
    if places:
        return f"{row['state']}; number {', '.join(places)} of {len(found['queue'])} requests waiting for models"
    return f"failed: {row['reason']}" if row["state"] == "failed" else ""


def _loading(load: dict[str, Any]) -> str:
    estimate = load["estimate_s"]
    length = "duration not known yet" if estimate is None else f"about {estimate:.1f} s in total"
    read = f"{format_size(load['read_bytes'])} of {format_size(load['weights_bytes'])} of weights read"
    return f"loading for {load['for_s']:.1f} s, {length}; {read}"


def taken(found: Overview) -> str:
    memory = found["memory"]
    if memory["limit"] is None:
        return f"{format_size(memory['counted'])} in use"
    return f"{format_size(memory['counted'])} of {format_size(memory['limit'])} (--memory) in use"


def ask(server: Asking, name: str, action: str) -> Overview:
    """Have `action` done with the model `name`; returns when it is done."""
    # As long as it takes: the server has its own limit (--max-wait).
    found: Overview = server.json(f"{_PATH}/{quote(name, safe='')}/{action}", "POST", None)
    return found


def change(server: Asking, name: str, action: str) -> Overview:
    """Ask for `action` of the model `name` and wait until it is done; in a terminal, show how far it is."""
    answers: list[Overview | SettingError] = []

    def run() -> None:
        try:
            answers.append(ask(server, name, action))
        except SettingError as error:
            answers.append(error)

    thread = threading.Thread(target=run, name="onekv-asking", daemon=True)
    thread.start()
    with tqdm(bar_format="{desc}", file=sys.stderr, disable=None, leave=False) as line:
        thread.join(LOOK_SECONDS)
        while thread.is_alive():
            if not line.disable:
                found = overview(server)
                line.set_description_str(f"{name}: {doing(found, find(found, name, server.url))}")
            thread.join(LOOK_SECONDS)
    (answer,) = answers
    if isinstance(answer, SettingError):
        raise answer
    return answer
