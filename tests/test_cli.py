"""The command as a person meets it: tables, answers, Ctrl-C, and errors of one line without a traceback."""

import io
import json
import math
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from onekv import __version__
from onekv.cli import COMMANDS, main
from onekv.cli.bench import SERVER, SERVERS_NEED
from onekv.config import tomllib
from terminal import PATIENCE, UNINTERRUPTED, Terminal

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
# Those that `SERVERS_NEED` is not about.
BENCHES = ("decode", "reuse", "disk", "index", "quality", "formats", "mlx_lm")
ONEKV = str(Path(sysconfig.get_path("scripts")) / "onekv")

pytestmark = pytest.mark.usefixtures("smollm2_path")


@pytest.fixture
def run(capsys):
    """Runs a command line in this process: its status, output and errors."""

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            status = main(argv)
        except SystemExit as exit:
            status = exit.code
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return status, out, err

    return run


def refused(result: tuple[int, str, str]) -> str:
    """The one line that says why."""
    status, out, err = result
    assert status == 1
    assert out == ""
    assert err.startswith("onekv: ")
    assert err.count("\n") == 1
    return err


# Help


def test_help_and_version_import_no_mlx():
    """In a process of its own, where nothing else has imported it."""
    code = (
        "import sys; from onekv.cli import COMMANDS, main\n"
        "for argv in (['--version'], ['--help'], *([name, '--help'] for name in COMMANDS if name != 'mlx-server')):\n"
        "    try: main(argv)\n"
        "    except SystemExit as exit: assert not exit.code, argv\n"
        "    assert not {'mlx', 'mlx_lm', 'numpy', 'transformers'} & set(sys.modules), argv"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [name for name in COMMANDS if name != "mlx-server"] + ["bench decode", "bench meet", "bench mlx-lm", "bench soak"],
)
def test_help_has_an_example(run, command):
    status, out, _ = run(*command.split(), "--help")
    assert status == 0
    assert f"example:\n  onekv {command}" in out


def test_help_of_the_mlx_server_has_both_programs_flags():
    """In a process of its own: it installs OneKV's classes in mlx-lm."""
    result = subprocess.run([ONEKV, "mlx-server", "--help"], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("onekv mlx-server: --kv-memory SIZE limits KV memory")
    assert "usage: onekv mlx-server" in result.stdout
    for flag in ("--model", "--prompt-cache-bytes", "--port"):
        assert flag in result.stdout
    assert "Traceback" not in result.stderr


def test_help_lists_the_commands_and_examples(run):
    status, out, _ = run("--help")
    assert status == 0
    for command in COMMANDS:
        assert re.search(f"\n    {command}[ \n]", out)
    assert "examples:\n  onekv chat" in out


def test_version(run):
    assert run("--version")[:2] == (0, f"onekv {__version__}\n")


@pytest.mark.parametrize("argv", [[], ["bench"], ["generate"], ["fly"]])
def test_an_incomplete_command_shows_its_usage(run, argv):
    status, _, err = run(*argv)
    assert status == 2
    assert err.startswith("usage: onekv")


# Plan


def test_plan_shows_where_the_memory_goes(run):
    status, out, err = run("plan", "smollm2-135m", "--kv-memory", "256MiB")
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    # 88 blocks of 64 tokens of 45 KiB are what rounds down to 256 MiB.
    assert ["KV", "pool", "247.50", "MiB"] in lines
    assert ["full", "attention", "30", "45.00", "KiB", "88", "5,632"] in lines
    assert ["1,024", "tokens", "5"] in lines
    assert ["4,096", "tokens", "1"] in lines
    assert ["8,192", "tokens", "0"] in lines


def test_plan_counts_a_draft_model(run):
    status, out, _ = run("plan", "--kv-memory", "256MiB", "--draft-model", "smollm2-135m")
    assert status == 0 and "smollm2-135m with smollm2-135m as its draft model" in out
    assert "219.64 MiB" in out and "90.00 KiB" in out


def test_plan_that_cannot_fit_shows_the_table_and_the_reason(run):
    status, out, err = run("plan", "--kv-memory", "4TiB")
    assert status == 1
    assert "KV pool" in out
    assert "onekv: it does not fit: the plan needs " in err
    assert "lower --kv-memory (now 4.00 TiB)" in err


def test_plan_follows_the_variables(run, monkeypatch):
    monkeypatch.setenv("ONEKV_KV_MEMORY", "32MiB")
    monkeypatch.setenv("ONEKV_BLOCK_SIZE", "16")
    _, out, _ = run("plan")
    assert ["full", "attention", "30", "45.00", "KiB", "45", "720"] in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize("command", [["plan"], ["generate", "Hi", "--model"], ["bench", "decode", "--model"]])
def test_an_unknown_model_suggests_a_near_one(run, command):
    assert "no model 'smolm2-135': " in (text := refused(run(*command, "smolm2-135")))
    assert "did you mean smollm2-135m?" in text


def test_a_budget_too_small_for_one_block_is_refused(run):
    assert "--kv-memory is 976.56 KiB, but this model needs at least 2.81 MiB" in refused(
        run("plan", "--kv-memory", "1MB")
    )


# Bad values


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "", "--chat"], "the prompt is empty"),
        (["generate", "Hi", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "Hi", "--temperature", "nan"], "temperature is nan"),
        (["generate", "Hi", "--top-p", "1.5"], "top_p is 1.5"),
        (["chat", "--min-p", "2"], "min_p is 2.0"),
        (["chat", "--top-k", "-2"], "top_k is -2"),
        (["generate", "Hi", "--dtype", "int3"], "--dtype is 'int3'"),
        (["generate", "Hi", "--kv-memory", "lots"], "--kv-memory='lots' is not a size"),
        (["chat", "--block-size", "0"], "--block-size is 0"),
        (["plan", "--max-kv-size", "4"], "is 4; it must be more than 4"),
        (["bench", "decode", "--case", "abc"], "--case is 'abc'"),
        (["bench", "decode", "--case", "0x5"], "--case is '0x5'"),
        (["bench", "decode", "--json", "no/such/folder/x.json"], "--json is 'no/such/folder/x.json'"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(run, argv, text):
    assert text in refused(run(*argv))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["generate", "Hi", "--max-tokens", "0"], "--max-tokens: '0' must be a whole number of at least 1"),
        (["generate", "a\udcffb"], r"prompt: 'a\udcffb' is not valid text"),
        (["chat", "--system", "\udcff"], r"--system: '\udcff' is not valid text"),
        (["generate", "Hi", "--seed", "x"], "--seed: invalid int value: 'x'"),
        (["bench", "decode", "--rounds", "0"], "--rounds: '0' must be a whole number of at least 1"),
        (["bench", "decode", "--tokens", "-4"], "--tokens: '-4' must be a whole number of at least 1"),
        (["bench", "decode", "--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
    ],
)
def test_a_value_that_cannot_be_read_shows_the_usage(run, argv, text):
    status, _, err = run(*argv)
    assert status == 2
    assert text in err


