"""`onekv serve`: settings from flags, variables and a TOML file, then the server."""

import argparse
import os
import sys
from dataclasses import replace

from .. import config
from ..config import Settings
from ..errors import SettingError
from ..models import DEFAULT_MODEL
from ..server.settings import ServerSettings
from . import options, reported

EXAMPLES = """onekv serve
  onekv serve mlx-community/Qwen3-8B-4bit --kv-memory 4GiB --max-batch 16
  onekv serve --host 0.0.0.0 --port 9000 --api-keys keys.txt
  onekv serve --config onekv.toml                   names as in the flags: kv_memory = "4GiB"

then, for example:
  OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python my_agent.py
  ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_API_KEY=none python my_agent.py"""


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, EXAMPLES)
    command.add_argument("model", nargs="?", help=options.MODEL_HELP)
    variable = config.variable("config")
    command.add_argument("--config", metavar="FILE", help=f"TOML file with any of the settings below ({variable})")
    options.add_settings(command, ServerSettings, "server")
    options.add_settings(command)


def run(arguments: argparse.Namespace) -> None:
    path = arguments.config or os.environ.get(config.variable("config"))
    known = ["model", *ServerSettings.names(), *Settings.names()]
    file = config.read_file(path, known) if path else {}
    server = options.resolved(ServerSettings, arguments, file)
    engine = options.resolved(Settings, arguments, file)
    if engine.disk_cache is None and not engine.hot_only and engine.prefix_cache:
        engine = replace(engine, disk_cache=config.AUTO)
    serve(arguments.model or str(file.get("model", DEFAULT_MODEL)), server, engine)


def serve(model: str, server: ServerSettings, engine: Settings) -> None:
    """Does not return: ends the process with the server's status."""
    try:
        from ..server.serve import serve
    except ModuleNotFoundError as error:
        raise SettingError(f"the server needs {error.name}; install it with: pip install 'onekv[server]'") from None
    status = reported(lambda: serve(model, server, engine))
    # All is stored and closed, or was never there. MLX frees what the engine's thread compiled when that thread ends,
    # which is after Python has joined it, and needs the interpreter for it: if that is being taken down, it aborts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
