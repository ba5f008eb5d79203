"""Results as a table for the terminal, and as a report in Markdown and HTML.

The first figure of a scenario decides who wins. Every scenario ends with a sentence: who won, by how much, and what
bounds it.
"""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...tables import table
from ...units import format_size
from .measure import Result, Results
from .scenarios import SCENARIOS, Figure, Scenario


def shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "B":
        return f"-{format_size(-value)}" if value < 0 else format_size(value)
    return f"{value:.2f} {unit}" if abs(value) < 100 else f"{value:.0f} {unit}"


def rows(results: Results) -> list[list[str]]:
    """Scenario and figure, contender, median, spread over the rounds."""
    found = []
    for name, contenders in results.items():
        for figure, about in SCENARIOS[name].figures.items():
            for contender, result in contenders.items():
                values = result.values(figure)
                if values:
                    low, high = (shown(each, about.unit) for each in (min(values), max(values)))
                    median, spread = shown(result.median(figure), about.unit), f"{low} to {high}" if values[1:] else ""
                    found.append([f"{name}: {about.title}", contender, median, spread])
    return found


def sentence(name: str, contenders: Mapping[str, Result]) -> str:
    """Who won, by how much, and what bounds it."""
    scenario = SCENARIOS[name]
    figure, about = next(iter(scenario.figures.items()))
    medians = {who: median for who, each in contenders.items() if (median := each.median(figure)) is not None}
    if len(medians) < 2:
        missing = ", ".join(
            f"{who}: {each.skipped or 'no figures'}" for who, each in contenders.items() if who not in medians
        )
        return f"Nothing to compare with ({missing})." if missing else "Nothing to compare with."
    ranked = sorted(medians, key=lambda who: medians[who], reverse=about.more)
    best, second = ranked[:2]
    values = f"{shown(medians[best], about.unit)} against {shown(medians[second], about.unit)}"
    by = _by(medians[best], medians[second], about)
    told = f"{best} is ahead of {second}{by}: {about.title} {values}. It is bound by {scenario.bound}."
    return " ".join([told, *_limits(scenario, contenders), *_kept(scenario, contenders)])


def _limits(scenario: Scenario, contenders: Mapping[str, Result]) -> list[str]:
    """How close those come to what bounds them whose bound is known (`limits`)."""
    return [
        f"{who}: {scenario.figures[figure].title} {shown(median, scenario.figures[figure].unit)}."
        for who, each in contenders.items()
        for figure in ("roofline", "disk")
        if figure in scenario.figures and (median := each.median(figure)) is not None
    ]


def _kept(scenario: Scenario, contenders: Mapping[str, Result]) -> list[str]:
    """Of each contender, whether the figure that must not exceed another one does."""
    if scenario.no_higher is None:
        return []
    figure, other = scenario.no_higher
    title, than = (scenario.figures[name].title for name in (figure, other))
    found = []
    for who, each in contenders.items():
        value, limit = each.median(figure), each.median(other)
        if value is not None and limit is not None:
            does = "does not exceed" if value <= limit else "exceeds"
            values = " and ".join(shown(size, scenario.figures[other].unit) for size in (value, limit))
            found.append(f"{who}: {title} {does} {than} ({values}).")
    return found


def _by(best: float, second: float, about: Figure) -> str:
    """A ratio, where there is one."""
    if best <= 0 or second <= 0:
        return ""
    return f" by {best / second if about.more else second / best:.2f}x"


def remarks(results: Results) -> list[str]:
    """What a reader must know: who was skipped and why, and who answered differently."""
    where: dict[tuple[str, str], list[str]] = {}
    for name, contenders in results.items():
        for who, each in contenders.items():
            if each.skipped:
                where.setdefault((who, each.skipped), []).append(name)
    found = [
        f"{'' if len(names) == len(results) > 1 else ', '.join(names) + ': '}{who} was skipped: {reason}."
        for (who, reason), names in where.items()
    ]
    plain = {name: each for name, each in results.items() if not SCENARIOS[name].needs.variants}
    answers = {(who, each.answer) for contenders in plain.values() for who, each in contenders.items() if each.answer}
    if len({answer for _, answer in answers}) > 1:
        said = "; ".join(sorted({f"{who} answered {answer!r}" for who, answer in answers}))
        found.append(f"Contenders do not run the same model, or not exactly: to a short prompt, {said}.")
    return found


