"""The `onekv` command.

    __init__      the list of commands; the exit status, and errors for users on one line
    options       arguments that several commands share, and their conversion from text to typed settings
    asking        HTTP requests to a running server
    watch         what `top` shows
    generate, chat, serve, launch, ps, top, load, unload, models, plan, doctor, demo, mlx_server, cache, sim, bench
                  one command each. `define` adds arguments and a `run` to its parser; `run` reads them, checks what
                  can be checked before a model is loaded, and passes typed values to the code that does the work

A command's module is imported only for that command, and its dependencies only when it runs: neither `onekv --help` nor
the help of a command imports MLX.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from .. import __version__
from ..errors import OneKVError
from ..models.build import require_mlx
from .options import add_command

# In the order in which `--help` lists them. The module has the name with an underscore.
COMMANDS = {
    "generate": "complete a prompt",
    "chat": "chat with a model; Ctrl-C stops an answer, Ctrl-D exits",
    "serve": "serve a model to OpenAI, Anthropic and Ollama clients",
    "launch": "run a coding agent (claude, codex, opencode, aider) on a OneKV server",
    "ps": "list the models of a running server",
    "top": "watch a running server: memory, requests, reuse, tiers, models",
    "load": "load a model on a running server",
    "unload": "unload a model from a running server",
    "models": "list, download or remove models on this machine",
    "plan": "show a model's memory footprint without loading it",
    "doctor": "check whether OneKV is exact, flat and fast on this machine",
    "demo": "hold a short conversation and show speed and memory",
    "mlx-server": "run mlx_lm.server with OneKV's caches; it takes the same flags, plus --kv-memory",
    "cache": "inspect, verify or clear the disk cache",
    "sim": "simulate the engine from a seed, with injected faults, and check every answer",
    "bench": "benchmark against mlx-lm, side by side",
}
EXAMPLES = """examples:
  onekv chat                                        chat with the default model
  onekv serve                                       serve OpenAI, Anthropic and Ollama clients
  onekv launch claude                               Claude Code on the default model
  onekv generate "The capital of France is" --max-tokens 20
  onekv plan mlx-community/Qwen3-8B-4bit --kv-memory 4GiB
  onekv doctor                                      is it exact, flat and fast on this machine?
  onekv ps                                          the models of a running server
  onekv top                                         a server's memory and requests, live
  onekv models ls                                   the models on this machine
  onekv cache ls                                    the contents of the disk cache
  onekv mlx-server --model mlx-community/Qwen3-8B-4bit    mlx_lm.server with OneKV's caches
  onekv bench decode --json result.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)

    def run() -> int | None:
        if given[:1] == ["mlx-server"]:
            require_mlx()
            from . import mlx_server

            mlx_server.serve(given[1:])
            return 0
        # What comes after -- is the agent's.
        own = given.index("--") if given[:1] == ["launch"] and "--" in given else len(given)
        arguments = _parser(given).parse_args(given[:own], argparse.Namespace(rest=given[own + 1 :]))
        if arguments.mlx:
            require_mlx()
        status: int | None = arguments.run(arguments)
        return status

    return reported(run)


def reported(run: Callable[[], int | None]) -> int:
    """The exit status of `run`; an error that is for people has been printed."""
    try:
        status = int(run() or 0)
        sys.stdout.flush()
        return status
    except OneKVError as error:
        print(f"onekv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nonekv: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does; the interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"onekv: {error}", file=sys.stderr)
        return 1


def _parser(given: list[str]) -> argparse.ArgumentParser:
    """Names all commands and knows the arguments of the one in `given`."""
    parser = argparse.ArgumentParser(
        prog="onekv",
        description="Language models on MLX, with every token's KV cache in memory exactly once.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"onekv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # No flag before it takes a value.
    chosen = next((word for word in given if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = add_command(commands, name, text)
        if name == chosen:
            import_module(f".{name.replace('-', '_')}", __package__).define(command)
    return parser
