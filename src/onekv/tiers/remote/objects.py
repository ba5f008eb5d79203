"""Object stores and shared folders, by obstore."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from .stores import Trouble
from .url import Place

# Questions to an object store at once.
AT_ONCE = 32
# What S3 says is wrong.
_CODE = re.compile(r"<Code>(\w+)</Code>")


class ObjectStore:
    def __init__(self, place: Place, timeout: float) -> None:
        import obstore
        from obstore.store import LocalStore, S3Store

        self._obstore: Any = obstore
        self._errors: Any = obstore.exceptions
        if place.kind == "file":
            self._store: Any = LocalStore(Path(place.path), mkdir=True)
            return
        # Credentials, region and endpoint are those of the environment: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and others.
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

    @contextmanager
    def _asking(self) -> Iterator[None]:
        errors = self._errors
        try:
            yield
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise Trouble(_reason(error), refused=True) from error
        except (errors.BaseError, OSError) as error:
            raise Trouble(_reason(error)) from error

    def heads(self, names: Sequence[str], size: int) -> list[bytes | None]:
        with self._asking():
            return asyncio.run(self._heads(names, size))

    async def _heads(self, names: Sequence[str], size: int) -> list[bytes | None]:
        free = asyncio.Semaphore(AT_ONCE)

        async def head(name: str) -> bytes | None:
            async with free:
                try:
                    return bytes(await self._obstore.get_range_async(self._store, name, start=0, length=size))
                except FileNotFoundError:
                    return None

        return list(await asyncio.gather(*map(head, names)))

    def get(self, name: str, size: int) -> memoryview | None:
        with self._asking():
            try:
                return memoryview(self._obstore.get_range(self._store, name, start=0, length=size))
            except FileNotFoundError:
                return None

    def put(self, name: str, value: memoryview) -> bool:
        with self._asking():
            try:
                self._obstore.put(self._store, name, value, mode="create", use_multipart=False)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return False
            except OSError as error:
                # A folder that is full or not ours to write to can still be read.
                raise Trouble(_reason(error), refused=True) from error
        return True

    def delete(self, name: str) -> None:
        with self._asking(), suppress(FileNotFoundError):
            self._obstore.delete(self._store, name)

    def close(self) -> None:
        """It holds nothing that has to be closed."""


def _reason(error: Exception) -> str:
    """Its first line, and of an answer in XML the code alone."""
    text, _, answer = str(error).partition("<?xml")
    code = _CODE.search(answer)
    return (text.splitlines() or [type(error).__name__])[0].rstrip(".: ") + (f" ({code[1]})" if code else "")