def terminal(results: Results) -> str:
    parts = [table(rows(results), ["", "", "median", "spread"]), ""]
    parts += [f"{name}: {sentence(name, each)}" for name, each in results.items()]
    return "\n".join([*parts, *remarks(results)])


def markdown(about: Mapping[str, Any], results: Results, plots: Mapping[str, list[str]]) -> str:
    """`plots` are names of SVG files for each scenario, light ones first, then dark ones."""
    lines = ["# onekv bench all", "", _about(about), ""]
    for name, contenders in results.items():
        scenario = SCENARIOS[name]
        lines += [f"## {name}: {scenario.about}", "", sentence(name, contenders), ""]
        titles = [f"{about.title}" for about in scenario.figures.values()]
        lines += ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
        for who, result in _measured(contenders):
            cells = [_cell(result, figure, each) for figure, each in scenario.figures.items()]
            lines.append(f"| {who} | " + " | ".join(cells) + " |")
        for light, dark in _pairs(plots.get(name, [])):
            lines += [
                "",
                "<picture>",
                f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">',
                f'<img src="{light}" alt="{name}">',
                "</picture>",
            ]
        lines.append("")
    return "\n".join([*lines, *(f"- {remark}" for remark in remarks(results)), ""])


def _measured(contenders: Mapping[str, Result]) -> list[tuple[str, Result]]:
    """Without those that were skipped: `remarks` has the reason."""
    return [(who, result) for who, result in contenders.items() if result.figures or not result.skipped]


def _cell(result: Result, figure: str, about: Figure) -> str:
    values = result.values(figure)
    if not values:
        return "-"
    spread = f" ({shown(min(values), about.unit)} to {shown(max(values), about.unit)})" if len(values) > 1 else ""
    return shown(result.median(figure), about.unit) + spread


def _pairs(files: list[str]) -> list[tuple[str, str]]:
    return list(zip(files[::2], files[1::2], strict=True))


def _about(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    machine = f"{about['device']}, {about['cores']} cores, {format_size(about['memory'])}, {about['system']}"
    versions = f"Python {about['python']}, {versions}"
    return f"{about['date']}, {about['model']} on {machine}; {versions}; medians of {about['rounds']} round(s)."


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; border: 1px solid #8886; text-align: left; }
img { max-width: 100%; } :root { color-scheme: light dark; }
"""


def page(about: Mapping[str, Any], results: Results, plots: Mapping[str, list[str]]) -> str:
    """The same as `markdown`, as one HTML file next to its plots."""
    parts = [f"<h1>onekv bench all</h1><p>{html.escape(_about(about))}</p>"]
    for name, contenders in results.items():
        scenario = SCENARIOS[name]
        parts.append(f"<h2>{name}: {html.escape(scenario.about)}</h2><p>{html.escape(sentence(name, contenders))}</p>")
        head = "".join(f"<th>{html.escape(each.title)}</th>" for each in scenario.figures.values())
        parts.append(f"<table><tr><th></th>{head}</tr>")
        for who, result in _measured(contenders):
            cells = "".join(f"<td>{_cell(result, figure, each)}</td>" for figure, each in scenario.figures.items())
            parts.append(f"<tr><th>{html.escape(who)}</th>{cells}</tr>")
        parts.append("</table>")
        for light, dark in _pairs(plots.get(name, [])):
            source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            parts.append(f'<picture>{source}<img src="{light}" alt="{name}"></picture>')
    parts += [f"<p>{html.escape(remark)}</p>" for remark in remarks(results)]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>onekv bench all</title><style>{_STYLE}</style>'
    return "\n".join([head, *parts, "</html>\n"])


def write(folder: Path, about: Mapping[str, Any], results: Results, plots: Mapping[str, list[str]]) -> None:
    (folder / "report.md").write_text(markdown(about, results, plots))
    (folder / "report.html").write_text(page(about, results, plots))
