"""HTTP requests to a OneKV server, using only the standard library; failures become errors for users.

An `Asking` is one server, with the names of the flags that select another one, for its error messages. Nothing here
imports MLX or the server's dependencies.
"""

import argparse
import http.client
import ipaddress
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import SettingError

# Sent if there is no key, because clients require one.
NO_KEY = "none"
TIMEOUT = 60.0


class NoServerError(SettingError):
    """Nobody answers there, or not any more."""


class RefusedError(SettingError):
    """The server answers with `status`, an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Asking:
    url: str
    key: str = NO_KEY
    # How a user names another server, and the key.
    elsewhere: str = "set its address with --url"
    key_by: str = "--api-key or ONEKV_API_KEY"

    def __post_init__(self) -> None:
        try:
            parts = urllib.parse.urlsplit(self.url)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            sound = False
        if not sound:
            raise SettingError(f"--url is {self.url!r}; it must have the form http://127.0.0.1:8000")

    def read(self, path: str, method: str = "GET", timeout: float | None = TIMEOUT) -> bytes:
        """Raises NoServerError, RefusedError with what the server says, or SettingError where it is none of ours."""
        with self._opened(path, method, timeout) as answer:
            body: bytes = answer.read()
        return body

    def events(self, path: str, timeout: float) -> Generator[Any, None, None]:
        """The data of server-sent events, read as JSON, until the server ends the stream.

        Raises the same, at any time; NoServerError even where nothing at all comes for `timeout` seconds.
        """
        with self._opened(path, "GET", timeout) as answer:
            if answer.headers.get_content_type() != "text/event-stream":
                raise self.not_ours()
            for line in answer:
                if line.startswith(b"data:"):
                    try:
                        yield json.loads(line[5:])
                    except ValueError:
                        raise self._cut() from None

    @contextmanager
    def _opened(self, path: str, method: str, timeout: float | None) -> Iterator[http.client.HTTPResponse]:
        """An answer to read from; errors while reading are reported like earlier ones."""
        address = self.url.rstrip("/") + path
        request = urllib.request.Request(address, method=method, headers={"Authorization": f"Bearer {self.key}"})
        # This machine is not asked by a proxy.
        proxies = [urllib.request.ProxyHandler({})] if _is_local(self.url) else []
        try:
            with urllib.request.build_opener(*proxies).open(request, timeout=timeout) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise RefusedError(self._refusal(error), error.code) from None
        except http.client.IncompleteRead:
            raise self._cut() from None
        except http.client.HTTPException:
            raise self.not_ours() from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise NoServerError(
                f"no server is listening on {self.url} ({reason}); start one with onekv serve, or {self.elsewhere}"
            ) from None

    def json(self, path: str, method: str = "GET", timeout: float | None = TIMEOUT) -> Any:
        """The same, read. Raises SettingError even where what answers is none of ours."""
        try:
            return json.loads(self.read(path, method, timeout))
        except ValueError:
            raise self.not_ours() from None

    def not_ours(self) -> SettingError:
        return SettingError(f"the server on {self.url} is not a OneKV server; {self.elsewhere}")

    def _cut(self) -> NoServerError:
        return NoServerError(f"the server on {self.url} closed the connection in the middle of its answer")

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        said = _message(error.read())
        if error.code == 401:
            said = f"it requires a different API key; set it with {self.key_by}"
            if self.key == NO_KEY:
                said = f"it requires an API key; set it with {self.key_by}"
        elif error.code == 503 and said is None:
            said = "it is not ready"
        return f"the server on {self.url} returned {error.code}: {said or error.reason}"


def add_server(command: argparse.ArgumentParser) -> None:
    """Flags that name a server that runs."""
    text = "address of the server; default: this machine, port 8000 (ONEKV_PORT)"
    command.add_argument("--url", metavar="URL", help=text)
    text = "the server's first API key, if it has any (ONEKV_API_KEY, ONEKV_API_KEYS); other users can see the flag"
    command.add_argument("--api-key", metavar="KEY", help=text)


def chosen(arguments: argparse.Namespace) -> Asking:
    """The server that `add_server`'s flags name, else the one that `onekv serve` starts with the same variables."""
    from ..server.settings import ServerSettings

    # The address that it listens on does not matter here, nor whether it would require a key.
    settings = ServerSettings.resolve({"api_key": arguments.api_key, "host": "127.0.0.1"})
    url = arguments.url or f"http://127.0.0.1:{settings.port}"
    return Asking(url, next(iter(settings.keys()), NO_KEY))


def _message(body: bytes) -> str | None:
    """What our errors say, in OpenAI's form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_local(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
