"""`onekv sim`: the arguments of the simulation."""

import argparse

from . import options

EXAMPLES = """onekv sim --seeds 100 --steps 5000
  onekv sim --seed 7 --steps 20000
  onekv sim --replay onekv-sim-7.json"""


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, EXAMPLES)
    text = "the first seed; default: random, and printed"
    command.add_argument("--seed", type=options.count, metavar="N", help=text)
    options.add_count(command, "--seeds", 1, "seeds", "number of seeds to run, one after another")
    options.add_count(command, "--steps", 5000, "steps", "steps of the engine for each seed")
    text = "start no new seed after this time; default: no limit"
    command.add_argument("--seconds", type=options.count, metavar="SECONDS", help=text)
    options.add_count(command, "--processes", 1, "processes", "number of concurrent processes")
    command.add_argument("--replay", metavar="FILE", help="rerun the recorded script of a failed seed")


def run(arguments: argparse.Namespace) -> int:
    from ..sim.command import run

    return run(arguments)
