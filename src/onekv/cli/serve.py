"""`onekv serve`: settings from flags, variables and a TOML file, then the server."""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import config
from ..config import Settings
from ..errors import SettingError
from ..models import DEFAULT_MODEL
from ..parallel import follow_if_launched, launched_rank
from ..server.logs import log_to_stderr
from ..server.model_settings import ModelSettings
from ..server.models.settings import BudgetSettings
from ..server.settings import ServerSettings
from . import options, reported

if TYPE_CHECKING:
    from ..server.hygiene import Hygiene, Rule
    from ..server.models.spec import ModelSpec

EXAMPLES = """onekv serve
  onekv serve mlx-community/Qwen3-8B-4bit --kv-memory 4GiB --max-batch 16
  onekv serve --host 0.0.0.0 --port 9000 --api-keys keys.txt
  onekv serve mlx-community/Qwen3-8B-4bit smollm2-135m --memory 12GiB
  onekv serve mlx-community/Qwen3-8B-4bit --adapter adapters/sql
  onekv serve --alias gpt-4o --alias llama3.2 --temperature 0.7
  onekv serve --port 11434                          the port that Ollama clients expect
  onekv serve --kv-events tcp://127.0.0.1:5557      publish cache contents to routers
  onekv serve --config onekv.toml                   names as in the flags: kv_memory = "4GiB"

then, for example:
  OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python my_agent.py
  ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_API_KEY=none python my_agent.py
  OLLAMA_HOST=http://127.0.0.1:8000 python my_ollama_program.py"""


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, EXAMPLES)
    command.add_argument("model", nargs="*", help=f"{options.MODEL_HELP}; several share --memory")
    command.add_argument("--model", dest="named", metavar="MODEL", help="the same, as a flag, as in other servers")
    variable = config.variable("config")
    command.add_argument("--config", metavar="FILE", help=f"TOML file with any of the settings below ({variable})")
    options.add_settings(command, ServerSettings, "server")
    options.add_settings(command, ModelSettings, "the model as clients see it")
    options.add_settings(command, BudgetSettings, "several models")
    options.add_settings(command)


def run(arguments: argparse.Namespace) -> None:
    from ..server.hygiene import chosen
    from ..server.models.spec import specs_of

    added, file = read_file(arguments)
    server = options.resolved(ServerSettings, arguments, file)
    budget = options.resolved(BudgetSettings, arguments, file)

    def resolve(table: Mapping[str, Any]) -> tuple[Settings, ModelSettings, BudgetSettings]:
        of_model = {**file, **table}
        engine = options.resolved(Settings, arguments, of_model)
        if engine.disk_cache is None and not engine.hot_only and engine.prefix_cache:
            engine = replace(engine, disk_cache=config.AUTO)
        served = options.resolved(ModelSettings, arguments, of_model)
        return engine, served, options.resolved(BudgetSettings, arguments, of_model)

    specs = specs_of(_given(arguments, file), file.get("models", {}), resolve)
    serve(specs, budget.memory, server, chosen(server.hygiene, added))


def _given(arguments: argparse.Namespace, file: dict[str, Any]) -> list[str]:
    if arguments.model and arguments.named and arguments.model != [arguments.named]:
        given = " ".join(arguments.model)
        raise SettingError(f"--model is {arguments.named!r}, but {given!r} is given too; use only one of them")
    return models_given(arguments.model or ([arguments.named] if arguments.named else []), file)


def models_given(named: list[str], file: Mapping[str, Any]) -> list[str]:
    """The models `named` on the command line, or else in the file; none where its tables are enough."""
    if named:
        return named
    if "model" in file:
        return [str(file["model"])]
    return [] if file.get("models") else [DEFAULT_MODEL]


def read_file(arguments: argparse.Namespace) -> tuple[dict[str, "Rule"], dict[str, Any]]:
    """What the TOML file has, if there is one: rules of hygiene, and settings."""
    from ..server.hygiene import read_table

    path = arguments.config or os.environ.get(config.variable("config"))
    kinds = (ServerSettings, ModelSettings, BudgetSettings, Settings)
    known = ["model", "models", *(name for kind in kinds for name in kind.names())]
    return read_table(config.read_file(path, known) if path else {})


def serve(specs: list["ModelSpec"], memory: str | int | None, server: ServerSettings, hygiene: "Hygiene") -> None:
    """Does not return: ends the process with the server's status."""
    if launched_rank():
        # Rank 0 serves; what it needs of the others is not HTTP.
        log_to_stderr(server.log_level, server.log_format)
        follow_if_launched()
    try:
        from ..server.serve import serve
    except ModuleNotFoundError as error:
        raise SettingError(f"the server needs {error.name}; install it with: pip install 'onekv[server]'") from None
    status = reported(lambda: serve(specs, memory, server, hygiene))
    # All is stored and closed, or was never there. MLX frees what the engine's thread compiled when that thread ends,
    # which is after Python has joined it, and needs the interpreter for it: if that is being taken down, it aborts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
