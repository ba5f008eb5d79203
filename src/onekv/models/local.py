"""The models on this machine: in OneKV's own cache folder (GGUF files), in the Hugging Face hub's cache, or elsewhere.

Their descriptions are read from their files, without MLX and without reading weights.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from huggingface_hub import CachedRepoInfo, HFCacheInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from ..errors import FetchError, ModelFormatError
from . import fetch
from .facts import context_length, model_facts, read_json, weight_files
from .gguf_header import read_header

Cache = Literal["onekv", "huggingface"]
OURS: Cache = "onekv"
HUB: Cache = "huggingface"


@dataclass(frozen=True)
class LocalModel:
    """`cache` is None outside of the caches, `path` is the file or folder that is loaded; `bytes` are of all of it."""

    name: str
    cache: Cache | None
    path: Path
    bytes: int
    # Seconds since 1970; systems write it rarely.
    last_used: float
    # Whether no download of it was begun and not ended.
    complete: bool


@dataclass(frozen=True)
class Kind:
    format: str
    architecture: str
    quantization: str
    parameters: int
    context_length: int | None


def cached_models() -> tuple[list[LocalModel], list[str]]:
    """All there are, by name, and why some folders of the hub's cache could not be read."""
    info = _hub_cache()
    warnings = [str(warning) for warning in info.warnings] if info is not None else []
    return sorted([*_ours(), *_of_hub(info)], key=lambda model: model.name.lower()), warnings


def own_model(path: Path) -> LocalModel:
    """One of the user's, outside of the caches."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    stats = [file.stat() for file in files]
    used = max((stat.st_atime for stat in stats), default=0.0)
    return LocalModel(path.name, None, path, sum(stat.st_size for stat in stats), used, True)


def kind_of(path: Path) -> Kind:
    """What a .gguf file or a model's folder is. Raises ModelFormatError if that cannot be told."""
    try:
        return _of_file(path) if path.is_file() else _of_folder(path)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        raise ModelFormatError(f"{error.filename or path} cannot be read: {error.strerror}") from error


def remove(model: LocalModel) -> None:
    """Raises FetchError if it is being fetched, or cannot be removed."""
    if model.cache == OURS:
        fetch.remove(model.path)
        return
    info = _hub_cache()
    if info is None:
        return
    for repo in info.repos:
        if repo.repo_type == "model" and repo.repo_id == model.name:
            # The hub's library knows what it shares with others; a copy of it may have revisions of the same names.
            alone = replace(info, repos=frozenset({repo}))
            alone.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
            # Where a download had only begun there are no revisions.
            if repo.repo_path.exists():
                _remove_folder(repo.repo_path)


def _remove_folder(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise FetchError(f"{error.filename or folder} cannot be removed: {error.strerror}") from error


def _ours() -> Iterator[LocalModel]:
    names = {spec.file_name: name for name, spec in fetch.KNOWN_FILES.items()}
    for file, complete in fetch.fetched().items():
        there = [each for each in (file, file.with_name(f"{file.name}.part")) if each.exists()]
        stats = [each.stat() for each in there]
        size, used = sum(stat.st_size for stat in stats), max(stat.st_atime for stat in stats)
        yield LocalModel(names.get(file.name, file.name), OURS, file, size, used, complete)


def _hub_cache() -> HFCacheInfo | None:
    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None
    except (ValueError, OSError) as error:
        raise FetchError(f"the Hugging Face hub's cache cannot be read: {error}; check HF_HOME") from error


def _of_hub(info: HFCacheInfo | None) -> Iterator[LocalModel]:
    for repo in info.repos if info is not None else ():
        if repo.repo_type != "model":
            continue
        path = _snapshot(repo)
        blobs = repo.repo_path / "blobs"
        begun = [file.stat().st_size for file in blobs.glob("*.incomplete")] if blobs.is_dir() else []
        complete = path is not None and (not begun or _has_weights(path))
        size = repo.size_on_disk + sum(begun)
        yield LocalModel(repo.repo_id, HUB, path or repo.repo_path, size, repo.last_accessed, complete)


def _snapshot(repo: CachedRepoInfo) -> Path | None:
    """The folder that is loaded by the repository's name, else the newest."""
    revisions = sorted(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
    if not revisions:
        return None
    folder = revisions[-1].snapshot_path
    files = sorted(folder.glob("*.gguf"))
    return files[0] if files and not (folder / "config.json").is_file() else folder


def _has_weights(path: Path) -> bool:
    try:
        return path.is_file() or bool(weight_files(path))
    except ModelFormatError:
        return False


def _of_file(path: Path) -> Kind:
    metadata, facts = read_header(path).metadata, model_facts(path)
    architecture = str(metadata.get("general.architecture", "not known"))
    context = metadata.get(f"{architecture}.context_length")
    return Kind(facts.format, architecture, facts.quantization, facts.parameters, int(context) if context else None)


def _of_folder(path: Path) -> Kind:
    config, facts = read_json(path / "config.json"), model_facts(path)
    architecture = str(config.get("model_type", "not known"))
    return Kind(facts.format, architecture, facts.quantization, facts.parameters, context_length(config))
