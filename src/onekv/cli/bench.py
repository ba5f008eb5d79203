"""`onekv bench`: the arguments of each benchmark; its module in `onekv.bench` is imported when it runs."""

import argparse
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..bench import serve, soak
from ..bench.suite.scenarios import SCENARIOS
from ..config import DTYPES
from ..errors import SettingError
from ..models import DEFAULT_MODEL
from . import options
from .options import add_count

SCENARIO_NAMES = list(SCENARIOS)
# Packages that the benchmarks of servers need in addition to the core, and how to install them.
SERVER = "'onekv[server]'"
SERVERS_NEED = {
    "httpx2": "'onekv[bench]'",
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
    _define_all(benches)
    _define_decode(benches)
    _define_reuse(benches)
    _define_disk(benches)
    _define_remote(benches)
    _define_index(benches)
    _define_quality(benches)
    _define_formats(benches)
    _define_speculate(benches)
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


def _define_all(benches: Any) -> None:
    text = "servers side by side in all scenarios: OneKV, mlx_lm.server and others; writes a report with plots"
    command = _add(benches, "all", text, "onekv bench all --rounds 3 --out report", SERVERS_NEED)
    names = ", ".join(SCENARIO_NAMES)
    scenario_help = f"one of: {names}; default: all of them; may be repeated"
    command.add_argument("--scenario", action="append", choices=SCENARIO_NAMES, metavar="NAME", help=scenario_help)
    also_help = "another running server that speaks OpenAI's API: llama.cpp=http://127.0.0.1:8080; may be repeated"
    command.add_argument("--also", action="append", metavar="NAME=URL", help=also_help)
    add_count(command, "--rounds", 3, "rounds", "number of rounds per server")
    add_count(command, "--context", 1500, "tokens", "approximate length of a long prompt")
    add_count(command, "--turns", 6, "turns", "number of an agent's turns, and of consecutive conversations")
    add_count(command, "--clients", 4, "clients", "number of concurrent clients")
    memory_help = "OneKV's budget for KV, for each model; default: 384MiB"
    command.add_argument("--kv-memory", default="384MiB", metavar="SIZE", help=memory_help)
    command.add_argument("--model", default=DEFAULT_MODEL, help=options.MODEL_HELP)
    command.add_argument(
        "--out", default="onekv-bench", metavar="DIR", help="folder for the report; default: onekv-bench"
    )


def _define_servers(benches: Any) -> None:
    _define_serve(benches)
    text = "a short request that arrives during a long prompt, compared with mlx_lm.server"
    command = _add(benches, "meet", text, "onekv bench meet --tokens 16000 --json result.json", SERVERS_NEED)
    add_count(command, "--tokens", 16000, "tokens", "length of the long prompt")
    after_help = "delay between the long request and the short one; default: 10 seconds"
    command.add_argument("--after", type=float, default=10.0, metavar="SECONDS", help=after_help)
    add_count(command, "--prefill-chunk", 512, "tokens", "OneKV's chunk size for prefill")
    command.add_argument("--model", default=DEFAULT_MODEL, help=options.MODEL_HELP)
    _add_json(command)
    text = "thousands of requests of all kinds to a small server; exits with 1 if anything leaked or failed"
    command = _add(benches, "soak", text, "onekv bench soak --requests 2000 --clients 32", SERVERS_NEED)
    _add_clients(command, 32)
    model_help = "tiny has random weights; default: tiny"
    command.add_argument("--model", default="tiny", choices=sorted(soak.KV_MEMORY), help=model_help)
    _add_json(command)
    text = "thousands of requests to more models than fit; exits with 1 if an answer, a byte or a conversation is lost"
    command = _add(benches, "day", text, "onekv bench day --requests 2000", SERVERS_NEED)
    _add_clients(command, 6)
    _add_json(command)
    text = "time to first token after a model swap, compared with loading the model in a fresh process"
    command = _add(benches, "swap", text, "onekv bench swap --rounds 5 --json result.json", SERVERS_NEED)
    add_count(command, "--rounds", 5, "rounds", "number of swaps to each model")
    command.add_argument("--model", default=DEFAULT_MODEL, help=options.MODEL_HELP)
    _add_json(command)


def _define_serve(benches: Any) -> None:
    text = "the server compared with mlx_lm.server: an agent's trace, and concurrent chats"
    command = _add(benches, "serve", text, "onekv bench serve --case chats --rounds 2", SERVERS_NEED)
    case_help = "scenario to run; default: agent and chats; may be repeated"
    command.add_argument("--case", action="append", choices=sorted(serve.CASES), help=case_help)
    add_count(command, "--turns", 20, "turns", "number of turns in the agent's conversation")
    add_count(command, "--clients", 8, "clients", "number of concurrent chats")
    add_count(command, "--rounds", 2, "rounds", "number of rounds per side")
    command.add_argument("--model", default=DEFAULT_MODEL, help=options.MODEL_HELP)
    _add_json(command)


def _add_clients(command: argparse.ArgumentParser, clients: int) -> None:
    """Options of a benchmark that sends a mix of requests."""
    add_count(command, "--requests", 2000, "requests", "total number of requests")
    add_count(command, "--clients", clients, "clients", "number of clients, each sending one request at a time")
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed that determines the requests; default: 0"
    )


