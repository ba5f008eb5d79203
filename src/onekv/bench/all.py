"""`onekv bench all`: OneKV and others in all scenarios; see `suite`."""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from ..errors import SettingError
from ..units import parse_size
from .clients import http


def run(arguments: argparse.Namespace) -> None:
    from ..memory.plan.device import read_device
    from ..models.loader import local_path
    from .decode import about
    from .suite import plots, report
    from .suite.contenders import Place, running
    from .suite.limits import measure
    from .suite.measure import Suite, make_folders
    from .suite.others import others
    from .suite.scenarios import SCENARIOS
    from .suite.session import Sizes

    http()
    parse_size(arguments.kv_memory, whole=read_device().available, name="--kv-memory")
    folder = Path(arguments.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--out is {arguments.out!r}, which cannot be created: {error.strerror}") from error
    also = others([running(text) for text in arguments.also or ()])
    sizes = Sizes(arguments.context, turns=arguments.turns, clients=arguments.clients)
    names = arguments.scenario or list(SCENARIOS)
    with tempfile.TemporaryDirectory() as files:
        print(f"saving {arguments.model} in mlx-lm's format ...", file=sys.stderr, flush=True)
        folders, file = make_folders(arguments.model, Path(files)), local_path(arguments.model)
        gguf = file if file is not None and file.suffix.lower() == ".gguf" else None
        room = gguf, sizes.clients, sizes.longest
        place = Place(arguments.model, folders, Path(files), arguments.kv_memory, *room)
        limits = measure(arguments.model, ["plain", *SCENARIOS["formats"].needs.variants], Path(files))
        suite = Suite(names, also, arguments.rounds, sizes, place, limits, folder / "results.json")
        how = {"rounds": arguments.rounds, "sizes": vars(sizes), "kv_memory": arguments.kv_memory}
        facts = {**about(arguments.model), **how, "limits": asdict(limits)}
        complete = suite.run(facts)
    drawn = plots.draw(folder, suite.results) if plots.available() else {}
    report.write(folder, facts, suite.results, drawn)
    print(report.terminal(suite.results))
    print(f"\nwritten to {folder}: results.json, report.md, report.html{', plots' if drawn else ''}")
    if not drawn:
        print(plots.INSTALL, file=sys.stderr)
    if not complete:
        raise KeyboardInterrupt
