"""Settings of the server, defined and resolved like all others: flag, ONEKV_ variable, TOML file, default."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from ..config import SettingsBase, one_of, setting, size, switch, text, whole
from ..errors import SettingError
from ..units import parse_size
from .logs import LOG_FORMATS

LOG_LEVELS = ("error", "warning", "info", "debug")


@dataclass(frozen=True)
class ServerSettings(SettingsBase):
    """Where the server listens, to whom, and how much it takes on."""

    host: str = setting(
        "127.0.0.1",
        text,
        "address to listen on",
        metavar="ADDRESS",
        otherwise="127.0.0.1, this machine only",
    )
    port: int = setting(8000, whole(0, 65535), "port to listen on; 0 picks a free one", metavar="PORT")
    api_keys: str | None = setting(
        None,
        text,
        "file with one API key per line; ONEKV_API_KEYS may also hold the keys themselves, separated by commas",
        metavar="FILE",
        secret=True,
    )
    api_key: str | None = setting(
        None,
        text,
        "a single API key; other users of the machine can see the flag, so prefer ONEKV_API_KEY or --api-keys",
        metavar="KEY",
        secret=True,
    )
    insecure: bool = switch(False, "allow listening on a public address without an API key")
    cors_origin: str | None = setting(
        None, text, "origins of web pages that may call the server, separated by commas, or *", metavar="ORIGINS"
    )
    allowed_hosts: str | None = setting(
        None,
        text,
        "host names under which clients may reach the server, separated by commas, or *",
        metavar="NAMES",
        otherwise="localhost and --host; any if there are API keys",
    )
    max_waiting: int = setting(256, whole(0), "maximum number of queued requests", unit="requests")
    max_wait: int = setting(600, whole(1), "how long a request may stay queued", unit="seconds")
    default_max_tokens: int = setting(
        4096, whole(1), "maximum tokens of an answer if the request sets none", unit="tokens"
    )
    turn_memory: str | int = setting(
        "16MiB",
        size(shares=False, zero=True),
        "memory for the token ids of generated turns, reused when a client sends a turn back; 0 disables it",
        metavar="SIZE",
    )
    max_connections: int | None = setting(
        None,
        whole(1),
        "maximum number of open connections",
        unit="connections",
        otherwise="the smaller of 1024 and half of the process's open file limit",
    )
    client_timeout: int = setting(
        60, whole(1), "how long a client may stall while sending a request or reading its answer", unit="seconds"
    )
    max_body: str | int = setting("32MiB", size(shares=False), "maximum size of a request body", metavar="SIZE")
    grace: int = setting(10, whole(0), "how long running requests may continue at shutdown", unit="seconds")
    hygiene: str = setting(
        "billing",
        text,
        "rules for text in system messages that changes with every conversation: billing drops clients' billing lines, "
        "clocks strips the time of day from dates, dates removes today's date, NAME is a rule from the TOML file; "
        "separated by commas, or none",
        metavar="RULES",
    )
    log_words: bool = switch(True, "quote in the log the few words at which a prompt diverges from the cache")
    show_text: bool = switch(
        False,
        "show the text of all prompts to the administrator on the page; otherwise every API key sees only its own",
    )
    step_limit: int = setting(
        300,
        whole(1),
        "how long a step of the engine may take before /health returns 503 and all stacks are logged; must exceed the "
        "longest prefill chunk",
        unit="seconds",
    )
    exit_when_stuck: bool = switch(
        False,
        "exit with status 70 when a step exceeds --step-limit or the engine cannot continue, so that a supervisor can "
        "restart the server",
    )
    kv_events: str | None = setting(
        None,
        text,
        "endpoint that publishes which blocks of tokens are cached, for routers: tcp://127.0.0.1:5557, tcp://*:5557, "
        "ipc:///PATH; in vLLM's format, over ZeroMQ, with token ids and without keys (docs/events.md)",
        metavar="ENDPOINT",
    )
    kv_events_topic: str = setting(
        "kv@{host}:{port}@{model}",
        text,
        "topic of these events; {host}, {port} and {model} are substituted",
        metavar="TOPIC",
    )
    kv_events_replay: str | None = setting(
        None, text, "endpoint where subscribers can request missed events: tcp://127.0.0.1:5558", metavar="ENDPOINT"
    )
    kv_events_buffer: int = setting(
        10_000,
        whole(0),
        "events kept for replay; a subscriber that missed more gets the full cache contents instead",
        unit="events",
    )
    kv_events_tokens: bool = switch(True, "send the token ids of stored blocks; needed by routers that hash them")
    log_level: str = setting(
        "info",
        one_of(*LOG_LEVELS),
        f"{', '.join(LOG_LEVELS)}; info logs each request, debug also probes",
        metavar="LEVEL",
    )
    log_format: str = setting(
        "text",
        one_of(*LOG_FORMATS),
        f"{' or '.join(LOG_FORMATS)}; json: every line of the log is an object, with named fields for requests",
        metavar="FORMAT",
    )

    @property
    def body_bytes(self) -> int:
        return parse_size(self.max_body, name="--max-body")

    @property
    def turn_bytes(self) -> int:
        return parse_size(self.turn_memory, name="--turn-memory", zero=True)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        address = _address(self.host)
        return self.host == "localhost" or (address is not None and address.is_loopback)

    @property
    def origins(self) -> list[str]:
        return _list(self.cors_origin)

    def allows_host(self, name: str, keys: bool) -> bool:
        """Whether a request may call the server `name` (lower case, no port); `keys`: it also needs a key.

        A page can have its own name resolve to this machine and is then of the same origin as the server. It cannot
        know a key, and it cannot do so where it was called by an address.
        """
        allowed = [host.lower().strip("[]") for host in _list(self.allowed_hosts)]
        if "*" in allowed or (keys and not allowed) or name in ("localhost", self.host.lower(), *allowed):
            return True
        address, bound = _address(name), _address(self.host)
        if address is None:
            return False
        return address.is_loopback or address == bound or bound is None or bound.is_unspecified

    def keys(self) -> list[str]:
        """The API keys; raises SettingError if there are none and the address is public."""
        text = os.environ.get("ONEKV_API_KEYS", "")
        found = [self.api_key.strip()] if self.api_key is not None else []
        found += [] if _is_file(text) else [key.strip() for key in text.split(",")]
        if self.api_keys is not None and _is_file(self.api_keys):
            found += _read_keys(Path(self.api_keys).expanduser())
        elif self.api_keys is not None and self.api_keys != text:
            # Not named: it may be a key, given in the wrong place.
            raise SettingError("--api-keys must be a file with one key per line, but there is no such file")
        keys = list(dict.fromkeys(key for key in found if key))
        short = [key for key in keys if len(key) < 8 or not key.isascii()]
        if short:
            raise SettingError("API keys must be ASCII and have at least 8 characters; at least one does not")
        if not keys and not self.local and not self.insecure:
            raise SettingError(
                f"--host is {self.host}, which others can reach, but there is no API key; set --api-keys FILE, "
                "ONEKV_API_KEYS or ONEKV_API_KEY, listen on 127.0.0.1, or set --insecure on"
            )
        return keys


def _is_file(text: str) -> bool:
    try:
        return bool(text) and Path(text).expanduser().is_file()
    except (OSError, RuntimeError):
        # Too long for a path, or ~ of an unknown user: keys.
        return False


def _read_keys(file: Path) -> list[str]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingError(f"cannot read the file {str(file)!r} given as --api-keys: {reason}") from None
    return [line.strip() for line in lines if not line.lstrip().startswith("#")]


def _list(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
