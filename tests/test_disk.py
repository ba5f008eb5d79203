"""The engine with a disk behind it: what is written when, what comes back, and what happens when that goes wrong."""

import os
import subprocess
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kill_engine
from architectures import build
from onekv.engine import Engine, Request
from onekv.engine import engine as engine_module
from onekv.prefix.figures import DAMAGED
from stock import engine_of, small_llama

MIB = 2**20
BLOCK = 64


@pytest.fixture(scope="module")
def model():
    """2 MiB of KV in each block of 64 tokens."""
    return small_llama(3, num_hidden_layers=4, intermediate_size=64, num_key_value_heads=8, head_dim=128)


def make_engine(model, folder: Path | None, blocks: int = 40, **settings) -> Engine:
    values = {"kv_memory": blocks * 2 * MIB, "max_batch": 3, "prefill_chunk": 256, **settings}
    if folder is not None:
        values = {"disk_cache": str(folder), "disk_limit": "2GB", **values}
    return engine_of(model, **values)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, length).tolist()


def run(engine: Engine, *prompts: list[int], count: int = 3, **options) -> list[Request]:
    requests = [Request(prompt, count, **options) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    engine.check_integrity()
    return requests


def cold_tokens(model, prompt: list[int], count: int = 3) -> list[int]:
    engine = make_engine(model, None, prefix_cache=False)
    return run(engine, prompt, count=count)[0].tokens


@pytest.fixture
def stored(model, tmp_path) -> tuple[Path, list[int]]:
    """A folder that has a prompt of ten blocks, and that prompt."""
    prompt = prompt_of(10 * BLOCK + 5, 1)
    engine = make_engine(model, tmp_path)
    run(engine, prompt)
    engine.close()
    return tmp_path, prompt


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*.safetensors"))


# Policies


def test_write_back_writes_nothing_until_something_is_evicted_or_the_engine_closes(model, tmp_path):
    engine = make_engine(model, tmp_path)
    run(engine, prompt_of(300, 1))
    engine.prefix.tiers[0].flush()
    assert files(tmp_path) == []
    engine.close()
    # Four whole blocks and the rest.
    assert len(files(tmp_path)) == 5


def test_write_through_writes_whole_blocks_at_once(model, tmp_path):
    engine = make_engine(model, tmp_path, disk_policy="write_through")
    run(engine, prompt_of(300, 1))
    engine.prefix.tiers[0].flush()
    assert len(files(tmp_path)) == 4
    engine.close()


def test_what_is_on_disk_is_the_pool_byte_for_byte(model, tmp_path):
    engine = make_engine(model, tmp_path, disk_policy="write_through")
    run(engine, prompt_of(BLOCK + 5, 1))
    engine.prefix.tiers[0].flush()
    (node,) = [node for node in engine.prefix.index.nodes.values() if node.end == BLOCK]
    (file,) = files(tmp_path)
    arrays, metadata = mx.load(str(file), return_metadata=True)
    assert metadata["key"] == node.key.hex()
    for layer, own in zip(engine.plan.layout.groups[0].layers, engine.memory.pools[0].layers, strict=True):
        slots = slice(node.blocks[0] * BLOCK, (node.blocks[0] + 1) * BLOCK)
        assert mx.array_equal(arrays[f"{layer.name}.keys"], own.k[:, slots])
        assert mx.array_equal(arrays[f"{layer.name}.values"], own.v[:, slots])
    engine.close()


def test_nothing_is_written_twice(model, stored):
    folder, prompt = stored
    before = {file: file.stat().st_mtime_ns for file in files(folder)}
    engine = make_engine(model, folder)
    run(engine, prompt)
    engine.close()
    after = {file: file.stat().st_mtime_ns for file in files(folder)}
    assert {file: after[file] for file in before} == before
    # The end of the first answer is a prefix of nothing that is there; the second wrote only its own end.
    assert len(after) <= len(before) + 1


def test_hot_only_never_touches_the_disk(model, tmp_path, monkeypatch):
    """200 evictions without a file, a thread or a write; what is still hot is reused without a byte more."""
    monkeypatch.setenv("ONEKV_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    engine = make_engine(model, None, blocks=20, hot_only=True)
    io = Path("/proc/self/io")
    run(engine, prompt_of(10 * BLOCK, 0))
    threads = threading.active_count()
    before = io.read_text() if io.exists() else ""
    for seed in range(1, 30):
        run(engine, prompt_of(10 * BLOCK, seed))
    after = io.read_text() if io.exists() else ""
    assert engine.prefix.stats().evicted_blocks >= 200
    assert _written(after) == _written(before)
    assert threading.active_count() == threads and not engine.prefix.tiers
    assert list(tmp_path.iterdir()) == []
    level = mx.get_active_memory()
    mx.reset_peak_memory()
    (again,) = run(engine, prompt_of(10 * BLOCK, 29)[: 9 * BLOCK + 1])
    assert again.cached_tokens == 9 * BLOCK
    assert mx.get_active_memory() <= level and mx.get_peak_memory() - level < MIB // 4
    engine.close()


def _written(io: str) -> list[str]:
    return [line for line in io.splitlines() if line.startswith(("wchar", "syscw"))]


def test_a_full_queue_discards_and_does_not_wait(model, tmp_path):
    """Room for two blocks only: ten evicted at once are mostly lost, counted, and nothing is wrong."""
    engine = make_engine(model, tmp_path, blocks=20, prefill_chunk=640, disk_queue="5MiB")
    prompts = [prompt_of(10 * BLOCK, seed) for seed in range(4)]
    for prompt in prompts:
        assert run(engine, prompt)[0].tokens == cold_tokens(model, prompt)
    stats = engine.prefix.tiers[0].stats()
    assert stats.discarded > 0 and stats.queued_bytes <= 5 * MIB
    assert engine.prefix.stats().evicted_blocks >= 20
    engine.close()


def test_the_limit_holds(model, tmp_path):
    limit = 16 * MIB
    engine = make_engine(model, tmp_path, blocks=20, disk_limit=limit)
    for seed in range(6):
        run(engine, prompt_of(10 * BLOCK, seed))
        engine.prefix.tiers[0].flush()
        assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) <= limit
    assert engine.prefix.tiers[0].stats().evicted > 0
    engine.close()
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) <= limit


