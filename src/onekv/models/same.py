"""Whether two files or folders contain the same model, byte by byte, wherever they are."""

import os
from pathlib import Path

from ..errors import ModelFormatError
from .facts import ADAPTER_CONFIG, ADAPTER_WEIGHTS, weight_files

_CHUNK = 1 << 20
# Chunks that are compared before all the others: a model that was trained further often begins as the other one does.
_PLACES = 16
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
# Files that say how a model is used: its tokenizer, chat template and sampling.
_USE = (".json", ".jinja", ".txt", ".model", ".tiktoken")


def same_weights(first: Path, second: Path) -> bool:
    """Of two GGUF files, or two folders in mlx-lm's format with the same config.json. False where one is incomplete."""
    try:
        return _same(_weights(first), _weights(second))
    except (OSError, ModelFormatError):
        # Loading it says what is wrong.
        return False


def same_adapter(first: Path, second: Path) -> bool:
    """Of two folders with an adapter."""
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    try:
        return _same({name: first / name for name in names}, {name: second / name for name in names})
    except OSError:
        return False


def other_use(first: Path, second: Path) -> str | None:
    """Of two folders with the same weights, a file that makes them other models all the same, such as a template."""
    files = [_use(path) for path in (first, second)]
    for name in sorted({*files[0], *files[1]}):
        if name not in files[0] or name not in files[1] or not _same_content(files[0][name], files[1][name]):
            return name
    return None


def _weights(path: Path) -> dict[str, Path]:
    """By name; of a GGUF file, its own does not count."""
    if path.is_file():
        return {"": path}
    return {file.name: file for file in (path / _CONFIG, *weight_files(path))}


def _use(path: Path) -> dict[str, Path]:
    files = path.iterdir() if path.is_dir() else ()
    return {file.name: file for file in files if file.suffix in _USE and file.name not in (_CONFIG, _INDEX)}


def _same(first: dict[str, Path], second: dict[str, Path]) -> bool:
    return first.keys() == second.keys() and all(_same_content(first[name], second[name]) for name in first)


def _same_content(first: Path, second: Path) -> bool:
    if os.path.samefile(first, second):
        return True
    size = first.stat().st_size
    if size != second.stat().st_size:
        return False
    with first.open("rb") as one, second.open("rb") as other:

        def same(at: int) -> bool:
            one.seek(at)
            other.seek(at)
            return one.read(_CHUNK) == other.read(_CHUNK)

        places = range(0, size, max(_CHUNK, size // _PLACES))
        return all(map(same, places)) and all(map(same, range(0, size, _CHUNK)))
