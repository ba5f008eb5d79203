"""What `onekv doctor` prints: a verdict, figures, JSON, an exit status, and no secrets."""

import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from onekv.cli import doctor as command
from onekv.cli import main
from onekv.doctor.base import Check, Figure, Finding, Result, Status
from onekv.doctor.checks import CHECKS
from onekv.doctor.model import SHARE
from onekv.doctor.report import as_json, as_text, exit_status, shown, verdict
from onekv.doctor.scrub import MASK, Scrubber, variables
from onekv.doctor.system import of_meminfo, of_swapusage, of_vm_stat, read_memory, sysctl

ROOT = Path(__file__).parents[1]
EXACT = Check("exactness", "", lambda case, notes: None, passed="exact", failed="NOT EXACT")
FLAT = Check("memory", "", lambda case, notes: None, passed="flat", failed="NOT FLAT")
MODEL = Check("model", "", lambda case, notes: None)


def result(check: Check, *findings: Finding, figures: tuple[Figure, ...] = ()) -> Result:
    status = max((finding.status for finding in findings), key=list(Status).index, default=Status.OK)
    return Result(check, status, 1.0, figures, findings)


def warning(text: str = "slow", remedy: str | None = "--port PORT") -> Finding:
    return Finding(Status.WARNING, text, remedy)


# The verdict


def test_a_verdict_in_words() -> None:
    model = result(MODEL, warning(), figures=(Figure(SHARE, 0.9, "share"),))
    results = [result(EXACT), result(FLAT), model]
    assert verdict(results) == "exact, flat; decode 0.90 of what memory allows; 1 warning"
    assert exit_status(results) == 0
    results[0] = result(EXACT, Finding(Status.FAILED, "wrong", "--kernels off"))
    assert verdict(results) == "NOT EXACT, flat; decode 0.90 of what memory allows; 1 check failed; 1 warning"
    assert exit_status(results) == 1
    skipped = [result(EXACT), result(MODEL, Finding(Status.SKIPPED, "no model"))]
    assert verdict(skipped) == "exact; no warnings; 1 skipped"


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (Figure("a", 3 * 2**30, "B"), "3.00 GiB"),
        (Figure("a", 2.5 * 2**20, "B/s"), "2.50 MiB/s"),
        (Figure("a", 2.44e-6, "relative", 5e-5), "2.4e-06 (at most 5.0e-05)"),
        (Figure("a", 65536, "tokens"), "65,536 tokens"),
        (Figure("a", 1234.5, "tokens/s"), "1,234 tokens/s"),
        (Figure("a", 0.4371, "share"), "0.437"),
        (Figure("a", "cpu: AMD EPYC"), "cpu: AMD EPYC"),
    ],
)
def test_figures_have_units(figure: Figure, text: str) -> None:
    assert shown(figure) == text


def test_the_text_names_what_helps() -> None:
    text = as_text([result(MODEL, warning("the port is taken"), figures=(Figure("decode", 40.0, "tokens/s"),))])
    assert "  WARNING: the port is taken\n    to avoid it: --port PORT\n  decode  40 tokens/s" in text
    assert text.endswith("verdict: passed; 1 warning")


def test_json_is_json_whatever_was_measured() -> None:
    read = json.loads(as_json([result(EXACT, figures=(Figure("worst", float("nan"), "relative", 1e-4),))]))
    (check,) = read["checks"]
    assert check["figures"] == [{"name": "worst", "value": "nan", "unit": "relative", "limit": 1e-4}]
    assert read["failed"] is False


# No secrets


def test_names_homes_and_secrets_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/jo.doe")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("ONEKV_API_KEYS", "first-secret,second-secret")
    monkeypatch.setattr(getpass, "getuser", lambda: "jo.doe")
    monkeypatch.setattr(socket, "gethostname", lambda: "joes-mac.local")
    scrub = Scrubber()
    assert scrub("/home/jo.doe/kv and /home/jo.doe, not /home/jo.doe2") == "~/kv and ~, not /home/jo.doe2"
    assert scrub("Bearer hf_abcdefgh; second-secret") == f"Bearer {MASK}; {MASK}"
    assert scrub("valkey://user:pass@joes-mac:6379/0") == f"valkey://{MASK}@HOST:6379/0"
    assert scrub("/Volumes/jo.doe on joes-mac.local") == "/Volumes/USER on HOST"
    assert scrub("[Errno 28] /home/jo.doe/.cache/onekv/kv/lock") == "[Errno 28] ~/.cache/onekv/kv/lock"


