"""The `onekv` command. Errors that OneKV raises on purpose are printed as one line; exit status 1."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from . import __version__, config
from .errors import OneKVError, PromptError, SettingError
from .models import DEFAULT_MODEL
from .models.build import require_mlx

EXAMPLES = """examples:
  onekv chat                                        talk to the default model
  onekv serve                                       an OpenAI- and Anthropic-compatible server
  onekv generate "The capital of France is" --max-tokens 20
  onekv plan mlx-community/Qwen3-8B-4bit --kv-memory 4GiB
  onekv cache ls                                    what the disk cache has
  onekv mlx-server --model mlx-community/Qwen3-8B-4bit    mlx_lm.server with OneKV's caches
  onekv bench decode --json result.json
"""
MODEL_HELP = f"name, hub id, folder or .gguf file; default {DEFAULT_MODEL}"


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)

    def run() -> int | None:
        if given[:1] == ["mlx-server"]:
            require_mlx()
            # Its flags are mlx_lm.server's, which has its own parser.
            from .mlx_lm.server import main as mlx_server

            mlx_server(given[1:])
            return 0
        arguments = _parser().parse_args(given)
        require_mlx()
        status: int | None = arguments.run(arguments)
        return status

    return _reported(run)


def _reported(run: Callable[[], int | None]) -> int:
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


# The commands' arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onekv",
        description="Language models on MLX with every token's KV cache exactly once in memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"onekv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_plan(commands)
    _add_command(commands, "demo", _demo, "hold a short conversation and show speed and memory", "onekv demo")
    _add_command(
        commands,
        "mlx-server",
        None,
        "mlx_lm.server with OneKV's caches: takes its flags, and --kv-memory",
        "onekv mlx-server --model mlx-community/Qwen3-8B-4bit --prompt-cache-bytes 2000000000",
    )
    _add_cache(commands)
    _add_sim(commands)
    _add_bench(commands)
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None] | None, text: str, example: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _add_generate(commands: Any) -> None:
    example = 'onekv generate "Once upon a time" --temperature 0.8'
    command = _add_command(commands, "generate", _generate, "complete a prompt", example)
    command.add_argument("prompt", type=_text, help="the text to complete; - reads it from standard input")
    command.add_argument("--model", default=DEFAULT_MODEL, help=MODEL_HELP)
    command.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    _add_sampling(command)
    config.add_arguments(command)


def _add_chat(commands: Any) -> None:
    text = "talk to a model; Ctrl-C stops an answer, Ctrl-D leaves"
    command = _add_command(commands, "chat", _chat, text, "onekv chat --system 'Answer briefly.'")
    command.add_argument("--model", default=DEFAULT_MODEL, help=MODEL_HELP)
    command.add_argument("--system", type=_text, metavar="TEXT", help="instructions for the model")
    _add_sampling(command)
    config.add_arguments(command)


SERVE_EXAMPLES = """onekv serve
  onekv serve mlx-community/Qwen3-8B-4bit --kv-memory 4GiB --max-batch 16
  onekv serve --host 0.0.0.0 --port 9000 --api-keys keys.txt
  onekv serve --config onekv.toml                   names as in the flags: kv_memory = "4GiB"

