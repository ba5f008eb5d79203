"""The pages of the documentation, and what is fenced in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
PAGES = [*TOP, *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))]


@dataclass(frozen=True)
class Fence:
    page: str
    line: int
    language: str
    text: str


def fences(page: str) -> list[Fence]:
    """Fenced blocks, in order."""
    text = (ROOT / page).read_text()
    return [
        Fence(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def run_examples(page: str, namespace: dict[str, object]) -> int:
    """Run the Python examples of a page one after the other, in one namespace; how many there were."""
    examples = [fence for fence in fences(page) if fence.language == "python"]
    for example in examples:
        exec(compile("\n" * example.line + example.text, page, "exec"), namespace)
    return len(examples)
