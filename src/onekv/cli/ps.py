"""`onekv ps`: the models of a running server."""

import argparse
import json

from ..tables import table
from ..units import format_seconds, format_size
from . import options
from .asking import add_server, chosen
from .swapping import Overview, Row, doing, overview, taken

EXAMPLES = """onekv ps
  onekv ps --url http://studio.local:8000 --api-key KEY
  onekv ps --json"""
HEADER = ["model", "state", "keep", "weights", "KV", "context", "running", "waiting", "idle", "unloaded in"]


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, EXAMPLES, mlx=False)
    add_server(command)
    command.add_argument("--json", action="store_true", help="print it as JSON; sizes are bytes, times are seconds")


def run(arguments: argparse.Namespace) -> None:
    found = overview(chosen(arguments))
    print(json.dumps(found, indent=2) if arguments.json else shown(found))


def shown(found: Overview) -> str:
    rows: list[Row] = found["models"]
    more = [f"{row['name']}: {words}" for row in rows if (words := doing(found, row))]
    return "\n".join([table([_cells(row) for row in rows], HEADER), "", *more, taken(found)])


def _cells(row: Row) -> list[str]:
    requests, size = row["requests"], row["bytes"]
    loaded = row["state"] == "loaded"
    idle = row["last_used_s"] if loaded and not requests["holding"] else None
    return [
        ", ".join(row["names"]),
        row["state"],
        row["keep"],
        format_size(size["weights"]),
        format_size(size["kv"]),
        f"{row['context_length']:,}",
        str(requests["holding"]),
        str(requests["waiting"]),
        "-" if idle is None else format_seconds(idle),
        "-" if row["expires_s"] is None else format_seconds(row["expires_s"]),
    ]