def _define_mlx_lm(benches: Any) -> None:
    text = "peak memory with mlx-lm's caches and with OneKV's replacements; writes a plot"
    command = _add(benches, "mlx-lm", text, "onekv bench mlx-lm --plot peaks.svg")
    add_count(command, "--tokens", 6144, "tokens", "length of one conversation")
    command.add_argument(
        "--plot", default="mlx-lm-peaks.svg", metavar="FILE", help="file for the plot; default: mlx-lm-peaks.svg"
    )
    _add_json(command)


def _define_decode(benches: Any) -> None:
    text = "prefill and decode speed side by side with mlx-lm, interleaved, medians"
    command = _add(benches, "decode", text, "onekv bench decode --case 1x2048 --case 4x1024 --json result.json")
    case_help = "number of sequences and tokens in each; default: 1x2048 and 4x1024; may be repeated"
    command.add_argument("--case", action="append", metavar="BATCHxCONTEXT", help=case_help)
    add_count(command, "--tokens", 32, "tokens", "tokens decoded per round")
    add_count(command, "--block-size", 64, "tokens", "tokens per block of the KV pool")
    shared_help = (
        "length of a prefix common to all prompts, which the peer reads separately for each row; default: 0 tokens"
    )
    command.add_argument("--shared", type=int, default=0, metavar="TOKENS", help=shared_help)
    _add_common(command)


def _define_reuse(benches: Any) -> None:
    text = "memory and time to resume a cached conversation, compared with mlx-lm's prompt cache"
    command = _add(benches, "reuse", text, "onekv bench reuse --size 50MB --size 200MB")
    size_help = "KV size of the conversation; default: 50MB, 100MB and 200MB; may be repeated"
    command.add_argument("--size", action="append", metavar="SIZE", help=size_help)
    _add_common(command)


def _define_disk(benches: Any) -> None:
    text = "resuming a conversation after a restart, and the disk cache's throughput compared with plain file I/O"
    command = _add(benches, "disk", text, "onekv bench disk --tokens 2000 --json result.json")
    add_count(command, "--tokens", 2000, "tokens", "length of the conversation")
    folder_help = (
        "where to create the temporary disk cache, to measure that disk; default: the system's temporary folder"
    )
    command.add_argument("--folder", metavar="DIR", help=folder_help)
    _add_common(command)


def _define_remote(benches: Any) -> None:
    text = "first token from a shared store compared with computing, and decode speed while that store fails"
    example = "onekv bench remote --tokens 4000 --rounds 3 --json result.json"
    command = _add(benches, "remote", text, example, {"redis": "'onekv[remote]'"})
    _add_formats(command)
    add_count(command, "--tokens", 4000, "tokens", "length of the conversation")
    _add_common(command)


