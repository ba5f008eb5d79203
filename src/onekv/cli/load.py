"""`onekv load`: load a model on a running server."""

import argparse

from ..units import format_size
from . import options
from .asking import add_server, chosen
from .swapping import change, find, overview, taken

EXAMPLES = """onekv load coder
  onekv load coder --pin                            and never evict it for another model
  onekv load coder --no-pin                         evict it again as its `keep` setting says"""


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, EXAMPLES, mlx=False)
    command.add_argument("model", metavar="NAME", help="a model of the server, as listed by `onekv ps`")
    text = "never evict it for another model; --no-pin: restore its configured `keep`"
    command.add_argument("--pin", action=argparse.BooleanOptionalAction, help=text)
    add_server(command)


def run(arguments: argparse.Namespace) -> None:
    server = chosen(arguments)
    name = find(overview(server), arguments.model, server.url)["name"]
    if arguments.pin is not None:
        # First: what is refused then is not loaded, and nothing takes its place in between.
        change(server, name, "pin" if arguments.pin else "unpin")
    found = change(server, name, "load")
    row = find(found, name, server.url)
    print(f"{name} is {row['state']} ({row['keep']}): {format_size(row['bytes']['total'])}; {taken(found)}")
