"""Parses `--remote-tier`: a pure function from text to a `Place`."""

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from ...config import on_or_off
from ...errors import SettingError

EXAMPLES = "valkey://HOST:6379/0?ttl=7d, s3://BUCKET/PREFIX or file:///shared/folder"
_ESCAPED = "; in a user or password, # is written %23, / is %2F, ? is %3F and @ is %40"
# Of each scheme: the kind of store, and whether it is reached by TLS.
SCHEMES = {
    "valkey": ("valkey", False),
    "redis": ("valkey", False),
    "valkeys": ("valkey", True),
    "rediss": ("valkey", True),
    "s3": ("s3", True),
    "file": ("file", False),
}
_OPTIONS = {"valkey": ("ttl", "timeout", "cluster"), "s3": ("timeout",), "file": ("timeout",)}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")


@dataclass(frozen=True, repr=False)
class Place:
    """Where a store is, and how to connect to it."""

    kind: str
    # For messages: without a password.
    shown: str
    # The host, or the bucket; and what is behind it: a number of a database, a prefix, or a folder.
    host: str = ""
    port: int = 6379
    path: str = ""
    user: str | None = None
    password: str | None = None
    tls: bool = False
    cluster: bool = False
    # Seconds: after which the store forgets a part, and which a lookup may take; None leaves it to the store, and to
    # what computing would take.
    ttl: float | None = None
    timeout: float | None = None

    @property
    def private(self) -> bool:
        """Whether only this machine's users can write there, or those who may write to a folder."""
        if self.kind == "file" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse(text: str, password: str | None = None) -> Place:
    """The place that `--remote-tier` names; `password` where the text has none. Raises SettingError."""
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        # Not what is wrong with it: that may be part of a password.
        raise SettingError(f"--remote-tier is not a URL; write it like {EXAMPLES}{_ESCAPED}") from None
    if url.scheme not in SCHEMES:
        begin = url.scheme or text.rpartition("@")[2]
        raise SettingError(f"--remote-tier begins with {begin!r}; write it like {EXAMPLES}")
    if SCHEMES[url.scheme][0] == "valkey" and (url.fragment or "@" in url.path + url.query):
        raise SettingError(f"--remote-tier is not a URL of a Valkey server; write it like {EXAMPLES}{_ESCAPED}")
    kind, tls = SCHEMES[url.scheme]
    host = url.hostname or ""
    at = f"[{host}]" if ":" in host else host
    shown = f"{url.scheme}://{at}{f':{port}' if port else ''}{url.path}"
    options = _options(kind, url.query, shown)
    path = unquote(url.path).strip("/")
    if kind == "file":
        if host or not path:
            raise SettingError(f"--remote-tier is {shown}; a shared folder is written file:///shared/folder")
        path = "/" + path
    elif not host:
        raise SettingError(f"--remote-tier is {shown}, without a host or bucket; write it like {EXAMPLES}")
    elif kind == "valkey" and not (path or "0").isdigit():
        raise SettingError(f"--remote-tier is {shown}; after the host comes the number of a database, such as /0")
    cluster = on_or_off(options.get("cluster", "off"), "--remote-tier: cluster")
    if cluster and path.strip("0"):
        raise SettingError(f"--remote-tier is {shown}, but a cluster only has database 0")
    return Place(
        kind,
        shown,
        host,
        port or 6379,
        path,
        unquote(url.username) if url.username else None,
        unquote(url.password) if url.password else password,
        tls,
        cluster,
        _duration(options.get("ttl"), "ttl"),
        _duration(options.get("timeout"), "timeout"),
    )


def _options(kind: str, query: str, shown: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name == "ttl" and kind != "valkey":
            raise SettingError(
                f"--remote-tier is {shown} with ttl={options[name]!r}, but this store has no time to live; "
                "use its lifecycle rules, or remove old files"
            )
        if name not in _OPTIONS[kind]:
            raise SettingError(f"--remote-tier has ?{name}; {shown} takes {', '.join(_OPTIONS[kind])}")
    return options


def _duration(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not seconds:
        raise SettingError(f"--remote-tier has {name}={text!r}; write a time like 7d, 12h, 30m, 5s or 500ms")
    return seconds
