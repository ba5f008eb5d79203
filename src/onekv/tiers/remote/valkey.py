"""Valkey or Redis, one server or a cluster, by redis-py."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .stores import Trouble
from .url import Place

# Connections at once: as many as there are threads that ask.
CONNECTIONS = 16
# What is read of something that is no value, such as a list.
OTHER = b"of another type"


class ValkeyStore:
    def __init__(self, place: Place, timeout: float) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        clients: Any = redis
        self._errors = redis.exceptions
        # Whole milliseconds.
        self._ttl = math.ceil(place.ttl * 1000) if place.ttl is not None else None
        common: dict[str, Any] = {
            "host": place.host,
            "port": place.port,
            "username": place.user,
            "password": place.password,
            "ssl": place.tls,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "socket_keepalive": True,
            # Who asks decides whether to ask again.
            "retry": Retry(NoBackoff(), 0),
            "client_name": "onekv",
        }
        self._client: Any
        self._connect: Callable[[], Any]
        if place.cluster:
            # Connects at once, and what it is to do if it cannot is the caller's to say: so at the first question.
            self._client, self._connect = None, lambda: clients.RedisCluster(**common, max_connections=CONNECTIONS)
        else:
            self._client = clients.Redis(**common, db=int(place.path or 0), max_connections=CONNECTIONS)

    @contextmanager
    def _asking(self, writes: bool = False) -> Iterator[Any]:
        errors = self._errors
        try:
            if self._client is None:
                self._client = self._connect()
            yield self._client
        except errors.ResponseError as error:
            # A server that is full, a replica, or not ours to write to can still be read: if not, reading it says so.
            raise Trouble(_first_line(error), refused=writes) from error
        except (errors.RedisError, errors.RedisClusterException, OSError) as error:
            # What concerns a cluster as a whole is not a RedisError.
            raise Trouble(_first_line(error)) from error

    def heads(self, names: Sequence[str], size: int) -> list[bytes | None]:
        with self._asking() as client:
            pipeline = client.pipeline(transaction=False) if hasattr(client, "connection_pool") else client.pipeline()
            for name in names:
                pipeline.getrange(name, 0, size - 1)
            found = pipeline.execute(raise_on_error=False)
            for value in found:
                if isinstance(value, Exception) and not _other_type(value):
                    raise value
            return [OTHER if isinstance(value, Exception) else value or None for value in found]

    def get(self, name: str, size: int) -> memoryview | None:
        with self._asking() as client:
            # Not GET: a value's writer must not decide how much memory is used here.
            try:
                value: bytes = client.getrange(name, 0, size - 1)
            except self._errors.ResponseError as error:
                if not _other_type(error):
                    raise
                value = OTHER
        return memoryview(value) if value else None

    def put(self, name: str, value: memoryview) -> bool:
        with self._asking(writes=True) as client:
            return client.set(name, value, nx=True, px=self._ttl) is not None

    def delete(self, name: str) -> None:
        with self._asking(writes=True) as client:
            client.unlink(name)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def _other_type(error: Exception) -> bool:
    return str(error).startswith("WRONGTYPE")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
