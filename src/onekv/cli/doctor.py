"""`onekv doctor`: checks whether OneKV is exact, flat and fast on this machine."""

import argparse
import sys
from functools import partial
from pathlib import Path

from ..config import Settings
from ..errors import SettingError
from ..models import DEFAULT_MODEL
from . import options

EXAMPLES = """onekv doctor                                    this machine, with small random models
  onekv doctor mlx-community/Qwen3-8B-4bit        and a model: does it fit, is it exact, how fast
  onekv doctor --check exactness --kernels off    one check, without OneKV's own kernels
  onekv doctor --json result.json                 for programs; - is standard output

What it prints can be pasted into a bug report: no names, home folders, keys or passwords are in it.
Exit status: 0 if all checks passed, perhaps with warnings, 1 if one failed, 2 for a malformed command."""
# Their names, here so that `--help` imports no MLX; in the order of `onekv.doctor.checks`.
NAMES = ("machine", "exactness", "memory", "choices", "disk", "server", "model", "clock")


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, partial(run, command), EXAMPLES)
    text = f"name, hub id, folder or .gguf file; default: {DEFAULT_MODEL} if it is on disk, else none"
    command.add_argument("model", nargs="?", help=text)
    text = f"run only this check, one of {', '.join(NAMES)}; may be repeated; default: all"
    command.add_argument("--check", action="append", choices=NAMES, metavar="NAME", help=text)
    text = "also write the result as JSON to this file; with -, print JSON instead of text"
    command.add_argument("--json", metavar="FILE", help=text)
    text = "port that `onekv serve` is to listen on; default: 8000 (ONEKV_PORT)"
    command.add_argument("--port", metavar="PORT", help=text)
    options.add_settings(command)


def run(command: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from ..server.settings import ServerSettings

    try:
        settings = options.resolved(Settings, arguments)
        port = ServerSettings.resolve({"port": arguments.port}).port
        _check_json(arguments.json)
    except SettingError as error:
        command.error(str(error))
    from ..models.limits import import_mlx_lm

    import_mlx_lm()
    from ..doctor.base import Case, Result
    from ..doctor.checks import CHECKS
    from ..doctor.report import as_json, as_text, exit_status
    from ..doctor.running import run_checks

    chosen = [check for check in CHECKS if not arguments.check or check.name in arguments.check]
    if arguments.model is not None and arguments.check and "model" not in arguments.check:
        command.error(f"a model was named ({arguments.model}), but --check leaves out the check called model")
    progress = Progress()
    case = Case(settings, arguments.model, port, say=progress.say, doing=progress.doing)
    results: list[Result] = []
    try:
        results.extend(run_checks(case, chosen))
    finally:
        # After Ctrl-C, too: the checks that have ended.
        left = len(chosen) - len(results)
        if arguments.json == "-":
            print(as_json(results, left))
        elif results:
            print(as_text(results, left))
        if arguments.json not in (None, "-"):
            Path(arguments.json).write_text(as_json(results, left) + "\n")
    return exit_status(results)


def _check_json(file: str | None) -> None:
    """Before anything is examined, not after."""
    if file not in (None, "-") and not Path(str(file)).parent.is_dir():
        raise SettingError(f"--json is {file!r}, but there is no folder {str(Path(str(file)).parent)!r}")


class Progress:
    """On stderr: a line for each check, and in a terminal one that passes, with what it is doing."""

    def say(self, text: str) -> None:
        self.doing("")
        print(text, file=sys.stderr, flush=True)

    def doing(self, text: str) -> None:
        if sys.stderr.isatty():
            # To the start of the line, and nothing of it is left.
            print(f"\r\033[K{text and '      ' + text[:70]}", end="", file=sys.stderr, flush=True)
