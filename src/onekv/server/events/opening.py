"""From settings to a publisher for each model.

Each publisher has endpoints of its own. Those of the first model are as configured; for each further model, the port is
higher by one, or the path of the socket file ends with .1, .2 and so on.
"""

import logging
import re
import socket
from typing import TYPE_CHECKING

from ...errors import SettingError
from ..settings import ServerSettings

if TYPE_CHECKING:
    from .publisher import Publisher

log = logging.getLogger("onekv.events")

# A port of 0 or * is any free one.
ENDPOINT = re.compile(r"tcp://(?P<host>.+):(?P<port>\d{1,5}|\*)|ipc://(?P<path>.+)")


def open_publishers(settings: ServerSettings, names: list[str], port: int) -> "list[Publisher | None]":
    """One for each of the models `names`, of a server that listens on `port`; None for each if there are to be none.

    Raises SettingError.
    """
    if settings.kv_events is None:
        if settings.kv_events_replay is not None:
            raise SettingError(f"--kv-events-replay is {settings.kv_events_replay!r}, but --kv-events is not set")
        return [None] * len(names)
    try:
        from .publisher import Publisher
    except ModuleNotFoundError as error:
        raise SettingError(f"--kv-events needs {error.name}; install it with: pip install 'onekv[events]'") from None
    opened: list[Publisher | None] = []
    try:
        for index, name in enumerate(names):
            live = _endpoint(settings.kv_events, index, "--kv-events")
            replay = settings.kv_events_replay
            replay = None if replay is None else _endpoint(replay, index, "--kv-events-replay")
            topic = topic_of(settings, name, port)
            opened.append(Publisher(live, topic, replay, settings.kv_events_buffer, settings.kv_events_tokens))
    except SettingError:
        for publisher in opened:
            if publisher is not None:
                publisher.close()
        raise
    for publisher in opened:
        assert publisher is not None
        also = f", replay on {publisher.replay_endpoint}" if publisher.replay_endpoint else ""
        log.info("events for routers: %s, topic %s%s", publisher.endpoint, publisher.topic, also)
    if settings.kv_events_tokens and not _local(settings.kv_events):
        log.warning(
            "--kv-events is %s: anyone who can reach it can read the token ids of all prompts and answers, without any "
            "key (--kv-events-tokens off leaves them out)",
            settings.kv_events,
        )
    return opened


def topic_of(settings: ServerSettings, model: str, port: int) -> str:
    host = settings.host if settings.host not in ("0.0.0.0", "::") else socket.gethostname()
    known = {"{host}": host, "{port}": str(port), "{model}": model}
    return re.sub(r"\{(host|port|model)\}", lambda found: known[found[0]], settings.kv_events_topic)


def _endpoint(given: str, index: int, flag: str) -> str:
    """The endpoint of the model number `index`."""
    found = ENDPOINT.fullmatch(given)
    if found is None:
        raise SettingError(
            f"{flag} is {given!r}; it must be a ZeroMQ endpoint such as tcp://127.0.0.1:5557, tcp://*:5557 or "
            "ipc:///run/onekv/events"
        )
    if found["path"] is not None:
        return f"{given}.{index}" if index else given
    if found["port"] in ("*", "0"):
        return f"tcp://{found['host']}:*"
    port = int(found["port"]) + index
    if port > 65535:
        raise SettingError(f"{flag} is {given!r}, and model number {index + 1} would have port {port}; use a lower one")
    return f"tcp://{found['host']}:{port}"


def _local(endpoint: str) -> bool:
    return endpoint.startswith(("ipc:", "tcp://127.", "tcp://localhost:", "tcp://[::1]:"))
