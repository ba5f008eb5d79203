"""Settings of the server, found like all others: flag, ONEKV_ variable, TOML file, default."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from ..config import SettingsBase, on_or_off, setting
from ..errors import SettingError
from ..units import parse_size


@dataclass(frozen=True)
class ServerSettings(SettingsBase):
    host: str = setting("127.0.0.1", "ADDRESS", "address to listen on; default 127.0.0.1, this machine alone")
    port: int = setting(8000, "PORT", "port to listen on, 0 for any free one; default 8000", int)
    api_keys: str | None = setting(
        None, "FILE", "file with one API key per line; ONEKV_API_KEYS may also hold the keys, separated by commas"
    )
    insecure: bool = setting(
        False, "on|off", "listen on an address that others reach although there is no key; default off", on_or_off
    )
    cors_origin: str | None = setting(
        None, "ORIGINS", "web pages that may call the server, separated by commas, or *; default none"
    )
    allowed_hosts: str | None = setting(
        None,
        "NAMES",
        "names by which clients may call the server, separated by commas, or *; "
        "default: localhost and --host; any where there are API keys",
    )
    max_waiting: int = setting(256, "N", "requests that may wait for their turn; default 256", int)
    max_wait: int = setting(600, "SECONDS", "how long a request may wait for its turn; default 600", int)
    default_max_tokens: int = setting(
        4096, "N", "tokens of an answer at most where the request does not say; default 4096", int
    )
    max_connections: int | None = setting(
        None, "N", "connections that may be open; default 1024, or half of the files a process may open", int
    )
    client_timeout: int = setting(
        60, "SECONDS", "how long a client may take to send a request or to go on reading its answer; default 60", int
    )
    max_body: str | int = setting("32MiB", "SIZE", "largest request body; default 32MiB")
    grace: int = setting(10, "SECONDS", "how long running requests may go on at shutdown; default 10", int)
    log_level: str = setting("info", "LEVEL", "error, warning, info or debug (which names paths); default info")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.port <= 65535:
            raise SettingError(f"--port is {self.port}; it must be from 0 to 65535")
        for name in ("max_wait", "default_max_tokens", "max_connections", "client_timeout"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        for name in ("max_waiting", "grace"):
            if getattr(self, name) < 0:
                raise SettingError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 0")
        if self.log_level not in ("error", "warning", "info", "debug"):
            raise SettingError(f"--log-level is {self.log_level!r}; it must be error, warning, info or debug")
        parse_size(self.max_body, whole=2**62, name="--max-body")

    @property
    def body_bytes(self) -> int:
        return parse_size(self.max_body, whole=2**62, name="--max-body")

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
        found = [] if _is_file(text) else [key.strip() for key in text.split(",")]
        if self.api_keys is not None and _is_file(self.api_keys):
            found += _read_keys(Path(self.api_keys).expanduser())
        elif self.api_keys is not None and self.api_keys != text:
            # Not named: it may be a key, given in the wrong place.
            raise SettingError("--api-keys must name a file with one key per line, but there is no such file")
        keys = list(dict.fromkeys(key for key in found if key))
        short = [key for key in keys if len(key) < 8 or not key.isascii()]
        if short:
            raise SettingError("an API key must have at least 8 characters, all of them ASCII; one has not")
        if not keys and not self.local and not self.insecure:
            raise SettingError(
                f"--host is {self.host}, which others can reach, and there is no API key; give --api-keys FILE "
                "or ONEKV_API_KEYS, listen on 127.0.0.1, or say --insecure on"
            )
        return keys


def _is_file(text: str) -> bool:
    try:
        return bool(text) and Path(text).expanduser().is_file()
    except (OSError, RuntimeError):
        # Too long for a path, or ~ of nobody: keys.
        return False


def _read_keys(file: Path) -> list[str]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingError(f"--api-keys is {str(file)!r}, which cannot be read: {reason}") from None
    return [line.strip() for line in lines if not line.lstrip().startswith("#")]


def _list(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
