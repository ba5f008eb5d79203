"""The contenders, and how their servers are started.

OneKV and mlx_lm.server are started here, in a fresh process for every measurement; `others.py` has other servers that
may be installed. Any other running server with OpenAI's API can be included with `--also NAME=URL`. It is not
restarted, so it keeps its cache from one measurement to the next; every measurement therefore uses different texts.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...errors import SettingError
from ..clients import KEYS, ServerProcess, http, onekv_server, other_server
from .watched import ENTRY


@dataclass(frozen=True)
class Needs:
    """What a scenario needs of a server."""

    models: int = 1
    # It is stopped and started again, and may keep what it likes on disk.
    restarts: bool = False
    # By name, flags of OneKV's server and of mlx_lm.server.
    variants: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """What a server is started with: the model as OneKV loads it, the same weights in folders as mlx-lm reads them, a
    folder for files of its own, and OneKV's KV budget.
    """

    model: str
    folders: tuple[Path, ...]
    files: Path
    kv_memory: str
    # The model's file, if it is a GGUF file; for servers whose memory is sized by tokens, how many they must hold.
    gguf: Path | None = None
    clients: int = 1
    longest: int = 8192
    # Told the process's id as soon as it runs, long before its server answers.
    started: Callable[[int], None] | None = None

    @property
    def written(self) -> Path:
        """What MLX has allocated, over time; see `watched`."""
        return self.files / "mlx.jsonl"


@dataclass(frozen=True)
class Contender(ABC):
    name: str
    # Of its server, added to what a scenario needs.
    flags: tuple[str, ...] = ()

    def why_not(self, needs: Needs, place: Place) -> str | None:
        """Why it cannot take part, if it cannot."""
        return None

    def models(self, place: Place) -> tuple[str, ...]:
        """What requests call its models, where there are several."""
        return tuple(map(str, place.folders))

    @abstractmethod
    def serve(self, needs: Needs, place: Place) -> AbstractContextManager[ServerProcess]:
        """A server that answers; its process has ended when the block is left, if it was started here."""


class OneKV(Contender):
    def models(self, place: Place) -> tuple[str, ...]:
        return ("first", "second")

    @contextmanager
    def serve(self, needs: Needs, place: Place) -> Iterator[ServerProcess]:
        flags = ["--kv-memory", place.kv_memory, *self.flags]
        if needs.restarts:
            flags += ["--hot-only", "off", "--disk-cache", str(place.files / "disk")]
        model = place.model
        if needs.models > 1:
            model, config = self.models(place)[0], place.files / "models.toml"
            config.write_text(_tables(place))
            flags += ["--config", str(config)]
        entry = ("-c", ENTRY, str(place.written), "onekv")
        with onekv_server(model, *flags, entry=entry, started=place.started) as server:
            yield server


def _tables(place: Place) -> str:
    """Two models, with room for one at a time."""
    from ..swap import memory_for

    paths = {"first": str(place.folders[0]), "second": str(place.folders[1])}
    tables = [f'[models.{name}]\nmodel = "{path}"' for name, path in paths.items()]
    return "\n".join([f"memory = {memory_for(paths, place.kv_memory)}", *tables, ""])


class MlxLm(Contender):
    """mlx_lm.server, unchanged and with its defaults."""

    @contextmanager
    def serve(self, needs: Needs, place: Place) -> Iterator[ServerProcess]:
        arguments = ["--model", str(place.folders[0]), "--log-level", "WARNING", *self.flags]
        command = [sys.executable, "-c", ENTRY, str(place.written), "mlx_lm.server", *arguments]
        with other_server(command, "default_model", place.started) as server:
            yield server


@dataclass(frozen=True)
class Running(Contender):
    """A server that was not started by the benchmark."""

    url: str = ""
    model: str = ""

    def why_not(self, needs: Needs, place: Place) -> str | None:
        if needs.restarts:
            return "it is not started by this benchmark, so it cannot be restarted"
        if needs.models > 1:
            return "it is not started by this benchmark, so its models are not known"
        if needs.variants:
            return "it is not started by this benchmark, so its settings are not known"
        return None

    @contextmanager
    def serve(self, needs: Needs, place: Place) -> Iterator[ServerProcess]:
        yield ServerProcess(self.url, self.model, None, place.files / "no log")


def running(text: str) -> Running:
    """From `NAME=URL`. Raises SettingError if that is not an answering server."""
    name, _, url = text.partition("=")
    if not name or urlsplit(url).scheme not in ("http", "https"):
        raise SettingError(f"--also is {text!r}; write it like llama.cpp=http://127.0.0.1:8080")
    url = url.rstrip("/").removesuffix("/v1")
    try:
        answer = http().get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=10)
        models: list[dict[str, Any]] = answer.json()["data"]
        return Running(name, url=url, model=models[0]["id"])
    except (http().HTTPError, ValueError, KeyError, IndexError) as error:
        raise SettingError(f"--also is {text!r}, but {url}/v1/models does not answer: {error!r}") from error


def variants(needs: Needs, others: list[Contender]) -> list[Contender]:
    """Who takes part in a scenario: OneKV first."""
    if not needs.variants:
        return [OneKV("OneKV"), MlxLm("mlx-lm"), *others]
    found: list[Contender] = []
    for name, (ours, theirs) in needs.variants.items():
        found += [OneKV(f"OneKV {name}", ours), MlxLm(f"mlx-lm {name}", theirs)]
    return [*found, *others]
