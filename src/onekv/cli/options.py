"""Arguments that several commands share, and their conversion from text to typed settings."""

import argparse
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

from ..config import Settings, SettingsBase, counted, flag, variable
from ..models import DEFAULT_MODEL

Run = Callable[[argparse.Namespace], int | None]
Kind = TypeVar("Kind", bound=SettingsBase)

MODEL_HELP = f"name, hub id, folder or .gguf file; default: {DEFAULT_MODEL}"


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return command


def define(command: argparse.ArgumentParser, run: Run | None, examples: str, mlx: bool = True) -> None:
    """What it runs, whether that needs MLX, and the examples at the end of its help."""
    command.epilog = f"example:\n  {examples}"
    command.set_defaults(run=run, mlx=mlx)


# Types of arguments


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def readable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        # Bytes that are no text in the user's locale arrive as characters that cannot be written back.
        raise argparse.ArgumentTypeError(f"{text!r} is not valid text") from None
    return text


def add_count(command: argparse.ArgumentParser, name: str, default: int, unit: str, text: str) -> None:
    """A flag for a number of `unit`."""
    said = f"{text}; default: {counted(default, unit)}"
    command.add_argument(name, type=count, default=default, metavar=unit.upper(), help=said)


# Before something is removed


def confirmed(question: str) -> bool:
    """Whether a person says yes."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


# Settings: a flag for each, as text; `resolved` reads them back and converts them.


def add_settings(command: argparse.ArgumentParser, kind: type[SettingsBase] = Settings, title: str = "memory") -> None:
    group = command.add_argument_group(title)
    for each in kind.defined():
        text = f"{each.help}; default: {each.default_text} ({variable(each.name)})"
        # A percent sign has a meaning to argparse.
        action = "append" if each.repeats else "store"
        group.add_argument(flag(each.name), action=action, metavar=each.metavar, help=text.replace("%", "%%"))


def resolved(kind: type[Kind], arguments: argparse.Namespace, file: dict[str, Any] | None = None) -> Kind:
    return kind.resolve({name: getattr(arguments, name) for name in kind.names()}, file)


# Sampling


class Sampling(TypedDict):
    """Keywords of `LLM.stream`."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None


def add_sampling(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")

    def option(name: str, kind: Callable[[str], Any], default: Any, metavar: str, text: str) -> None:
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=text)

    option("--max-tokens", count, 256, "TOKENS", "maximum tokens to generate; default: 256 tokens")
    option("--temperature", float, 0.0, "T", "0 is greedy decoding; default: 0")
    option("--top-p", float, 1.0, "P", "keep the likeliest tokens up to cumulative probability P, 0 to 1; default: 1")
    option("--top-k", int, 0, "TOKENS", "keep this many of the likeliest tokens; default: 0, all")
    option("--min-p", float, 0.0, "P", "drop tokens less likely than P times the best, 0 to 1; default: 0")
    option("--seed", int, None, "N", "makes sampling reproducible; default: none")


def sampling(arguments: argparse.Namespace) -> Sampling:
    """Raises SettingError for a value that cannot be used."""
    from ..engine import Sampling as Checked

    Checked(arguments.temperature, arguments.top_p, arguments.top_k, arguments.min_p, arguments.seed)
    return Sampling(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
    )
