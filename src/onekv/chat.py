"""The interactive chat of the command line."""

import io
import sys
from typing import Any

from .errors import MemoryBudgetError, OneKVError
from .llm import LLM, Message


def chat(llm: LLM, system: str | None, sampling: dict[str, Any]) -> None:
    """Read a line, stream the answer, until the input ends; Ctrl-C at the prompt drops the line."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A stray byte typed or pasted is no reason to end a conversation.
        sys.stdin.reconfigure(errors="replace")
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
