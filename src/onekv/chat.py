"""The interactive chat of the command line."""

import sys
from typing import Any

from .errors import OneKVError
from .llm import LLM, Message


def chat(llm: LLM, system: str | None, sampling: dict[str, Any]) -> None:
    """Read a line, stream the answer, until the input ends; Ctrl-C at the prompt drops the line."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    print(f"{llm.name}. Ctrl-C stops an answer, /new starts over, Ctrl-D leaves.", file=sys.stderr)
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


def _answer(llm: LLM, messages: list[Message], sampling: dict[str, Any]) -> str | None:
    """Print the answer as it comes; what was stopped is kept as far as it came. None if it was refused."""
    try:
        stream = llm.stream_chat(messages, **sampling)
    except OneKVError as error:
        print(f"onekv: {error}", file=sys.stderr)
        return None
    try:
        for piece in stream:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    finally:
        stream.close()
    print()
    return stream.completion.text