# Generate


def test_generate_reads_the_prompt_from_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("The capital of France is"))
    status, out, err = run("generate", "-", "--max-tokens", "4", "--kv-memory", "32MiB")
    assert (status, err) == (0, "")
    assert "Paris" in out
    assert out.endswith("\n")


@pytest.mark.parametrize(
    ("sent", "text"),
    [(b"", "the prompt is empty"), (b"ab\xff", "standard input is not valid utf-8: invalid byte at offset 2")],
)
def test_generate_refuses_input_that_is_no_prompt(run, monkeypatch, sent, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(sent), encoding="utf-8"))
    assert text in refused(run("generate", "-"))


def test_generate_refuses_a_prompt_longer_than_the_pool(run):
    text = refused(run("generate", "word " * 300, "--kv-memory", "8MB"))
    assert "the prompt has 301 tokens and max_tokens is 256" in text
    assert "the KV pool holds 128" in text
    assert "raise --kv-memory (now 7.63 MiB)" in text


def test_output_that_nobody_reads_is_no_error():
    with subprocess.Popen([ONEKV, "plan"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


# Chat


def test_chat_goes_on_after_a_question_that_does_not_fit(run, monkeypatch):
    questions = f"{'word ' * 300}\n\nWhat is the capital of France?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(questions))
    status, out, err = run("chat", "--kv-memory", "8MB", "--max-tokens", "12")
    assert status == 0
    assert "Paris" in out
    assert "raise --kv-memory (now 7.63 MiB); /new starts over" in err


def ask(chat: Terminal, question: str) -> str:
    chat.sendline(question)
    chat.until(question + "\r\n")
    return chat.until("\r\n> ")


def test_chat_in_a_terminal(terminal):
    """Answers stream; Ctrl-C stops an answer and not the program; /new forgets; Ctrl-D leaves."""
    chat = terminal(ONEKV, "chat", "--kv-memory", "64MiB", "--max-tokens", "300")
    chat.until("smollm2-135m. Ctrl-C stops an answer, /new starts over, Ctrl-D exits.")
    chat.until("> ")
    question = "What is the capital of France?"
    first = ask(chat, question)
    assert "Paris" in first

    # Between printing its prompt and reading, Python's input() does not notice Ctrl-C; no person is that fast.
    time.sleep(0.5)
    chat.sendcontrol("c")
    chat.until("\r\n> ")

    long = "Write a long story about a clockmaker."
    chat.sendline(long)
    chat.until(long + "\r\n")
    chat.expect("(?s).{20}")
    assert "> " not in chat.after
    chat.sendcontrol("c")
    chat.until(" [stopped]\r\n> ")

    chat.sendline("/new")
    chat.until("/new\r\n> ")
    assert ask(chat, question) == first

    chat.sendcontrol("d")
    assert chat.end() == 0


def test_chat_in_a_terminal_takes_ctrl_c_also_where_it_was_ignored(terminal):
    chat = terminal(*UNINTERRUPTED, ONEKV, "chat", "--kv-memory", "32MiB")
    chat.until("\r\n> ")
    time.sleep(0.5)
    chat.sendcontrol("c")
    chat.until("\r\n> ")
    chat.sendcontrol("d")
    assert chat.end() == 0


def test_ctrl_c_that_is_ignored_ends_nothing():
    code = (
        "import signal, sys; from onekv import report; from onekv.cli import main; show = report.print_plan\n"
        "def interrupted(*given):\n    signal.raise_signal(signal.SIGINT); return show(*given)\n"
        "report.print_plan = interrupted; sys.exit(main(['plan']))"
    )
    for before, status in (((), 130), (UNINTERRUPTED, 0)):
        argv = [*before, sys.executable, "-c", code]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert result.returncode == status, result.stderr


def test_ctrl_c_while_the_model_is_loaded_ends_with_one_line():
    code = "import sys; from onekv.cli import main; print('ready', flush=True); sys.exit(main(['chat']))"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert (out, err) == ("", "\nonekv: interrupted\n")


# Figures


def test_bench_decode_writes_its_figures(run, tmp_path):
    file = tmp_path / "result.json"
    status, out, _ = run("bench", "decode", "--case", "2x32", "--tokens", "2", "--rounds", "1", "--json", str(file))
    assert status == 0
    assert out.startswith("batch x context")
    about = json.loads(file.read_text())
    assert (about["model"], about["tokens"], about["rounds"]) == ("smollm2-135m", 2, 1)
    (result,) = about["results"]
    assert (result["batch"], result["context"]) == (2, 32)
    for name in ("prefill_ratio", "decode_ratio", "prefill_tokens_per_s", "decode_peer", "roofline"):
        assert math.isfinite(result[name])
        assert result[name] > 0


def without(packages: Iterable[str], code: str) -> subprocess.CompletedProcess[str]:
    """Python without these packages, as where they are not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(packages)!r})); {code}"
    argv = [sys.executable, "-c", code]
    return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)


def required(requirements: list[str]) -> set[str]:
    """The packages that are imported for `requirements`."""
    return {re.split(r"[<>=; ]", each)[0].replace("-", "_") for each in requirements}


@pytest.mark.parametrize("package", SERVERS_NEED)
@pytest.mark.parametrize("bench", ["serve", "soak"])
def test_a_benchmark_that_needs_more_packages_says_which(bench, package):
    done = without([package], f"from onekv.cli import main; sys.exit(main(['bench', {bench!r}]))")
    line = f"onekv: this benchmark needs {package}; install it with: pip install {SERVERS_NEED[package]}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def test_the_other_benchmarks_need_the_core_install_alone():
    extras = required(PROJECT["project"]["optional-dependencies"]["server"])
    assert {name for name, source in SERVERS_NEED.items() if source == SERVER} == extras
    # huggingface-hub and pypi-simple, which are of the core, bring these.
    more = (extras | required(PROJECT["dependency-groups"]["dev"]) | {"numba"}) - {"httpx2", "h11", "pydantic"}
    modules = ", ".join(f"onekv.bench.{name}" for name in BENCHES)
    done = without(more, f"import {modules}")
    assert done.returncode == 0, done.stderr


def test_demo_holds_three_turns_and_prints_a_table(run):
    status, out, _ = run("demo")
    assert status == 0
    assert out.count("\n> ") == 2
    lines = [line.split() for line in out.splitlines()]
    header = next(i for i, words in enumerate(lines) if words[:3] == ["turn", "prompt", "generated"])
    turns = lines[header + 2 : header + 5]
    assert [words[0] for words in turns] == ["1", "2", "3"]
    assert out.splitlines()[-1].startswith("Next: `onekv serve`")
    prompts = [int(words[1]) for words in turns]
    assert prompts == sorted(set(prompts))
    for words in turns:
        assert all(float(speed) > 0 for speed in words[3:5])
        assert " ".join(words[5:9]) == "109.82 MiB 247.50 MiB"
