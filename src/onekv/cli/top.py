"""`onekv top`: a live view of a running server in a terminal."""

import argparse
import sys

from ..errors import SettingError
from . import options
from .asking import RefusedError, add_server, chosen

EXAMPLES = """onekv top
  onekv top --url http://studio.local:8000 --api-key KEY

keys:
  q quits, p pauses, arrows or j and k move in a table, tab switches to the other one
  u unloads and l loads the selected model, if there are several; both ask first"""


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, EXAMPLES, mlx=False)
    add_server(command)


def run(arguments: argparse.Namespace) -> int:
    try:
        from .watch.app import Top
        from .watch.feed import first
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("textual", "rich"):
            raise
        raise SettingError(f"onekv top needs {missing}; install it with: pip install 'onekv[top]'") from None
    server = chosen(arguments)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SettingError("onekv top needs a terminal; `onekv ps --json` and GET /admin/live are for programs")
    try:
        snapshot = first(server)
    except RefusedError as error:
        if error.status != 503:
            raise
        # Its model is being loaded: that is waited for.
        snapshot = None
    app = Top(server, snapshot)
    app.run()
    return app.return_code or 0
