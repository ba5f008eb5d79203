"""The `onekv` command. Errors that OneKV raises on purpose are printed as one line; exit status 1."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import __version__, config
from .errors import OneKVError
from .models import DEFAULT_MODEL

EXAMPLES = """examples:
  onekv chat                                        talk to the default model
  onekv generate "The capital of France is" --max-tokens 20
  onekv plan mlx-community/Qwen3-8B-4bit --kv-memory 4GiB
  onekv bench decode --json result.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except OneKVError as error:
        print(f"onekv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nonekv: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does.
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onekv",
        description="Language models on MLX with every token's KV cache exactly once in memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"onekv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], Any], text: str, example: str) -> Any:
        sub = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        return sub

    generate = command(
        "generate",
        _generate,
        "complete a prompt",
        'onekv generate "Once upon a time" --temperature 0.8',
    )
    generate.add_argument("prompt", help="the text to complete; - reads it from standard input")
    generate.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"name, hub id, folder or .gguf file; default {DEFAULT_MODEL}",
    )
    generate.add_argument("--chat", action="store_true", help="send the prompt as a user's message")
    _sampling_arguments(generate)
    config.add_arguments(generate)

    chat = command(
        "chat",
        _chat,
        "talk to a model; Ctrl-C stops an answer, Ctrl-D leaves",
        "onekv chat --system 'Answer briefly.'",
    )
    chat.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"name, hub id, folder or .gguf file; default {DEFAULT_MODEL}",
    )
    chat.add_argument("--system", metavar="TEXT", help="instructions for the model")
    _sampling_arguments(chat)
    config.add_arguments(chat)

    plan = command(
        "plan",
        _plan,
        "show where the memory would go, without loading the model",
        "onekv plan smollm2-135m --kv-memory 4GiB",
    )
    plan.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"name, hub id, folder or .gguf file; default {DEFAULT_MODEL}",
    )
    config.add_arguments(plan)

    command("demo", _demo, "hold a short conversation and show speed and memory", "onekv demo")

    bench = command(
        "bench",
        lambda arguments: bench.print_help() or 2,
        "measure against mlx-lm, side by side",
        "onekv bench decode",
    )
    benches = bench.add_subparsers(metavar="BENCHMARK")
    decode = benches.add_parser(
        "decode",
        help="prefill and decode speed against mlx-lm",
        description="Decode (and prefill) side by side with mlx-lm, interleaved, medians.",
        epilog="example:\n  onekv bench decode --case 1x2048 --case 4x1024 --json result.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    decode.set_defaults(run=_bench_decode)
    decode.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"a model, or 8b for random weights of that shape; default {DEFAULT_MODEL}",
    )
    decode.add_argument(
        "--case",
        action="append",
        metavar="BATCHxCONTEXT",
        help="default 1x2048 and 4x1024; may be given several times",
    )
    decode.add_argument("--tokens", type=int, default=32, help="tokens decoded per round; default 32")
    decode.add_argument("--rounds", type=int, default=5, help="rounds, each of both sides; default 5")
    decode.add_argument("--json", metavar="FILE", help="also write the figures here")
    decode.add_argument("--dtype", choices=config.DTYPES, help="dtype of the weights")
    decode.add_argument("--block-size", type=int, default=64, help="tokens in a block; default 64")
    return parser


def _sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        metavar="N",
        help="tokens to generate at most; default 256",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token; default 0",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="keep the likeliest tokens that make up P; default 1",
    )
    group.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="keep the K likeliest tokens; default 0: all",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop tokens less likely than P times the best; default 0",
    )
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    return {name: getattr(arguments, name) for name in names}


def _load(arguments: argparse.Namespace) -> Any:
    from .llm import LLM

    return LLM(arguments.model, **config.given_settings(arguments))


def _generate(arguments: argparse.Namespace) -> None:
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    with _load(arguments) as llm:
        if arguments.chat:
            prompt = llm.chat_tokens([{"role": "user", "content": prompt}])
        for piece in llm.stream(prompt, **_sampling(arguments)):
            print(piece, end="", flush=True)
        print()


def _chat(arguments: argparse.Namespace) -> None:
    from .chat import chat

    with _load(arguments) as llm:
        chat(llm, arguments.system, _sampling(arguments))


def _plan(arguments: argparse.Namespace) -> int:
    from .report import print_plan

    return print_plan(arguments.model, config.Settings.resolve(config.given_settings(arguments)))


def _demo(arguments: argparse.Namespace) -> None:
    from .report import demo

    demo()


def _bench_decode(arguments: argparse.Namespace) -> None:
    from .bench.decode import run

    run(arguments)
