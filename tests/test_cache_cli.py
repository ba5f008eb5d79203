"""`onekv cache` as a person meets it, on folders that a real disk tier filled."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parent / "tiers"))

from disk_parts import files, open_tier, store

from onekv.cli import main
from onekv.cli.cache_folder import ago
from terminal import PATIENCE, UNINTERRUPTED
from test_cli import ONEKV, refused

ACTIONS = ("ls", "stats", "verify", "clear")


@pytest.fixture
def run(capsys):
    """Runs `onekv cache` in this process: its status, output and errors."""

    def run(*argv: str | Path) -> tuple[int, str, str]:
        status = main(["cache", *map(str, argv)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return status, out, err

    return run


@pytest.fixture
def folder(tmp_path) -> Path:
    """Twelve blocks of one model, three of another."""
    root = tmp_path / "kv"
    for name, count in (("big", 12), ("small", 3)):
        with opened(root, name) as tier:
            store(tier, count)
    return root


@contextmanager
def opened(root: Path, name: str):
    tier = open_tier(root, fingerprint=f"weights of {name}", name=name)
    try:
        yield tier
    finally:
        tier.close()


def rows(out: str) -> list[list[str]]:
    """The cells of a table's body; cells are two blanks apart."""
    lines = out.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[rule + 1 :]]


def everything(root: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in root.rglob("*")}


