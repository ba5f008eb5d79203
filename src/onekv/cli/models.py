"""`onekv models`: the arguments of its actions; `model_list` implements them."""

import argparse
from typing import Any

from . import options

EXAMPLES = """onekv models ls
  onekv models show smollm2-135m
  onekv models pull mlx-community/Qwen3-8B-4bit
  onekv models rm mlx-community/Qwen3-8B-4bit"""
NAME = "a name listed by `onekv models ls`"


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, None, EXAMPLES)
    actions = command.add_subparsers(required=True, metavar="ACTION")
    text = "the models in OneKV's cache and in the Hugging Face cache, with sizes and kinds"
    ls = _add(actions, "ls", _ls, text, "onekv models ls --json", mlx=False)
    text = "one model, and the KV memory it would get on this machine"
    show = _add(actions, "show", _show, text, "onekv models show smollm2-135m", mlx=True)
    show.add_argument("name", metavar="NAME", help=f"{NAME}, a folder or a .gguf file")
    for each in (ls, show):
        text = "print it as JSON; sizes are bytes, times are seconds since 1970"
        each.add_argument("--json", action="store_true", help=text)
    text = "download a model, resuming an interrupted download"
    pull = _add(actions, "pull", _pull, text, "onekv models pull mlx-community/Qwen3-8B-4bit", mlx=True)
    pull.add_argument("name", metavar="NAME", help="a name or a hub id")
    text = "remove a model from its cache"
    rm = _add(actions, "rm", _rm, text, "onekv models rm mlx-community/Qwen3-8B-4bit --yes", mlx=False)
    rm.add_argument("name", metavar="NAME", help=NAME)
    rm.add_argument("--yes", action="store_true", help="do not ask for confirmation")


def _add(actions: Any, name: str, run: options.Run, text: str, example: str, mlx: bool) -> argparse.ArgumentParser:
    command = options.add_command(actions, name, text)
    options.define(command, run, example, mlx)
    return command


def _ls(arguments: argparse.Namespace) -> None:
    from . import model_list

    model_list.ls(arguments.json)


def _show(arguments: argparse.Namespace) -> None:
    from . import model_list

    model_list.show(arguments.name, arguments.json)


def _pull(arguments: argparse.Namespace) -> None:
    from . import model_list

    model_list.pull(arguments.name)


def _rm(arguments: argparse.Namespace) -> int | None:
    from . import model_list

    return model_list.rm(arguments.name, arguments.yes)
