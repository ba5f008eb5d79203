"""`onekv unload`: unload a model from a running server."""

import argparse

from . import options
from .asking import add_server, chosen
from .swapping import change, find, overview, taken

EXAMPLES = "onekv unload coder"


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, EXAMPLES, mlx=False)
    text = "a model of the server, as listed by `onekv ps`; its running requests are completed first"
    command.add_argument("model", metavar="NAME", help=text)
    add_server(command)


def run(arguments: argparse.Namespace) -> None:
    server = chosen(arguments)
    name = find(overview(server), arguments.model, server.url)["name"]
    found = change(server, name, "unload")
    print(f"{name} is {find(found, name, server.url)['state']}; {taken(found)}")
