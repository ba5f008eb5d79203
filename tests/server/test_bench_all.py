"""`onekv bench all` with real servers and a tiny model; what it measures is not asserted, but for what must hold."""

import asyncio
import json
import platform
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from several import start_several

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from gguf_files import Spec, write

from conftest import stop_server
from onekv.bench.clients import Answer, resident
from onekv.bench.decode import about
from onekv.bench.soak import save_tiny
from onekv.bench.suite.contenders import Needs, Place, Running, running, variants
from onekv.bench.suite.limits import Limits, measure
from onekv.bench.suite.measure import Result, Results
from onekv.bench.suite.others import others
from onekv.bench.suite.report import markdown, remarks, sentence
from onekv.bench.suite.scenarios import MOST_ANSWERS, SCENARIOS, _decoded, _speed
from onekv.bench.suite.session import Session, Sizes
from onekv.bench.suite.timeline import Phase, Timeline, resident_by_ps
from onekv.errors import OneKVError, SettingError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def run(tiny: str, out: Path, *flags: str) -> tuple[str, dict[str, Any]]:
    sizes = ["--rounds", "1", "--context", "60", "--turns", "2", "--clients", "2", "--kv-memory", "16MiB"]
    command = [sys.executable, "-m", "onekv", "bench", "all", "--model", tiny, "--out", str(out), *sizes, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((out / "results.json").read_text())["results"]


def test_models_are_swapped_and_servers_restarted(tiny: str, tmp_path: Path) -> None:
    said, results = run(tiny, tmp_path / "out", "--scenario", "swap", "--scenario", "restart")
    for name in ("swap", "restart"):
        # Others are named, whether they are here or not.
        assert list(results[name]) == ["OneKV", "mlx-lm", "llama.cpp", "vllm-metal", "oMLX"]
        assert all(results[name][who]["skipped"] for who in ("llama.cpp", "vllm-metal", "oMLX"))
        for found in (results[name][who] for who in ("OneKV", "mlx-lm")):
            assert found["spread"]["first"] == [found["median"]["first"]] * 2
            assert not found["skipped"] and found["median"]["first"] > 0 and found["median"]["peak"] > 0
            # Of both processes, where there were two.
            assert found["timeline"]["process"] and found["timeline"]["mlx"]
        assert results[name]["OneKV"]["answer"] == results[name]["mlx-lm"]["answer"]
        assert re.search(rf"^{name}: .+ is ahead of .+\. It is bound by .+\.$", said, re.MULTILINE)
    report = (tmp_path / "out" / "report.md").read_text()
    for who in ("vllm-metal", "oMLX"):
        assert f"{who} was skipped: not installed." in said and f"- {who} was skipped: not installed." in report
    assert results["restart"]["OneKV"]["median"]["disk"] > 0 and "disk" not in results["restart"]["mlx-lm"]["median"]
    assert re.search(r"OneKV: reading its KV at the raw speed of the disk \d.* s\.", said)
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"report.md", "report.html", "swap-bars-light.svg", "restart-memory-dark.svg"} <= files
    assert "swap-bars-dark.svg" in (tmp_path / "out" / "report.html").read_text()


def test_a_second_prefill_has_no_higher_peak_and_other_servers_take_part(tiny: str, tmp_path: Path) -> None:
    other = start_several(tmp_path, {"a": {"model": tiny}}, "--hot-only", "on")
    try:
        flags = ("--scenario", "phases", "--scenario", "restart", "--also", f"other={other.url}/v1")
        said, results = run(tiny, tmp_path / "out", *flags)
    finally:
        stop_server(other)
    figures = results["phases"]["OneKV"]["median"]
    assert 0 < figures["second_peak"] <= figures["first_peak"]
    for who in ("OneKV", "mlx-lm"):
        found = results["phases"][who]
        assert all(found["median"][f"{name}_peak"] > 0 for name in ("load", "first", "decode", "after", "second"))
        # From the start of the process, not from when its server answers: Python alone takes less than with MLX.
        line, (name, begin, end) = found["timeline"], found["timeline"]["phases"][0]
        assert name == "load"
        for samples in (line["process"], line["footprint"]):
            inside = [size for at, size in samples if begin <= at <= end]
            assert inside[0] < max(inside) / 2
    assert "OneKV: MLX's peak during the second prefill does not exceed MLX's peak during the first prefill (" in said
    assert results["phases"]["other"]["median"]["first"] > 0 and "peak" not in results["phases"]["other"]["median"]
    assert "cannot be restarted" in results["restart"]["other"]["skipped"]


@pytest.mark.parametrize("text", ["nothing", "=http://127.0.0.1:1", "x=ftp://127.0.0.1", "x=http://127.0.0.1:1"])
def test_a_server_that_does_not_answer_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--also"):
        running(text)


