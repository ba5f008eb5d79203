"""`onekv doctor` finds planted faults, says which switch avoids them, and is clean without them.

Each test runs only the check concerned, in this process, with the fault planted in what the check examines. The first
three of the ten faults are in test_doctor_exact.py.
"""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from examining import KERNELS_OFF, clean, examine, found
from onekv import loops
from onekv.cli import main
from onekv.config import Settings
from onekv.doctor import checks, disk, machine, serving
from onekv.doctor.base import Case, Check, Notes, Result, Status, switch
from onekv.doctor.engines import chat_model, generate, make_engine, random_prompt
from onekv.doctor.running import run_checks
from onekv.errors import SettingError
from onekv.tiers.files import Clock, Files
from onekv.tiers.folder import Folder

# 4. A full disk


class FullDisk(Files):
    """Has room for so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, handle: int, data: memoryview) -> int:
        if self.room < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(data)
        return super().write(handle, data)


def on_disk(folder: Path, **settings: Any) -> Settings:
    return Settings(disk_cache=str(folder), **settings)


def test_the_disk(tmp_path: Path) -> None:
    result = examine(disk.CHECK, Case(on_disk(tmp_path / "kv")))
    assert clean(result), result.findings
    figures = {figure.name: figure.value for figure in result.figures}
    assert figures["disk write"] > 0 and figures["disk read"] > 0 and figures["restored from disk"] > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left"


# Room for nothing; or for what is written to measure speed, and after that for few blocks.
@pytest.mark.parametrize("room", [0, disk.SPEED_BYTES + 2**20])
def test_a_full_disk(room: int, tmp_path: Path) -> None:
    findings = found(examine(disk.CHECK, Case(on_disk(tmp_path / "kv"), files=FullDisk(room))))
    assert "the disk is full" in findings[0].text
    assert all("--hot-only on" in str(finding.remedy) for finding in findings)
    assert list(tmp_path.iterdir()) == []


def test_little_free_space(tmp_path: Path) -> None:
    class Little(Files):
        def free(self, folder: Any) -> int:
            return 2**20

    (finding,) = found(examine(disk.CHECK, Case(on_disk(tmp_path / "kv"), files=Little())), Status.WARNING)
    assert "only 1.00 MiB is free" in finding.text and "--disk-cache DIR" in str(finding.remedy)


# 5. A port in use


@pytest.fixture(scope="module")
def server_result() -> tuple[Result, int]:
    """The check of the server with a port that somebody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        return examine(serving.CHECK, Case(port=port)), port


def test_a_port_in_use(server_result: tuple[Result, int]) -> None:
    result, port = server_result
    (finding,) = found(result, Status.WARNING)
    assert f"port {port}" in finding.text and finding.remedy == switch("port", "PORT")


def test_two_clients(server_result: tuple[Result, int]) -> None:
    """The server of the check has a port of its own."""
    result, _ = server_result
    assert not found(result)
    assert [figure.value > 0 for figure in result.figures if figure.name.endswith("second turn cached")] == [True] * 2


def test_without_the_extra_there_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "NEEDS", ("fastapi", "no_such_package"))
    result = examine(serving.CHECK)
    assert result.status is Status.SKIPPED
    assert result.findings[0].text == "no_such_package is not installed; run pip install 'onekv[server]'"


# 6. A raised wired limit


def test_the_machine() -> None:
    result = examine(machine.CHECK)
    assert not found(result)
    figures = {figure.name: figure.value for figure in result.figures}
    assert figures["memory"] > figures["footprint of this process"] > 0
    assert {"device", "mlx", "mlx-lm", "onekv", "python", "swap used", "open files"} <= set(figures)


def test_a_wired_limit_that_the_system_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS tells it."""
    command = tmp_path / "sysctl"
    command.write_text('#!/bin/sh\n[ "$2" = iogpu.wired_limit_mb ] && echo 57344 || exit 1\n')
    command.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (finding,) = found(examine(machine.CHECK), Status.WARNING)
    assert "iogpu.wired_limit_mb was raised to 57344" in finding.text
    assert finding.remedy == "sudo sysctl iogpu.wired_limit_mb=0"


def test_a_wired_limit_that_this_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: given.append(limit) or 2**34)
    (finding,) = found(examine(machine.CHECK), Status.WARNING)
    assert "MLX's wired limit to 16.00 GiB" in finding.text
    assert given == [0], "the doctor raises it for nobody"


# 7. A damaged cache file


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A disk cache with a conversation."""
    folder = tmp_path_factory.mktemp("written") / "kv"
    settings = on_disk(folder, kv_memory="8MB", disk_limit="64MB")
    with closing(make_engine(chat_model(), settings)) as engine:
        generate(engine, random_prompt(200), 4)
    return folder


@pytest.fixture
def cache(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "kv")


def used(folder: Path) -> Result:
    """What the check says of the user's own folder; the rest of it is tested above."""
    return examine(Check("disk", "", lambda case, notes: disk._used(folder, notes)))


def test_a_sound_cache(cache: Path) -> None:
    assert clean(used(cache))


