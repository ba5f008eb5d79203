"""`onekv cache`: the arguments of its actions; `cache_folder` implements them."""

import argparse
import os
from typing import Any

from ..config import AUTO, variable
from . import options

EXAMPLES = """onekv cache ls
  onekv cache stats --json
  onekv cache verify --disk-cache /data/kv
  onekv cache clear --model smollm2-135m"""


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, None, EXAMPLES)
    actions = command.add_subparsers(required=True, metavar="ACTION")
    text = "the models in the disk cache, with sizes and ages"
    ls = _add(actions, "ls", _ls, text, "onekv cache ls --json")
    text = "the disk cache's total size, and the bytes written today"
    stats = _add(actions, "stats", _stats, text, "onekv cache stats --disk-cache /data/kv")
    for each in (ls, stats):
        text = "print it as JSON; sizes are bytes, times are seconds since 1970"
        each.add_argument("--json", action="store_true", help=text)
    text = "read every file and remove those that are corrupt or orphaned; exits with 1 if there were any"
    _add(actions, "verify", _verify, text, "onekv cache verify")
    text = "remove everything, or one model's blocks"
    clear = _add(actions, "clear", _clear, text, "onekv cache clear --model smollm2-135m --yes")
    text = "a name, or an id or id prefix, as listed by `onekv cache ls`"
    clear.add_argument("--model", metavar="NAME", help=text)
    clear.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def _add(actions: Any, name: str, run: options.Run, text: str, example: str) -> argparse.ArgumentParser:
    command = options.add_command(actions, name, text)
    options.define(command, run, example)
    text = f"folder of the disk cache; default: OneKV's own ({variable('disk_cache')})"
    command.add_argument("--disk-cache", metavar="DIR", help=text)
    return command


def _name(arguments: argparse.Namespace) -> str:
    given: str | None = arguments.disk_cache
    return given or os.environ.get(variable("disk_cache")) or AUTO


def _ls(arguments: argparse.Namespace) -> None:
    from . import cache_folder

    cache_folder.ls(cache_folder.find(_name(arguments)), arguments.json)


def _stats(arguments: argparse.Namespace) -> None:
    from . import cache_folder

    cache_folder.stats(cache_folder.find(_name(arguments)), arguments.json)


def _verify(arguments: argparse.Namespace) -> int:
    from . import cache_folder

    return cache_folder.check(cache_folder.find(_name(arguments)))


def _clear(arguments: argparse.Namespace) -> int | None:
    from . import cache_folder

    return cache_folder.empty(cache_folder.find(_name(arguments)), arguments.model, arguments.yes)
