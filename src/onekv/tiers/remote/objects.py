"""Object stores and shared folders, by obstore."""

import asyncio
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...errors import SettingError
from .stores import Trouble
from .url import Place

# Questions to an object store at once.
AT_ONCE = 32
# What S3 says is wrong, and its status.
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"Server returned non-2xx status code: ([0-9]{3})\b")
# As S3 and a folder say it: not even the first byte of a range is there.
_EMPTY = re.compile(r"Server returned non-2xx status code: 416\b|Requested range was invalid")
# Statuses of a server that refuses something, where others of the 400s and 500s say that it fails: a timeout, too many
# requests; not implemented, no room.
_FAILS, _REFUSES = (408, 429), (501, 507)


class ObjectStore:
    def __init__(self, place: Place, timeout: float) -> None:
        import obstore
        from obstore.store import LocalStore, S3Store

        self._obstore: Any = obstore
        self._errors: Any = obstore.exceptions
        self._local: Any = LocalStore
        self._store: Any = None
        self._folder = Path(place.path) if place.kind == "file" else None
        if self._folder is not None:
            return
        _check_endpoint()
        try:
            # Credentials, region and endpoint are those of the environment: AWS_ACCESS_KEY_ID, AWS_ENDPOINT and others.
            self._store = S3Store(
                place.host,
                prefix=place.path or None,
                client_options={
                    "timeout": timedelta(seconds=timeout),
                    "connect_timeout": timedelta(seconds=timeout),
                    "allow_http": True,
                },
                # Who asks decides whether to ask again.
                retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout)},
            )
        except self._errors.BaseError as error:
            raise SettingError(f"--remote-tier is {place.shown}, which cannot be opened: {_reason(error)}") from None

    def _opened(self, make: bool = False) -> Any:
        """A folder is opened when it is there, and made when something is first written."""
        if self._store is None:
            assert self._folder is not None, "only folders are opened late"
            if make:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._store = self._local(self._folder.resolve(strict=True))
        return self._store

    @contextmanager
    def _asking(self, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except (self._errors.BaseError, OSError) as error:
            # A folder that cannot be written to, full or not ours, can still be read: if not, reading it says so.
            refused = writes and (self._folder is not None or _refuses(error))
            raise Trouble(_reason(error), refused=refused) from error

    def heads(self, names: Sequence[str], size: int) -> list[bytes | None]:
        with self._asking():
            return asyncio.run(self._heads(names, size))

    async def _heads(self, names: Sequence[str], size: int) -> list[bytes | None]:
        free = asyncio.Semaphore(AT_ONCE)

        async def head(name: str) -> bytes | None:
            async with free:
                try:
                    return bytes(await self._obstore.get_range_async(self._opened(), name, start=0, length=size))
                except FileNotFoundError:
                    return None
                except self._errors.GenericError as error:
                    if _EMPTY.search(str(error)):
                        return b""
                    raise

        return list(await asyncio.gather(*map(head, names)))

    def get(self, name: str, size: int) -> memoryview | None:
        with self._asking():
            try:
                return memoryview(self._obstore.get_range(self._opened(), name, start=0, length=size))
            except FileNotFoundError:
                return None
            except self._errors.GenericError as error:
                if _EMPTY.search(str(error)):
                    return memoryview(b"")
                raise

    def put(self, name: str, value: memoryview) -> bool:
        with self._asking(writes=True):
            store = self._opened(make=True)
            try:
                self._obstore.put(store, name, value, mode="create", use_multipart=False)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return False
        return True

    def delete(self, name: str) -> None:
        with self._asking(writes=True), suppress(FileNotFoundError):
            self._obstore.delete(self._opened(), name)

    def close(self) -> None:
        """It holds nothing that has to be closed."""


def _check_endpoint() -> None:
    """What is no URL would be noticed at the first request only, and not said."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        given = os.environ.get(name, "http://")
        if not given.startswith(("http://", "https://")):
            raise SettingError(f"{name} is {given!r}; it must begin with http:// or https://")


def _refuses(error: Exception) -> bool:
    """Whether a server answered that this may or can not be written."""
    found = _STATUS.search(str(error))
    status = int(found[1]) if found else 0
    return status in _REFUSES or (400 <= status < 500 and status not in _FAILS)


def _reason(error: Exception) -> str:
    """Its first line, and of an answer in XML the code alone."""
    text, _, answer = str(error).partition("<?xml")
    code = _CODE.search(answer)
    return (text.splitlines() or [type(error).__name__])[0].rstrip(".: ") + (f" ({code[1]})" if code else "")
