"""`onekv generate`: complete a prompt."""

import argparse
import sys

from ..config import Settings
from ..errors import PromptError
from ..models import DEFAULT_MODEL
from ..parallel import launched_rank
from . import options

EXAMPLES = """onekv generate "Once upon a time" --temperature 0.8 --max-tokens 100
  echo "Name three rivers." | onekv generate - --chat
  onekv generate "SELECT" --model mlx-community/Qwen3-8B-4bit --adapter adapters/sql"""


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, EXAMPLES)
    command.add_argument("prompt", type=options.readable, help="the text to complete; - reads it from standard input")
    command.add_argument("--model", default=DEFAULT_MODEL, help=options.MODEL_HELP)
    command.add_argument("--chat", action="store_true", help="send the prompt as a user message")
    options.add_sampling(command)
    options.add_settings(command)


def run(arguments: argparse.Namespace) -> None:
    sampling = options.sampling(arguments)
    if arguments.prompt == "-" and launched_rank() is not None:
        raise PromptError("the prompt is -, but mlx.launch does not forward the end of its input; pass the text itself")
    prompt = _read_stdin() if arguments.prompt == "-" else arguments.prompt
    if not prompt:
        raise PromptError("the prompt is empty; it must have at least one token")
    settings = options.resolved(Settings, arguments)
    generate(arguments.model, settings, prompt, arguments.chat, sampling)


def generate(model: str, settings: Settings, prompt: str, as_chat: bool, sampling: options.Sampling) -> None:
    from ..llm import LLM

    with LLM(model, **vars(settings)) as llm:
        tokens = llm.chat_tokens([{"role": "user", "content": prompt}]) if as_chat else prompt
        for piece in llm.stream(tokens, **sampling):
            print(piece, end="", flush=True)
        print()


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"standard input is not valid {error.encoding}: invalid byte at offset {error.start}"
        ) from error
