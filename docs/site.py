"""Builds the documentation as a site, into build/site, and fails on any warning: `make site`."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "site-source"
# Pages, and what they show or link to.
COPIED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "docs/*", "benchmarks/*")


def main() -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.is_file():
                copy = SOURCE / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
