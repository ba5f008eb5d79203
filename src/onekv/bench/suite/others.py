"""Servers of other projects that may be installed: llama.cpp's is started here; for the rest, the reason why not."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec

from ...errors import OneKVError
from ..clients import LOCAL, ServerProcess, other_server
from .contenders import Contender, Needs, Place


class LlamaCpp(Contender):
    """`llama-server`, with a slot for each client, each with room for the longest conversation."""

    def why_not(self, needs: Needs, place: Place) -> str | None:
        if shutil.which("llama-server") is None:
            return "not installed: there is no llama-server on PATH"
        if place.gguf is None:
            return "the model is not a GGUF file"
        if needs.models > 1:
            return "llama-server is started with one model"
        if needs.variants:
            return "the benchmark does not set its KV types; start it with those and name it with --also"
        return None

    def serve(self, needs: Needs, place: Place) -> AbstractContextManager[ServerProcess]:
        room = ["--parallel", str(place.clients), "--ctx-size", str(place.clients * place.longest)]
        command = ["llama-server", "--model", str(place.gguf), "--host", LOCAL, *room, *self.flags]
        return other_server(command, "gguf", place.started)


@dataclass(frozen=True)
class NotStarted(Contender):
    """A server that the benchmark cannot start: it has not been run this way."""

    present: Callable[[], bool] = lambda: False

    def why_not(self, needs: Needs, place: Place) -> str | None:
        if not self.present():
            return "not installed"
        return f"it is installed, but not started by this benchmark: start it and name it with --also {self.name}=URL"

    def serve(self, needs: Needs, place: Place) -> AbstractContextManager[ServerProcess]:
        raise OneKVError(f"{self.name} is not started by this benchmark")


def others(named: Sequence[Contender]) -> list[Contender]:
    """Those of other projects: running ones, as `named`, take the place of those with the same name."""
    known: list[Contender] = [
        LlamaCpp("llama.cpp"),
        NotStarted("vllm-metal", present=lambda: find_spec("vllm_metal") is not None),
        NotStarted("oMLX", present=lambda: shutil.which("omlx") is not None or find_spec("omlx") is not None),
    ]
    taken = {each.name.lower() for each in named}
    return [*named, *(each for each in known if each.name.lower() not in taken)]
