"""Settings of the server, defined and found like all others: flag, ONEKV_ variable, TOML file, default."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from ..config import SettingsBase, one_of, setting, size, switch, text, whole
from ..errors import SettingError
from ..units import parse_size

LOG_LEVELS = ("error", "warning", "info", "debug")


@dataclass(frozen=True)
class ServerSettings(SettingsBase):
    """Where the server listens, to whom, and how much it takes on."""

    host: str = setting(
        "127.0.0.1",
        text,
        "address to listen on",
        metavar="ADDRESS",
        otherwise="127.0.0.1, this machine alone",
    )
    port: int = setting(8000, whole(0, 65535), "port to listen on, 0 for any free one", metavar="PORT")
    api_keys: str | None = setting(
        None,
        text,
        "file with one API key per line; ONEKV_API_KEYS may also hold the keys, separated by commas",
        metavar="FILE",
    )
    insecure: bool = switch(False, "listen on an address that others reach although there is no key")
    cors_origin: str | None = setting(
        None, text, "web pages that may call the server, separated by commas, or *", metavar="ORIGINS"
    )
    allowed_hosts: str | None = setting(
        None,
        text,
        "names by which clients may call the server, separated by commas, or *",
        metavar="NAMES",
        otherwise="localhost and --host; any where there are API keys",
    )
    max_waiting: int = setting(256, whole(0), "requests that may wait for their turn", unit="requests")
    max_wait: int = setting(600, whole(1), "how long a request may wait for its turn", unit="seconds")
    default_max_tokens: int = setting(
        4096, whole(1), "tokens of an answer at most where the request does not say", unit="tokens"
    )
    max_connections: int | None = setting(
        None,
        whole(1),
        "connections that may be open",
        unit="connections",
        otherwise="the smaller of 1024 and half of the files that the process may open",
    )
    client_timeout: int = setting(
        60, whole(1), "how long a client may take to send a request or to go on reading its answer", unit="seconds"
    )
    max_body: str | int = setting("32MiB", size(shares=False), "largest request body", metavar="SIZE")
    grace: int = setting(10, whole(0), "how long running requests may go on at shutdown", unit="seconds")
    log_level: str = setting(
        "info", one_of(*LOG_LEVELS), f"{', '.join(LOG_LEVELS)} (which names paths)", metavar="LEVEL"
    )

    @property
    def body_bytes(self) -> int:
        return parse_size(self.max_body, name="--max-body")

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
