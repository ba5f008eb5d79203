"""The same benchmarks with this checkout and with an earlier commit, in turns, in processes of their own.

    python benchmarks/beside_commit.py COMMIT
    python benchmarks/beside_commit.py COMMIT --bench decode --bench serve --turns 3 --json FILE

Each line is one figure of OneKV's own, median over the turns. The ratio is above 1 where this checkout is faster or
needs less. `peer` is the same ratio for mlx-lm, whose code is that of both sides: what it differs from 1 is noise.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from onekv.tables import table

ROOT = Path(__file__).parents[1]
BENCHES = {
    "decode": "--case 1x1024 --case 4x512 --tokens 24 --rounds 1",
    "reuse": "--size 100MB --rounds 1",
    "serve": "--turns 5 --clients 4 --rounds 1",
    "disk": "--tokens 2000 --rounds 3",
    "formats": "--context 2048 --format q8 --format q4 --format tq4 --rounds 1",
}
# Which of a result's figures are compared, and what their peer's is called, now or earlier.
MORE_IS_BETTER = {
    "prefill_tokens_per_s": ("prefill_peer", "prefill_mlx_lm"),
    "decode_tokens_per_s": ("decode_peer", "decode_mlx_lm"),
    "speed": ("raw",),
}
LESS_IS_BETTER: dict[str, tuple[str, ...]] = {
    "seconds": ("seconds_mlx_lm",),
    "peak": ("peak_mlx_lm",),
    "first_after_restart": (),
    "total": (),
    "first_mean": (),
    "process": (),
    "resident": (),
}
COMPARED = MORE_IS_BETTER | LESS_IS_BETTER


def figures(result: Any, name: str = "") -> Iterator[tuple[str, str, float, float | None]]:
    """Name, key, OneKV's figure and the peer's, of every figure that is compared."""
    if isinstance(result, list):
        for entry in result:
            label = next((entry[key] for key in ("format", "what") if key in entry), None)
            if label is None:
                label = "x".join(str(entry[key]) for key in ("batch", "context", "tokens") if key in entry)
            yield from figures(entry, f"{name} {label}")
    elif "onekv" in result:
        for key in LESS_IS_BETTER.keys() & result["onekv"].keys():
            yield f"{name} {key}", key, result["onekv"][key], result["mlx_lm"][key]
    else:
        for key, value in result.items():
            if isinstance(value, dict | list) and key not in ("rounds", "versions"):
                yield from figures(value, name if key in ("results", "speeds") else f"{name} {key}")
            elif isinstance(value, float | int) and key in COMPARED:
                peer = next((result[other] for other in COMPARED[key] if other in result), None)
                yield f"{name} {key}", key, value, peer


def run(bench: str, source: Path, out: Path) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    command = [sys.executable, "-m", "onekv", "bench", bench, *BENCHES[bench].split(), "--json", str(out)]
    done = subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {source}:\n{done.stderr[-2000:]}")
    return json.loads(out.read_text())


def compare(bench: str, turns: list[tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
    then: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    now: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    keys = {}
    for before, after in turns:
        for side, result in ((then, before), (now, after)):
            for name, key, ours, peer in figures(result):
                side[name].append((ours, peer))
                keys[name] = key
    for name in then.keys() & now.keys():
        old, new = (statistics.median(ours for ours, _ in side[name]) for side in (then, now))
        peers = [[peer for _, peer in side[name] if peer] for side in (then, now)]
        more = keys[name] in MORE_IS_BETTER
        ratio = new / old if more else old / new
        peer_ratio = None
        if all(peers):
            peer_old, peer_new = map(statistics.median, peers)
            peer_ratio = peer_new / peer_old if more else peer_old / peer_new
        yield {"figure": f"{bench}{name}", "then": old, "now": new, "ratio": ratio, "peer": peer_ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--bench", action="append", choices=BENCHES, help="default: all; may be repeated")
    parser.add_argument("--turns", type=int, default=2, help="per side; default: 2")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    benches = arguments.bench or list(BENCHES)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder, "earlier")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(earlier), arguments.commit], check=True, capture_output=True)
        try:
            progress = tqdm(total=len(benches) * arguments.turns * 2, unit="run")
            for bench in benches:
                turns = []
                for _ in range(arguments.turns):
                    pair = []
                    for source in (earlier, ROOT):
                        progress.set_description(f"{bench}, {'then' if source == earlier else 'now'}")
                        pair.append(run(bench, source, Path(folder, "result.json")))
                        progress.update()
                    turns.append((pair[0], pair[1]))
                rows += sorted(compare(bench, turns), key=lambda row: row["figure"])
            progress.close()
        finally:
            subprocess.run([*git, "remove", "--force", str(earlier)], check=True, capture_output=True)
    cells = [
        [row["figure"], *(f"{row[key]:.4g}" for key in ("then", "now")), f"{row['ratio']:.2f}",
         f"{row['peer']:.2f}" if row["peer"] else ""]
        for row in rows
    ]  # fmt: skip
    print(table(cells, ["figure", "then", "now", "ratio", "peer"]))
    if arguments.json:
        described = {"commit": arguments.commit, "turns": arguments.turns, "benches": {b: BENCHES[b] for b in benches}}
        arguments.json.write_text(json.dumps({**described, "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
