"""`onekv chat`: a conversation at the terminal."""

import argparse
import io
import signal
import sys
from typing import TYPE_CHECKING

from ..config import Settings
from ..errors import MemoryBudgetError, OneKVError
from ..models import DEFAULT_MODEL
from . import options

if TYPE_CHECKING:
    from ..llm import LLM, Message


def define(command: argparse.ArgumentParser) -> None:
    options.define(command, run, "onekv chat --system 'Answer briefly.' --kv-memory 256MiB")
    command.add_argument("--model", default=DEFAULT_MODEL, help=options.MODEL_HELP)
    command.add_argument("--system", type=options.readable, metavar="TEXT", help="instructions for the model")
    options.add_sampling(command)
    options.add_settings(command)


def run(arguments: argparse.Namespace) -> None:
    sampling = options.sampling(arguments)
    settings = options.resolved(Settings, arguments)
    if sys.stdin.isatty() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # Some scripts start what they run with Ctrl-C ignored; to a person at the terminal it is a key of the chat.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    from ..llm import LLM

    with LLM(arguments.model, **vars(settings)) as llm:
        chat(llm, arguments.system, sampling)


def chat(llm: "LLM", system: str | None, sampling: options.Sampling) -> None:
    """Read a line, stream the answer, until the input ends; Ctrl-C at the prompt drops the line."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A stray byte typed or pasted is no reason to end a conversation.
        sys.stdin.reconfigure(errors="replace")
    print(f"{llm.name}. Ctrl-C stops an answer, /new starts over, Ctrl-D exits.", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line == "/new":
            messages = list(start)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(llm, messages, sampling)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(llm: "LLM", messages: "list[Message]", sampling: options.Sampling) -> str | None:
    """Print the answer as it comes; what was stopped is kept as far as it came. None if there is nothing to keep."""
    stream = None
    try:
        stream = llm.stream_chat(messages, **sampling)
        for piece in stream:
            print(piece, end="", flush=True)
    except OneKVError as error:
        hint = "; /new starts over" if isinstance(error, MemoryBudgetError) else ""
        print(f"onekv: {error}{hint}", file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    finally:
        if stream is not None:
            stream.close()
    print()
    return stream.completion.text or None if stream is not None else None
