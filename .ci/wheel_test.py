"""Builds the wheel, or takes the one that is given, installs it into a bare environment and uses it there.

The environment is new and sees nothing but what pip brings for the wheel and its extras: first `cpu`, with which all
modules that need no other extra must load and answer, then the others. The model is the default one, from the user's
cache or fetched into it. Needs pip 22.3 and nothing else.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# The extra that modules need, by the beginning of their names; the longest counts. All others need `cpu` alone.
NEEDS = {
    "onekv.server": "server",
    "onekv.server.events": "events",
    "onekv.tiers.remote.valkey": "remote",
    "onekv.tiers.remote.objects": "remote",
    "onekv.cli.watch": "top",
}
# Imports the modules that need an extra.
IMPORT_ALL = """
import importlib, json, pkgutil, sys
import onekv
needs, wanted = json.loads(sys.argv[1]), sys.argv[2]
count = 0
for module in pkgutil.walk_packages(onekv.__path__, "onekv."):
    rooms = [room for room in needs if (module.name + ".").startswith(room + ".")]
    if module.name != "onekv.__main__" and needs.get(max(rooms, key=len, default=""), "cpu") == wanted:
        importlib.import_module(module.name)
        count += 1
print(count, "modules of", onekv.__path__[0])
"""


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """What the command prints; ends the test if its exit status is another."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    if done.returncode != status:
        sys.exit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def check(correct: bool, message: str) -> None:
    if not correct:
        sys.exit(message)


def build(folder: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_files(wheel: Path) -> str:
    """All files of the package, data included, and no others."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "src/onekv", cwd=ROOT).splitlines()
    expected = {line.removeprefix("src/") for line in listed if (ROOT / line).exists()}
    found = set(zipfile.ZipFile(wheel).namelist())
    information = f"onekv-{PROJECT['version']}.dist-info/"
    package = {name for name in found if not name.startswith(information)}
    check(package == expected, f"the wheel differs from src/onekv in {sorted(package ^ expected)}")
    check("onekv/py.typed" in package, "py.typed is not in the wheel")
    check(f"{information}licenses/LICENSE" in found, "LICENSE is not in the wheel")
    data = sorted({Path(name).suffix for name in package} - {".py"})
    return (
        f"{len(found)} files, {wheel.stat().st_size:,} bytes; beside .py: {' '.join(suffix or '-' for suffix in data)}"
    )


def smoke(wheel: Path, folder: Path) -> None:
    environment = folder / "environment"
    venv.create(environment)
    python, onekv = environment / "bin" / "python", environment / "bin" / "onekv"

    def install(extra: str) -> None:
        """And import all that needs it."""
        # Not all of what comes with it is ever imported, so it is compiled on first use.
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
        run(*pip, f"onekv[{extra}] @ {wheel.as_uri()}", cwd=folder)
        step(f"pip install onekv[{extra}]")
        step(run(python, "-c", IMPORT_ALL, json.dumps(NEEDS), extra, cwd=folder).strip())

    install("cpu")
    version = run(onekv, "--version", cwd=folder).strip()
    check(version == f"onekv {PROJECT['version']}", f"onekv --version says {version!r}")
    check("full attention" in run(onekv, "plan", "--kv-memory", "64MiB", cwd=folder), "onekv plan shows no plan")
    prompt = ("The capital of France is", "--max-tokens", "8", "--kv-memory", "64MiB")
    answer = run(onekv, "generate", *prompt, cwd=folder)
    check("Paris" in answer, f"onekv generate says {answer!r}")
    step("onekv --version, plan, generate")
    for extra in dict.fromkeys(NEEDS.values()):
        install(extra)


_started = time.monotonic()


def step(text: str) -> None:
    print(f"{time.monotonic() - _started:5.1f} s  {text}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="onekv-wheel-") as name:
        made = Path(sys.argv[1]).resolve() if sys.argv[1:] else build(Path(name))
        step(f"{made.name}: {check_files(made)}")
        smoke(made, Path(name))
        step("the wheel is good")
