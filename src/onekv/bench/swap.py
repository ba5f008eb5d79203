"""Time to first token after a model swap, compared with loading that model in a fresh process.

A model is used twice: as its file or folder, and in mlx-lm's format. The server has room for one of them at a time.
Requests go to both in turn, so that each waits until the other model is unloaded and its own is loaded. The peer is a
process that has imported everything, then loads the model with the same settings and generates one token; its startup
is not counted. Neither has a disk cache. Rounds of both sides alternate; times are in seconds, medians over the rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import OneKVError
from .clients import ServerProcess, http, onekv_server, save

KV_MEMORY = "128MiB"
PROMPT = "The first thing to know about rivers is that"
TIMEOUT_S = 600.0
FRESH = """
import sys, time
from onekv import LLM
import onekv.llm, mlx_lm.models.llama, transformers
try:
    import numba
except ImportError:
    pass
begin = time.perf_counter()
llm = LLM(sys.argv[1], kv_memory=sys.argv[2], progress=False)
llm.generate(sys.argv[3], max_tokens=1)
print("seconds", time.perf_counter() - begin)
llm.close()
"""


@dataclass(frozen=True)
class Round:
    model: str
    swap: float
    fresh: float


def run(arguments: argparse.Namespace) -> None:
    from .decode import about

    http()
    with tempfile.TemporaryDirectory() as folder:
        paths = _paths(arguments.model, Path(folder))
        memory = str(memory_for(paths, KV_MEMORY))
        tables = [f'[models.{name}]\nmodel = "{path}"' for name, path in paths.items()]
        file = Path(folder) / "models.toml"
        file.write_text("\n".join([f"memory = {memory}", f'kv_memory = "{KV_MEMORY}"', *tables]))
        rounds: list[Round] = []
        with onekv_server("file", "--config", str(file)) as server:
            for number in range(arguments.rounds):
                for name in reversed(paths):
                    rounds.append(Round(name, _first_token(server, name), _fresh(paths[name])))
                    print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    for name in paths:
        swap = statistics.median(each.swap for each in rounds if each.model == name)
        fresh = statistics.median(each.fresh for each in rounds if each.model == name)
        print(f"{name:<8} first token after a swap {swap:.2f} s, in a fresh process {fresh:.2f} s: {swap / fresh:.2f}x")
    if arguments.json:
        figures = {**about(arguments.model), "rounds": [asdict(each) for each in rounds]}
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")


def _paths(model: str, folder: Path) -> dict[str, str]:
    """The model's own file or folder, and a folder of it in mlx-lm's format."""
    from ..models import load_model

    loaded = load_model(model)
    target = folder / "folder"
    target.mkdir()
    # A word that no model reads, so that a folder with the same weights is not taken for the same model.
    save(target, loaded.model, {**loaded.config, "copy": 2}, loaded.tokenizer)
    return {"file": str(loaded.path), "folder": str(target)}


def memory_for(paths: dict[str, str], kv_memory: str) -> int:
    """Bytes for the larger of these models, with that budget for KV."""
    from ..config import Settings
    from ..memory.plan import MARGIN
    from ..server.model_settings import ModelSettings
    from ..server.models.planning import plan_model
    from ..server.models.spec import ModelSpec

    settings = Settings(kv_memory=kv_memory)
    specs = [ModelSpec(name, path, settings, ModelSettings(), "lru") for name, path in paths.items()]
    return MARGIN + max(plan_model(spec, 2**36).need for spec in specs)


def _first_token(server: ServerProcess, model: str) -> float:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    begin = time.perf_counter()
    answer = http().post(f"{server.url}/v1/completions", json=body, headers=server.headers, timeout=TIMEOUT_S)
    if answer.status_code != 200:
        raise OneKVError(f"{model} answered {answer.status_code}: {answer.text[:500]}")
    return time.perf_counter() - begin


def _fresh(model: str) -> float:
    command = [sys.executable, "-c", FRESH, model, KV_MEMORY, PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise OneKVError(f"loading {model} in its own process failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.split("seconds")[1])