def test_the_beginning_of_a_conversation_outlives_its_end(model, tmp_path):
    """Where not all fits, what is kept is what can be continued from."""
    engine = make_engine(model, tmp_path, disk_limit=16 * MIB)
    prompt = prompt_of(12 * BLOCK, 1)
    run(engine, prompt)
    engine.close()
    engine = make_engine(model, tmp_path, disk_limit=16 * MIB)
    (again,) = run(engine, prompt)
    assert again.cached_tokens >= 5 * BLOCK
    engine.close()


# Coming back


def test_a_restart_continues_with_all_whole_blocks(model, stored):
    folder, prompt = stored
    engine = make_engine(model, folder)
    (request,) = run(engine, prompt)
    assert request.cached_tokens == 10 * BLOCK
    assert request.tokens == cold_tokens(model, prompt)
    stats = engine.prefix.tiers[0].stats()
    assert stats.hits == 10 and stats.promoted_bytes > 20 * MIB and stats.promoted_seconds > 0
    engine.close()


def test_promotion_takes_less_than_four_blocks_beside_the_pool(model, tmp_path):
    prompt = prompt_of(30 * BLOCK + 5, 1)
    engine = make_engine(model, tmp_path)
    run(engine, prompt)
    engine.close()
    engine = make_engine(model, tmp_path)
    run(engine, prompt_of(20, 2))
    level = mx.get_active_memory()
    mx.reset_peak_memory()
    Path("/proc/self/clear_refs").write_text("5")
    resident = _status("VmRSS")
    request = Request(prompt, 1)
    engine.submit(request)
    while not request.cached_tokens:
        engine.step()
    assert request.cached_tokens == 30 * BLOCK
    assert mx.get_peak_memory() - level < MIB
    # Resident: the pool itself becomes so as it is filled, if it was not touched before; it was, it is zeroed.
    assert _status("VmHWM") - resident < 4 * 2 * MIB
    engine.close()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def test_two_requests_for_the_same_read_it_once(model, stored):
    folder, prompt = stored
    engine = make_engine(model, folder)
    first, second = run(engine, prompt, prompt[: 9 * BLOCK] + prompt_of(80, 5))
    assert first.cached_tokens == 10 * BLOCK and second.cached_tokens == 9 * BLOCK
    assert engine.prefix.tiers[0].stats().hits == 10
    assert first.tokens == cold_tokens(model, prompt)
    assert second.tokens == cold_tokens(model, second.prompt)
    engine.close()


def test_another_request_is_prefilled_while_one_loads(model, stored, monkeypatch):
    folder, prompt = stored
    engine = make_engine(model, folder, speculate="off")
    other = prompt_of(700, 7)
    requests = [Request(prompt, 3), Request(other, 3)]
    for request in requests:
        engine.submit(request)
    with monkeypatch.context() as patch:
        # No time to read anything: the disk is as slow as can be.
        patch.setattr(engine_module, "LOAD_SECONDS", -1.0)
        for _ in range(2):
            engine.step()
        assert engine.scheduler.loading == requests[:1] and engine.scheduler.prefilling == requests[1:]
        assert requests[1].sequence.length > 0
        engine.check_integrity()
    engine.step()
    # The older one goes first as soon as its blocks are there.
    assert engine.scheduler.prefilling[:1] == requests[:1] or requests[0] in engine.scheduler.running
    while not engine.idle:
        engine.step()
    assert requests[0].tokens == cold_tokens(model, prompt)
    assert requests[1].tokens == cold_tokens(model, other)
    engine.close()


