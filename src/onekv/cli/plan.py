"""`onekv plan`: how memory would be used."""

import argparse

from ..config import Settings
from ..models import DEFAULT_MODEL
from . import options

EXAMPLES = """onekv plan smollm2-135m --kv-memory 4GiB
  onekv plan mlx-community/Qwen3-8B-4bit --adapter adapters/sql"""


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, EXAMPLES)
    command.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=options.MODEL_HELP)
    options.add_settings(command)


def run(arguments: argparse.Namespace) -> int:
    settings = options.resolved(Settings, arguments)
    from ..report import print_plan

    return print_plan(arguments.model, settings)