def in_use(root: Path) -> subprocess.Popen:
    """Another process that has the folder, as a server does."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent / 'tiers')!r})\n"
        "from pathlib import Path; from disk_parts import open_tier, store\n"
        "tier = open_tier(Path(sys.argv[1]), fingerprint='weights of big', name='big'); store(tier, 2, first=50)\n"
        "print('ready', flush=True); sys.stdin.read(); tier.close()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


# Looking


def test_ls_shows_models_with_sizes_and_ages(run, folder):
    status, out, err = run("ls", "--disk-cache", folder)
    assert (status, err) == (0, "")
    assert out.startswith(f"{folder}\n")
    listed = {row[0]: row[1:] for row in rows(out)}
    assert set(listed) == {"big", "small"}
    size = sum(path.stat().st_size for path in files(folder)) * 12 // 15
    identity, blocks, shown, oldest, used = listed["big"]
    assert (blocks, shown) == ("12", f"{size / 1024:.2f} KiB")
    assert any(path.name.startswith(identity) for path in folder.iterdir())
    assert oldest.endswith(("now", "ago")) and used.endswith(("now", "ago"))


def test_ls_as_json(run, folder):
    before = time.time()
    _, out, _ = run("ls", "--disk-cache", folder, "--json")
    listed = {each["name"]: each for each in json.loads(out)}
    assert listed["small"]["blocks"] == listed["small"]["parts"] == 3
    assert (folder / listed["small"]["hash"]).is_dir()
    assert before - 60 < listed["big"]["created"] <= listed["big"]["used"] <= time.time()
    assert listed["big"]["bytes"] == 4 * listed["small"]["bytes"]


def test_stats_add_up(run, folder):
    _, out, _ = run("stats", "--disk-cache", folder, "--json")
    stats = json.loads(out)
    size = sum(path.stat().st_size for path in files(folder))
    assert (stats["models"], stats["blocks"], stats["files"], stats["bytes"]) == (2, 15, 15, size)
    assert stats["written_today_bytes"] == size
    assert stats["index_bytes"] > 0 and stats["free_bytes"] > 0
    status, out, _ = run("stats", "--disk-cache", folder)
    assert status == 0
    assert ["blocks", "15"] in rows(out)


def test_an_empty_cache_is_shown_as_empty(run, tmp_path):
    open_tier(tmp_path / "kv").close()
    run("clear", "--disk-cache", tmp_path / "kv", "--yes")
    status, out, _ = run("ls", "--disk-cache", tmp_path / "kv")
    assert (status, out) == (0, f"the disk cache {tmp_path / 'kv'} is empty\n")
    assert ["last used", "-"] in rows(run("stats", "--disk-cache", tmp_path / "kv")[1])


def test_the_default_folder_and_its_variable(run, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("ONEKV_DISK_CACHE", str(folder))
    assert "small" in run("ls")[1]
    monkeypatch.delenv("ONEKV_DISK_CACHE")
    monkeypatch.setenv("ONEKV_CACHE_DIR", str(tmp_path))
    # OneKV's own is `kv` in there.
    assert "small" in run("ls")[1]
    assert "small" in run("ls", "--disk-cache", "auto")[1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "now"), (5, "5 s ago"), (60, "1 min ago"), (3 * 3600 + 1700, "3 h ago"), (86400 * 9, "9 d ago"), (-5, "now")],
)
def test_ages(seconds, text):
    assert ago(1000.0 + seconds, 1000.0) == text


# While a server uses the folder


def test_looking_works_beside_a_server_and_changing_names_its_pid(run, folder):
    with in_use(folder) as server:
        assert ["big", "14"] in [[row[0], row[2]] for row in rows(run("ls", "--disk-cache", folder)[1])]
        assert json.loads(run("stats", "--disk-cache", folder, "--json")[1])["blocks"] == 17
        for action in ("verify", "clear"):
            assert f"is in use by another process (pid {server.pid})" in refused(run(action, "--disk-cache", folder))
        assert len(files(folder)) == 17
        server.stdin.close()
    assert run("verify", "--disk-cache", folder)[0] == 0


# Wrong folders


@pytest.mark.parametrize("action", ACTIONS)
def test_a_folder_that_is_not_there_is_refused_and_not_made(run, tmp_path, action):
    assert f"there is no disk cache at {tmp_path / 'no'}" in refused(run(action, "--disk-cache", tmp_path / "no"))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("has", ["nothing", "a file of someone"])
def test_a_foreign_folder_is_refused_and_left_as_it_is(run, tmp_path, action, has):
    if has != "nothing":
        (tmp_path / "thesis.txt").write_text("important")
    before = everything(tmp_path)
    assert f"{tmp_path} is not a OneKV disk cache" in refused(run(action, "--disk-cache", tmp_path))
    assert everything(tmp_path) == before


def test_a_file_instead_of_a_folder_is_refused(run, tmp_path):
    (tmp_path / "file").touch()
    assert "is not a OneKV disk cache" in refused(run("ls", "--disk-cache", tmp_path / "file"))


# Checking


def test_verify_of_a_sound_cache(run, folder):
    before = set(files(folder))
    status, out, err = run("verify", "--disk-cache", folder)
    assert (status, err) == (0, "")
    assert f"{folder}: 15 files (" in out
    assert "no problems found" in out
    assert set(files(folder)) == before


def test_verify_removes_what_is_damaged_and_says_so(run, folder):
    some = files(folder)
    content = bytearray(some[0].read_bytes())
    content[-7] ^= 1
    some[0].write_bytes(content)
    some[1].unlink()
    (some[2].parent / (some[2].name + ".tmp")).write_bytes(b"half")
    (some[3].parent / "mine.txt").touch()
    status, out, _ = run("verify", "--disk-cache", folder)
    assert status == 1
    assert "1 corrupt, 1 missing, 1 orphaned" in out
    assert f"not a OneKV file, left in place: {some[3].parent / 'mine.txt'}" in out
    assert not some[0].exists()
    status, out, _ = run("verify", "--disk-cache", folder)
    assert (status, "13 files" in out, "no problems found" in out) == (0, True, True)


def test_a_damaged_index_is_named_by_ls_and_repaired_by_verify(run, folder):
    (folder / "index.db").write_bytes(b"garbage" * 1000)
    for action in ("ls", "stats"):
        assert "`onekv cache verify` repairs it" in refused(run(action, "--disk-cache", folder))
    assert run("verify", "--disk-cache", folder)[0] == 1
    assert "is empty" in run("ls", "--disk-cache", folder)[1]
    assert run("verify", "--disk-cache", folder)[0] == 0


def test_verify_shows_its_progress_on_a_terminal_alone(folder, terminal):
    checking = terminal(ONEKV, "cache", "verify", "--disk-cache", str(folder))
    checking.until("checking: ")
    checking.until("15/15")
    checking.until("no problems found")


# Emptying


def test_clear_removes_everything_and_says_what(run, folder):
    size = sum(path.stat().st_size for path in files(folder))
    status, out, _ = run("clear", "--disk-cache", folder, "--yes")
    assert (status, out) == (0, f"15 files ({size / 1024:.2f} KiB) removed from {folder}\n")
    assert files(folder) == []
    assert run("verify", "--disk-cache", folder)[0] == 0


@pytest.mark.parametrize("by", ["name", "id"])
def test_clear_of_one_model_leaves_the_others(run, folder, by):
    wanted = "small"
    if by == "id":
        wanted = next(row[1] for row in rows(run("ls", "--disk-cache", folder)[1]) if row[0] == "small")
    _, out, _ = run("clear", "--disk-cache", folder, "--model", wanted, "--yes")
    assert out.startswith("3 files (")
    assert [row[0] for row in rows(run("ls", "--disk-cache", folder)[1])] == ["big"]
    assert run("verify", "--disk-cache", folder)[0] == 0


@pytest.mark.parametrize(("name", "text"), [("smal", "has no model 'smal'; see `onekv cache ls`"), ("", "is empty")])
def test_clear_of_an_unknown_model_removes_nothing(run, folder, name, text):
    assert text in refused(run("clear", "--disk-cache", folder, "--model", name, "--yes"))
    assert len(files(folder)) == 15


@pytest.mark.parametrize(
    ("keys", "status", "left"), [("n\n", 1, 15), ("\n", 1, 15), ("\x04", 1, 15), ("\x03", 130, 15), ("y\n", 0, 3)]
)
def test_clear_asks_on_a_terminal(folder, terminal, keys, status, left):
    clearing = terminal(ONEKV, "cache", "clear", "--disk-cache", str(folder), "--model", "big")
    assert "big" in clearing.until("? [y/N] ")
    time.sleep(0.3)
    clearing.send(keys)
    assert clearing.end() == status
    assert len(files(folder)) == left


def test_clear_does_not_ask_for_a_folder_in_use(folder, terminal):
    with in_use(folder) as server:
        clearing = terminal(ONEKV, "cache", "clear", "--disk-cache", str(folder))
        assert "[y/N]" not in clearing.until(f"(pid {server.pid})")
        server.stdin.close()


@pytest.mark.parametrize("removed", [1, 5, 15])
def test_ctrl_c_while_files_are_removed_leaves_a_sound_cache(run, folder, monkeypatch, removed):
    """The signal comes just after a file is gone and before its row is."""
    unlink, gone = os.unlink, []

    def interrupted(path: str) -> None:
        unlink(path)
        gone.append(path)
        if len(gone) == removed:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", interrupted)
        status, _, err = run("clear", "--disk-cache", folder, "--yes")
    assert (status, err) == (130, "\nonekv: interrupted\n")
    # A row that promises a file that is gone would be counted as missing here.
    assert run("verify", "--disk-cache", folder)[0] == 0


def test_ctrl_c_that_is_ignored_does_not_end_clearing(folder):
    code = (
        "import os, signal, sys; from onekv.cli import main; unlink = os.unlink\n"
        "def interrupted(path):\n    signal.raise_signal(signal.SIGINT); unlink(path)\n"
        "os.unlink = interrupted; sys.exit(main(sys.argv[1:]))"
    )
    argv = [*UNINTERRUPTED, sys.executable, "-c", code, "cache", "clear", "--disk-cache", str(folder), "--yes"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert files(folder) == []


def test_ctrl_c_while_files_are_checked_loses_nothing(folder):
    code = (
        "import signal, sys; from onekv.tiers import maintain; from onekv.cli import main; read = maintain._checksum\n"
        "def slow(*where):\n    signal.raise_signal(signal.SIGINT); return read(*where)\n"
        "maintain._checksum = slow; sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, "cache", "verify", "--disk-cache", str(folder)]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
    assert (result.returncode, result.stderr) == (130, "\nonekv: interrupted\n")
    assert len(files(folder)) == 15


# Help


@pytest.mark.parametrize("action", ACTIONS)
def test_help_has_an_example(capsys, action):
    with pytest.raises(SystemExit):
        main(["cache", action, "--help"])
    out = capsys.readouterr().out
    assert f"example:\n  onekv cache {action}" in out
    assert "--disk-cache DIR" in out and "ONEKV_DISK_CACHE" in out


def test_a_block_is_read_with_mx_load(folder):
    """As docs/disk.md says."""
    path = files(folder)[0]
    tensors, metadata = mx.load(str(path), return_metadata=True)
    assert set(tensors) == {"0.keys", "0.values"}
    assert len(bytes.fromhex(metadata["tokens"])) % 4 == 0
    assert path.name.startswith(metadata["key"])