def test_a_request_that_is_cancelled_while_it_loads_leaves_nothing(model, stored, monkeypatch):
    folder, prompt = stored
    engine = make_engine(model, folder)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "LOAD_SECONDS", -1.0)
        request = Request(prompt, 3)
        engine.submit(request)
        engine.step()
        assert engine.scheduler.loading == [request] and engine.memory.pools[0].held
        engine.cancel([request])
    assert engine.idle and engine.memory.pools[0].free == engine.memory.pools[0].blocks
    engine.check_integrity()
    (again,) = run(engine, prompt)
    assert again.cached_tokens == 10 * BLOCK and again.tokens == cold_tokens(model, prompt)
    engine.close()


def test_salts_and_weights_are_kept_apart(model, stored):
    folder, prompt = stored
    engine = make_engine(model, folder)
    assert run(engine, prompt, salt="other")[0].cached_tokens == 0
    engine.close()
    other = small_llama(4, num_hidden_layers=4, intermediate_size=64, num_key_value_heads=8, head_dim=128)
    engine = make_engine(other, folder)
    (request,) = run(engine, prompt)
    assert request.cached_tokens == 0 and request.tokens == cold_tokens(other, prompt)
    engine.close()


def test_clearing_the_cache_clears_the_disk(model, stored):
    folder, prompt = stored
    engine = make_engine(model, folder)
    engine.prefix.clear()
    assert run(engine, prompt)[0].cached_tokens == 0
    engine.prefix.tiers[0].flush()
    assert files(folder) == []
    engine.close()


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_bytes_on_disk_grow_with_tokens_not_with_turns(name, tmp_path):
    """Ten turns, and all of it evicted or stored in each: blocks are there once, states at ends of turns."""
    model = build(name)
    settings = {"kv_memory": "8MB", "max_batch": 1, "prefill_chunk": 48, "block_size": 16}
    chat = prompt_of(40, 1)
    for turn in range(10):
        engine = make_engine(model, tmp_path, **settings)
        (request,) = run(engine, chat)
        chat = chat + request.tokens + prompt_of(20, turn)
        layout = engine.plan.layout
        engine.close()
    token = sum(group.token_bytes for group in layout.groups)
    # Whole blocks once, one partial block per turn, two snapshots per turn.
    bound = (len(chat) + 10 * 16) * token + 2 * 10 * layout.sequence_bytes
    headers = len(files(tmp_path)) * 8192
    assert sum(file.stat().st_size for file in files(tmp_path)) <= bound + headers


# When it goes wrong


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_block_is_computed_again(model, stored, caplog):
    folder, prompt = stored
    for file in files(folder)[:3]:
        flip(file)
    engine = make_engine(model, folder)
    (request,) = run(engine, prompt)
    assert request.tokens == cold_tokens(model, prompt)
    stats = engine.prefix.tiers[0].stats()
    assert 1 <= stats.corrupt <= 3
    assert len([record for record in caplog.records if "damaged" in record.getMessage()]) == 1
    assert engine.prefix.stats().misses.get(DAMAGED) or request.cached_tokens == 10 * BLOCK
    engine.close()
    # What was computed again is stored again; damage further on shows when it is read.
    for _ in range(3):
        engine = make_engine(model, folder)
        (again,) = run(engine, prompt)
        assert again.tokens == request.tokens
        engine.close()
    assert again.cached_tokens == 10 * BLOCK


@pytest.mark.parametrize("damage", ["folder removed", "files removed", "index overwritten"])
def test_damage_while_it_runs(model, stored, damage):
    folder, prompt = stored
    engine = make_engine(model, folder, blocks=20)
    if damage == "folder removed":
        subprocess.run(["rm", "-r", folder], check=True)
    elif damage == "files removed":
        for file in files(folder):
            file.unlink()
    else:
        with open(folder / "index.db", "r+b") as index:
            index.write(os.urandom(64 * 1024))
    for seed in range(4):
        other = prompt_of(10 * BLOCK, 50 + seed)
        assert run(engine, other)[0].tokens == cold_tokens(model, other)
        assert run(engine, prompt)[0].tokens == cold_tokens(model, prompt)
    engine.close()


def test_kills_at_random_moments_give_no_wrong_token():
    assert kill_engine.run(rounds=3, seed=7) > 0
