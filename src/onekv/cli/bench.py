"""`onekv bench`: the arguments of each benchmark; its module in `onekv.bench` is imported when it runs."""

import argparse
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..bench import serve, soak
from ..config import DTYPES
from ..errors import SettingError
from ..models import DEFAULT_MODEL
from . import options
from .options import add_count

# What the benchmarks of servers import beside the core install, and how it is installed.
SERVER = "'onekv[server]'"
SERVERS_NEED = {
    "httpx2": "httpx2",
    "fastapi": SERVER,
    "starlette": SERVER,
    "uvicorn": SERVER,
    "h11": SERVER,
    "pydantic": SERVER,
    "prometheus_client": SERVER,
    "llguidance": SERVER,
}


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, None, "onekv bench decode")
    benches = command.add_subparsers(required=True, metavar="BENCHMARK")
    _define_decode(benches)
    _define_reuse(benches)
    _define_disk(benches)
    _define_index(benches)
    _define_quality(benches)
    _define_formats(benches)
    _define_servers(benches)
    _define_mlx_lm(benches)


def _add(benches: Any, name: str, text: str, example: str, needs: dict[str, str] | None = None) -> Any:
    def run(arguments: argparse.Namespace) -> int | None:
        _check_installed(needs or {})
        _check_json(arguments)
        module = import_module(f"..bench.{name.replace('-', '_')}", __package__)
        result: int | None = module.run(arguments)
        return result

    command = options.add_command(benches, name, text)
    options.define(command, run, example)
    return command


def _check_installed(needs: dict[str, str]) -> None:
    for package, source in needs.items():
        if find_spec(package) is None:
            raise SettingError(f"this benchmark needs {package}; install it with: pip install {source}")


def _check_json(arguments: argparse.Namespace) -> None:
    """Before anything is measured, not after."""
    file = getattr(arguments, "json", None)
    if file is not None and not Path(file).parent.is_dir():
        raise SettingError(f"--json is {file!r}, but there is no folder {str(Path(file).parent)!r}")


def _define_servers(benches: Any) -> None:
    text = "the server beside mlx_lm.server: an agent's trace, and chats at the same time"
    serve.add_arguments(_add(benches, "serve", text, "onekv bench serve --case chats --rounds 2", SERVERS_NEED))
    text = "thousands of requests of all kinds at a small server; exits with 1 if anything is not as it was before"
    soak.add_arguments(_add(benches, "soak", text, "onekv bench soak --requests 2000 --clients 32", SERVERS_NEED))


def _define_mlx_lm(benches: Any) -> None:
    text = "memory peaks of mlx-lm's caches, and of OneKV's in their place; writes a plot"
    command = _add(benches, "mlx-lm", text, "onekv bench mlx-lm --plot peaks.svg")
    add_count(command, "--tokens", 6144, "tokens", "of one conversation")
    command.add_argument("--plot", default="mlx-lm-peaks.svg", metavar="FILE", help="default: mlx-lm-peaks.svg")
    _add_json(command)


def _define_decode(benches: Any) -> None:
    text = "prefill and decode speed side by side with mlx-lm, interleaved, medians"
    command = _add(benches, "decode", text, "onekv bench decode --case 1x2048 --case 4x1024 --json result.json")
    case_help = "sequences and tokens of each; default: 1x2048 and 4x1024; may be given several times"
    command.add_argument("--case", action="append", metavar="BATCHxCONTEXT", help=case_help)
    add_count(command, "--tokens", 32, "tokens", "decoded per round")
    add_count(command, "--block-size", 64, "tokens", "in a block")
    shared_help = "tokens that all prompts begin with; the peer then reads them for each row; default: 0 tokens"
    command.add_argument("--shared", type=int, default=0, metavar="TOKENS", help=shared_help)
    _add_common(command)


def _define_reuse(benches: Any) -> None:
    text = "memory and time of continuing a cached conversation, beside mlx-lm's prompt cache"
    command = _add(benches, "reuse", text, "onekv bench reuse --size 50MB --size 200MB")
    size_help = "KV of the conversation; default: 50MB, 100MB and 200MB; may be given several times"
    command.add_argument("--size", action="append", metavar="SIZE", help=size_help)
    _add_common(command)


def _define_disk(benches: Any) -> None:
    text = "continuing a conversation after a restart, and the disk cache's speed beside plain reads and writes"
    command = _add(benches, "disk", text, "onekv bench disk --tokens 2000 --json result.json")
    add_count(command, "--tokens", 2000, "tokens", "of the conversation")
    folder_help = "where the temporary disk cache is made, to measure that disk; default: the system's place for such"
    command.add_argument("--folder", metavar="DIR", help=folder_help)
    _add_common(command)


def _define_index(benches: Any) -> None:
    text = "time and memory of the prefix index"
    command = _add(benches, "index", text, "onekv bench index --blocks 1000000 --tokens 100000")
    add_count(command, "--blocks", 1_000_000, "blocks", "in the index")
    add_count(command, "--tokens", 100_000, "tokens", "to match")
    add_count(command, "--siblings", 5000, "conversations", "that part at one block, for a second match")
    add_count(command, "--rounds", 20, "rounds", "matches timed")


def _define_quality(benches: Any) -> None:
    text = "perplexity and needles in a long context, for each KV format"
    command = _add(benches, "quality", text, "onekv bench quality --format q8 --format q4")
    command.add_argument("--model", default=DEFAULT_MODEL, help=options.MODEL_HELP)
    _add_formats(command)
    add_count(command, "--tokens", 20480, "tokens", "of the text")
    add_count(command, "--window", 2048, "tokens", "read as one prompt")
    add_count(command, "--needle", 4000, "tokens", "of context to find numbers in")
    plain_help = "first and last layers, so many of each, kept plain; default: 0 layers"
    command.add_argument("--kv-plain-layers", type=int, default=0, metavar="LAYERS", help=plain_help)
    _add_json(command)
    _add_dtype(command)


def _define_formats(benches: Any) -> None:
    text = "decode speed of each KV format beside plain KV, interleaved, medians"
    command = _add(benches, "formats", text, "onekv bench formats --context 8192")
    _add_formats(command)
    add_count(command, "--context", 8192, "tokens", "before the first one decoded")
    add_count(command, "--tokens", 8, "tokens", "decoded per round")
    _add_common(command)


def _add_formats(command: argparse.ArgumentParser) -> None:
    text = "a KV format to measure; plain (auto) always is; default: all; may be given several times"
    command.add_argument("--format", action="append", metavar="FORMAT", help=text)


def _add_common(command: argparse.ArgumentParser) -> None:
    text = f"a model, or 8b for random weights of that shape; default: {DEFAULT_MODEL}"
    command.add_argument("--model", default=DEFAULT_MODEL, help=text)
    add_count(command, "--rounds", 5, "rounds", "each of both sides")
    _add_json(command)
    _add_dtype(command)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", help="also write the figures here")


def _add_dtype(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype", choices=DTYPES, help="of the weights; default: float32 on CPU, else the model's own"
    )
