"""Rounds of all scenarios and contenders, interleaved; each measurement with a fresh server.

Before anything is measured, a contender should give the same greedy answer to a short prompt as the others: otherwise
it does not run the same model, which is reported with its figures. Results are saved after each measurement, so that
Ctrl-C loses only the measurement in flight.
"""

import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import OneKVError
from ..clients import http
from .contenders import Contender, Place, variants
from .limits import Limits
from .scenarios import SCENARIOS
from .session import Figures, Session, Sizes
from .timeline import Timeline


@dataclass
class Result:
    """One contender in one scenario: figures of every round, or why there are none."""

    figures: list[Figures] = field(default_factory=list)
    # Of the last round.
    timeline: Timeline = field(default_factory=Timeline)
    answer: str = ""
    skipped: str = ""

    def median(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.median(values) if values else None

    def spread(self, name: str) -> tuple[float, float] | None:
        values = self.values(name)
        return (min(values), max(values)) if values else None

    def values(self, name: str) -> list[float]:
        return [each[name] for each in self.figures if name in each]


# By scenario, then by contender.
Results = dict[str, dict[str, Result]]


class Suite:
    def __init__(
        self,
        names: list[str],
        others: list[Contender],
        rounds: int,
        sizes: Sizes,
        place: Place,
        limits: Limits,
        saved: Path,
    ) -> None:
        """`saved` is the file for results."""
        self._limits = limits
        self._scenarios = {name: SCENARIOS[name] for name in names}
        self._others, self._rounds, self._sizes, self._place, self._saved = others, rounds, sizes, place, saved
        self.results: Results = {name: {} for name in names}

    def run(self, about: dict[str, Any]) -> bool:
        """Whether everything was measured: Ctrl-C ends it early."""
        from tqdm.auto import tqdm

        plan = list(self._plan())
        try:
            with tqdm(plan, unit="measurement", desc="onekv bench all") as bar:
                for number, name, contender in bar:
                    bar.set_postfix_str(f"round {number + 1}, {name}, {contender.name}")
                    self._measure(number, name, contender)
                    self.save(about)
        except KeyboardInterrupt:
            if not any(result.figures for each in self.results.values() for result in each.values()):
                raise
            tqdm.write("interrupted; what has been measured so far is reported")
            return False
        return True

    def _plan(self) -> Iterator[tuple[int, str, Contender]]:
        """Whoever is first in one round is last in the next."""
        for number in range(self._rounds):
            for name, scenario in self._scenarios.items():
                contenders = variants(scenario.needs, self._others)
                for contender in contenders if number % 2 == 0 else contenders[::-1]:
                    result = self.results[name].setdefault(contender.name, Result())
                    result.skipped = contender.why_not(scenario.needs, self._place) or ""
                    if not result.skipped:
                        yield number, name, contender

    def _measure(self, number: int, name: str, contender: Contender) -> None:
        scenario, result = self._scenarios[name], self.results[name][contender.name]
        if result.skipped:
            return
        with tempfile.TemporaryDirectory() as files:
            place = replace(self._place, files=Path(files))
            # The same texts for all contenders.
            session = Session(contender, scenario.needs, place, self._sizes, f"{name} {number}")
            try:
                figures, result.answer = session.measure(scenario.run)
            except (OneKVError, http().HTTPError) as error:
                result.skipped = f"it failed: {' '.join(str(error).split())[:300]}"
                return
        result.figures.append(figures | self._limits.of(contender.name, figures))
        result.timeline = session.timeline

    def save(self, about: dict[str, Any]) -> None:
        found = {
            scenario: {
                name: {
                    "figures": result.figures,
                    "median": {figure: result.median(figure) for figure in (result.figures or [{}])[0]},
                    "spread": {figure: result.spread(figure) for figure in (result.figures or [{}])[0]},
                    "answer": result.answer,
                    "skipped": result.skipped,
                    "timeline": result.timeline.as_json(),
                }
                for name, result in contenders.items()
            }
            for scenario, contenders in self.results.items()
        }
        unfinished = self._saved.with_suffix(".new")
        unfinished.write_text(json.dumps({**about, "results": found}) + "\n")
        unfinished.replace(self._saved)


def make_folders(model: str, folder: Path) -> tuple[Path, Path]:
    """The model twice as mlx-lm reads it. The second has links to the first's files, and a config.json that differs in
    a word which no model reads, so that no server takes it for the same one.
    """
    from ...models import load_model
    from ..clients import save

    first, second = folder / "first", folder / "second"
    for each in (first, second):
        each.mkdir()
    loaded = load_model(model)
    save(first, loaded.model, dict(loaded.config), loaded.tokenizer)
    for file in first.iterdir():
        if file.name == "config.json":
            config = json.loads(file.read_text())
            (second / file.name).write_text(json.dumps({**config, "copy": 2}))
        else:
            _link(file, second / file.name)
    return first, second


def _link(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, target)