def _define_index(benches: Any) -> None:
    text = "time and memory of the prefix index"
    command = _add(benches, "index", text, "onekv bench index --blocks 1000000 --tokens 100000")
    add_count(command, "--blocks", 1_000_000, "blocks", "number of blocks in the index")
    add_count(command, "--tokens", 100_000, "tokens", "length of the prompt to match")
    add_count(
        command,
        "--siblings",
        5000,
        "conversations",
        "number of conversations that diverge at one block, for a second match",
    )
    add_count(command, "--rounds", 20, "rounds", "number of matches timed")


def _define_quality(benches: Any) -> None:
    text = "perplexity, KL divergence from plain KV and needle retrieval, for each KV format"
    command = _add(benches, "quality", text, "onekv bench quality --format k5v4 --format q4")
    command.add_argument("--model", default=DEFAULT_MODEL, help=options.MODEL_HELP)
    _add_formats(command)
    text_help = "a kind of text to read: prose, code or json; default: all; may be repeated"
    command.add_argument("--text", action="append", choices=("prose", "code", "json"), metavar="KIND", help=text_help)
    add_count(command, "--tokens", 20480, "tokens", "tokens to read of each text")
    add_count(command, "--window", 2048, "tokens", "length of the windows that a text is divided into")
    needle_help = "length of the context in which numbers are hidden, 0 to skip that; default: 4,000 tokens"
    command.add_argument("--needle", type=int, default=4000, metavar="TOKENS", help=needle_help)
    plain_help = "number of first and of last layers stored unquantized; default: 0 layers"
    command.add_argument("--kv-plain-layers", type=int, default=0, metavar="LAYERS", help=plain_help)
    _add_json(command)
    _add_dtype(command)


def _define_formats(benches: Any) -> None:
    text = "decode speed of each KV format compared with plain KV, interleaved, medians"
    command = _add(benches, "formats", text, "onekv bench formats --context 8192")
    _add_formats(command)
    add_count(command, "--context", 8192, "tokens", "length of the context before the first decoded token")
    add_count(command, "--tokens", 8, "tokens", "tokens decoded per round")
    _add_common(command)


def _define_speculate(benches: Any) -> None:
    text = "decode speed with and without speculation: copied text, free text, or a given share of correct guesses"
    command = _add(benches, "speculate", text, "onekv bench speculate --rounds 3 --json result.json")
    add_count(command, "--tokens", 128, "tokens", "tokens decoded per answer")
    oracle_help = "simulate guesses for --model 8b that are right with this probability per token; default: 0.3 to 0.9"
    command.add_argument("--oracle", nargs="*", type=float, metavar="SHARE", help=oracle_help)
    proposed_help = "with --oracle: tokens guessed at a time; default: 2, 4 and 8 tokens"
    command.add_argument("--proposed", nargs="+", type=options.count, metavar="TOKENS", help=proposed_help)
    batch_help = "with --oracle: number of sequences; default: 1 and 8 sequences"
    command.add_argument("--batch", nargs="+", type=options.count, metavar="SEQUENCES", help=batch_help)
    add_count(command, "--context", 512, "tokens", "with --oracle: length of the context before an answer")
    _add_common(command)


def _add_formats(command: argparse.ArgumentParser) -> None:
    text = "a KV format to measure, in addition to plain (auto); default: all; may be repeated"
    command.add_argument("--format", action="append", metavar="FORMAT", help=text)


def _add_common(command: argparse.ArgumentParser) -> None:
    text = f"a model, or 8b for random weights of that shape; default: {DEFAULT_MODEL}"
    command.add_argument("--model", default=DEFAULT_MODEL, help=text)
    add_count(command, "--rounds", 5, "rounds", "number of rounds per side")
    _add_json(command)
    _add_dtype(command)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", help="also write the figures to this file")


def _add_dtype(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the weights; default: float32 on CPU, otherwise the model's own"
    )
