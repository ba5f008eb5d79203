"""The actions of `onekv models`: list the models in the caches, show one, download one, remove one.

`ls` and `rm` do not import MLX. `show` needs it for the plan, which is made from the shapes of the weights.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..config import Settings, there_are
from ..errors import FetchError, MemoryBudgetError, ModelFormatError, ModelNotFoundError, OneKVError, SettingError
from ..interrupts import uninterrupted
from ..models.facts import weight_files
from ..models.fetch import KNOWN_FILES, fetch
from ..models.local import Kind, LocalModel, cached_models, kind_of, own_model, remove
from ..tables import table
from ..units import format_seconds, format_size
from .options import confirmed

_PLACES = {"onekv": "OneKV's", "huggingface": "Hugging Face's", None: "none"}


@dataclass(frozen=True)
class Listed:
    """A model, what it is, and why that is unknown or it cannot be used, if so."""

    model: LocalModel
    kind: Kind | None
    problem: str | None

    def as_json(self) -> dict[str, Any]:
        kind = asdict(self.kind) if self.kind is not None else dict.fromkeys(field.name for field in fields(Kind))
        return asdict(self.model) | {"path": str(self.model.path)} | kind | {"problem": self.problem}


# Looking


def ls(as_json: bool) -> None:
    models, warnings = cached_models()
    for warning in warnings:
        print(f"onekv: left out: {' '.join(warning.split())}", file=sys.stderr)
    found = [_listed(model) for model in models]
    if as_json:
        print(json.dumps([each.as_json() for each in found], indent=2))
    elif not found:
        print("there are no models in the caches; onekv models pull NAME downloads one")
    else:
        total = format_size(sum(each.model.bytes for each in found))
        print(f"{table([_cells(each) for each in found], _HEADER)}\n\n{total} in total")


_HEADER = ["model", "architecture", "weights", "context", "size", "last used", "cache"]


def _cells(listed: Listed) -> list[str]:
    model, kind = listed.model, listed.kind
    context = f"{kind.context_length:,}" if kind is not None and kind.context_length is not None else "-"
    return [
        model.name,
        kind.architecture if kind is not None else "-",
        "incomplete" if not model.complete else kind.quantization if kind is not None else "-",
        context,
        format_size(model.bytes),
        f"{format_seconds(max(0.0, time.time() - model.last_used))} ago",
        _PLACES[model.cache],
    ]


def _listed(model: LocalModel) -> Listed:
    if not model.complete:
        return Listed(model, None, f"it is incomplete; onekv models pull {model.name} resumes the download")
    try:
        return Listed(model, kind_of(model.path), None)
    except ModelFormatError as error:
        return Listed(model, None, str(error))


def show(name: str, as_json: bool) -> None:
    listed = _listed(_find(name))
    planned = _plan(listed)
    if as_json:
        print(json.dumps(listed.as_json() | {"plan": planned}, indent=2))
        return
    model, kind = listed.model, listed.kind
    rows = [["path", str(model.path)], ["cache", _PLACES[model.cache]], ["size on disk", format_size(model.bytes)]]
    if kind is not None:
        rows += [
            ["format", kind.format],
            ["architecture", kind.architecture],
            ["parameters", f"{kind.parameters:,}"],
            ["most weights in", kind.quantization],
            ["context", "unknown" if kind.context_length is None else f"{kind.context_length:,} tokens"],
        ]
    rows += [["problem", planned["problem"]]] if planned["problem"] else _plan_rows(planned)
    width = max(len(label) for label, _ in rows)
    print(f"{model.name}\n\n" + "\n".join(f"{label.ljust(width)}  {value}" for label, value in rows))


def _plan_rows(planned: dict[str, Any]) -> list[list[str]]:
    longest = planned["longest"]
    return [
        ["weights in memory", format_size(planned["weights"])],
        ["KV memory here", f"{format_size(planned['kv'])} of {format_size(planned['available'])} free"],
        ["tokens in it", "no limit" if longest is None else f"{longest:,}"],
    ]


def _plan(listed: Listed) -> dict[str, Any]:
    """As `onekv plan` makes it with the settings of the environment: bytes, or why there is no plan."""
    nothing = {"device": None, "available": None, "weights": None, "kv": None, "longest": None}
    if listed.problem is not None:
        return nothing | {"problem": listed.problem}
    from ..memory.plan import make_plan
    from ..models import context_length, load_for

    settings = Settings.resolve({})
    try:
        loaded = load_for(str(listed.model.path), settings, lazy=True, progress=False)
        plan = make_plan(loaded.model, settings, context_length(loaded.config))
    except OneKVError as error:
        return nothing | {"problem": str(error)}
    found = {
        "device": plan.device.name,
        "available": plan.device.available,
        "weights": plan.weights,
        "kv": plan.pool_bytes + plan.state_bytes,
        "longest": plan.longest if plan.longest < 2**62 else None,
    }
    try:
        plan.check()
    except MemoryBudgetError as error:
        return found | {"problem": str(error)}
    return found | {"problem": None}


def _find(name: str) -> LocalModel:
    """The model of a cache that has the name or path, or a file or folder elsewhere. Raises ModelNotFoundError."""
    models, path = cached_models()[0], Path(name).expanduser()
    for model in models:
        if model.name == name or (path.exists() and path.resolve() == model.path.resolve()):
            return model
    if path.exists():
        return own_model(path.absolute())
    known = [model.name for model in models]
    there = there_are(name, known) if known else "there are none; onekv models pull NAME downloads one"
    raise ModelNotFoundError(f"no model {name!r} in the caches; {there}")


# Changing


def pull(name: str) -> None:
    if name in KNOWN_FILES:
        path = fetch(KNOWN_FILES[name])
    elif Path(name).expanduser().exists():
        raise SettingError(f"{name} is a local file or folder; there is nothing to download")
    else:
        path = _from_hub(name)
    files = [path] if path.is_file() else weight_files(path)
    print(f"{name} is available: {format_size(sum(file.stat().st_size for file in files))} of weights in {path}")


def _from_hub(name: str) -> Path:
    from ..models.limits import import_mlx_lm

    import_mlx_lm()
    from ..models.hub import hub_folder, is_hub_id

    if not is_hub_id(name):
        known = list(KNOWN_FILES)
        raise ModelNotFoundError(
            f"{name!r} is neither a hub id such as org/name nor a known name; {there_are(name, known)}"
        )
    folder = hub_folder(name)
    try:
        # A hub that cannot be reached leaves what an earlier download has begun.
        weight_files(folder)
    except ModelFormatError as error:
        raise FetchError(f"{error}; if its download was interrupted, check the network and pull it again") from error
    return folder


def rm(name: str, sure: bool) -> int | None:
    """Asks a person who is not `sure`; 1 if the answer is not yes."""
    model = _find(name)
    if model.cache is None:
        raise SettingError(f"{name} is not in a model cache, so it is not removed")
    size = format_size(model.bytes)
    if not sure and not confirmed(f"remove {model.name}, {size}, from {_PLACES[model.cache]} cache?"):
        print("nothing was removed")
        return 1
    with uninterrupted():
        remove(model)
    print(f"{model.name} was removed; {size} freed")
    return None
