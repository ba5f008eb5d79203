"""`onekv plan`: where the memory would go."""

import argparse

from ..config import Settings
from ..models import DEFAULT_MODEL
from . import options


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, "onekv plan smollm2-135m --kv-memory 4GiB")
    command.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=options.MODEL_HELP)
    options.add_settings(command)


def run(arguments: argparse.Namespace) -> int:
    settings = options.resolved(Settings, arguments)
    from ..report import print_plan

    return print_plan(arguments.model, settings)
