"""Bars of a scenario's first figure, and memory over time, as SVG: each for a light and for a dark page."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .measure import Result, Results
from .scenarios import SCENARIOS

INSTALL = "plots need matplotlib; install it with: pip install 'onekv[bench]'"
_COLOURS = ("#3b82c4", "#d98032", "#5aa469", "#a4669b", "#8c8c8c", "#c4a93b")
_MIB = 2**20


def available() -> bool:
    return find_spec("matplotlib") is not None


def draw(folder: Path, results: Results) -> dict[str, list[str]]:
    """Names of the files by scenario: light and dark, alternating."""
    import matplotlib

    matplotlib.use("svg")
    # Texts stay texts, and the same figures give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "onekv"}
    found: dict[str, list[str]] = {}
    for name, contenders in results.items():
        measured = {who: result for who, result in contenders.items() if result.figures}
        if measured:
            found[name] = [*_both(folder, f"{name}-bars", _bars, name, measured)]
        if any(result.timeline.process for result in measured.values()):
            found[name] += _both(folder, f"{name}-memory", _memory, name, measured)
    return found


def _both(folder: Path, file: str, plot: Any, *what: Any) -> list[str]:
    import matplotlib.pyplot as plt

    names = []
    for shade, style in (("light", "default"), ("dark", "dark_background")):
        with plt.style.context(style):
            figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
            plot(axes, *what)
            names.append(f"{file}-{shade}.svg")
            figure.savefig(folder / names[-1], transparent=True, metadata={"Date": None})
            plt.close(figure)
    return names


def _bars(axes: Any, name: str, contenders: dict[str, Result]) -> None:
    figure, about = next(iter(SCENARIOS[name].figures.items()))
    scale, unit = (_MIB, "MiB") if about.unit == "B" else (1, about.unit)
    known = {who: result for who, result in contenders.items() if result.values(figure)}
    medians = [(result.median(figure) or 0.0) / scale for result in known.values()]
    low = [median - min(each.values(figure)) / scale for median, each in zip(medians, known.values(), strict=True)]
    high = [max(each.values(figure)) / scale - median for median, each in zip(medians, known.values(), strict=True)]
    axes.barh(list(known), medians, xerr=[low, high], color=_COLOURS[: len(known)], ecolor="#888888")
    axes.invert_yaxis()
    axes.set_xlabel(f"{about.title}, {unit}; {'more' if about.more else 'less'} is better")


def _memory(axes: Any, name: str, contenders: dict[str, Result]) -> None:
    for colour, (who, result) in zip(_COLOURS, contenders.items(), strict=False):
        samples = result.timeline.taken
        if not samples:
            continue
        begin = samples[0][0]
        axes.plot([at - begin for at, _ in samples], [size / _MIB for _, size in samples], color=colour, label=who)
        mlx = [(at - begin, active / _MIB) for at, active, _, _ in result.timeline.mlx]
        if mlx:
            axes.plot(*zip(*mlx, strict=True), color=colour, linewidth=0.7, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB; dotted: MLX, active")
    axes.legend(frameon=False)