# Stands in for llama.cpp's server, with its arguments.
LLAMA_SERVER = """#!{python}
import argparse, os
parser = argparse.ArgumentParser(allow_abbrev=False)
for flag in ("--model", "--host", "--port", "--parallel", "--ctx-size"):
    parser.add_argument(flag, required=True)
told = parser.parse_args()
assert told.parallel == "3" and told.ctx_size == "600"
own = ["serve", told.model, "--host", told.host, "--port", told.port, "--hot-only", "on", "--kv-memory", "1MiB"]
os.execv("{python}", ["{python}", "-m", "onekv", *own])
"""


def test_llama_cpp_is_started_where_it_is_installed_and_the_model_is_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "m.gguf", Spec())
    place = Place("m", (), tmp_path, "1MiB", tmp_path / "m.gguf", 3, 200)
    llama, *rest = others([])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no llama-server on PATH" in (llama.why_not(Needs(), place) or "")
    program = tmp_path / "llama-server"
    program.write_text(LLAMA_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    assert llama.why_not(Needs(), place) is None and llama.why_not(Needs(restarts=True), place) is None
    assert llama.why_not(Needs(), replace(place, gguf=None)) == "the model is not a GGUF file"
    assert llama.why_not(Needs(models=2), place) and llama.why_not(SCENARIOS["formats"].needs, place)
    with llama.serve(Needs(), place) as server:
        assert server.process is not None and server.get("/v1/models")["data"]
    assert server.process.poll() is not None
    # What cannot be started says what to do, once it is there.
    assert [each.why_not(Needs(), place) for each in rest] == ["not installed"] * 2
    program.rename(tmp_path / "omlx")
    assert "--also oMLX=URL" in (rest[1].why_not(Needs(), place) or "")
    with pytest.raises(OneKVError, match="not started"):
        rest[1].serve(Needs(), place)
    # A running one takes its place.
    assert [each.name for each in others([Running("Llama.cpp")])] == ["Llama.cpp", "vllm-metal", "oMLX"]


def test_what_bounds_a_speed_is_told_with_it(tiny: str, tmp_path: Path) -> None:
    limits = Limits(memory=1000.0, disk=50.0, weights=80, tokens={"plain": 2, "q8": 1})
    decode = {"speed": 10.0, "rows": 4, "row_tokens": 2.5}
    # A step reads 80 + 4 * 2.5 * 2 bytes and gives 4 tokens: 40 tokens a second, of which 10 are a quarter.
    assert limits.of("OneKV", decode) == {"roofline": 25.0}
    assert limits.of("OneKV q8", decode) == {"roofline": 22.5} and limits.of("mlx-lm q8", decode) == {}
    assert limits.of("OneKV", {"first": 1.0, "restored": 100}) == {"disk": 4.0}
    told = sentence("concurrent", {"OneKV": Result([{**decode, "roofline": 25.0}]), "x": Result([{"speed": 1.0}])})
    assert told.endswith("OneKV: share of the speed at which memory can be read 25.00 %.")
    found = measure(tiny, ["plain", "q8"], tmp_path)
    assert found.memory > 2**20 and found.disk > 2**20 and found.weights > 0 and not list(tmp_path.iterdir())
    assert 0 < found.tokens["q8"] < found.tokens["plain"]


def test_variants_take_part_by_name() -> None:
    assert [each.name for each in variants(Needs(), [])] == ["OneKV", "mlx-lm"]
    names = [each.name for each in variants(SCENARIOS["formats"].needs, [])]
    assert names == ["OneKV plain", "mlx-lm plain", "OneKV q8", "mlx-lm q8", "OneKV q4", "mlx-lm q4"]


def test_peaks_are_those_of_a_phase() -> None:
    line = Timeline([(0.0, 5), (1.0, 10), (2.0, 30), (3.0, 20)], [(0.5, 1, 0, 1), (1.5, 2, 0, 8), (2.6, 3, 0, 9)])
    line.phases = [Phase("first", 0.9, 1.1), Phase("second", 2.5, 3.5)]
    assert line.growth() is None
    line.ready()
    assert line.growth() == 10 and line.peak() == 30 and line.peak("first") == 10 and line.peak("second") == 20
    # The sample at 1.5 has the peak since 0.5, with all of the first phase; that at 2.6 the one since 1.5.
    assert line.mlx_peak("second") == 9 and line.mlx_peak() == 9 and line.mlx_peak("none") is None
    assert line.mlx_peak("first") == 8
    # What the process says of itself counts, where it does.
    line.footprint = [(1.0, 12), (3.0, 40)]
    line.ready()
    assert line.peak() == 40 and line.peak("first") == 12 and line.growth() == 0


def test_what_a_process_writes_of_itself_is_read_once(tmp_path: Path) -> None:
    line, file = Timeline(), tmp_path / "mlx.jsonl"
    file.write_text("[1.0, 10, 20, 30, 99]\n[2.0, 11")
    line.read(file)
    file.write_text("[1.0, 10, 20, 30, 99]\n[2.0, 11, 21, 31, 98]\n")
    line.read(file)
    assert line.mlx == [(1.0, 10, 20, 30), (2.0, 11, 21, 31)] and line.footprint == [(1.0, 99), (2.0, 98)]


def test_what_a_process_takes_is_told_by_the_system() -> None:
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        one, other = resident(process.pid), resident_by_ps(process.pid)
        process.communicate(b"\n")
    # It may have been reading, still, when it was looked at first.
    assert one is not None and other is not None and abs(one - other) < one / 10 and 2**20 < one < 2**30
    assert resident(process.pid) is None and resident_by_ps(process.pid) is None


def test_the_report_names_who_won_and_who_was_skipped() -> None:
    results: Results = {
        "reuse": {"OneKV": Result([{"first": 0.5}, {"first": 0.25}, {"first": 1.0}], answer="red")},
        "concurrent": {"OneKV": Result([{"speed": 10.0}]), "mlx-lm": Result([{"speed": 40.0}])},
    }
    results["reuse"]["mlx-lm"] = Result([{"first": 1.0}], answer="blue")
    results["reuse"]["other"] = Result(skipped="it failed: no")
    assert sentence("reuse", results["reuse"]).startswith(
        "OneKV is ahead of mlx-lm by 2.00x: time to first token 0.50 s"
    )
    assert sentence("concurrent", results["concurrent"]).startswith("mlx-lm is ahead of OneKV by 4.00x")
    rose = {
        "OneKV": Result([{"first": 1.0, "first_peak": 2.0**20, "second_peak": 2.0**21}]),
        "x": Result([{"first": 2}]),
    }
    assert "OneKV: MLX's peak during the second prefill exceeds MLX's peak during the first" in sentence("phases", rose)
    told = remarks(results)
    assert "reuse: other was skipped: it failed: no." in told
    gone = Result(skipped="not installed")
    everywhere = {name: {**each, "gone": gone} for name, each in results.items()}
    assert [each for each in remarks(everywhere) if "gone" in each] == ["gone was skipped: not installed."]
    assert any("OneKV answered 'red'" in each and "mlx-lm answered 'blue'" in each for each in told)
    facts = {**about("m"), "device": "c", "versions": {"mlx": "1"}, "rounds": 3}
    assert facts["cores"] >= 1 and facts["memory"] > 2**28 and facts["python"] == platform.python_version()
    text = markdown(facts, results, {})
    assert "| OneKV | 0.50 s (0.25 s to 1.00 s) |" in text
    machine = rf"m on c, {facts['cores']} cores, \S+ \S+, {re.escape(facts['system'])}; Python 3\.\S+, mlx 1"
    assert re.search(machine, text)
    assert (
        results["reuse"]["OneKV"].spread("first") == (0.25, 1.0) and results["reuse"]["other"].spread("first") is None
    )


class Brief:
    """A server that ends its answers after three tokens."""

    sizes, text = Sizes(), random.Random(0)

    async def ask(self, messages: list[dict[str, str]], max_tokens: int, model: int = 0) -> Answer:
        assert messages[-1]["role"] == "user" and all(each["content"] for each in messages)
        return Answer("three tokens", 10, 3, 0.5, 1.5)


def test_a_speed_is_that_of_many_tokens() -> None:
    messages: list[dict[str, str]] = []
    answers = asyncio.run(_decoded(cast(Session, Brief()), messages, 10))
    assert [each["role"] for each in messages] == ["user", "assistant"] * 4
    assert _speed(answers) == 2.0
    # It does not go on for ever.
    assert len(asyncio.run(_decoded(cast(Session, Brief()), [], 1000))) == MOST_ANSWERS


def test_ctrl_c_reports_what_has_been_measured(tiny: str, tmp_path: Path) -> None:
    """Also while a server is being started; nothing is left running."""
    sizes = ["--rounds", "1", "--context", "60", "--kv-memory", "16MiB", "--scenario", "reuse"]
    command = [sys.executable, "-m", "onekv", "bench", "all", "--model", tiny, "--out", str(tmp_path), *sizes]
    where: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    process = subprocess.Popen(command, text=True, **where)
    results = tmp_path / "results.json"
    # OneKV has been measured: mlx-lm's server is next.
    while not results.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted; what has been measured so far is reported" in said and "Traceback" not in said
    found = json.loads(results.read_text())["results"]["reuse"]
    assert found["OneKV"]["figures"] and not found["mlx-lm"]["figures"]
    groups = subprocess.run(["ps", "-eo", "pgid="], capture_output=True, text=True).stdout.split()
    assert groups and str(process.pid) not in groups


def test_a_budget_that_is_none_is_refused_before_anything_is_measured(tiny: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onekv", "bench", "all", "--model", tiny, "--kv-memory", "lots"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "--kv-memory='lots' is not a size" in done.stderr and not list(tmp_path.iterdir())