def test_variables_are_shown_unless_they_are_secret() -> None:
    found = {
        "ONEKV_KERNELS": "off",
        "ONEKV_DRAFT_TOKENS": "7",
        "ONEKV_API_KEY": "a key of somebody",
        "ONEKV_API_KEYS": "/home/jo/keys",
        "ONEKV_REMOTE_TIER": "valkey://user:pass@host",
        "ONEKV_TIER_SECRET": "x",
        "ONEKV_REMOTE_PASSWORD": "y",
        "ONEKV_NOT_OURS": "who knows",
        "PATH": "/bin",
    }
    shown = {name: value for name, value in variables(found).items() if value != MASK}
    assert shown == {"ONEKV_KERNELS": "off", "ONEKV_DRAFT_TOKENS": "7"}
    assert set(variables(found)) == set(found) - {"PATH"}


def test_nothing_private_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither in the text nor in JSON, wherever it comes from."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ONEKV_API_KEY", "a-very-secret-key")
    monkeypatch.setenv("ONEKV_DISK_CACHE", f"{tmp_path}/kv")
    failed = Finding(Status.FAILED, f"{tmp_path}/kv: a-very-secret-key", f"rm {tmp_path}/kv")
    results = [result(EXACT, failed, figures=(Figure("model", f"{tmp_path}/model"),))]
    for text in (as_text(results), as_json(results)):
        assert str(tmp_path) not in text and "a-very-secret-key" not in text
        assert "~/kv" in text and "~/model" in text


# The operating system


def test_linux_says_how_much_memory_there_is() -> None:
    text = "MemTotal:       100 kB\nMemFree:  1 kB\nMemAvailable:   40 kB\nSwapTotal:  8 kB\nSwapFree:  6 kB\n"
    memory = of_meminfo(text)
    assert (memory.total, memory.available, memory.swap_used) == (102400, 40960, 2048)


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            400000.
Pages inactive:                           20000.
Pages speculative:                         3000.
Pages wired down:                        100000.
Pages purgeable:                            400.
"Translation faults":                 123456789.
"""


def test_so_does_macos() -> None:
    assert of_vm_stat(VM_STAT) == 16384 * 33400
    assert of_swapusage("total = 2048.00M  used = 1024.50M  free = 1023.50M  (encrypted)") == int(1024.5 * 2**20)
    assert of_swapusage("total = 4.00G  used = 1.50G  free = 2.50G") == int(1.5 * 2**30)


def test_this_system_says_it() -> None:
    memory = read_memory()
    assert memory.available is not None and 0 < memory.available <= memory.total
    assert sysctl("no.such.value") is None


# The command


def test_the_command_knows_all_checks() -> None:
    assert [check.name for check in CHECKS] == list(command.NAMES)
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert [name for name in command.NAMES if f"`{name}`" not in page] == []


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "onekv", "doctor", *arguments]
    return subprocess.run(argv, text=True, capture_output=True, env={**os.environ, **variables}, timeout=120)


def test_text_and_json(tmp_path: Path) -> None:
    done = doctor("--check", "clock", "--check", "machine", "--json", str(tmp_path / "found.json"), ONEKV_KERNELS="off")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[4:6]] == ["machine", "clock"]
    assert "ONEKV_KERNELS=off" in done.stdout and done.stdout.splitlines()[-1].startswith("verdict: ")
    assert "[1/2] machine" in done.stderr and "[2/2] clock" in done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [check["name"] for check in found["checks"]] == ["machine", "clock"]


def test_json_on_stdout_and_a_failed_check(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    done = doctor("--check", "disk", "--json", "-", "--disk-cache", str(tmp_path))
    assert done.returncode == 1, done.stderr
    (check,) = json.loads(done.stdout)["checks"]
    assert check["status"] == "failed" and check["findings"][0]["remedy"].startswith("--disk-cache DIR")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--check", "magic"], "invalid choice: 'magic'"),
        (["--kernels", "none"], "--kernels is 'none'"),
        (["--port", "x"], "--port is 'x'"),
        (["--json", "/no/such/folder/x"], "there is no folder '/no/such/folder'"),
        (["smollm2-135m", "--check", "disk"], "--check leaves out the check called model"),
    ],
)
def test_a_malformed_command(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    said = capsys.readouterr().out
    assert "onekv doctor mlx-community/Qwen3-8B-4bit" in said and "Exit status: 0" in said
