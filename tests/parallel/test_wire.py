"""Connections between ranks: who may speak on them, and what a rank does when it does not hear what it should."""

import gc
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import xxhash

from architectures import ARCHITECTURES, build
from onekv.bench.clients import save
from onekv.cli import main
from onekv.config import Settings
from onekv.errors import ParallelError, SettingError
from onekv.memory.layout.reader import read_layout
from onekv.models import DEFAULT_MODEL, load_model
from onekv.parallel.following import FollowingMemory
from onekv.parallel.group import Group, _accept, versions
from onekv.parallel.guard import Guard
from onekv.parallel.lead import refusal
from onekv.parallel.sharding import open_share
from onekv.parallel.wire import Gone, Wire

SECRET, OTHER = b"a secret", b"another secret"


def connected(first: bytes = SECRET, second: bytes = SECRET) -> tuple[Wire, Wire, "Recorder"]:
    """Both ends of a connection, and what stands between them."""
    between = Recorder()
    wires: dict[bool, Wire] = {}
    threads = [
        threading.Thread(target=lambda side=side: wires.__setitem__(side[2], Wire(*side)))
        for side in ((between.first, first, True), (between.second, second, False))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wires[True], wires[False], between


class Recorder:
    """Passes on what the first sends to the second, and the reverse; remembers what the first has sent last."""

    def __init__(self) -> None:

        self.first, inner = _tcp_pair()
        self.second, outer = _tcp_pair()
        self.last = b""
        self.outer = outer
        threading.Thread(target=self._pass, args=(inner, outer, True), daemon=True).start()
        threading.Thread(target=self._pass, args=(outer, inner, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, record: bool) -> None:
        while data := source.recv(65536):
            if record:
                self.last = data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return first, listener.accept()[0]


def test_messages_arrive_in_both_directions() -> None:
    leader, follower, _ = connected()
    for number in range(3):
        leader.send({"do": "pass", "tokens": [number] * 50_000})
        assert follower.receive()["tokens"] == [number] * 50_000
        follower.send({"do": "answer", "answer": number})
        assert leader.receive() == {"do": "answer", "answer": number}
    leader.close()
    with pytest.raises(Gone):
        follower.receive()


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    leader, follower, _ = connected(SECRET, OTHER)
    leader.send({"do": "end"})
    with pytest.raises(ParallelError, match="MAC"):
        follower.receive()


def test_a_message_that_comes_twice_is_not_taken() -> None:
    leader, follower, between = connected()
    leader.send({"do": "copy", "group": 0, "source": 1, "target": 2})
    assert follower.receive()["do"] == "copy"
    between.outer.sendall(between.last)
    with pytest.raises(ParallelError, match="MAC"):
        follower.receive()


def greet(address: Any, secret: bytes, hello: dict[str, Any]) -> None:
    wire = Wire(socket.create_connection(address), secret, leads=False)
    wire.send(hello)
    try:
        wire.receive()
    except (Gone, ParallelError):
        assert secret != SECRET


def test_rank_0_turns_strangers_away() -> None:
    group: Any = Group(0, 3, None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        calls = [
            (OTHER, {"rank": 1, "versions": versions()}),
            (SECRET, {"rank": 2, "versions": versions()}),
            (SECRET, {"rank": 1, "versions": versions()}),
        ]
        callers = [threading.Thread(target=greet, args=(address, *call)) for call in calls]
        for caller in callers:
            caller.start()
        wires = _accept(group, listener, SECRET)
        assert len(wires) == 2
        for caller in callers:
            caller.join()


def test_ranks_of_different_versions_do_not_work_together() -> None:
    group: Any = Group(0, 2, None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hello = {"rank": 1, "versions": "onekv 0.0.1, mlx 1, mlx-lm 1"}
        caller = threading.Thread(target=greet, args=(listener.getsockname(), SECRET, hello))
        caller.start()
        with pytest.raises(ParallelError, match=r"rank 1 runs onekv 0\.0\.1"):
            _accept(group, listener, SECRET)
        caller.join()


# A rank whose peer keeps silent; the second argument is what it does meanwhile.
WATCHED = """
import socket, sys, time
from onekv.parallel.guard import Guard
from onekv.parallel.wire import Wire
wire = Wire(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), b"a secret", leads=False)
wire.greeted()
guard = Guard(1, 2, {0: wire}, limit=float(sys.argv[3]))
guard.start()
if sys.argv[2] == "busy":
    import threading
    threading.Thread(target=lambda: [wire.receive() for _ in iter(int, 1)], daemon=True).start()
    with guard.busy("a pass over 7 tokens"):
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("doing", "limit", "said"),
    [
        ("idle", "1", "rank 0 has been silent for more than 1 s"),
        ("busy", "3", "a pass over 7 tokens takes more than 3 s"),
    ],
)
def test_a_rank_that_waits_too_long_exits_and_says_why(doing: str, limit: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        command = [sys.executable, "-c", WATCHED, port, doing, limit]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        wire = Wire(listener.accept()[0], SECRET, leads=True)
        wire.greeted()
        if doing == "busy":
            # A peer that is there and does nothing.
            threading.Thread(target=_beat, args=(wire,), daemon=True).start()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 70 and f"rank 1 of 2 exits: {said} (--step-limit)" in errors, errors


def _beat(wire: Wire) -> None:
    pause = threading.Event()
    while not pause.wait(0.1):
        try:
            wire.send({"do": "beat"})
        except Gone:
            return


def test_a_rank_with_other_tables_says_so() -> None:
    memory = FollowingMemory(Guard(1, 2, {}), read_layout(build("llama")), (8,), 16, 32, True)
    with pytest.raises(ParallelError, match="differ from those of rank 0"):
        memory.change([(0, [(0, [1, 2])])], "0" * 16)


def test_a_pass_that_was_withdrawn_leaves_nothing_in_the_pool() -> None:
    """What it would have written depends on collectives, which the other ranks never start."""
    model: Any = build("llama")
    memory = FollowingMemory(Guard(1, 2, {}), read_layout(model), (8,), 16, 32, True)
    memory.change([(0, [(0, [3])])], digest_of([3]))
    memory.run_told(model, mx.array([[1, 2, 3]]), [(0, 0)], [3], False, True, confirmed=lambda: False)
    assert not any(mx.any(array).item() for array in memory.arrays())
    memory.run_told(model, mx.array([[1, 2, 3]]), [(0, 0)], [3], False, True, confirmed=lambda: True)
    assert all(mx.any(array).item() for array in memory.arrays())


def test_a_rank_writes_its_pool_in_place() -> None:
    model: Any = build("llama")
    memory = FollowingMemory(Guard(1, 2, {}), read_layout(model), (4096,), 16, 32, True)
    memory.change([(0, [(0, [3, 4])])], digest_of([3, 4]))
    pool = sum(array.nbytes for array in memory.arrays())
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for length, tokens in ((0, [[1] * 20]), (20, [[2]]), (21, [[3]])):
        step = ([(0, length)], [len(tokens[0])], len(tokens[0]) == 1)
        memory.run_told(model, mx.array(tokens), *step, True, confirmed=lambda: True)
    assert pool > 2**22 and mx.get_peak_memory() - before < pool / 4


def digest_of(blocks: list[int]) -> str:
    return xxhash.xxh3_64(np.array([len(blocks), *blocks], np.int32).tobytes()).hexdigest()


def test_models_that_mlx_lm_cannot_shard_are_refused(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["mixtral"]
    whole: Any = load_model(DEFAULT_MODEL, lazy=True, progress=False)
    save(tmp_path, build("mixtral"), {"model_type": architecture.module, **architecture.config}, whole.tokenizer)
    group: Any = Group(0, 2, None)
    with pytest.raises(SettingError, match="over 2 ranks: mlx-lm's mixtral does not implement `shard`"):
        open_share(str(tmp_path), None, group, progress=False)
    with pytest.raises(SettingError, match="GGUF"):
        open_share(str(whole.path), None, group, progress=False)


def test_settings_that_several_ranks_cannot_have_are_refused() -> None:
    assert refusal(Settings(disk_cache="kv", kv_format="q8"), "a-model") is None
    for settings, word in (
        (Settings(adapter="lora"), "--adapter"),
        (Settings(draft_model="small"), "--draft-model"),
        (Settings(remote_tier="file:///tmp/kv"), "--remote-tier"),
    ):
        assert word in str(refusal(settings, "a-model"))
    assert "name or folder" in str(refusal(Settings(), object()))


def test_a_prompt_from_standard_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_RANK", "0")
    assert main(["generate", "-"]) == 1
    assert "mlx.launch does not forward the end of its input" in capsys.readouterr().err


def test_several_models_are_refused() -> None:
    command = [sys.executable, "-m", "onekv", "serve", "smollm2-135m", "another", "--port", "0"]
    environment = {**os.environ, "MLX_RANK": "0"}
    run = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=120)
    assert run.returncode == 1 and "a server has a single model" in run.stderr, run.stderr