then, for example:
  OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python my_agent.py
  ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_API_KEY=none python my_agent.py"""


def _add_serve(commands: Any) -> None:
    text = "serve a model to OpenAI and Anthropic clients"
    command = _add_command(commands, "serve", _serve, text, SERVE_EXAMPLES)
    command.add_argument("model", nargs="?", help=MODEL_HELP)
    variable = config.variable("config")
    command.add_argument("--config", metavar="FILE", help=f"TOML file with any of the settings below ({variable})")
    # Their module needs nothing of the extra `server`.
    from .server.settings import ServerSettings

    config.add_arguments(command, ServerSettings, "server")
    config.add_arguments(command)


def _add_plan(commands: Any) -> None:
    text = "show where the memory would go, without loading the model"
    command = _add_command(commands, "plan", _plan, text, "onekv plan smollm2-135m --kv-memory 4GiB")
    command.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=MODEL_HELP)
    config.add_arguments(command)


CACHE_EXAMPLES = """onekv cache ls
  onekv cache stats --json
  onekv cache verify --disk-cache /data/kv
  onekv cache clear --model smollm2-135m"""


def _add_cache(commands: Any) -> None:
    text = "look into the disk cache, check it, or empty it"
    actions = _add_command(commands, "cache", None, text, CACHE_EXAMPLES).add_subparsers(
        required=True, metavar="ACTION"
    )
    ls = _add_cache_action(actions, "ls", "the models in the disk cache, with sizes and ages", "onekv cache ls --json")
    text = "what the disk cache takes in all, and what was written today"
    stats = _add_cache_action(actions, "stats", text, "onekv cache stats --disk-cache /data/kv")
    for command in (ls, stats):
        command.add_argument("--json", action="store_true", help="print it as JSON; times are seconds since 1970")
    text = "read every file, remove what is damaged or left over; exits with 1 if there was something"
    _add_cache_action(actions, "verify", text, "onekv cache verify")
    text = "remove everything, or what belongs to one model"
    clear = _add_cache_action(actions, "clear", text, "onekv cache clear --model smollm2-135m --yes")
    clear.add_argument(
        "--model", metavar="NAME", help="a name, or an id or its beginning, as `onekv cache ls` shows it"
    )
    clear.add_argument("--yes", action="store_true", help="do not ask")


def _add_cache_action(actions: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    command = _add_command(actions, name, _cache, text, example)
    command.set_defaults(action=name)
    variable = config.variable("disk_cache")
    command.add_argument("--disk-cache", metavar="DIR", help=f"its folder; default: OneKV's own ({variable})")
    return command


def _add_bench(commands: Any) -> None:
    text = "measure against mlx-lm, side by side"
    benches = _add_command(commands, "bench", None, text, "onekv bench decode").add_subparsers(
        required=True, metavar="BENCHMARK"
    )
    _add_bench_decode(benches)
    _add_bench_reuse(benches)
    _add_bench_disk(benches)
    _add_bench_index(benches)
    _add_bench_quality(benches)
    _add_bench_formats(benches)
    _add_bench_servers(benches)
    _add_bench_mlx_lm(benches)


def _add_bench_servers(benches: Any) -> None:
    # Neither imports MLX.
    from .bench import serve, soak

    text = "the server beside mlx_lm.server: an agent's trace, and chats at the same time"
    command = _add_command(benches, "serve", _bench("serve"), text, "onekv bench serve --case chats --rounds 2")
    serve.add_arguments(command)
    text = "thousands of requests of all kinds at a small server; exits with 1 if anything is not as it was before"
    command = _add_command(benches, "soak", _bench("soak"), text, "onekv bench soak --requests 2000 --clients 32")
    soak.add_arguments(command)


def _add_bench_mlx_lm(benches: Any) -> None:
    text = "memory peaks of mlx-lm's caches, and of OneKV's in their place; writes a plot"
    command = _add_command(benches, "mlx-lm", _bench("mlx_lm"), text, "onekv bench mlx-lm --plot peaks.svg")
    command.add_argument("--tokens", type=_count, default=6144, metavar="N", help="of one conversation; default 6144")
    command.add_argument("--plot", default="mlx-lm-peaks.svg", metavar="FILE", help="default mlx-lm-peaks.svg")
    command.add_argument("--json", metavar="FILE", help="also write the figures here")


def _add_bench_decode(benches: Any) -> None:
    text = "prefill and decode speed side by side with mlx-lm, interleaved, medians"
    example = "onekv bench decode --case 1x2048 --case 4x1024 --json result.json"
    command = _add_command(benches, "decode", _bench("decode"), text, example)
    case_help = "default 1x2048 and 4x1024; may be given several times"
    command.add_argument("--case", action="append", metavar="BATCHxCONTEXT", help=case_help)
    command.add_argument("--tokens", type=_count, default=32, metavar="N", help="decoded per round; default 32")
    command.add_argument("--block-size", type=_count, default=64, metavar="N", help="tokens in a block; default 64")
    _add_bench_common(command)


def _add_bench_reuse(benches: Any) -> None:
    text = "memory and time of continuing a cached conversation, beside mlx-lm's prompt cache"
    command = _add_command(benches, "reuse", _bench("reuse"), text, "onekv bench reuse --size 50MB --size 200MB")
    size_help = "KV of the conversation; default 50MB, 100MB and 200MB; may be given several times"
    command.add_argument("--size", action="append", metavar="SIZE", help=size_help)
    _add_bench_common(command)


def _add_bench_disk(benches: Any) -> None:
    text = "continuing a conversation after a restart, and the disk cache's speed beside plain reads and writes"
    command = _add_command(benches, "disk", _bench("disk"), text, "onekv bench disk --tokens 2000 --json result.json")
    command.add_argument("--tokens", type=_count, default=2000, metavar="N", help="of the conversation; default 2000")
    folder_help = "where the temporary disk cache is made, to measure that disk; default: the system's place for such"
    command.add_argument("--folder", metavar="DIR", help=folder_help)
    _add_bench_common(command)


def _add_bench_quality(benches: Any) -> None:
    text = "perplexity and needles in a long context, for each KV format"
    command = _add_command(benches, "quality", _bench("quality"), text, "onekv bench quality --format q8 --format q4")
    command.add_argument("--model", default=DEFAULT_MODEL, help=MODEL_HELP)
    _add_formats(command)
    command.add_argument("--tokens", type=_count, default=20480, metavar="N", help="of the text; default 20480")
    command.add_argument("--window", type=_count, default=2048, metavar="N", help="read as one prompt; default 2048")
    needle_help = "tokens of context to find numbers in; default 4000"
    command.add_argument("--needle", type=_count, default=4000, metavar="N", help=needle_help)
    command.add_argument("--kv-plain-layers", type=int, default=0, metavar="N", help="first and last layers kept plain")
    command.add_argument("--json", metavar="FILE", help="also write the figures here")
    command.add_argument("--dtype", choices=config.DTYPES, help="dtype of the weights")


def _add_bench_formats(benches: Any) -> None:
    text = "decode speed of each KV format beside plain KV, interleaved, medians"
    command = _add_command(benches, "formats", _bench("formats"), text, "onekv bench formats --context 8192")
    _add_formats(command)
    context_help = "tokens before the first one decoded; default 8192"
    command.add_argument("--context", type=_count, default=8192, metavar="N", help=context_help)
    command.add_argument("--tokens", type=_count, default=8, metavar="N", help="decoded per round; default 8")
    _add_bench_common(command)


def _add_formats(command: argparse.ArgumentParser) -> None:
    text = "a KV format to measure; plain (auto) always is; default: all; may be given several times"
    command.add_argument("--format", action="append", metavar="FORMAT", help=text)


def _add_bench_common(command: argparse.ArgumentParser) -> None:
    model_help = f"a model, or 8b for random weights of that shape; default {DEFAULT_MODEL}"
    command.add_argument("--model", default=DEFAULT_MODEL, help=model_help)
    command.add_argument("--rounds", type=_count, default=5, metavar="N", help="each of both sides; default 5")
    command.add_argument("--json", metavar="FILE", help="also write the figures here")
    command.add_argument("--dtype", choices=config.DTYPES, help="dtype of the weights")


def _add_bench_index(benches: Any) -> None:
    text = "time and memory of the prefix index"
    example = "onekv bench index --blocks 1000000 --tokens 100000"
    command = _add_command(benches, "index", _bench("index"), text, example)
    command.add_argument("--blocks", type=_count, default=1_000_000, metavar="N", help="in the index; default 1000000")
    command.add_argument("--tokens", type=_count, default=100_000, metavar="N", help="to match; default 100000")
    siblings = "conversations that part at one block, for a second match; default 5000"
    command.add_argument("--siblings", type=_count, default=5000, metavar="N", help=siblings)
    command.add_argument("--rounds", type=_count, default=20, metavar="N", help="matches timed; default 20")


SIM_EXAMPLES = """onekv sim --seeds 100 --steps 5000
  onekv sim --seed 7 --steps 20000
  onekv sim --replay onekv-sim-7.json"""


def _add_sim(commands: Any) -> None:
    text = "simulate the engine with faults, from a seed, and check that every answer is right"
    command = _add_command(commands, "sim", _sim, text, SIM_EXAMPLES)
    command.add_argument("--seed", type=_count, metavar="N", help="the first seed; default: any, and it is shown")
    command.add_argument(
        "--seeds", type=_count, default=1, metavar="N", help="how many, one after the other; default 1"
    )
    steps = "of the engine, for each seed; default 5000"
    command.add_argument("--steps", type=_count, default=5000, metavar="N", help=steps)
    command.add_argument("--seconds", type=_count, metavar="S", help="begin no seed after that time; default: no limit")
    command.add_argument("--processes", type=_count, default=1, metavar="N", help="at the same time; default 1")
    command.add_argument("--replay", metavar="FILE", help="run the script of a seed that failed")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")

    def option(flag: str, kind: Callable[[str], Any], default: Any, metavar: str, text: str) -> None:
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)

    option("--max-tokens", _count, 256, "N", "tokens to generate at most; default 256")
    option("--temperature", float, 0.0, "T", "0 takes the likeliest token; default 0")
    option("--top-p", float, 1.0, "P", "keep the likeliest tokens that make up P; default 1")
    option("--top-k", int, 0, "K", "keep the K likeliest tokens; default 0: all")
    option("--min-p", float, 0.0, "P", "drop tokens less likely than P times the best; default 0")
    option("--seed", int, None, "N", "makes sampling repeatable")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        # Bytes that are no text in the user's locale arrive as characters that cannot be written back.
        raise argparse.ArgumentTypeError(f"{text!r} is not readable text") from None
    return text


# The commands. What can be checked before a model is loaded is checked first.


def _generate(arguments: argparse.Namespace) -> None:
    sampling = _sampling(arguments)
    prompt = _read_stdin() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise PromptError("the prompt is empty; it must have at least one token")
    with _load(arguments) as llm:
        if arguments.chat:
            prompt = llm.chat_tokens([{"role": "user", "content": prompt}])
        for piece in llm.stream(prompt, **sampling):
            print(piece, end="", flush=True)
        print()


def _chat(arguments: argparse.Namespace) -> None:
    from .chat import chat

    sampling = _sampling(arguments)
    if sys.stdin.isatty() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # Some scripts start what they run with Ctrl-C ignored; to a person at the terminal it is a key of the chat.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with _load(arguments) as llm:
        chat(llm, arguments.system, sampling)


def _serve(arguments: argparse.Namespace) -> None:
    from .server.settings import ServerSettings

    path = arguments.config or os.environ.get(config.variable("config"))
    known = ["model", *config.names(ServerSettings), *config.names(config.Settings)]
    file = config.read_file(path, known) if path else {}
    settings = ServerSettings.resolve(config.given_settings(arguments, ServerSettings), file)
    engine = config.Settings.resolve(config.given_settings(arguments), file)
    if engine.disk_cache is None and not engine.hot_only and engine.prefix_cache:
        engine = replace(engine, disk_cache=config.AUTO)
    model = arguments.model or str(file.get("model", DEFAULT_MODEL))
    try:
        from .server.serve import serve
    except ModuleNotFoundError as error:
        raise SettingError(f"the server needs {error.name}; install it with: pip install 'onekv[server]'") from None
    status = _reported(lambda: serve(model, settings, {f.name: getattr(engine, f.name) for f in fields(engine)}))
    # All is stored and closed, or was never there. MLX frees what the engine's thread compiled when that thread ends,
    # which is after Python has joined it, and needs the interpreter for it: if that is being taken down, it aborts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _plan(arguments: argparse.Namespace) -> int:
    from .report import print_plan

    return print_plan(arguments.model, config.Settings.resolve(config.given_settings(arguments)))


def _cache(arguments: argparse.Namespace) -> int | None:
    from .cache_cli import run

    return run(arguments)


def _demo(arguments: argparse.Namespace) -> None:
    from .report import demo

    demo()


def _sim(arguments: argparse.Namespace) -> int:
    from .sim.command import run

    return run(arguments)


def _bench(name: str) -> Callable[[argparse.Namespace], int | None]:
    """Runs a module of `bench`, which is imported only then."""

    def run(arguments: argparse.Namespace) -> int | None:
        _check_json(arguments)
        result: int | None = import_module(f".bench.{name}", __package__).run(arguments)
        return result

    return run


def _check_json(arguments: argparse.Namespace) -> None:
    """Before anything is measured, not after."""
    file = getattr(arguments, "json", None)
    if file is not None and not Path(file).parent.is_dir():
        raise SettingError(f"--json is {file!r}, but there is no folder {str(Path(file).parent)!r}")


def _load(arguments: argparse.Namespace) -> Any:
    from .llm import LLM

    return LLM(arguments.model, **config.given_settings(arguments))


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    from .engine import Sampling

    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    options = {name: getattr(arguments, name) for name in names}
    Sampling(**options)
    return {"max_tokens": arguments.max_tokens, **options}


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not text in {error.encoding}: byte {error.start} is wrong") from error
