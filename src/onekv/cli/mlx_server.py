"""`onekv mlx-server`: mlx_lm.server, which has its own parser; its flags are passed to `serve` unchanged."""

import argparse

from . import options


def define(command: argparse.ArgumentParser) -> None:
    """For the list of commands."""
    example = "onekv mlx-server --model mlx-community/Qwen3-8B-4bit --prompt-cache-bytes 2000000000"
    options.define(command, lambda _: serve([]), example)


def serve(flags: list[str]) -> None:
    from ..mlx_lm.server import main

    main(flags)
