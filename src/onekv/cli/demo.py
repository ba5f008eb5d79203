"""`onekv demo`: a short conversation with the default model."""

import argparse

from . import options


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, "onekv demo")


def run(arguments: argparse.Namespace) -> None:
    from ..report import demo

    demo()
