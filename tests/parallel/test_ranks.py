"""Two real ranks: the tokens of one, half of the memory, and one end for both."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from program import run
from ranks import Ranks, free_ports

from architectures import ARCHITECTURES, build
from onekv.bench.clients import save
from onekv.models import DEFAULT_MODEL, load_model
from onekv.tiers.maintain import verify

SETTINGS: dict[str, Any] = {"block_size": 16, "max_batch": 4, "prefill_chunk": 32, "kv_memory": "1MiB"}
PROMPTS = [[(7 * i + 3 * j) % 120 + 1 for j in range(length)] for i, length in enumerate((70, 41, 9))]
PROGRAM = str(Path(__file__).with_name("program.py"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The folder, in mlx-lm's format, of an architecture with changes to its configuration."""
    tokenizer: Any = load_model(DEFAULT_MODEL, lazy=True, progress=False).tokenizer

    def folder(name: str, **changes: Any) -> str:
        path = tmp_path_factory.mktemp(name)
        config = {"model_type": ARCHITECTURES[name].module, **ARCHITECTURES[name].config, **changes}
        save(path, build(name, **changes), config, tokenizer)
        return str(path)

    return folder


@pytest.fixture(scope="module")
def both(folders: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any, Any]]:
    """What each job gives on one rank, on rank 0 of two, and on rank 1; all jobs of two ranks in one launch."""
    disks = {ranks: str(tmp_path_factory.mktemp("disk") / "kv") for ranks in (1, 2)}

    def job(model: str, ranks: int, **settings: Any) -> dict[str, Any]:
        """A batch, then two prompts that continue one of it: the second one needs a copy of its last block."""
        later = [[*PROMPTS[0], 5], [*PROMPTS[0], 9]]
        return {"model": model, "settings": {**SETTINGS, **settings}, "prompts": PROMPTS, "later": later}

    def on_disk(model: str, ranks: int, share: int) -> dict[str, Any]:
        """Evicts what the batch has left in a small pool, and then reads it from disk."""
        settings = {"kv_memory": share // ranks, "disk_cache": disks[ranks], "disk_policy": "write_through"}
        long = [[(11 * i + j) % 120 + 1 for j in range(150)] for i in range(3)]
        return {**job(model, ranks, **settings), "later": [*long, [*PROMPTS[0], 5], [*long[0], 5]], "forget": True}

    wide, known = folders("qwen3", intermediate_size=8192), folders("llama", vocab_size=49152)
    models = {name: folders(name) for name in ("llama", "qwen3_moe", "gpt_oss", "llama-dynamic-rope", "qwen3_5")}
    jobs: dict[str, Callable[[int], dict[str, Any]]] = {
        "llama": lambda ranks: on_disk(models["llama"], ranks, 2**18),
        "qwen3": lambda ranks: job(wide, ranks),
        "qwen3_moe": lambda ranks: job(models["qwen3_moe"], ranks),
        "gpt_oss": lambda ranks: job(models["gpt_oss"], ranks),
        # It cannot decode a batch, which is found out by an exception while a pass is built.
        "llama-dynamic-rope": lambda ranks: job(models["llama-dynamic-rope"], ranks),
        "qwen3_5": lambda ranks: on_disk(models["qwen3_5"], ranks, 2**19),
        # Its keys are calibrated, with text of a tokenizer that knows more tokens than the other models.
        "llama tq4": lambda ranks: job(known, ranks, kv_format="tq4"),
    }
    alone = {name: run(make(1)) for name, make in jobs.items()}
    told = {name: make(2) for name, make in jobs.items()}
    told["qwen3"]["prediction"] = alone["qwen3"]["tokens"][: len(PROMPTS)]
    # The last: the other rank exits.
    told["refused"] = job(folders("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3), 2)
    file = tmp_path_factory.mktemp("jobs") / "jobs.json"
    file.write_text(json.dumps(list(told.values())))
    with Ranks(PROGRAM, str(file)) as ranks:
        statuses = ranks.wait()
        assert statuses == [0, 0], ranks.err(0) + ranks.err(1)
        results = [[json.loads(line) for line in ranks.out(rank).splitlines()] for rank in range(2)]
    others = [*results[1], None]
    return {name: (alone.get(name), *pair) for name, *pair in zip(told, results[0], others, strict=True)}


def test_two_ranks_give_the_tokens_of_one(both: dict[str, Any]) -> None:
    for name, (one, two, _) in both.items():
        if name != "refused":
            assert (one["ranks"], two["ranks"]) == (1, 2)
            assert two["tokens"] == one["tokens"] and two["cached"] == one["cached"], name
            assert two["uncompiled"], name
    assert "tensor parallel" in both["qwen3"][1]["uncompiled"]


def test_cached_prefixes_are_found_in_memory_and_on_the_disks_of_both_ranks(both: dict[str, Any]) -> None:
    assert both["gpt_oss"][1]["cached"] == [0, 0, 0, 70, 70]
    assert both["llama"][1]["evicted"] > 0
    for name in ("llama", "qwen3_5"):
        found = both[name][1]
        assert found["cached"][-2:] == [64, 144], (name, found)


def test_speculation_works(both: dict[str, Any]) -> None:
    assert both["qwen3"][1]["accepted"] > 0


def test_a_rank_never_holds_much_more_than_half_of_the_weights(both: dict[str, Any]) -> None:
    """Not even while they are loaded."""
    one, *two = both["qwen3"]
    assert one["peak"] > 12 * 2**20, "the weights are most of it"
    assert max(rank["peak"] for rank in two) < 0.65 * one["peak"], (one["peak"], two)


def test_heads_that_cannot_be_divided_are_refused(both: dict[str, Any]) -> None:
    refused = both["refused"][1]["refused"]
    assert "6 query heads and 3 KV heads" in refused and "mlx.launch -n" in refused


ENDLESS_PROMPT = [j % 120 + 1 for j in range(70)]
# Generates for ever, after it has said what of its prompt was cached.
ENDLESS = """
import sys
import onekv
from onekv import LLM
model, disk, limit = sys.argv[1:]
llm = LLM(model, step_limit=float(limit), disk_cache=disk, disk_policy="write_through", kv_memory="1MiB", block_size=16)
prompt = [j % 120 + 1 for j in range(70)]
print("cached", llm.generate(prompt, 4, ignore_eos=True).cached_tokens, flush=True)
llm.engine.prefix.tiers[0].flush()
print("flushed", flush=True)
while True:
    llm.generate(prompt, 200, ignore_eos=True)
"""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("endless") / "kv"


@pytest.mark.parametrize(("rank", "cached"), [(0, 0), (1, 64)])
def test_a_rank_that_is_killed_ends_the_other(folders: Callable[..., str], disk: Path, rank: int, cached: int) -> None:
    """And the disk caches are whole: the next launch finds what this one has stored."""
    with Ranks("-c", ENDLESS, folders("llama"), str(disk), "300") as ranks:
        _wait_for_endless(ranks)
        ranks.processes[rank].kill()
        other = 1 - rank
        assert ranks.processes[other].wait(timeout=120) == 70, ranks.err(other)
        assert f"rank {other} of 2 exits: rank {rank} is gone" in ranks.err(other)
        assert ranks.out(0).startswith(f"cached {cached}\n")
    for each in range(2):
        report = verify(disk / f"rank-{each}-of-2")
        assert report.checked > 0 and report.corrupt == report.missing == 0, report


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_ends_the_other_after_the_step_limit(
    folders: Callable[..., str], tmp_path: Path, rank: int
) -> None:
    """And ends, too, if it ever continues."""
    with Ranks("-c", ENDLESS, folders("llama"), str(tmp_path / "kv"), "15") as ranks:
        _wait_for_endless(ranks)
        ranks.processes[rank].send_signal(signal.SIGSTOP)
        other = 1 - rank
        # Whichever is noticed first: that nothing comes from it, or that a pass does not end.
        assert ranks.processes[other].wait(timeout=120) == 70, ranks.err(other)
        reason = (
            rf"rank {other} of 2 exits: (rank {rank} has been silent for|a pass over \d+ tokens takes) more than 15 s"
        )
        assert re.search(reason, ranks.err(other)), ranks.err(other)
        ranks.processes[rank].send_signal(signal.SIGCONT)
        assert ranks.processes[rank].wait(timeout=120) == 70, ranks.err(rank)


def _wait_for_endless(ranks: Ranks) -> None:
    while "flushed" not in ranks.out(0):
        assert [process.poll() for process in ranks.processes] == [None, None], ranks.err(0) + ranks.err(1)
        time.sleep(0.05)


def test_the_program_of_the_documentation(folders: Callable[..., str]) -> None:
    """docs/scale.md: only rank 0 gets past `LLM(...)`; the other one exits with status 0."""
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    program = program.replace('"./model"', repr(folders("llama", vocab_size=49152))).replace("4GiB", "1MiB")
    with Ranks("-c", program) as ranks:
        assert ranks.wait() == [0, 0], ranks.err(0) + ranks.err(1)
        assert ranks.out(0).startswith("2 ") and ranks.out(1) == ""


def test_a_server_under_mlx_launch(folders: Callable[..., str], disk: Path, tmp_path: Path) -> None:
    """It answers, computes log probabilities of a prompt on all ranks, and ends with a signal to any of them.

    What one rank has on disk and the other has lost is not used.
    """
    shutil.rmtree(disk / "rank-1-of-2")
    first_port, port = free_ports(2)
    launcher = [str(Path(sys.executable).with_name("mlx.launch")), "-n", "2", "--backend", "ring"]
    flags = ["--port", str(port), "--disk-cache", str(disk), "--kv-memory", "1MiB", "--block-size", "16"]
    server = [sys.executable, "-m", "onekv", "serve", folders("llama"), *flags]
    command = [*launcher, "--starting-port", str(first_port), "--", *server]
    log = tmp_path / "log"
    with log.open("wb") as output:
        # Without a pipe: it polls its standard input without a pause if that is at its end.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        launched = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        while "  curl " not in log.read_text():
            assert launched.poll() is None, log.read_text()
            time.sleep(0.1)
        assert "sharded over 2 ranks" in log.read_text()
        body = {"model": "default", "prompt": ENDLESS_PROMPT, "max_tokens": 2}
        url = f"http://127.0.0.1:{port}/v1/completions"
        plain = httpx.post(url, json=body, timeout=120).json()
        assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert httpx.get(f"http://127.0.0.1:{port}/admin/cache", timeout=120).json()["tiers"][0]["hits"] == 0
        scored = httpx.post(url, json={**body, "logprobs": 1, "echo": True}, timeout=120).json()
        logprobs = scored["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs[0] is None and len(logprobs) == len(ENDLESS_PROMPT) + 2
        assert all(value < 0 for value in logprobs[1:])
        os.kill(_rank_1(launched.pid), signal.SIGTERM)
        assert launched.wait(timeout=120) == 0
        # The launcher would tell of a rank that has not ended with status 0.
        assert "WARN" not in log.read_text() and "Traceback" not in log.read_text(), log.read_text()
    finally:
        launched.kill()


def _rank_1(launcher: int) -> int:
    """The process that was started second."""
    children = Path(f"/proc/{launcher}/task").glob("*/children")
    pids = sorted(int(pid) for file in children for pid in file.read_text().split())
    (found,) = [pid for pid in pids if "MLX_RANK=1" in Path(f"/proc/{pid}/environ").read_text()]
    return found