def test_a_damaged_cache_file(cache: Path) -> None:
    files = sorted(cache.rglob("*.safetensors"))
    damaged = bytearray(files[0].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    files[0].write_bytes(damaged)
    files[1].unlink()
    (finding,) = found(used(cache))
    assert f"1 damaged, 1 missing files in the disk cache ({len(files)} checked)" in finding.text
    assert finding.remedy == f"onekv cache verify --disk-cache {cache}"
    assert files[0].read_bytes() == damaged, "it is the user's to repair"


def test_a_damaged_index(cache: Path) -> None:
    (cache / "index.db").write_bytes(b"this is no database" * 100)
    (finding,) = found(used(cache))
    assert "cannot be read" in finding.text and "onekv cache verify" in str(finding.remedy)


def test_a_folder_that_is_not_a_cache(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    (finding,) = found(used(tmp_path))
    assert "not a OneKV disk cache" in finding.text and finding.remedy == switch("disk_cache", "DIR")


# 8. A missing numba


def test_a_missing_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    if mx.default_device() != mx.cpu:
        pytest.skip("numba is for CPUs")
    monkeypatch.setitem(sys.modules, "numba", None)
    loops.why_not.cache_clear()
    try:
        (finding,) = found(examine(machine.CHECK), Status.WARNING)
        assert "numba is not installed" in finding.text and finding.remedy == "pip install -U 'onekv[cpu]'"
        assert clean(examine(machine.CHECK, Case(Settings(kernels="off")))), "nobody misses it"
    finally:
        monkeypatch.undo()
        loops.why_not.cache_clear()


# 9. A clock that jumps


class Jumps(Clock):
    """Between two looks at it, the wall clock is set back by an hour."""

    def __init__(self) -> None:
        self.looks = 0

    def now(self) -> float:
        self.looks += 1
        return time.time() - (3600 if self.looks > 1 else 0)


def test_a_clock() -> None:
    assert clean(examine(machine.CLOCK))


def test_a_clock_that_jumps() -> None:
    (finding,) = found(examine(machine.CLOCK, Case(clock=Jumps())), Status.WARNING)
    assert "the system clock jumped by -3600.0 s" in finding.text


# 10. A stale lock

STALE = """
import os, sys, time
from pathlib import Path
from onekv.tiers.folder import Folder

folder = Folder(Path(sys.argv[1]))
if os.fork() == 0:
    # A child that has the lock of its parent, which is gone. It ends when nobody reads its output any more.
    print("locked", flush=True)
    sys.stdin.read()
os._exit(0)
"""


def test_a_stale_lock(cache: Path) -> None:
    command = [sys.executable, "-c", STALE, str(cache)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdout.readline()
        parent.wait(60)
        (finding,) = found(used(cache))
        # Its child ends, too.
        parent.stdin.close()
    assert f"process {parent.pid}, which took the lock, no longer runs: the lock is stale" in finding.text
    assert "--disk-cache DIR" in str(finding.remedy)


def test_a_folder_in_use(cache: Path) -> None:
    folder = Folder(cache)
    try:
        (finding,) = found(used(cache), Status.WARNING)
    finally:
        folder.release()
    assert f"in use by process {os.getpid()}" in finding.text and finding.remedy == switch("disk_cache", "DIR")
    assert clean(used(cache)), "what was left by a process that has ended is no lock"


def test_with_hot_only_the_disk_is_not_looked_at() -> None:
    assert examine(disk.CHECK, Case(Settings(hot_only=True))).status is Status.SKIPPED


# The contract


def test_a_check_that_raises_is_a_failed_check() -> None:
    def unexpected(case: Case, notes: Notes) -> None:
        switch("no such setting", "x")

    def deliberate(case: Case, notes: Notes) -> None:
        raise SettingError("--kv-memory is 'x'")

    checks = [Check("unexpected", "", unexpected), Check("deliberate", "", deliberate), machine.CLOCK]
    first, second, third = run_checks(Case(), checks)
    assert first.findings[0].text.startswith("LookupError: there is no setting 'no such setting' (onekv/doctor/base.py")
    assert second.findings[0].text == "--kv-memory is 'x'"
    assert [each.status for each in (first, second, third)] == [Status.FAILED, Status.FAILED, Status.OK]


def test_after_ctrl_c_the_checks_that_have_ended_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(case: Case, notes: Notes) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "result.json"
    monkeypatch.setattr(checks, "CHECKS", [machine.CLOCK, Check("interrupted", "", interrupted)])
    assert main(["doctor", "--json", str(file)]) == 130
    out, err = capsys.readouterr()
    assert "clock" in out and "interrupted: 1 check has not ended" in out and err.endswith("onekv: interrupted\n")
    assert [check["name"] for check in json.loads(file.read_text())["checks"]] == ["clock"]


def test_a_switch_exists_and_takes_its_value() -> None:
    assert switch("kernels", "off") == KERNELS_OFF
    assert switch("port", "9000") == "--port 9000 (ONEKV_PORT=9000)"
    with pytest.raises(SettingError, match="--kernels is 'none'"):
        switch("kernels", "none")
    with pytest.raises(LookupError):
        switch("magic", "on")
